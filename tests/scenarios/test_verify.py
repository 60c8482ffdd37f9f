"""`cdc verify` while others write: no false alarm, every planted fault and no other, repair through the log."""

import json
import re
from typing import TYPE_CHECKING

import redis
from pyspark.sql import functions as F

from cdc.sinks.delta.log import TableLog
from cdc.verify.comparison import Comparison, Options
from cdc.verify.repair import repair
from cdc.verify.verification import verify
from tests.support import http, writer

if TYPE_CHECKING:
    from tests.scenarios.conftest import World

METADATA = "spark.databricks.delta.commitInfo.userMetadata"
"""Where Spark takes the text that its commits have besides their rows."""
PLANTED = 7
"""Faults of each class in each view: in rows that nobody changes any more."""
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
