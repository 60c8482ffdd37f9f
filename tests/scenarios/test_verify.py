"""`cdc verify` while others write: no false alarm, every planted fault and no other, repair through the log."""

import json
import re
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from typing import TYPE_CHECKING

import pytest
import redis
from pyspark.sql import functions as F

from cdc import client
from cdc.connectors.client import Connect
from cdc.generations.registry import Registry
from cdc.kafka.topics import Topics
from cdc.sinks.delta.log import TableLog
from cdc.verify.comparison import Comparison, Options
from cdc.verify.repair import repair
from cdc.verify.verification import verify
from tests.scenarios.conftest import SINKS
from tests.support import http, writer
from tests.support.wait import wait_until

if TYPE_CHECKING:
    from tests.scenarios.conftest import World

METADATA = "spark.databricks.delta.commitInfo.userMetadata"
"""Where Spark takes the text that its commits have besides their rows."""
PLANTED = 7
"""Faults of each class in each view: in rows that nobody changes any more."""
SAME_CLOCK_S = 5.0
"""Seconds by which the clocks of Postgres and of this process may differ: they are one machine's."""
RATE = 60.0
"""Changes a second while views are compared: each of the five hot rows changes four times a second,
and a comparison takes many seconds.
"""


def begin(world: "World") -> None:
    world.sql(writer.TABLE, writer.FILL)
    world.begin("{table: public.busy, partitions: 2}")


def verified(world: "World") -> list[Comparison]:
    """All rows; of a sample and of what has changed since a time see test_documented_commands."""
    return verify(world.spark, world.pipeline, world.described, world.sinks, Options())


def plant(world: "World") -> None:
    """PLANTED rows missing, extra and different in each view."""
    missing, different = range(1, PLANTED + 1), range(101, PLANTED + 101)
    index = f"{world.stack.endpoints.elasticsearch}/{world.name}-public.busy"
    cache, prefix = redis.Redis.from_url(world.cache), f"{world.name}:public.busy:"
    for number in missing:
        http.delete(f"{index}/_doc/{number}").raise_for_status()
        cache.delete(f"{prefix}{number}")
    for number in different:
        wrong = {"id": number, "name": "wrong", "amount": f"{number / 7.0:.2f}"}
        http.put(f"{index}/_doc/{number}", json=wrong).raise_for_status()
        cache.set(f"{prefix}{number}", json.dumps(wrong))
    for number in range(90_001, 90_001 + PLANTED):
        http.put(f"{index}/_doc/{number}", json={"id": number}).raise_for_status()
        cache.set(f"{prefix}{number}", json.dumps({"id": number}))
    folder = f"{world.warehouse}/public.busy/mirror"
    stored = TableLog(folder).last_commit().checkpoint
    assert stored
    # As if it were the pipeline's own fault: what somebody else has changed is refused until a
    # rebuild.
    world.spark.conf.set(METADATA, stored.to_json())
    try:
        world.spark.sql(f"DELETE FROM delta.`{folder}` WHERE id BETWEEN 1 AND {PLANTED}")
        world.spark.sql(
            f"UPDATE delta.`{folder}` SET name = 'wrong' WHERE id BETWEEN 101 AND {100 + PLANTED}"
        )
        rows = (
            world.spark.read.format("delta")
            .load(folder)
            .where(f"id BETWEEN 201 AND {200 + PLANTED}")
        )
        ghosts = rows.withColumn("id", F.col("id") + 90_000).withColumn(
            "_cdc_id", F.col("id").cast("string")
        )
        ghosts.write.format("delta").mode("append").save(folder)
    finally:
        world.spark.conf.unset(METADATA)


def test_under_load(world: "World") -> None:
    begin(world)
    # Changes come while rows are compared; more batches of them would only take the comparison's
    # processors.
    text = world.file.read_text()
    world.file.write_text(re.sub(r"(type: (?:elasticsearch|redis), )", r"\1trigger_s: 1, ", text))
    with world.running():
        world.settle()
    plant(world)
    with world.running():
        with writer.writing(world.dsn, RATE) as load:
            comparisons = verified(world)
            assert load.changes > writer.CHANGES
            assert not any(comparison.undecided for comparison in comparisons)
            assert [
                (comparison.sink, comparison.missing, comparison.extra, comparison.different)
                for comparison in comparisons
            ] == [(sink.name, PLANTED, PLANTED, PLANTED) for sink in world.sinks]
            for comparison in comparisons:
                rows = {(row.id, row.kind, row.column) for row in comparison.differences}
                assert {(str(n), "missing", None) for n in range(1, PLANTED + 1)} <= rows
                assert {(str(n), "different", "name") for n in range(101, 101 + PLANTED)} <= rows
            mended = repair(
                world.spark, world.pipeline, world.described, world.sinks, Options(), comparisons
            )
            results = [
                (comparison.sink, comparison.equal, comparison.undecided, comparison.repaired)
                for comparison in mended
            ]
            assert results == [(sink.name, True, 0, 3 * PLANTED) for sink in world.sinks]
        world.settle()
    world.assert_equal()


