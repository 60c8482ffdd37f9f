"""Scan of a mirror: executors turn its columns into the documents that the other views store."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from cdc.codec.table import codec
from cdc.model.table import Table
from cdc.sink.lane_run import freeze_gc_after

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession

ArrowMap = Callable[[Iterator["pa.RecordBatch"]], Iterator["pa.RecordBatch"]]
"""A function for `mapInArrow`: batches of a partition in, batches out."""
SCANNED = "id string, document string"
ROW_ID = "_cdc_id"


def scan_mirror(
    spark: "SparkSession", table: Table, folder: str, ids: Sequence[str] | None
) -> "DataFrame":
    """Read the rows of the mirror in a folder, or those of some ids: SCANNED."""
    from pyspark.sql import functions as F

    mirror = spark.read.format("delta").load(folder)
    if ids is not None:
        requested = spark.createDataFrame([(row_id,) for row_id in ids], f"{ROW_ID} string")
        mirror = mirror.join(F.broadcast(requested), ROW_ID, "left_semi")
    needed = {ROW_ID, *(column.name for column in table.columns)}
    names = {f"c{number}": name for number, name in enumerate(mirror.columns)}
    # By number: Spark parses a dot or a backtick in a name.
    columns = [number for number, name in names.items() if name in needed]
    rows = mirror.toDF(*names).select(*columns)
    return rows.mapInArrow(freeze_gc_after(document_reader(table, names)), SCANNED)


def document_reader(table: Table, names: Mapping[str, str]) -> ArrowMap:
    """Make the function that turns a mirror's columns, ROW_ID among them, into SCANNED.

    names: the mirror's names of columns, by the names that the batches have.
    """

    def read_documents(batches: Iterator["pa.RecordBatch"]) -> Iterator["pa.RecordBatch"]:
        import pyarrow as pa

        for batch in batches:
            mirror = batch.rename_columns([names[column] for column in batch.schema.names])
            columns = [row_ids(mirror), documents(table, mirror)]
            yield pa.RecordBatch.from_arrays(columns, names=["id", "document"])

    return read_documents


def row_ids(batch: "pa.RecordBatch") -> "pa.Array":
    """Return the ids of a batch's rows as text."""
    import pyarrow as pa

    return batch.column(ROW_ID).cast(pa.string())


def documents(table: Table, batch: "pa.RecordBatch") -> "pa.Array":
    """Make a document of each row.

    A column that the mirror lacks is null: it is added once a row brings it. Raises ArrowInvalid, a
    ValueError, for a column of another type than the table's.
    """
    import pyarrow as pa

    present = set(batch.schema.names)
    columns = [
        batch.column(field.name) if field.name in present else pa.nulls(batch.num_rows, field.type)
        for field in codec(table).schema
    ]
    # Whatever type they have: the codec casts them where it reads a value.
    names = [column.name for column in table.columns]
    return codec(table).documents(pa.RecordBatch.from_arrays(columns, names=names))
