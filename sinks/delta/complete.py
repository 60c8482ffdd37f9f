"""Rows of the warehouse whose changes don't carry every value: completed from older changes, then from the mirror."""

from typing import TYPE_CHECKING

from cdc.change import Table
from cdc.sink import UNKNOWN, Refused
from sinks.delta.frames import GONE

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

NAMED = ("_cdc_id", "_cdc_partition", "_cdc_offset")


def completed(changes: "DataFrame", table: Table, mirror: str | None, sink: str) -> "DataFrame":
    """Folded changes as rows to merge, as `frames.changed`.

    mirror is the folder of the Delta table, None while there is none.

    Raises:
        Refused: for rows with a value that neither an older change nor the mirror has.
    """
    from pyspark.sql import functions as F

    from cdc import rows

    layers = _layers(changes)
    typed = rows.parsed(layers, table, "_cdc_row").select(*layers.columns, *rows.columns(table))
    names = [column.name for column in table.columns]
    found = typed.groupBy(*NAMED, GONE).agg(
        # The search ends at a change without a row: what lay before it is void.
        F.max(F.col("_cdc_row").isNull()).alias("_cdc_ends"),
        *(_first(name).alias(name) for name in names),
    )
    asked = F.filter(
        F.array(*(F.when(F.col(rows.quoted(n)).isNull(), F.lit(n)) for n in names)), lambda n: n.isNotNull()
    )
    made = found.select(
        *NAMED,
        *(F.col(f"{rows.quoted(name)}.value").alias(name) for name in names),
        GONE,
        F.when(~F.col(GONE) & (F.size(asked) > 0), asked).alias("_cdc_view"),
        "_cdc_ends",
    ).persist()
    try:
        # Once they are counted, Spark knows whether they are few enough to be held by every task.
        made.count()
        # Cut off from its source: it is small, and what follows is planned without it.
        full = _filled(made, mirror).localCheckpoint()
    finally:
        made.unpersist()
    if lost := full.where("_cdc_lost").select("_cdc_id").take(1000):
        raise Refused({(table.topic, row["_cdc_id"]): UNKNOWN for row in lost}, sink)
    return full.drop("_cdc_lost")


def _filled(made: "DataFrame", mirror: str | None) -> "DataFrame":
    """Rows with the values that only the mirror has; `_cdc_lost` of those that it has none for."""
    from pyspark.sql import functions as F

    from cdc.rows import quoted

    asking = F.col("s._cdc_view").isNotNull()
    names = [name for name in made.columns if name not in ("_cdc_view", "_cdc_ends")]
    if mirror is None:
        return made.alias("s").select(*map(quoted, names), asking.alias("_cdc_lost"))
    stored = made.sparkSession.read.format("delta").load(mirror)
    held = stored.join(made.where("_cdc_view IS NOT NULL").select("_cdc_id"), "_cdc_id", "left_semi").alias("t")

    def value(name: str) -> "Column":
        own = F.col(f"s.{quoted(name)}")
        if name in NAMED or name not in stored.columns:
            return own.alias(name)
        return (
            F.when(F.array_contains("s._cdc_view", F.lit(name)), F.col(f"t.{quoted(name)}")).otherwise(own).alias(name)
        )

    lost = asking & (F.col("s._cdc_ends") | F.col("t._cdc_id").isNull())
    both = made.alias("s").join(held, F.col("s._cdc_id") == F.col("t._cdc_id"), "left")
    return both.select(*map(value, names), lost.alias("_cdc_lost"))


def _layers(changes: "DataFrame") -> "DataFrame":
    """Each change as several rows: itself at depth 0, then the older ones that it may be completed from."""
    from pyspark.sql import functions as F

    none = F.array().cast("array<struct<row:string,kept:array<string>>>")
    newest = F.struct(F.col("after").alias("row"), F.coalesce("kept", F.array()).alias("kept"))
    layers = F.concat(F.array(newest), F.coalesce("older", none))
    named = [F.col(name.removeprefix("_cdc_")).alias(name) for name in NAMED]
    gone = F.col("after").isNull().alias(GONE)
    laid = changes.select(*named, gone, F.posexplode(layers).alias("_cdc_depth", "layer"))
    lacks, row = F.col("layer.kept").alias("_cdc_lacks"), F.col("layer.row").alias("_cdc_row")
    return laid.select(*NAMED, GONE, "_cdc_depth", lacks, row)


def _first(name: str) -> "Column":
    """The newest value of a column that a change carries, as {value}; null when none does."""
    from pyspark.sql import functions as F

    from cdc.rows import quoted

    carried = F.col("_cdc_row").isNotNull() & ~F.coalesce(F.array_contains("_cdc_lacks", name), F.lit(False))
    return F.min_by(F.struct(F.col(quoted(name)).alias("value")), F.when(carried, F.col("_cdc_depth")))