def proofs(world: "World") -> dict[tuple[str, str], tuple[float | None, float | None]]:
    """By sink and table, what `cdc status` knows: proved through when, all rows since when."""
    return {
        (sink["name"], view["table"]): (view["proved_through"], view["complete_at"])
        for sink in world.json("status")["sinks"]
        for view in sink["views"]
    }


def test_changes_under_load_raise_no_alarm(world: "World") -> None:
    """Rows that always change differ at nearly every look. A changed definition ends a proof, and is no damage."""
    begin(world)
    prove_all_the_time(world)
    with (
        Topics(world.pipeline.kafka) as kafka,
        world.running(proves=True),
        writer.writing(world.dsn, RATE),
    ):
        registry = Registry(world.pipeline, kafka)

        def proofs_since(moment: float) -> int:
            registry.read()
            known = [registry.for_sink(sink).proofs.get("public.busy") for sink in SINKS]
            return sum(proof is not None and proof.through > moment for proof in known)

        world.settle()
        world.cdc("verify")
        for _ in range(3):
            moment = time.time()
            wait_until(partial(lambda since: proofs_since(since) == 3, moment), 90, "proofs", 1.0)
        world.sql("ALTER TABLE busy ADD COLUMN extra int DEFAULT 7")
        wait_until(
            lambda: proofs_since(0.0) == 0, 90, "the proofs of the former columns to end", 1.0
        )
        records = kafka.read_all(world.pipeline.generations_topic)
    assert not [record.key for record in records if b'"found_at"' in (record.value or b"")]


def prove_all_the_time(world: "World") -> None:
    """Let turns of the proof follow each other as quickly as they can."""
    with world.file.open("a") as file:
        file.write("proof: {percent: 100}\n")


def proved_since(world: "World", moment: float) -> bool:
    return all((through or 0.0) > moment for through, _ in proofs(world).values())


def differing(world: "World") -> list[tuple[str, str, list[str]]]:
    """The views that `cdc status` finds to differ, each with keys."""
    return [
        (finding["sink"], finding["table"], finding["keys"])
        for finding in world.json("status")["findings"]
        if finding["code"] == "view-differs"
    ]


