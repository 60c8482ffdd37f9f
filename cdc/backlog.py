"""A large batch of documents, folded before it is decoded: only the newest record of each row is opened.

Opening records is most of the work of a batch, and in a long one most are followed by another of their row. Those are
taken as if compaction had come first: what no connector writes is noticed where it is the newest of its row.

In:  the steps of a batch, read from Kafka once more, past the stream. Out: what a plain `order.fold` gives.
Invariant: each task reads partitions of its own, so nothing is shuffled.
"""

from collections.abc import Iterable, Sequence
from functools import cache, reduce

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F

from cdc import decode, log, order
from cdc.change import Advance, Table
from cdc.log import Spans


def read(spark: SparkSession, bootstrap: str, group: str, steps: Iterable[Advance], tasks: int) -> list[DataFrame]:
    """The records of these steps, dealt out to so many tasks at most; a Kafka partition is in one part."""
    return [log.between(spark, bootstrap, share, group) for share in shares(spanned(steps), tasks)]


def newest(parts: Iterable[DataFrame], tables: Sequence[Table], reading: decode.Reading) -> DataFrame:
    """What a plain `order.fold` of these records as documents gives.

    Only for a reading that isn't careful and has no floors: every record counts as a living one.
    """
    records = reduce(DataFrame.union, (_folded(part, tables) for part in parts))
    decoded = decode.decoded(records, tables, "documents", reading, further=["records"])
    return decoded.select(*_counted()).sortWithinPartitions("topic", "partition", "first")


def shares(spans: Spans, tasks: int) -> list[Spans]:
    """The spans, dealt out so that each task has about as many offsets; an empty one is nobody's."""
    found: list[Spans] = [{} for _ in range(tasks)]
    loads = [0] * tasks
    for place, (start, until) in sorted(spans.items(), key=lambda one: one[1][0] - one[1][1]):
        if start < until:
            least = loads.index(min(loads))
            found[least][place] = start, until
            loads[least] += until - start
    return [share for share in found if share]


def spanned(steps: Iterable[Advance]) -> Spans:
    """What has to be read for all of them; two may be of the same table, from different places on."""
    found: Spans = {}
    for step in steps:
        for partition, (start, until) in enumerate(zip(step.start_offsets, step.until.offsets, strict=True)):
            place = step.table.topic, partition
            first, last = found.get(place, (start, until))
            found[place] = min(first, start), max(last, until)
    return found


def _folded(records: DataFrame, tables: Sequence[Table]) -> DataFrame:
    """The newest record of each row, as Kafka has it, and how many there are."""
    named = records.withColumn("key", F.col("key").cast("string")).withColumn("id", decode.ids(tables))
    # One partition to Spark, which then sees no need to bring rows together.
    keyed = named.coalesce(1).groupBy("id", "partition", "topic")
    newest = (F.max_by(name, "offset").alias(name) for name in ("key", "value"))
    return keyed.agg(F.count("*").alias("records"), F.max("offset").alias("offset"), *newest)


@cache
def _counted() -> tuple[Column, ...]:
    none = F.lit(0).cast("long")
    return (
        *(F.col(name) for name in ("topic", "partition", "id", "records", "offset")),
        order.whole("document").alias("document"),
        F.col("offset").alias("first"),
        none.alias("dead"),
        none.alias("quarantined"),
    )
