"""Kafka records to changes, as Spark expressions; the same for every table of a batch.

    records  key, value binary; topic, partition, offset, timestamp: what Spark's Kafka source gives
    changes  topic string, partition int, offset long, id string, one row per record
             kept array<string>   columns whose value the record doesn't carry (`cdc.toast`), null when it carries all
             dead boolean         from before the table's last TRUNCATE: see `cdc.control`
      as events      key string, op string, after string (the connector's JSON), lsn long, commit_us long
      as documents   document string: the row as a view's JSON
             op is null for a tombstone; after and document are null for both kinds of delete

A record that isn't what the connector writes stops the batch, with its topic, partition and offset. Read carefully,
it gets a `problem` instead, and every record keeps its `record` (key, value) for the quarantine.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, reduce

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from cdc.change import Form, Table
from cdc.fit import unfit
from cdc.rows import document, row_id
from cdc.toast import Placeholder

ENVELOPE = (
    "op string, after string, source struct<lsn bigint, ts_us bigint, schema string, table string, sequence string>"
)
UNDECODABLE = "cdc cannot decode"
"""First words of a failure that Spark reports as text; `cdc.explain` gives it its class back."""


@dataclass(frozen=True)
class Reading:
    """What decoding has to know besides the tables."""

    placeholder: str = "__debezium_unavailable_value"
    floors: Mapping[str, int] = field(default_factory=dict)
    """Per topic, the LSN below which its changes are dead."""
    since: Mapping[str, Sequence[int]] = field(default_factory=dict)
    """Per topic, by partition: the offset below which its records are dead, whatever is in them."""
    careful: bool = False
    holds: Form | None = None
    """Whose limits a careful reading minds: those of sinks of that form; None for the form that it gives."""

    @property
    def floored(self) -> bool:
        """Whether any record may be dead."""
        return bool(self.floors or self.since)

    def carefully(self) -> "Reading":
        return replace(self, careful=True)


def decoded(
    records: DataFrame, tables: Sequence[Table], form: Form, reading: Reading, further: Sequence[str] = ()
) -> DataFrame:
    """Every record as a change, in the form that a sink takes, with further columns that it has."""
    placeholder, envelope, after = Placeholder(reading.placeholder), F.col("envelope"), F.col("after")
    place, whole = ("topic", "partition", "offset", *further), ("record",) if reading.careful else ()
    opened = records.select(
        *place,
        "value",
        F.col("key").cast("string").alias("key"),
        F.from_json(F.col("value").cast("string"), ENVELOPE).alias("envelope"),
        *(F.struct("key", "value").alias(name) for name in whole),
    )
    # A select for each value that several others are made from: within one Spark would make it anew for each of them.
    named = opened.select(
        *(*place, *whole, "key"),
        F.col("value").isNull().alias("tombstone"),
        _intact(envelope.after).alias("valid"),
        ids(tables).alias("id"),
        envelope.op.alias("op"),
        F.when(envelope.op != "d", envelope.after).alias("after"),
        _lsn(envelope.source).alias("lsn"),
        envelope.source.ts_us.alias("commit_us"),
        F.concat(F.lit("."), envelope.source.schema, F.lit("."), envelope.source.table).alias("origin"),
    )
    suspected = named.withColumn("suspected", placeholder.suspected(after))
    carried = suspected.select(
        *(*place, *whole, "key", "tombstone", "valid", "id", "op", "lsn", "commit_us", "origin"),
        placeholder.masked(after, F.col("suspected")).alias("after"),
        placeholder.kept(after, F.col("suspected")).alias("kept"),
    )
    wrong = _wrong(tables, form, reading)
    good = carried.withColumn("problem", wrong) if reading.careful else carried.withColumn("id", _or_stop(wrong))
    return good.select(*further, *_columns(tables, form, reading))


def ids(tables: Sequence[Table]) -> Column:
    """The id of a record whose key is text."""
    return by_topic(tables, _id)


def _columns(tables: Sequence[Table], form: Form, reading: Reading) -> list[Column]:
    own = [F.col(name) for name in ("topic", "partition", "offset", "id", "kept")]
    own.append((_past(reading.since) | _dead(F.col("lsn"), reading.floors)).alias("dead"))
    if reading.careful:
        own += [F.col("problem"), F.col("record")]

    def intact(value: Column) -> Column:
        return F.when(F.col("problem").isNull(), value) if reading.careful else value

    if form == "documents":
        return [*own, intact(by_topic(tables, _document)).alias("document")]
    return [*own, *map(F.col, ("key", "op")), intact(F.col("after")).alias("after"), *map(F.col, ("lsn", "commit_us"))]


# Built once a table: a stream that starts again would wait seconds for its thousands of calls into the JVM.
@cache
def _id(table: Table) -> Column:
    return row_id(table, F.col("key"))


@cache
def _document(table: Table) -> Column:
    return document(table, F.col("after"))


def _wrong(tables: Sequence[Table], form: Form, reading: Reading) -> Column:
    """Why a record isn't a change of its topic's table; null when it is. Names no value."""
    op, row = F.col("op"), F.col("after")
    found = (
        # Of another server or with another key: it need not be a change of the table as it is now.
        F.when(_past(reading.since), F.lit(None))
        .when(F.col("key").isNull(), "it has no key")
        .when(~F.col("valid"), "its bytes are no text")
        .when(F.col("id").isNull(), "its key is not one of the table")
        .when(F.col("tombstone"), F.lit(None))
        .when(op.isNull(), "its value is no change event")
        .when(~op.isin("r", "c", "u", "d"), "its operation is unknown")
        .when((op != "d") & (row.isNull() | ~row.startswith("{")), "it lacks the row")
        .when(~F.col("topic").endswith(F.col("origin")), "it is of another table")
    )
    if reading.careful:
        holds = reading.holds or form
        found = found.when(op != "d", by_topic(tables, lambda table: unfit(table, row, holds)))
    return found


def _intact(row: Column) -> Column:
    """Whether key and row were UTF-8: what isn't becomes U+FFFD, silently, which a row may also hold by right."""
    key, value = (F.try_validate_utf8(F.col(name).cast("string")).isNotNull() for name in ("key", "value"))
    return (F.col("key").isNull() | key) & (~F.coalesce(row.contains("\ufffd"), F.lit(False)) | value)


