"""Sinks that were away for longer than the log keeps what they need: said before the first batch, and repaired."""

import re
from typing import TYPE_CHECKING, Any

import deltalake
import pytest
import redis
from kafka import KafkaAdminClient, TopicPartition

from cdc.errors import ConnectorError, SettingsError
from cdc.generations.registry import GenerationBuild
from cdc.kafka.topics import Topics
from cdc.runtime.context import Context
from cdc.runtime.streams import Streams
from cdc.verify.verification import compare
from tests.support.compaction import compact
from tests.support.wait import wait_until

if TYPE_CHECKING:
    from tests.scenarios.conftest import World

ITEMS, OTHER_TABLE = "public.items", "public.others"
MISSED = "may have missed deletes"


class CommandStopped(Exception):
    """An error that ends a command as if somebody had stopped it."""


def end_at_verify(build: GenerationBuild) -> None:
    if build.phase == "verify":
        raise CommandStopped


def catch_up(world: "World", name: str) -> None:
    """`cdc run --sink NAME --until-caught-up`, in this process."""
    context = Context(world.file, world.folder)
    (stream,) = Streams(context).of_sinks(world.spark, context.sinks([name]))
    stream.run(until_caught_up=True)


def rows(world: "World", table: str) -> tuple[int, int, bool]:
    """Compare the cache's view: rows of the source, rows of the view, whether they are equal."""
    (described,) = (candidate for candidate in world.described if candidate.qualified == table)
    (comparison,) = compare(
        world.spark, [described], world.dsn, [sink for sink in world.sinks if sink.name == "cache"]
    )
    return comparison.source_rows, comparison.view_rows, comparison.equal


def lag(world: "World", table: str) -> tuple[int, float]:
    """Return the number of offsets that the cache is behind, and its least age in seconds."""
    (cache,) = (sink for sink in world.json("status")["sinks"] if sink["name"] == "cache")
    (view,) = (view for view in cache["views"] if view["table"] == table)
    return view["lag_records"] or 0, view["lag_seconds"] or 0.0


def test_a_view_that_may_have_missed_deletes_is_refused(world: "World") -> None:
    world.sql(
        "CREATE TABLE items (id int PRIMARY KEY, n int)",
        "CREATE TABLE others (id int PRIMARY KEY, n int)",
        "INSERT INTO items SELECT n, 0 FROM generate_series(1, 20) n",
        "INSERT INTO others SELECT n, 0 FROM generate_series(1, 20) n",
    )
    tables = [f"{{table: {table}, partitions: 1}}" for table in (ITEMS, OTHER_TABLE)]
    world.begin(*tables, sinks=["cache"])
    with world.running():
        world.settle()
    with pytest.raises(CommandStopped):
        world.rebuild("cache", show=end_at_verify)
    world.sql("DELETE FROM items WHERE id <= 5", "UPDATE others SET n = 1 WHERE id = 1")
    wait_until(
        lambda: lag(world, ITEMS)[0] >= 10 and lag(world, ITEMS)[1] > 2, 30, "tombstones of age"
    )
    with Topics(world.stack.endpoints.kafka) as kafka:
        kafka.override({f"{world.name}.{ITEMS}": {"delete.retention.ms": "1000"}})
    with pytest.raises(ConnectorError, match=f"{ITEMS} in cache {MISSED}") as caught:
        catch_up(world, "cache")
    assert caught.value.hint == f"cdc -p FILE rebuild cache --table {ITEMS}"
    # The other table goes on.
    assert rows(world, OTHER_TABLE) == (20, 20, True)
    assert rows(world, ITEMS) == (15, 20, False)
    status = world.json("status")
    (view,) = (view for view in status["sinks"][0]["views"] if view["table"] == ITEMS)
    assert MISSED in view["problem"]
    assert view["hint"] == f"cdc -p FILE rebuild cache --table {ITEMS}"
    assert f"cdc -p FILE rebuild cache --table {ITEMS}" in [
        finding["fix"] for finding in status["findings"]
    ]
    audit = world.json("topics", "audit", "--table", ITEMS, code=8)
    assert {
        (finding["code"], finding["sink"])
        for finding in audit["topics"][0]["findings"]
        if finding["defect"]
    } == {("view-stopped", "cache")}
    world.file.write_text(world.file.read_text() + "delete_retention_hours: 0.0005\n")
    # What was built by then may have missed them as well.
    phases: list[str] = []
    world.rebuild("cache", show=lambda build: phases.append(build.phase))
    assert phases[0] == "verify"
    assert "replay" in phases
    assert rows(world, ITEMS) == (15, 15, True)
    with world.running():
        # What readers saw before goes on no more: there is no way back to it.
        wait_until(
            lambda: world.json("generations")["generations"][0]["phase"] is None,
            30,
            "it to be removed",
        )
    with pytest.raises(SettingsError, match="no generation to go back to: nothing is kept"):
        world.rollback("cache")


