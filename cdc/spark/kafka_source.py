"""Read topics into a frame with Spark's Kafka source: every committed record below a position.
Audits and `verify` use it. Streams don't: see `lane_records`.

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
    partitions = {topic: list(range(end.partition_count)) for topic, end in ends.items()}
    offsets = {topic: dict(enumerate(end.offsets)) for topic, end in ends.items()}
    return (
        spark.read.format("kafka")
        .options(**reader_options(bootstrap))
        .option("assign", json.dumps(partitions))
        .option("endingOffsets", json.dumps(offsets))
        .load()
    )


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
