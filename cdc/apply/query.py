"""Build a streaming query, and read its progress from Spark."""

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from cdc.apply.plan import Ends, ResumePlan
from cdc.sink.lane import COLUMNS
from cdc.spark.kafka_source import reader_options

RAM_DISK = "/dev/shm"  # noqa: S108 (mkdtemp makes a private folder in it)
"""The folder for Spark's checkpoint, if it exists. It needn't outlive the run, and is written twice
a batch.
"""
LIGHT = {
    "fs.file.impl": "org.apache.hadoop.fs.RawLocalFileSystem",
    "fs.file.impl.disable.cache": "true",
}
"""Session settings for sinks that store nothing in files. A checkpoint without checksum files starts
two processes a batch (`chmod`) instead of four.
"""


class Planned(NamedTuple):
    """A batch as Spark hands it over: its records, not yet read, and its number in the query."""

    records: DataFrame
    number: int


def light(spark: SparkSession) -> SparkSession:
    """A session of its own for a sink that stores nothing in files."""
    spark = spark.newSession()
    for name, value in LIGHT.items():
        spark.conf.set(name, value)
    return spark


@contextmanager
def checkpoint(sink: str) -> Iterator[str]:
    """A temporary folder for the checkpoint of one query."""
    memory = RAM_DISK if os.access(RAM_DISK, os.W_OK) else None
    folder = tempfile.mkdtemp(prefix=f"cdc-{sink}-", dir=memory)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def read(
    spark: SparkSession, bootstrap: str, writer: str, plan: ResumePlan, limit: int
) -> DataFrame:
    """The stream of records from the plan's positions on: key, value, topic, partition, offset."""
    return (
        spark.readStream.format("kafka")
        .options(**reader_options(bootstrap, writer))
        .option(
            "assign",
            json.dumps({topic: list(range(s.partition_count)) for topic, s in plan.shapes.items()}),
        )
        .option("startingOffsets", json.dumps(plan.offsets()))
        .option("failOnDataLoss", "true")
        .option("maxOffsetsPerTrigger", limit)
        .load()
        .select(*COLUMNS)
    )


def start(
    records: DataFrame,
    folder: str,
    sink: str,
    trigger_s: float | None,
    give: Callable[[Planned], None],
) -> StreamingQuery:
    """Start a query of these records, with its checkpoint in `folder`. Spark's thread calls `give`
    with each batch.

    trigger_s: seconds from the start of a batch to that of the next, at least; None: the query ends
    once all records are handed over that are in the topics now.
    """
    spark = records.sparkSession
    # Each sink has a scheduler pool, so that a long warehouse job doesn't delay the cache.
    spark.sparkContext.setLocalProperty("spark.scheduler.pool", sink)
    # Fewer tasks: each costs a worker's time, and a chunk may hold records of several
    # partitions.
    tasks = int(spark.conf.get("spark.sql.shuffle.partitions") or 1)
    writer = records.coalesce(tasks).writeStream.option("checkpointLocation", folder)
    if trigger_s is None:
        writer = writer.trigger(availableNow=True)
    else:
        milliseconds = int(trigger_s * 1000)
        writer = writer.trigger(processingTime=f"{milliseconds} milliseconds")
    return writer.foreachBatch(lambda frame, number: give(Planned(frame, number))).start()


def planned_ends(folder: str, batch_id: int) -> Ends:
    """The ends of a batch, per topic and partition: the offsets that Spark planned it with.

    Read from the query's offset log, whose last line holds the end offsets of its only source. The
    records can't tell: transaction markers and compaction leave offsets without a record.
    """
    *_, last = Path(folder, "offsets", str(batch_id)).read_text(encoding="utf-8").splitlines()
    return _ends(json.loads(last))


def latest(query: StreamingQuery) -> tuple[Ends, float]:
    """The ends of the topics that the query saw last, and when, in Unix seconds; 0 if it hasn't
    looked yet.
    """
    progress = query.lastProgress
    ends = progress["sources"][0]["latestOffset"] if progress and progress["sources"] else None
    if not progress or not ends:
        return {}, 0.0
    parsed = json.loads(ends) if isinstance(ends, str) else ends
    return _ends(parsed), datetime.fromisoformat(progress["timestamp"]).timestamp()


def _ends(parsed: dict[str, dict[str, int]]) -> Ends:
    return {
        topic: {int(partition): offset for partition, offset in ends.items()}
        for topic, ends in parsed.items()
    }
