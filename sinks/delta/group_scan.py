"""Scan of many small mirrors: executors read their files, without a plan of Spark's for each.

A mirror that this can't read is left to be scanned by itself.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cdc.model.table import Table
from cdc.sinks.delta.files import parquet
from cdc.sinks.delta.log import add_files
from cdc.sinks.delta.log.commits import Commits
from cdc.sinks.delta.scan import ArrowMap, documents, row_ids

if TYPE_CHECKING:
    import deltalake
    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession

GROUPED = ["table", "id", "document"]
BATCH_ROWS = 1000


@dataclass(frozen=True)
class MirrorFiles:
    """The files of a mirror as the driver has opened it.

    files: None where some rows are marked as deleted, for only Spark reads these.
    """

    table: Table
    files: tuple[str, ...] | None


def scan_mirrors(
    spark: "SparkSession", folders: Mapping[Table, str], commits: Commits
) -> "DataFrame":
    """Scan the mirrors in these folders, as `cdc.sink.capabilities.GroupScanner` says."""
    mirrors = [
        _mirror_files(table, commits.table(folder), folder) for table, folder in folders.items()
    ]
    tasks = max(1, min(spark.sparkContext.defaultParallelism, len(mirrors)))
    read = _reader(mirrors, tasks)
    return spark.range(0, tasks, numPartitions=tasks).mapInArrow(
        read, "table string, id string, document string"
    )


def _mirror_files(
    table: Table, delta_table: "deltalake.DeltaTable | None", folder: str
) -> MirrorFiles:
    """List the files of a mirror; one that doesn't exist has no rows."""
    if delta_table is None:
        return MirrorFiles(table, ())
    if add_files.has_deleted_rows(delta_table):
        return MirrorFiles(table, None)
    return MirrorFiles(table, tuple(add_files.local_paths(delta_table, folder)))


def _reader(mirrors: Sequence[MirrorFiles], tasks: int) -> ArrowMap:
    """Make the function of a task: it gets numbers and reads those shares of the mirrors."""

    def read(batches: Iterator["pa.RecordBatch"]) -> Iterator["pa.RecordBatch"]:
        for number in (number for batch in batches for number in batch.column("id").to_pylist()):
            for mirror in mirrors[number::tasks]:
                yield from read_rows(mirror)

    return read


def read_rows(mirror: MirrorFiles) -> Iterator["pa.RecordBatch"]:
    if mirror.files is None:
        yield _unread(mirror)
        return
    try:
        for file in mirror.files:
            for batch in _batches(file):
                yield _batch(mirror, row_ids(batch), documents(mirror.table, batch))
    except (OSError, ValueError, KeyError, NotImplementedError):
        yield _unread(mirror)


def _batches(path: str) -> Iterator["pa.RecordBatch"]:
    with parquet.open_file(path) as file:
        yield from file.iter_batches(BATCH_ROWS)


def _unread(mirror: MirrorFiles) -> "pa.RecordBatch":
    """Make the row that says that a mirror wasn't read: without id and document."""
    import pyarrow as pa

    return _batch(mirror, pa.nulls(1, pa.string()), pa.nulls(1, pa.string()))


def _batch(mirror: MirrorFiles, ids: "pa.Array", texts: "pa.Array") -> "pa.RecordBatch":
    import pyarrow as pa

    names = pa.array([mirror.table.qualified] * len(ids), pa.string())
    return pa.RecordBatch.from_arrays([names, ids, texts], names=GROUPED)