def test_status_says_through_which_moment_views_are_proved(world: "World") -> None:
    world.sql(
        "CREATE TABLE items (id int PRIMARY KEY, n int)",
        "CREATE TABLE more (id int PRIMARY KEY, n int)",
        "INSERT INTO items SELECT n, 0 FROM generate_series(1, 50) n",
    )
    world.begin("public.items", "public.more")
    prove_all_the_time(world)
    items = ("cache", "public.items")
    cached = f"{world.name}:public.items:"
    with redis.Redis.from_url(world.cache) as server:
        with world.running():
            world.settle()
            assert set(proofs(world).values()) == {(None, None)}
            assert "proved" not in world.cdc("status").stdout
            began = time.time()
            world.cdc("verify")
            first = proofs(world)
            assert len(first) == 6
            for through, complete_at in first.values():
                assert through == complete_at
                assert through
                assert began - SAME_CLOCK_S < through < time.time() + SAME_CLOCK_S
            assert "all rows since" in world.cdc("status").stdout
            # A sample, or what has changed since a time, proves nothing.
            world.cdc("verify", "--sample", "50")
            world.cdc("verify", "--since", "1h")
            assert proofs(world) == first

        # A run moves the proof on by what has changed; of which rows all were compared doesn't change.
        with world.running(proves=True):
            world.sql("UPDATE items SET n = 1 WHERE id <= 3", "DELETE FROM items WHERE id = 4")
            changed = time.time()
            wait_until(lambda: proved_since(world, changed), 60, "all views to be proved")
            second = proofs(world)
            assert {view: since for view, (_, since) in second.items()} == {
                view: since for view, (_, since) in first.items()
            }
            with closing(client.view(world.file, *items)) as view_of_cache:
                proved = client.proved_through(view_of_cache)
            assert proved
            assert proved.timestamp() >= (second[items][0] or 0)

        # A column that comes with a value for all rows changes them without records. No run works.
        world.sql("ALTER TABLE more ADD COLUMN extra int DEFAULT 7")

        # Of rows that have changed since, a later run finds the damage: an item that wasn't written, one
        # that wasn't deleted, an older value.
        with world.running():
            world.sql(
                "UPDATE items SET n = 2 WHERE id IN (30, 31)", "DELETE FROM items WHERE id = 32"
            )
            world.settle()
        server.delete(f"{cached}30")
        server.set(f"{cached}31", '{"id":31,"n":0}')
        index = f"{world.stack.endpoints.elasticsearch}/{world.name}-public.items"
        http.put(f"{index}/_doc/32", json={"id": 32, "n": 0}).raise_for_status()
        # One that nobody has changed is only found by a comparison of all rows.
        server.set(f"{cached}20", '{"id":20,"n":9}')
        with world.running(proves=True):
            wait_until(lambda: len(differing(world)) == 2, 60, "both views to differ")
            assert differing(world) == [
                ("search", "public.items", ["32"]),
                ("cache", "public.items", ["30", "31"]),
            ]
            assert proofs(world)[items] == (None, None)
            assert {proofs(world)[sink, "public.more"] for sink in SINKS} == {(None, None)}
            shown = " ".join(world.cdc("status").stdout.split())
            assert (
                "public.items in cache: 2 rows differ from Postgres, with keys such as 30, 31"
                in shown
            )
            with closing(client.view(world.file, *items)) as view_of_cache:
                assert client.proved_through(view_of_cache) is None
            mended = world.json("verify", "--repair")["views"]
            assert {view["repaired"] for view in mended if view["sink"] == "cache"} == {0, 3}
            assert proofs(world)[items][0]
            assert differing(world) == []

        with world.running(proves=True):
            # A proof is of one generation. A rebuild proves the next one; what a rollback shows again
            # isn't proved.
            old = proofs(world)[items]
            world.rebuild("cache")
            rebuilt = proofs(world)[items]
            assert (rebuilt[0] or 0) > (old[0] or 0)
            moment = time.time()
            wait_until(
                lambda: (proofs(world)[items][0] or 0) > moment, 60, "the new generation's proof"
            )
            world.rollback("cache")
            assert proofs(world)[items] == (None, None)

            # Nor is a view that is read again from the beginning, though it is equal again at once.
            world.cdc("verify")
            assert all(through for through, _ in proofs(world).values())
            world.sql("TRUNCATE items")
            world.settle()
            moment = time.time()
            others = [(sink, "public.more") for sink in SINKS]
            wait_until(
                lambda: all((proofs(world)[view][0] or 0) > moment for view in others), 60, "a turn"
            )
            truncated = proofs(world)
            assert {view for view, proof in truncated.items() if proof == (None, None)} == {
                (sink, "public.items") for sink in SINKS
            }


def sweep_all_the_time(
    world: "World", patch: pytest.MonkeyPatch | None = None, repair: bool = False
) -> None:
    """Let sweeps follow each other, with slices that are smaller than the tables. patch: also let turns in this
    process follow each other at once.
    """
    with world.file.open("a") as file:
        settings = {"percent": 100, "sweep_hours": 0.001, "repair": repair}
        file.write(f"proof: {json.dumps(settings)}\n")
    if patch:
        patch.setattr("cdc.verify.prover.LEAST_PAUSE_S", 0.2)


def swept_since(world: "World", moment: float) -> bool:
    """Whether all rows of all views have been compared since a moment."""
    return all((complete_at or 0.0) > moment for _, complete_at in proofs(world).values())


def lose(world: "World", *statements: str) -> None:
    """Insert and delete rows while the connector leaves such changes out: the log lacks them."""
    name = world.name
    with Connect(world.pipeline.connect) as connect:
        config = connect.config(name)
        assert config
        for skipped in ("t,c,d", config["skipped.operations"]):
            connect.stop(name)
            connect.put(name, {**config, "skipped.operations": skipped})
            connect.resume(name)
            if skipped == "t,c,d":
                world.sql(*statements)
                world.settle()


