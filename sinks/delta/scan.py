"""A version of a mirror, read on an executor without the rows that are marked as deleted.

By deltalake's reading of the log and the marks, not ours.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import deltalake
import pyarrow as pa

from cdc.codec.table import codec
from cdc.model.table import Table
from cdc.sink.lane_run import freeze_gc_after
from cdc.sinks.delta import parquet
from cdc.sinks.delta.log import Commits
from cdc.sinks.delta.place import locate, table_uri

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

ArrowMap = Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]
"""A function for `mapInArrow`: batches of a partition in, batches out."""
SCANNED = "id string, document string"
ROW_ID = "_cdc_id"
GROUPED = ["table", "id", "document"]
BATCH_ROWS = 1000


class MirrorVersion:
    """A version of a mirror. It is opened when the first row is read.

    Used by one task in its thread. Methods raise OSError, DeltaError.
    """

    def __init__(self, folder: str, version: int) -> None:
        self._folder = folder
        self._version = version

    @cached_property
    def columns(self) -> frozenset[str]:
        """The names of its columns."""
        return frozenset(field.name for field in self._table.schema().fields)

    def rows(self, ids: pa.Array, schema: pa.Schema) -> Iterator[pa.Table]:
        """Read the rows of sorted ids, as the columns of a schema."""
        for path in self._paths:
            yield from parquet.rows_with_ids(path, ids, schema, self._selections.get(path))

    def batches(self, rows: int, share: int = 0, shares: int = 1) -> Iterator[pa.RecordBatch]:
        """Read all rows, so many at once at most, with the columns that each file has; or the rows of one
        share of the files.
        """
        for path in self._paths[share::shares]:
            selection = self._selections.get(path)
            start = 0
            with parquet.open_file(path) as file:
                for batch in file.iter_batches(rows):
                    end = start + batch.num_rows
                    if selection is None:
                        yield batch
                    else:
                        yield batch.filter(pa.array(selection[start:end]))
                    start = end

    @cached_property
    def _table(self) -> deltalake.DeltaTable:
        return deltalake.DeltaTable(table_uri(self._folder), version=self._version)

    @cached_property
    def _paths(self) -> list[str]:
        actions = pa.table(self._table.get_add_actions())
        # Not `file_uris`, which puts the table's folder before absolute paths too.
        return [locate(self._folder, path) for path in actions["path"].to_pylist()]

    @cached_property
    def _selections(self) -> dict[str, Any]:
        """By path of those files that have deletion vectors: which of its rows aren't deleted."""
        vectors = pa.table(self._table.deletion_vectors().read_all())
        paths = (locate(self._folder, path) for path in vectors["filepath"].to_pylist())
        selections = vectors["selection_vector"]
        return {path: selections[number].values for number, path in enumerate(paths)}


def scan_mirror(
    spark: "SparkSession", table: Table, folder: str, ids: Sequence[str] | None
) -> "DataFrame":
    """Read all rows of the mirror in a folder, or the rows with these ids: SCANNED."""
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

    def read_documents(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            mirror = batch.rename_columns([names[column] for column in batch.schema.names])
            columns = [row_ids(mirror), documents(table, mirror)]
            yield pa.RecordBatch.from_arrays(columns, names=["id", "document"])

    return read_documents


def row_ids(batch: pa.RecordBatch) -> pa.Array:
    """Return the ids of a batch's rows as text."""
    return batch.column(ROW_ID).cast(pa.string())


def documents(table: Table, batch: pa.RecordBatch) -> pa.Array:
    """Make a document of each row.

    A column that the mirror lacks is null: it is added once a row brings it. Raises ArrowInvalid, a
    ValueError, for a column of another type than the table's.
    """
    present = set(batch.schema.names)
    columns = [
        batch.column(field.name) if field.name in present else pa.nulls(batch.num_rows, field.type)
        for field in codec(table).schema
    ]
    # Whatever type they have: the codec casts them where it reads a value.
    names = [column.name for column in table.columns]
    return codec(table).documents(pa.RecordBatch.from_arrays(columns, names=names))


@dataclass(frozen=True)
class Mirror:
    """A mirror in a version; None where there is none, so it has no rows."""

    table: Table
    folder: str
    version: int | None


def scan_mirrors(
    spark: "SparkSession", folders: Mapping[Table, str], commits: Commits
) -> "DataFrame":
    """Scan the mirrors in these folders, as `cdc.sink.contract.GroupScanner` says."""
    states = {folder: commits.state(folder) for folder in folders.values()}
    mirrors = [
        Mirror(table, folder, state.version if (state := states[folder]) else None)
        for table, folder in folders.items()
    ]
    tasks = max(1, min(spark.sparkContext.defaultParallelism, len(mirrors)))
    read = _reader(mirrors, tasks)
    return spark.range(0, tasks, numPartitions=tasks).mapInArrow(
        read, "table string, id string, document string"
    )


def _reader(mirrors: Sequence[Mirror], tasks: int) -> ArrowMap:
    """Make the function of a task: it gets numbers and reads those shares of the mirrors."""

    def read(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for number in (number for batch in batches for number in batch.column("id").to_pylist()):
            for mirror in mirrors[number::tasks]:
                yield from read_rows(mirror)

    return read


def read_rows(mirror: Mirror) -> Iterator[pa.RecordBatch]:
    """Read the rows of a mirror: GROUPED, or one row without id and document where it can't be read."""
    if mirror.version is None:
        return
    try:
        for batch in MirrorVersion(mirror.folder, mirror.version).batches(BATCH_ROWS):
            yield _batch(mirror, row_ids(batch), documents(mirror.table, batch))
    except (
        deltalake.exceptions.DeltaError,
        OSError,
        ValueError,
        KeyError,
        NotImplementedError,
    ):
        yield _unread(mirror)


def scan_bucket(spark: "SparkSession", mirror: Mirror, ids: Sequence[str] | None) -> "DataFrame":
    """Read the rows of a mirror in a bucket, of all ids or of some: SCANNED."""
    from pyspark.sql import functions as F

    tasks = spark.sparkContext.defaultParallelism
    read = partial(_read_shares, mirror, tasks)
    rows = spark.range(tasks, numPartitions=tasks).mapInArrow(freeze_gc_after(read), SCANNED)
    if ids is None:
        return rows
    requested = spark.createDataFrame([(row_id,) for row_id in ids], "id string")
    return rows.join(F.broadcast(requested), "id", "left_semi")


def _read_shares(
    mirror: Mirror, shares: int, batches: Iterator[pa.RecordBatch]
) -> Iterator[pa.RecordBatch]:
    """Read shares of a mirror's files: numbers of shares in, SCANNED out."""
    if mirror.version is None:
        return
    version = MirrorVersion(mirror.folder, mirror.version)
    for share in (number for batch in batches for number in batch.column("id").to_pylist()):
        for rows in version.batches(BATCH_ROWS, share, shares):
            columns = [row_ids(rows), documents(mirror.table, rows)]
            yield pa.RecordBatch.from_arrays(columns, names=["id", "document"])


def _unread(mirror: Mirror) -> pa.RecordBatch:
    """Make the row that says that a mirror wasn't read: without id and document."""
    return _batch(mirror, pa.nulls(1, pa.string()), pa.nulls(1, pa.string()))


def _batch(mirror: Mirror, ids: pa.Array, texts: pa.Array) -> pa.RecordBatch:
    names = pa.array([mirror.table.qualified] * len(ids), pa.string())
    return pa.RecordBatch.from_arrays([names, ids, texts], names=GROUPED)
