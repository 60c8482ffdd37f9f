"""What only Spark does with staged files: which events a log lacks, the newest of rows that are staged repeatedly."""

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import deltalake
    from pyspark.sql import DataFrame, SparkSession


def read(spark: "SparkSession", folder: str, names: Sequence[str], schema: "deltalake.Schema") -> "DataFrame":
    """Files of a folder as the columns of a schema; null in what a file lacks."""
    from pyspark.sql.types import StructType

    columns = StructType.fromJson(json.loads(schema.to_json()))
    if not names:
        return spark.createDataFrame([], columns)
    return spark.read.schema(columns).parquet(*(f"{folder}/{name}" for name in names))


def lacking(events: "DataFrame", log: "DataFrame", topic_id: str) -> "DataFrame":
    """Those of some events of one topic that a log of changes hasn't got. They are few: what a repair brings."""
    from pyspark.sql import functions as F

    place = ["_cdc_partition", "_cdc_offset"]
    if "_cdc_topic" in log.columns:
        # Rows from before events named their topic are of the one that there was.
        log = log.where(F.coalesce("_cdc_topic", F.lit(topic_id)) == topic_id)
    held = log.join(F.broadcast(events.select(*place)), place, "left_semi").select(*place)
    return events.join(F.broadcast(held), place, "left_anti")


def newest(rows: "DataFrame", gone: "DataFrame") -> "DataFrame":
    """The newest of each row, without those whose newest change has deleted them. gone: their own columns."""
    from pyspark.sql import functions as F

    marked = gone.withColumn("_cdc_gone", F.lit(True))
    both = rows.withColumn("_cdc_gone", F.lit(False)).unionByName(marked, allowMissingColumns=True)
    names = [f"`{name.replace('`', '``')}`" for name in both.columns]
    latest = both.groupBy("_cdc_id").agg(F.max_by(F.struct(*names), "_cdc_offset").alias("_cdc_newest"))
    return latest.select("_cdc_newest.*").where("NOT _cdc_gone").drop("_cdc_gone")
