"""What a batch brings to a Delta table: how many rows, events to append, rows to merge, a mirror with them."""

from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING

from cdc.change import Advance, Applied, Stored, Table
from cdc.sink import Batch
from sinks.delta import positions

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

GONE = "_cdc_gone"
"""A column of what is merged that a mirror doesn't have: whether the row is deleted."""


def events(batch: Batch, advance: Advance, stored: Stored | None) -> "DataFrame":
    """What is new of a table's events, as rows of its log of changes; of a repair, all of them."""
    from cdc import rows

    new = unseen(batch.events, advance, stored).where("op IS NOT NULL")
    # Of a deleted row only the key is known for sure.
    parsed = rows.parsed(new, advance.table, "coalesce(after, key)")
    return parsed.select(*_event(advance.table, advance.until.topic_id))


# Columns are made once a table: the calls into the JVM cost as much as the rest of a small batch.
@cache
def _event(table: Table, topic_id: str) -> "tuple[Column, ...]":
    from pyspark.sql import functions as F

    from cdc import rows

    own = ("id", "op", "partition", "offset", "lsn", "kept")
    named = [F.col(name).alias(f"_cdc_{name}") for name in own]
    named += [F.lit(topic_id).alias("_cdc_topic"), F.timestamp_micros("commit_us").alias("_cdc_commit")]
    return *named, *rows.columns(table)


def lacking(events: "DataFrame", log: "DataFrame", topic_id: str) -> "DataFrame":
    """Those of some events of one topic that a log of changes hasn't got. They are few: what a repair brings."""
    from pyspark.sql import functions as F

    place = ["_cdc_partition", "_cdc_offset"]
    if "_cdc_topic" in log.columns:
        # Rows from before events named their topic are of the one that there was.
        log = log.where(F.coalesce("_cdc_topic", F.lit(topic_id)) == topic_id)
    held = log.join(F.broadcast(events.select(*place)), place, "left_semi").select(*place)
    return events.join(F.broadcast(held), place, "left_anti")


def changed(changes: "DataFrame", table: Table) -> "DataFrame":
    """What folded changes bring to a mirror: `_cdc_id`, `_cdc_partition`, `_cdc_offset`, the columns, `_cdc_gone`."""
    from cdc import rows

    return rows.parsed(changes, table, "after").select(*_changed(table))


@cache
def _changed(table: Table) -> "tuple[Column, ...]":
    from pyspark.sql import functions as F

    from cdc import rows

    named = (F.col(name).alias(f"_cdc_{name}") for name in ("id", "partition", "offset"))
    return *named, *rows.columns(table), F.col("after").isNull().alias(GONE)


def first(source: "DataFrame") -> "DataFrame":
    """The rows of a mirror that has none yet: nothing can match."""
    return source.where(f"NOT {GONE}").drop(GONE)


def merged(mirror: "DataFrame", source: "DataFrame") -> "DataFrame":
    """A whole mirror with changed rows in it, made by one task: for one so small that this costs less than marks."""
    from cdc.rows import quoted

    def value(name: str) -> str:
        # A changed row has nothing in a column that the source has dropped.
        new, old = (f"{at}.{quoted(name)}" if name in frame.columns else "NULL" for at, frame in sides.items())
        return f"CASE WHEN s._cdc_id IS NOT NULL THEN {new} ELSE {old} END AS {quoted(name)}"

    sides = {"s": source, "t": mirror}
    old, new = mirror.coalesce(1).alias("t"), source.coalesce(1).hint("shuffle_hash").alias("s")
    names = [*mirror.columns, *(name for name in source.columns if name not in (*mirror.columns, GONE))]
    both = old.join(new, new["_cdc_id"] == old["_cdc_id"], "full_outer").where(f"NOT coalesce(s.{GONE}, false)")
    return both.selectExpr(*map(value, names))


def unseen(frame: "DataFrame", advance: Advance, stored: Stored | None) -> "DataFrame":
    """The table's rows that lie at or above its own position; all of them for a repair."""
    mine = frame.where(frame["topic"] == advance.table.topic)
    if advance.repairs:
        return mine
    below = enumerate(positions.known(stored, advance.until))
    above = [f"(partition <> {p} OR offset >= {at})" for p, at in below if at]
    return mine.where(" AND ".join(above)) if above else mine


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
