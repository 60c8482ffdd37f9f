"""Where Spark puts what doesn't fit into its memory while a mirror is made again."""

import os

from pyspark.sql import SparkSession

AS_TEXT = 8
"""How much larger the newest rows are as the connector's text, which they are kept as meanwhile, than in the mirror."""


def spilled_to() -> str | None:
    """A folder of this machine; None when that is elsewhere, or nobody has asked for Spark yet."""
    spark = SparkSession.getActiveSession()
    if spark is None or not str(spark.sparkContext.master).startswith("local"):
        return None
    temporary = str(spark._jvm.System.getProperty("java.io.tmpdir"))  # type: ignore[union-attr]
    named = os.environ.get("SPARK_LOCAL_DIRS") or spark.sparkContext.getConf().get("spark.local.dir") or temporary
    return named.split(",")[0]
