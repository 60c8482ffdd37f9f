"""Staged files as DataFrames, for two tasks that Spark alone does.

It finds the events that a log of changes lacks, and the newest of rows that are staged repeatedly.
"""

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import deltalake
    from pyspark.sql import DataFrame, SparkSession


def read_files(
    spark: "SparkSession", folder: str, names: Sequence[str], schema: "deltalake.Schema"
) -> "DataFrame":
    """Read files of a folder as the columns of a schema; a column that a file lacks is null."""
    from pyspark.sql.types import StructType

    columns = StructType.fromJson(json.loads(schema.to_json()))
    if not names:
        return spark.createDataFrame([], columns)
    return spark.read.schema(columns).parquet(*(f"{folder}/{name}" for name in names))


def missing_events(events: "DataFrame", log: "DataFrame", topic_id: str) -> "DataFrame":
    """Select those events of one topic that a log of changes lacks.

    The events are few: a repair brings them.
    """
    from pyspark.sql import functions as F

    offset = ["_cdc_partition", "_cdc_offset"]
    if "_cdc_topic" in log.columns:
        # Rows of earlier versions don't name their topic: there was only this one.
        log = log.where(F.coalesce("_cdc_topic", F.lit(topic_id)) == topic_id)
    stored_offsets = log.join(F.broadcast(events.select(*offset)), offset, "left_semi").select(
        *offset
    )
    return events.join(F.broadcast(stored_offsets), offset, "left_anti")


def newest_rows(rows: "DataFrame", deleted: "DataFrame") -> "DataFrame":
    """Select the newest version of each row, without the rows whose newest change is a delete.

    deleted: our own columns, of the deletes.
    """
    from pyspark.sql import functions as F

    deletes = deleted.withColumn("_cdc_gone", F.lit(True))
    changes = rows.withColumn("_cdc_gone", F.lit(False)).unionByName(
        deletes, allowMissingColumns=True
    )
    names = [f"`{name.replace('`', '``')}`" for name in changes.columns]
    newest = F.max_by(F.struct(*names), "_cdc_offset").alias("_cdc_newest")
    latest = changes.groupBy("_cdc_id").agg(newest)
    return latest.select("_cdc_newest.*").where("NOT _cdc_gone").drop("_cdc_gone")
