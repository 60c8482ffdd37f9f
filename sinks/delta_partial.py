"""Rows of the warehouse whose changes don't carry every value: completed from older changes, then from the mirror."""

from typing import TYPE_CHECKING

from cdc.change import Table
from cdc.sink import UNKNOWN, Refused

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

NAMED = ("_cdc_id", "_cdc_partition", "_cdc_offset")


def completed(changes: "DataFrame", table: Table, mirror: str | None, sink: str) -> "DataFrame":
    """Folded changes as rows to merge; `_cdc_view` names the columns whose value is the mirror's own.

    mirror is the folder of the Delta table, None while there is none.

    Raises:
        Refused: for rows with a value that neither an older change nor the mirror has.
    """
    from pyspark.sql import functions as F

    from cdc import rows

    layers = _layers(changes)
    typed = rows.parsed(layers, table, "_cdc_row").select(*layers.columns, *rows.columns(table))
    names = [column.name for column in table.columns]
    found = typed.groupBy(*NAMED, "_cdc_gone").agg(
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
        "_cdc_gone",
        F.when(~F.col("_cdc_gone") & (F.size(asked) > 0), asked).alias("_cdc_view"),
        "_cdc_ends",
    ).persist()
    try:
        _refuse_unknown(made, table, mirror, sink)
        # Cut off from its source: it is small, and what follows is planned without it.
        return made.drop("_cdc_ends").localCheckpoint()
    finally:
        made.unpersist()


def _layers(changes: "DataFrame") -> "DataFrame":
    """Each change as several rows: itself at depth 0, then the older ones that it may be completed from."""
    from pyspark.sql import functions as F

    none = F.array().cast("array<struct<row:string,kept:array<string>>>")
    newest = F.struct(F.col("after").alias("row"), F.coalesce("kept", F.array()).alias("kept"))
    layers = F.concat(F.array(newest), F.coalesce("older", none))
    named = [F.col(name.removeprefix("_cdc_")).alias(name) for name in NAMED]
    gone = F.col("after").isNull().alias("_cdc_gone")
    laid = changes.select(*named, gone, F.posexplode(layers).alias("_cdc_depth", "layer"))
    lacks, row = F.col("layer.kept").alias("_cdc_lacks"), F.col("layer.row").alias("_cdc_row")
    return laid.select(*NAMED, "_cdc_gone", "_cdc_depth", lacks, row)


def _first(name: str) -> "Column":
    """The newest value of a column that a change carries, as {value}; null when none does."""
    from pyspark.sql import functions as F

    from cdc.rows import quoted

    carried = F.col("_cdc_row").isNotNull() & ~F.coalesce(F.array_contains("_cdc_lacks", name), F.lit(False))
    return F.min_by(F.struct(F.col(quoted(name)).alias("value")), F.when(carried, F.col("_cdc_depth")))


def _refuse_unknown(made: "DataFrame", table: Table, mirror: str | None, sink: str) -> None:
    from pyspark.sql import functions as F

    asking = made.where(F.col("_cdc_view").isNotNull()).select("_cdc_id", "_cdc_ends")
    if mirror is None:
        lost = asking
    else:
        held = made.sparkSession.read.format("delta").load(mirror).select("_cdc_id", F.lit(1).alias("held"))
        lost = asking.join(held, "_cdc_id", "left").where(F.col("_cdc_ends") | F.col("held").isNull())
    if found := lost.select("_cdc_id").take(1000):
        raise Refused({(table.topic, row["_cdc_id"]): UNKNOWN for row in found}, sink)