def _or_stop(wrong: Column) -> Column:
    place = F.concat_ws(" ", F.col("topic"), F.lit("partition"), "partition", F.lit("offset"), "offset")
    stop = F.raise_error(F.concat(F.lit(f"{UNDECODABLE} "), place, F.lit(": "), wrong)).cast("string")
    return F.when(wrong.isNull(), F.col("id")).otherwise(stop)


def _lsn(source: Column) -> Column:
    """Where in the log the connector was; rows of an incremental snapshot tell it in `sequence` only: [null,"123"]."""
    return F.coalesce(source.lsn, F.get_json_object(source.sequence, "$[1]").try_cast("bigint"))


def _dead(lsn: Column, floors: Mapping[str, int]) -> Column:
    """A tombstone has no LSN and lives on: it only deletes what a later record of its key would bring anyway."""
    live = F.lit(False)
    for topic, floor in floors.items():
        live = F.when(F.col("topic") == topic, F.coalesce(lsn < F.lit(floor), F.lit(False))).otherwise(live)
    return live


def _past(since: Mapping[str, Sequence[int]]) -> Column:
    """Whether a record lies before those that count: tombstones, too."""
    past = F.lit(False)
    for topic, offsets in since.items():
        for partition, offset in enumerate(offsets):
            place = (F.col("topic") == topic) & (F.col("partition") == partition)
            past = F.when(place, F.col("offset") < offset).otherwise(past)
    return past


def by_topic(tables: Sequence[Table], expression: Callable[[Table], Column]) -> Column:
    """An expression per table, chosen by the record's topic; null for any other topic."""
    first, *rest = tables
    chosen = F.when(F.col("topic") == first.topic, expression(first))
    return reduce(lambda case, table: case.when(F.col("topic") == table.topic, expression(table)), rest, chosen)
