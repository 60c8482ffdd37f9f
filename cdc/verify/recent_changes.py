"""Records of a table's topic since a position or a time, as Spark reads them.

They say which rows changed, and to what.
"""

import json
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from cdc.codec import log_rows
from cdc.model.position import Position
from cdc.model.table import Table
from cdc.sink.lane_run import freeze_gc_after
from cdc.spark.kafka_source import reader_options
from cdc.verify.bucket_hashes import Work, column_values, record_batch
from cdc.verify.row_equality import comparable

if TYPE_CHECKING:
    import pyarrow as pa

STATES = "id string, seen long"
EARLIEST = {"startingOffsets": "earliest"}


def states_since(spark: SparkSession, kafka: str, table: Table, position: Position) -> DataFrame:
    """Return id, seen: the state of the row after each committed record at or above a position.

    seen is the row's hash (`Comparable.state_hash`), null where the record deletes the row. Where
    compaction has removed a record there is a newer one of its key, so no id is missed. Records
    that can't be read are left out.
    """
    records = read_records(spark, kafka, table, _starting_at(table, position.offsets))
    return records.select("key", "value").mapInArrow(freeze_gc_after(_states(table)), STATES)


def _states(table: Table) -> Work:
    documents = log_rows.documents(table)
    rules = comparable(table)

    def work(batches: Iterator["pa.RecordBatch"]) -> Iterator["pa.RecordBatch"]:
        for batch in documents(batches):
            states = [
                (row_id, None if document is None else rules.state_hash(document))
                for row_id, document in zip(*column_values(batch), strict=True)
            ]
            yield record_batch(STATES, states)

    return work


def ids_since(spark: SparkSession, kafka: str, table: Table, since_ms: int) -> DataFrame:
    """Return the distinct ids of records that the connector produced at that time or later.

    `since_ms`: Unix milliseconds.
    """
    options = {"startingTimestamp": str(since_ms), "startingOffsetsByTimestampStrategy": "latest"}
    return _keys(read_records(spark, kafka, table, options), table).select("id").distinct()


def ids_unchanged_since(spark: SparkSession, kafka: str, table: Table, since_ms: int) -> DataFrame:
    """Return the ids of rows whose last record in the topic has a row that was committed before that time."""
    records = read_records(spark, kafka, table, EARLIEST).select("key", "value", "offset")
    committed = records.mapInArrow(freeze_gc_after(log_rows.commits(table)), log_rows.COMMITS)
    # All records of a row are in one partition.
    last = committed.groupBy("id").agg(F.max_by("committed_us", "offset").alias("last_us"))
    return last.where(F.col("last_us") < since_ms * 1000).select("id")


def keys(spark: SparkSession, kafka: str, table: Table, start: Sequence[int] = ()) -> DataFrame:
    """Return id, key: each key of the topic once, as bytes, of records at or above `start`, by
    partition; of all where it is empty.
    """
    options = _starting_at(table, start) if start else EARLIEST
    return _keys(read_records(spark, kafka, table, options), table).distinct()


def _starting_at(table: Table, offsets: Sequence[int]) -> dict[str, str]:
    starts = {str(partition): offset for partition, offset in enumerate(offsets)}
    return {"startingOffsets": json.dumps({table.topic: starts})}


def _keys(records: DataFrame, table: Table) -> DataFrame:
    """Return id, key of each record; records with another key than the table's are left out."""
    return records.select("key").mapInArrow(freeze_gc_after(log_rows.ids(table)), log_rows.IDS)


def read_records(
    spark: SparkSession, kafka: str, table: Table, options: dict[str, str]
) -> DataFrame:
    return (
        spark.read.format("kafka")
        .options(**reader_options(kafka))
        .option("subscribe", table.topic)
        .options(**options)
        .load()
    )