def events(world: "World") -> int:
    log = deltalake.DeltaTable(f"{world.warehouse}/{ITEMS}/changes")
    return int(log.to_pyarrow_table(columns=["_cdc_offset"]).num_rows)


def view_of(world: "World") -> dict[str, Any]:
    view: dict[str, Any] = world.json("status")["sinks"][0]["views"][0]
    return view


def test_a_log_of_changes_has_every_change_or_says_where_it_may_not(
    world: "World", monkeypatch: pytest.MonkeyPatch
) -> None:
    world.sql("CREATE TABLE items (id int PRIMARY KEY, n int)", "INSERT INTO items VALUES (1, 0)")
    world.begin(f"{{table: {ITEMS}, partitions: 1}}", sinks=["warehouse"])
    topic = f"{world.name}.{ITEMS}"
    catch_up(world, "warehouse")
    with Topics(world.stack.endpoints.kafka) as kafka:
        assert kafka.settings([topic])[topic]["min.compaction.lag.ms"] == str(24 * 3_600_000)
        for number in range(10):
            world.sql(f"UPDATE items SET n = {number}")
        wait_until(
            lambda: (view_of(world)["lag_records"] or 0) >= 11, 30, "the changes in the topic"
        )
        catch_up(world, "warehouse")
        assert events(world) == 11
        compact(kafka, topic)
    assert view_of(world)["holes"] == []
    world.sql("UPDATE items SET n = -1")
    world.file.write_text(world.file.read_text() + "changes_retention_hours: 0.0003\n")
    wait_until(lambda: (view_of(world)["lag_seconds"] or 0) > 2, 30, "the change to be of age")
    catch_up(world, "warehouse")
    (hole,) = view_of(world)["holes"]
    assert re.match(r"offsets \d+-\d+ of partition 0, written from \d{4}-", hole)
    assert f"may lack superseded records: {hole}" in " ".join(world.cdc("status").stdout.split())
    (audit,) = world.json("topics", "audit")["topics"]
    assert [
        (finding["code"], finding["defect"], hole in finding["message"])
        for finding in audit["findings"]
    ] == [("changes-incomplete", False, True)]
    # No Spark is needed to list generations, also those of a warehouse.
    monkeypatch.setenv("JAVA_HOME", "/nowhere")
    listed = world.json("generations")["generations"]
    assert "warehouse" in {view["sink"] for view in listed}


def test_a_view_that_the_log_cannot_make_again_is_not_emptied(world: "World") -> None:
    """A cache that has lost its position alone, and a topic that has lost its first records."""
    world.sql(
        "CREATE TABLE items (id int PRIMARY KEY, n int)", "INSERT INTO items VALUES (1, 0), (2, 0)"
    )
    world.begin(f"{{table: {ITEMS}, partitions: 1}}", sinks=["cache"])
    topic = f"{world.name}.{ITEMS}"
    catch_up(world, "cache")
    with Topics(world.stack.endpoints.kafka) as kafka:
        kafka.override({topic: {"cleanup.policy": "compact,delete"}})
        with KafkaAdminClient(bootstrap_servers=world.stack.endpoints.kafka) as admin:
            admin.delete_records({TopicPartition(topic, 0): 1})
        kafka.override({topic: {"cleanup.policy": "compact"}})
        assert kafka.starts([topic])[topic].offsets == (1,)
    with redis.Redis.from_url(world.cache, decode_responses=True) as cache:
        assert cache.delete(f"{world.name}:_cdc:{ITEMS}")
        with pytest.raises(ConnectorError, match="no longer holds its first records"):
            catch_up(world, "cache")
        assert cache.exists(f"{world.name}:{ITEMS}:1", f"{world.name}:{ITEMS}:2") == 2
