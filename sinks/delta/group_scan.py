"""Scans of mirrors by deltalake's log and marks, on executors: of many small ones without a plan of
Spark's for each, and of one in a bucket, which Spark's own source would need Hadoop's connector for.

A small mirror that this can't read is left to be scanned by itself.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import deltalake

from cdc.model.table import Table
from cdc.sink.lane_run import freeze_gc_after
from cdc.sinks.delta.log.commits import Commits
from cdc.sinks.delta.mirror.version import MirrorVersion
from cdc.sinks.delta.scan import SCANNED, ArrowMap, documents, row_ids

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession

GROUPED = ["table", "id", "document"]
BATCH_ROWS = 1000


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

    def read(batches: Iterator["pa.RecordBatch"]) -> Iterator["pa.RecordBatch"]:
        for number in (number for batch in batches for number in batch.column("id").to_pylist()):
            for mirror in mirrors[number::tasks]:
                yield from read_rows(mirror)

    return read


def read_rows(mirror: Mirror) -> Iterator["pa.RecordBatch"]:
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
    mirror: Mirror, shares: int, batches: Iterator["pa.RecordBatch"]
) -> Iterator["pa.RecordBatch"]:
    """Read shares of a mirror's files: numbers of shares in, SCANNED out."""
    import pyarrow as pa

    if mirror.version is None:
        return
    version = MirrorVersion(mirror.folder, mirror.version)
    for share in (number for batch in batches for number in batch.column("id").to_pylist()):
        for rows in version.batches(BATCH_ROWS, share, shares):
            columns = [row_ids(rows), documents(mirror.table, rows)]
            yield pa.RecordBatch.from_arrays(columns, names=["id", "document"])


def _unread(mirror: Mirror) -> "pa.RecordBatch":
    """Make the row that says that a mirror wasn't read: without id and document."""
    import pyarrow as pa

    return _batch(mirror, pa.nulls(1, pa.string()), pa.nulls(1, pa.string()))


def _batch(mirror: Mirror, ids: "pa.Array", texts: "pa.Array") -> "pa.RecordBatch":
    import pyarrow as pa

    names = pa.array([mirror.table.qualified] * len(ids), pa.string())
    return pa.RecordBatch.from_arrays([names, ids, texts], names=GROUPED)
