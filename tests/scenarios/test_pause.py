"""`cdc pause`, `cdc resume`: one sink is stopped, through restarts, and the others go on."""

from contextlib import closing
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
import redis

from cdc import client
from cdc.cli.health import check_health
from cdc.errors import ReadTimeout, SettingsError, SinkPaused
from cdc.generations import pause as pauses
from cdc.kafka.topics import Topics
from cdc.observe import diagnosis
from cdc.runtime.context import Context
from tests.support.wait import wait_until

if TYPE_CHECKING:
    from tests.scenarios.conftest import World


def sink_status(world: "World", name: str) -> dict[str, Any]:
    (status,) = [sink for sink in world.json("status")["sinks"] if sink["name"] == name]
    return dict(status)


def assert_a_batch_that_hangs_is_reported(world: "World") -> None:
    """A cache that answers, but lets writes wait, is what stands still; no other sink is."""

    def stuck() -> set[str | None]:
        status = check_health(Context(world.file, world.folder))
        return {finding.sink for finding in status.findings if finding.code == "sink-stuck"}

    with closing(redis.Redis.from_url(world.cache)) as server:
        server.client_pause(600_000, all=False)
        try:
            world.sql("UPDATE items SET n = 2")
            wait_until(lambda: stuck() == {"cache"}, 60, "the report of the batch that hangs")
        finally:
            server.client_unpause()
    world.settle()
    wait_until(lambda: not stuck(), 30, "it to be over")


def test_a_paused_sink_stands_still_and_the_others_go_on(
    world: "World", monkeypatch: pytest.MonkeyPatch
) -> None:
    world.sql("CREATE TABLE items (id int PRIMARY KEY, n int)")
    world.begin("public.items")
    world.sql("INSERT INTO items SELECT n, 0 FROM generate_series(1, 100) n")
    with world.running():
        world.settle()
        paused = world.json("pause", "cache")
        assert paused["paused_by"]
        # A second time changes nothing, and says since when it has been paused.
        assert world.json("pause", "cache") == paused
        wait_until(
            lambda: sink_status(world, "cache")["restarts"].get("paused") == 1,
            20,
            "the run to obey",
        )
        cache_offsets, search_offsets = world.offsets("cache"), world.offsets("search")
        world.sql("UPDATE items SET n = 1")
        world.wait_for("search", search_offsets + 100)
        assert world.offsets("cache") == cache_offsets

        status = world.json("status", code=0)
        (finding,) = [entry for entry in status["findings"] if entry["sink"] == "cache"]
        assert (finding["code"], finding["severity"]) == ("sink-paused", "info")
        assert finding["fix"].endswith(" resume cache")
        with psycopg.connect(world.dsn) as connection:
            token = client.token(connection)
        with pytest.raises(ReadTimeout, match="cache is paused by") as caught:
            client.wait_for(client.view(world.file, "cache", "public.items"), token, 1)
        assert "resume cache" in caught.value.hint
        for attempt in (world.rebuild, world.rollback):
            with pytest.raises(SinkPaused, match="cache is paused"):
                attempt("cache")
    # Neither a restart nor a run that is to catch up ends the pause.
    failed = world.cdc("run", "--sink", "cache", "--until-caught-up", code=7)
    assert "cache is paused" in failed.stderr
    with world.running():
        wait_until(lambda: sink_status(world, "cache")["state"] == "paused", 30, "the pause")
        world.wait_for("search", search_offsets + 100)
        assert world.offsets("cache") == cache_offsets
        assert world.json("resume", "cache") == {"sink": "cache", "resumed": True}
        world.settle()
        assert world.json("resume", "cache") == {"sink": "cache", "resumed": False}
        wait_until(lambda: sink_status(world, "cache")["state"] == "running", 20, "it to be told")
        monkeypatch.setattr(diagnosis, "STILL_S", 3.0)
        assert_a_batch_that_hangs_is_reported(world)
    world.assert_equal()
    entries = world.json("operations")["operations"]
    assert [entry["verb"] for entry in entries] == [
        *("migrate", "register"),
        *("pause", "pause", "resume", "resume"),
    ]
    assert {entry["result"] for entry in entries} == {"done"}
    assert {entry["by"] for entry in entries} == {paused["paused_by"]}
    assert entries[2]["arguments"] == {"sink": "cache"}
    assert "pause sink=cache" in world.cdc("operations").stdout
    # Refused where it means nothing, and noted.
    with Topics(world.pipeline.kafka) as kafka, pytest.raises(SettingsError, match="no sink other"):
        pauses.pause(world.pipeline, kafka, "other", "somebody")
    assert "no sink other" in world.cdc("resume", "other", code=2).stderr
    (entry,) = [entry for entry in world.json("operations")["operations"] if entry["exit_code"]]
    assert (entry["verb"], entry["exit_code"]) == ("resume", 2)
    assert "no sink other" in entry["result"]
