"""What a second mirror needs beside the first: in the warehouse, and where Spark puts what doesn't fit into memory."""

import os
import shutil
from pathlib import Path

from pyspark.sql import SparkSession

from cdc.sink.contract import require_free_space
from sinks.delta.files import links

AS_TEXT = 8
"""How much larger the newest rows are as the connector's text, which they are kept as meanwhile, than in the mirror."""


COPIES = 3
"""How often its files are there at the end of a switch, where they can't be linked: built, shown, and those before."""


def require_room(needed: int, warehouse: str, sink: str) -> None:
    """Raise SinkRejected when there is no room for mirrors of so many bytes."""
    if "://" not in warehouse:
        Path(warehouse).mkdir(parents=True, exist_ok=True)
        copies = 1 if links.can_link(warehouse) else COPIES
        require_free_space(needed * copies, shutil.disk_usage(warehouse).free, warehouse, sink)
    if folder := spilled_to():
        require_free_space(needed * AS_TEXT, shutil.disk_usage(folder).free, folder, sink)


def spilled_to() -> str | None:
    """A folder of this machine; None when that is elsewhere, or nobody has asked for Spark yet."""
    spark = SparkSession.getActiveSession()
    if spark is None or not str(spark.sparkContext.master).startswith("local"):
        return None
    temporary = str(spark._jvm.System.getProperty("java.io.tmpdir"))  # type: ignore[union-attr]
    named = os.environ.get("SPARK_LOCAL_DIRS") or spark.sparkContext.getConf().get("spark.local.dir") or temporary
    return named.split(",")[0]
