"""Kafka records to changes, as Spark expressions; the same for every table of a batch.

    records  key, value binary; topic, partition, offset, timestamp: what Spark's Kafka source gives
    events   topic string, partition int, offset long, key string, id string, op string, after string, lsn long,
             commit_us long
             one row per record; op is null for a tombstone, after is null for both kinds of delete
    documents  topic, partition, offset, id as above, document string: the row as a view's JSON, null for a delete

A record that isn't what the connector writes stops the batch with its topic, partition and offset.
"""

from collections.abc import Callable, Sequence
from functools import reduce

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from cdc.change import Form, Table
from cdc.rows import document, row_id

ENVELOPE = "op string, after string, source struct<lsn bigint, ts_us bigint>"
UNDECODABLE = "cdc cannot decode"
"""First words of a failure that Spark reports as text; `cdc.explain` gives it its class back."""


def decoded(records: DataFrame, tables: Sequence[Table], form: Form) -> DataFrame:
    """Decode every record into the form that a sink takes: `events` or `documents`."""
    opened = events(records, tables)
    if form == "events":
        return opened
    made = by_topic(tables, lambda table: document(table, F.col("after")))
    return opened.select("topic", "partition", "offset", "id", made.alias("document"))


def events(records: DataFrame, tables: Sequence[Table]) -> DataFrame:
    """Every record: its row's id, the operation and the row after it as the connector's JSON text."""
    opened = records.select(
        "topic",
        "partition",
        "offset",
        F.col("key").cast("string").alias("key"),
        F.col("value").isNull().alias("tombstone"),
        F.from_json(F.col("value").cast("string"), ENVELOPE).alias("envelope"),
    )
    op, after = F.col("envelope.op"), F.col("envelope.after")
    written = op.isin("r", "c", "u") & after.isNotNull()
    good = F.col("key").isNotNull() & (F.col("tombstone") | F.coalesce(written | (op == "d"), F.lit(False)))
    checked = F.when(good, by_topic(tables, lambda table: row_id(table, F.col("key"))))
    return opened.select(
        "topic",
        "partition",
        "offset",
        "key",
        F.coalesce(checked, _refuse()).alias("id"),
        op.alias("op"),
        F.when(op != "d", after).alias("after"),
        F.col("envelope.source.lsn").alias("lsn"),
        F.col("envelope.source.ts_us").alias("commit_us"),
    )


def _refuse() -> Column:
    place = F.concat_ws(" ", F.col("topic"), F.lit("partition"), "partition", F.lit("offset"), "offset")
    return F.raise_error(F.concat(F.lit(f"{UNDECODABLE} "), place)).cast("string")


def by_topic(tables: Sequence[Table], expression: Callable[[Table], Column]) -> Column:
    """An expression per table, chosen by the record's topic; null for any other topic."""
    first, *rest = tables
    chosen = F.when(F.col("topic") == first.topic, expression(first))
    return reduce(lambda case, table: case.when(F.col("topic") == table.topic, expression(table)), rest, chosen)
