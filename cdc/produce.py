"""A frame of what one executor reads somewhere else, where Spark has no reader of its own."""

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession


def produced(spark: "SparkSession", read: "Callable[[], Iterator[pa.RecordBatch]]", schema: str) -> "DataFrame":
    """`read`'s batches as a frame of that schema; it runs once each time the frame is computed."""

    def run(told: "Iterator[pa.RecordBatch]") -> "Iterator[pa.RecordBatch]":
        # A worker with input left over is thrown away by Spark: the next would import everything again, 0.7 s.
        for _ in told:
            pass
        yield from read()

    return spark.range(1, numPartitions=1).mapInArrow(run, schema)
