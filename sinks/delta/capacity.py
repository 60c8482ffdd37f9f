"""Disk space for a second mirror: in the warehouse, and where Spark spills."""

import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from cdc.model.table import Table
from cdc.sink.promotion import require_free_space
from cdc.sinks.delta.place import is_bucket
from cdc.sinks.delta.tables import Tables

TEXT_FACTOR = 8
"""How much larger the newest rows are as the connector's text than in the mirror.

Spark keeps them as that text until they are written.
"""
SPARK_FOLDER = "/tmp"  # noqa: S108
"""Where Spark spills unless it is configured: the default of spark.local.dir."""


def check_capacity(views: Tables, tables: Sequence[Table]) -> None:
    """Check the space for the files of second mirrors, and for the rows as text where Spark spills.

    Raises SinkRejected when there is too little.
    """
    mirrors = (views.commits.state(views.folder(table, "mirror")) for table in tables)
    size_bytes = sum(mirror.size_bytes for mirror in mirrors if mirror)
    require_capacity(size_bytes, views.path, views.sink)


def require_capacity(size_bytes: int, warehouse: str, sink: str) -> None:
    """Raise SinkRejected when there is no space for mirrors of so many bytes."""
    if not is_bucket(warehouse):
        Path(warehouse).mkdir(parents=True, exist_ok=True)
        require_free_space(size_bytes, shutil.disk_usage(warehouse).free, warehouse, sink)
    if folder := spill_folder():
        require_free_space(size_bytes * TEXT_FACTOR, shutil.disk_usage(folder).free, folder, sink)


def spill_folder() -> str | None:
    """Return the folder of this machine in which Spark spills.

    None when Spark runs elsewhere, or hasn't been started yet.
    """
    from pyspark.sql import SparkSession

    spark = SparkSession.getActiveSession()
    if spark is None or not str(spark.sparkContext.master).startswith("local"):
        return None
    configured = spark.sparkContext.getConf().get("spark.local.dir")
    folders = os.environ.get("SPARK_LOCAL_DIRS") or configured or SPARK_FOLDER
    return folders.split(",")[0]