def test_a_first_verify_proves_views_that_are_made_meanwhile(world: "World") -> None:
    begin(world)
    with ThreadPoolExecutor(1) as pool:
        verifying = pool.submit(world.cdc, "verify")
        time.sleep(3.0)
        with world.running():
            verifying.result(300)
            assert all(through for through, _ in proofs(world).values())


def test_a_sweep_finds_damage_in_rows_that_nobody_changes(
    world: "World", monkeypatch: pytest.MonkeyPatch
) -> None:
    begin(world)
    sweep_all_the_time(world, monkeypatch)
    with world.running():
        world.settle()
        world.cdc("verify")
    index = f"{world.stack.endpoints.elasticsearch}/{world.name}-public.busy"
    http.put(f"{index}/_doc/2500", json={"id": 2500, "name": "wrong"}).raise_for_status()
    with redis.Redis.from_url(world.cache) as server:
        server.delete(f"{world.name}:public.busy:2600")
    with world.running(proves=True):
        wait_until(lambda: len(differing(world)) == 2, 180, "both views to differ")
        assert differing(world) == [
            ("search", "public.busy", ["2500"]),
            ("cache", "public.busy", ["2600"]),
        ]
        # The other view is equal, and is swept again and again.
        for _ in range(2):
            moment = time.time()
            wait_until(
                partial(
                    lambda since: (proofs(world)["warehouse", "public.busy"][1] or 0) > since,
                    moment,
                ),
                180,
                "a sweep of the warehouse",
            )
        # A change that the log lacks is in no view.
        world.cdc("verify", "--repair")
        lose(world, "DELETE FROM busy WHERE id = 7")
        wait_until(lambda: len(differing(world)) == 3, 180, "all views to differ")
        assert differing(world) == [(sink, "public.busy", ["7"]) for sink in SINKS]


def test_a_run_repairs_what_its_sweep_finds(
    world: "World", monkeypatch: pytest.MonkeyPatch
) -> None:
    begin(world)
    sweep_all_the_time(world, monkeypatch, repair=True)
    with world.running():
        world.settle()
        world.cdc("verify")
    plant(world)
    with world.running(proves=True):
        lose(
            world,
            "DELETE FROM busy WHERE id = 701",
            "INSERT INTO busy VALUES (9000, 'new', 1, now())",
        )
        moment = time.time()
        wait_until(lambda: swept_since(world, moment), 400, "sweeps that find all views equal")
        assert differing(world) == []
        # A row that is sent again is mended in all views.
        views = [view for sink in world.json("status")["sinks"] for view in sink["views"]]
        assert sum(view["repaired"] for view in views) >= 3 * PLANTED + 2
        assert "rows repaired" in world.cdc("status").stdout
    world.assert_equal()


def test_a_sweep_raises_no_alarm(world: "World") -> None:
    """While rows change, and the run is killed, rows are truncated, a column is added, a view is rebuilt."""
    begin(world)
    sweep_all_the_time(world)
    with Topics(world.pipeline.kafka) as kafka, writer.writing(world.dsn, RATE):
        registry = Registry(world.pipeline, kafka)

        def under_way() -> bool:
            known = registry.read().for_sink("cache").proofs.get("public.busy")
            return known is not None and known.sweep is not None

        def come_round() -> None:
            moment = time.time()

            def is_swept() -> bool:
                registry.read()
                known = [registry.for_sink(sink).proofs.get("public.busy") for sink in SINKS]
                return all(proof is not None and proof.complete_at > moment for proof in known)

            wait_until(is_swept, 600, "sweeps to come round", 1.0)

        def prove() -> None:
            world.settle()
            world.cdc("verify")
            wait_until(under_way, 120, "a sweep to be under way", 0.5)

        with world.process() as run:
            prove()
            run.kill()
            run.wait(60)
        assert under_way()
        with world.process():
            come_round()
            wait_until(under_way, 120, "a sweep to be under way", 0.5)
            world.sql("TRUNCATE busy")
            world.sql(writer.FILL)
            prove()
            world.sql("ALTER TABLE busy ADD COLUMN extra int DEFAULT 7")
            world.sql("UPDATE busy SET amount = 2 WHERE id < 900")
            prove()
            world.rebuild("cache")
            wait_until(under_way, 120, "a sweep to be under way", 0.5)
        records = kafka.read_all(world.pipeline.generations_topic)
    assert not [record.key for record in records if b'"found_at"' in (record.value or b"")]
