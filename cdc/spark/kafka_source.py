"""Read topics into a frame with Spark's Kafka source: every committed record below a position.
Audits and `verify` use it. Streams don't: see `lane_records`.

In:  the broker, the positions to read up to. Out: a frame of records.
Invariant: no row leaves the executors.
"""

import json
from collections.abc import Mapping

from pyspark.sql import DataFrame, SparkSession

from cdc.kafka.login import for_java
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
    return {**for_java(bootstrap, "kafka."), **FETCH_OPTIONS}


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
