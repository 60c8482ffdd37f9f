"""The events of a repair as DataFrames: Spark finds those that a log of changes lacks."""

import re
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from cdc.sink.lane_run import freeze_gc_after
from cdc.sinks.delta.files import links, parquet
from cdc.sinks.delta.files.failures import write_failure
from cdc.sinks.delta.files.parquet import DataFile, row_groups

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession

FILE_COLUMNS = "name string, size long, stats string"
WORKER_WRITE_ERROR = re.compile(r"OSError: \[Errno (5|13|27|28|30|122)\]")
"""How a worker's file system says that it takes no more: by Linux's numbers of errors."""


def read_files(
    spark: "SparkSession", folder: str, names: Sequence[str], schema: Any
) -> "DataFrame":
    """Read files of a folder as the columns of a schema; a column that a file lacks is null."""
    from pyspark.sql.types import StructType

    columns = StructType.fromJson(schema)
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


def write_files(folder: str, rows: "DataFrame", schema: Any) -> list[DataFile]:
    """Write rows as files into a table's folder; they aren't part of the table yet.

    Raises SinkUnavailable when the folder takes no more.
    """
    from pyspark.errors import PySparkException
    from pyspark.sql.types import StructType

    typed = rows.to(StructType.fromJson(schema))
    # By number: Spark parses a dot or a backtick in a name.
    numbered = typed.toDF(*(f"c{number}" for number in range(len(typed.columns))))
    try:
        files = numbered.mapInArrow(
            freeze_gc_after(_writer(folder, typed.columns)), FILE_COLUMNS
        ).collect()
    except PySparkException as error:
        if WORKER_WRITE_ERROR.search(str(error)):
            raise write_failure(folder, error) from None
        raise
    return [DataFile(file["name"], file["size"], file["stats"]) for file in files]


def _writer(
    folder: str, names: Sequence[str]
) -> "Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]":
    """Make the function of a task: it writes one file, if it has a row."""

    def write_file(batches: "Iterator[pa.RecordBatch]") -> "Iterator[pa.RecordBatch]":
        import pyarrow as pa

        tables = (pa.Table.from_batches([batch]).rename_columns(names) for batch in batches)
        if file := parquet.write_file(folder, links.new_file_name(), row_groups(tables)):
            yield pa.RecordBatch.from_pylist(
                [{"name": file.name, "size": file.size, "stats": file.stats}]
            )

    return write_file
