"""`cdc verify` while others write: no false alarm, every planted fault and no other, repair through the log."""

import json
import re
import time
from typing import TYPE_CHECKING

import redis
from pyspark.sql import functions as F

from cdc import client
from cdc.sinks.delta.log import TableLog
from cdc.verify.comparison import Comparison, Options
from cdc.verify.repair import repair
from cdc.verify.verification import verify
from tests.scenarios.conftest import SINKS
from tests.support import http, writer

if TYPE_CHECKING:
    from tests.scenarios.conftest import World

METADATA = "spark.databricks.delta.commitInfo.userMetadata"
"""Where Spark takes the text that its commits have besides their rows."""
PLANTED = 7
"""Faults of each class in each view: in rows that nobody changes any more."""
CLOCKS_S = 5.0
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


def test_status_says_through_which_moment_views_are_proved(world: "World") -> None:
    world.sql(
        "CREATE TABLE items (id int PRIMARY KEY, n int)",
        "CREATE TABLE more (id int PRIMARY KEY, n int)",
        "INSERT INTO items SELECT n, 0 FROM generate_series(1, 50) n",
    )
    world.begin("public.items", "public.more")
    items = ("cache", "public.items")
    cached = f"{world.name}:public.items:"
    with world.running(), redis.Redis.from_url(world.cache) as server:
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
            assert began - CLOCKS_S < through < time.time() + CLOCKS_S
        assert "all rows since" in world.cdc("status").stdout

        # A sample proves nothing new. What has changed moves the proof on, but of which rows all
        # were compared doesn't change.
        world.cdc("verify", "--sample", "50")
        assert proofs(world) == first
        world.sql("UPDATE items SET n = 1 WHERE id <= 3")
        compared = {
            (view["sink"], view["table"]): view["scope"]
            for view in world.json("verify", "--since", "proof")["views"]
        }
        assert compared == {
            (sink, table): f"{rows} rows that changed"
            for sink in SINKS
            for table, rows in (("public.items", 3), ("public.more", 0))
        }
        second = proofs(world)
        for view, (through, complete_at) in second.items():
            assert through
            assert through > (first[view][0] or 0)
            assert complete_at == first[view][1]
        view_of_cache = client.view(world.file, *items)
        proved = client.proved_through(view_of_cache)
        assert proved
        assert proved.timestamp() == second[items][0]

        # A row that nobody changes is only found by a comparison of all rows; then nothing is
        # proved of its view, until it is mended.
        server.set(f"{cached}20", '{"id":20,"n":9}')
        world.cdc("verify", "--since", "proof")
        # Of one that was changed since the last proof, the damage is found.
        world.sql("UPDATE items SET n = 2 WHERE id = 30")
        world.settle()
        server.delete(f"{cached}30")
        (wrong,) = (
            view
            for view in world.json("verify", "--since", "proof", code=8)["views"]
            if not view["equal"]
        )
        assert (wrong["sink"], wrong["missing"], wrong["different"]) == ("cache", 1, 0)
        assert proofs(world)[items] == (None, None)
        assert "not proved: public.items in cache: cdc -p FILE verify" in " ".join(
            world.cdc("status").stdout.split()
        )
        assert client.proved_through(view_of_cache) is None
        # Without a proof all rows of the table are compared.
        mended = world.json("verify", "--since", "proof", "--repair")["views"]
        assert {view["repaired"] for view in mended if view["sink"] == "cache"} == {0, 2}
        assert proofs(world)[items][0]

        # A proof is of one generation. A rebuild proves the next one; what a rollback shows again
        # isn't proved.
        old = proofs(world)[items]
        world.rebuild("cache")
        rebuilt = proofs(world)[items]
        assert (rebuilt[0] or 0) > (old[0] or 0)
        world.rollback("cache")
        assert proofs(world)[items] == (None, None)

        # Nor is a view that is read again from the beginning, though it is equal again at once.
        world.cdc("verify")
        assert all(through for through, _ in proofs(world).values())
        world.sql("TRUNCATE items")
        world.settle()
        truncated = proofs(world)
        assert {view for view, proof in truncated.items() if proof == (None, None)} == {
            (sink, "public.items") for sink in SINKS
        }
        view_of_cache.close()
