"""Read topics into a frame with Spark's Kafka source: every committed record below a position, or in
ranges of offsets. Audits and the state of documents use it. Streams don't: see `lane_records`.

In:  the broker, the positions to read up to. Out: a frame of records; counts of them.
Invariant: no row leaves the executors.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from cdc.model.position import Position

FETCH_OPTIONS = {
    "kafka.isolation.level": "read_committed",
    # Milliseconds that the broker may delay an empty answer. Each partition whose last offsets are
    # markers costs that long.
    "kafka.fetch.max.wait.ms": "1",
    # Large polls, because Spark asks for the topic's first and last offset at every poll, and
    # discards what was fetched ahead.
    "kafka.max.poll.records": "2000",
}

EARLIEST = -2
"""Start offset that stands for the first record that the broker has."""
OffsetRanges = dict[tuple[str, int], tuple[int, int]]
"""By topic and partition: the offset to start from, and the one to stop before."""


def reader_options(bootstrap: str) -> dict[str, str]:
    """Return options of Spark's Kafka source: the broker, and how records are fetched."""
    return {"kafka.bootstrap.servers": bootstrap, **FETCH_OPTIONS}


@dataclass(frozen=True)
class PartitionCensus:
    """How many records a partition holds, of how many keys, and how many of the records are
    tombstones.
    """

    records: int = 0
    keys: int = 0
    tombstones: int = 0


def read_until(spark: SparkSession, bootstrap: str, ends: Mapping[str, Position]) -> DataFrame:
    """Read every committed record below the ends: key, value binary; topic, partition, offset,
    timestamp.
    """
    ranges = {
        (topic, partition): (EARLIEST, offset)
        for topic, end in ends.items()
        for partition, offset in enumerate(end.offsets)
    }
    return read_ranges(spark, bootstrap, ranges)


def read_ranges(spark: SparkSession, bootstrap: str, spans: OffsetRanges) -> DataFrame:
    """Read every committed record of these ranges, with the columns of `read_until`."""
    starts, ends = ({place: span[index] for place, span in spans.items()} for index in (0, 1))
    return (
        spark.read.format("kafka")
        .options(**reader_options(bootstrap))
        .option(
            "assign",
            json.dumps({topic: list(places) for topic, places in _by_topic(starts).items()}),
        )
        .option("startingOffsets", json.dumps(_by_topic(starts)))
        .option("endingOffsets", json.dumps(_by_topic(ends)))
        .load()
    )


def _by_topic(offsets: Mapping[tuple[str, int], int]) -> dict[str, dict[int, int]]:
    offsets_by_topic: dict[str, dict[int, int]] = {}
    for (topic, partition), offset in offsets.items():
        offsets_by_topic.setdefault(topic, {})[partition] = offset
    return offsets_by_topic


def census(
    spark: SparkSession, bootstrap: str, ends: Mapping[str, Position]
) -> dict[str, list[PartitionCensus]]:
    """Count what each partition holds below the ends, by topic."""
    by_key = read_until(spark, bootstrap, ends).groupBy("topic", "partition", "key")
    counts = (
        by_key.agg(
            F.count("*").alias("records"), F.count_if(F.col("value").isNull()).alias("tombstones")
        )
        .groupBy("topic", "partition")
        .agg(
            F.sum("records").alias("records"),
            F.count("*").alias("keys"),
            F.sum("tombstones").alias("tombstones"),
        )
    )
    census_by_topic = {
        topic: [PartitionCensus()] * end.partition_count for topic, end in ends.items()
    }
    for row in counts.collect():
        census_by_topic[row["topic"]][row["partition"]] = PartitionCensus(
            row["records"], row["keys"], row["tombstones"]
        )
    return census_by_topic
