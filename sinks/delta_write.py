"""What a batch brings to a Delta table: how many rows, events to append, a mirror after its merge, the merge itself."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING

from cdc.change import Advance, Applied, Stored, Table
from cdc.sink import Batch

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

REWRITING = {"spark.databricks.delta.merge.deletionVectors.persistent": "false"}
MARKING = {
    "spark.databricks.delta.merge.deletionVectors.persistent": "true",
    # All of a large mirror is read three times: compiled, 50,000 changes of a million rows take 6 s instead of 7.5.
    "spark.sql.codegen.wholeStage": "true",
    "spark.sql.codegen.factoryMode": "FALLBACK",
}
"""Session settings: MERGE takes no options."""
OWN = ("_cdc_gone", "_cdc_view")
"""Columns of what is merged that a mirror doesn't have: whether the row is gone, and what the view alone knows."""


def events(batch: Batch, advance: Advance, stored: Stored | None) -> "DataFrame":
    """What is new of a table's events, as rows of its log of changes."""
    from cdc import rows

    new = unseen(batch.events, advance, stored).where("op IS NOT NULL")
    # Of a deleted row only the key is known for sure.
    return rows.parsed(new, advance.table, "coalesce(after, key)").select(*_event(advance.table))


# Columns are made once a table: the calls into the JVM cost as much as the rest of a small batch.
@cache
def _event(table: Table) -> "tuple[Column, ...]":
    from pyspark.sql import functions as F

    from cdc import rows

    own = ("id", "op", "partition", "offset", "lsn", "kept")
    named = (F.col(name).alias(f"_cdc_{name}") for name in own)
    return *named, F.timestamp_micros("commit_us").alias("_cdc_commit"), *rows.columns(table)


def changed(changes: "DataFrame", table: Table) -> "DataFrame":
    """What folded changes bring to a mirror: `_cdc_id`, `_cdc_partition`, `_cdc_offset`, the columns, `_cdc_gone`."""
    from cdc import rows

    return rows.parsed(changes, table, "after").select(*_changed(table))


@cache
def _changed(table: Table) -> "tuple[Column, ...]":
    from pyspark.sql import functions as F

    from cdc import rows

    named = (F.col(name).alias(f"_cdc_{name}") for name in ("id", "partition", "offset"))
    return *named, *rows.columns(table), F.col("after").isNull().alias("_cdc_gone")


def first(source: "DataFrame") -> "DataFrame":
    """The rows of a mirror that has none yet: nothing can match."""
    return source.where("NOT _cdc_gone").drop(*OWN)


def merged(mirror: "DataFrame", source: "DataFrame") -> "DataFrame":
    """A whole mirror as `merge` would leave it, made by one task: for one so small that this costs less."""
    from cdc.rows import quoted

    def value(name: str) -> str:
        new, old = f"s.{quoted(name)}", f"t.{quoted(name)}"
        if name not in source.columns:
            return old
        if name not in mirror.columns:
            return f"{new} AS {quoted(name)}"
        return f"CASE WHEN {_brought(name, source)} THEN {new} ELSE {old} END AS {quoted(name)}"

    old, new = mirror.coalesce(1).alias("t"), source.coalesce(1).hint("shuffle_hash").alias("s")
    names = [*mirror.columns, *(name for name in source.columns if name not in (*mirror.columns, *OWN))]
    both = old.join(new, new["_cdc_id"] == old["_cdc_id"], "full_outer").where("NOT coalesce(s._cdc_gone, false)")
    return both.selectExpr(*map(value, names))


def _brought(name: str, source: "DataFrame") -> str:
    """Whether a row has a change, and the change a value for the column."""
    there = "s._cdc_id IS NOT NULL"
    if "_cdc_view" not in source.columns:
        return there
    text = name.replace("\\", "\\\\").replace("'", "\\'")
    return f"{there} AND NOT coalesce(array_contains(s._cdc_view, '{text}'), false)"


def merge(folder: str, source: "DataFrame", *, rewrite: bool) -> None:
    """Bring the rows in; `rewrite` files that hold them before, or else mark their rows as deleted."""
    from delta.tables import DeltaTable

    from cdc.rows import quoted

    target = DeltaTable.forPath(source.sparkSession, folder)
    names = [name for name in source.columns if name not in OWN]
    inserted: dict[str, str | Column] = {quoted(name): f"s.{quoted(name)}" for name in names}
    known = set(target.toDF().columns)
    updated: dict[str, str | Column] = {
        quoted(name): f"CASE WHEN {_brought(name, source)} THEN s.{quoted(name)} ELSE t.{quoted(name)} END"
        if "_cdc_view" in source.columns and name in known
        else f"s.{quoted(name)}"
        for name in names
    }
    statement = (
        target.alias("t")
        .merge(source.alias("s"), "t._cdc_id = s._cdc_id")
        .withSchemaEvolution()
        .whenMatchedDelete("s._cdc_gone")
        .whenMatchedUpdate(set=updated)
        .whenNotMatchedInsert("NOT s._cdc_gone", values=inserted)
    )
    with _set(source.sparkSession, REWRITING if rewrite else MARKING):
        statement.execute()


@contextmanager
def _set(spark: "SparkSession", settings: Mapping[str, str]) -> Iterator[None]:
    before = {name: str(spark.conf.get(name)) for name in settings}
    try:
        for name, value in settings.items():
            spark.conf.set(name, value)
        yield
    finally:
        for name, old in before.items():
            spark.conf.set(name, old)


def unseen(frame: "DataFrame", advance: Advance, stored: Stored | None) -> "DataFrame":
    """The table's rows that lie at or above its own position; all of them for a repair."""
    mine = frame.where(frame["topic"] == advance.table.topic)
    if stored is None or advance.repairs:
        return mine
    above = (f"(partition <> {p} OR offset >= {at})" for p, at in enumerate(stored.position.offsets))
    return mine.where(" AND ".join(above))


Counts = Mapping[str, tuple[Applied, bool]]
NOTHING = (Applied(), False)


def counts(batch: Batch) -> Counts:
    """What becomes of each topic's records, and whether some lack values; fills the cache that the writes read."""
    result: dict[str, tuple[Applied, bool]] = {}
    for row in batch.changes.groupBy("topic").agg(*_counted()).collect():
        written, deleted, dead, quarantined = (row[name] for name in ("written", "deleted", "dead", "quarantined"))
        folded = row["records"] - written - deleted - dead - quarantined
        applied = Applied(row["records"], written, deleted, folded, dead, quarantined)
        result[row["topic"]] = applied, row["partial"] > 0
    return result


@cache
def _counted() -> "tuple[Column, ...]":
    from pyspark.sql import functions as F

    newest = F.col("offset").isNotNull()
    return (
        *(F.sum(name).alias(name) for name in ("records", "dead", "quarantined")),
        F.count_if(newest & F.col("after").isNotNull()).alias("written"),
        F.count_if(newest & F.col("after").isNull()).alias("deleted"),
        F.count("kept").alias("partial"),
    )
