"""How executors read many small mirrors: their files, without Spark's plan for each.

One that this can't read is left to be scanned by itself.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cdc.model.table import Table
from sinks.delta.files import parquet
from sinks.delta.log import add_files
from sinks.delta.log.commits import Commits
from sinks.delta.mirror.scan import Read, documents, ids

if TYPE_CHECKING:
    import deltalake
    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession

GROUPED = ["table", "id", "document"]
BATCH_ROWS = 1000


@dataclass(frozen=True)
class Mirror:
    """A mirror as it was opened; files: None where rows of them are marked as deleted: only Spark reads these."""

    table: Table
    files: tuple[str, ...] | None


def frame(spark: "SparkSession", folders: Mapping[Table, str], commits: Commits) -> "DataFrame":
    """As `cdc.sink.contract.GroupScanner` says, of the tables whose mirrors are in these folders."""
    mirrors = [_mirror(table, folder, commits.table(folder)) for table, folder in folders.items()]
    tasks = max(1, min(spark.sparkContext.defaultParallelism, len(mirrors)))
    read = _reader(mirrors, tasks)
    return spark.range(0, tasks, numPartitions=tasks).mapInArrow(read, "table string, id string, document string")


def _mirror(table: Table, folder: str, held: "deltalake.DeltaTable | None") -> Mirror:
    """One that isn't there has no rows."""
    if held is None:
        return Mirror(table, ())
    files = tuple(add_files.places(held, folder))
    return Mirror(table, files if add_files.unmarked(held) else None)


def _reader(mirrors: Sequence[Mirror], tasks: int) -> Read:
    """Reads the mirrors of each share whose number it is given."""

    def read(parts: Iterator["pa.RecordBatch"]) -> Iterator["pa.RecordBatch"]:
        for number in (number for part in parts for number in part.column("id").to_pylist()):
            for mirror in mirrors[number::tasks]:
                yield from _rows(mirror)

    return read


def _rows(mirror: Mirror) -> Iterator["pa.RecordBatch"]:
    if mirror.files is None:
        yield _unread(mirror)
        return
    try:
        for file in mirror.files:
            for part in _parts(file):
                yield _batch(mirror, ids(part), documents(mirror.table, part))
    except (OSError, ValueError, KeyError, NotImplementedError):
        yield _unread(mirror)


def _parts(file: str) -> Iterator["pa.RecordBatch"]:
    with parquet.opened(file) as held:
        yield from held.iter_batches(BATCH_ROWS)


def _unread(mirror: Mirror) -> "pa.RecordBatch":
    import pyarrow as pa

    return _batch(mirror, pa.nulls(1, pa.string()), pa.nulls(1, pa.string()))


def _batch(mirror: Mirror, row_ids: "pa.Array", texts: "pa.Array") -> "pa.RecordBatch":
    import pyarrow as pa

    names = pa.array([mirror.table.qualified] * len(row_ids), pa.string())
    return pa.RecordBatch.from_arrays([names, row_ids, texts], names=GROUPED)
