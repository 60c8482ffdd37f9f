"""Delta Lake: per table a folder <path>/<schema>.<table> with `changes` and `mirror`.

`changes` is the log of all events, `mirror` has the current rows.

Each of the two has its own position, in the metadata of the very commit that brought its rows.
Events below it are filtered out before the write. Executors write the files of a batch
(`executor`) and find the rows that it supersedes (`mirror.superseded`), the driver commits them
(`batch_commit`, of each table `table_commit`). A commit is a file of the table's log that didn't exist
before: of two writers one fails, and reads the position again.
"""

import os
import shutil
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from cdc.model.finding import Finding, find
from cdc.model.outcome import Applied
from cdc.model.position import ViewCheckpoint
from cdc.model.table import RowFormat, Table
from cdc.sink.contract import Batch, Outcome
from cdc.sink.promotion import require_free_space
from cdc.sinks.delta import generations
from cdc.sinks.delta.batch import BatchCommit, begin_steps, load_position
from cdc.sinks.delta.cleanup import Cleanups
from cdc.sinks.delta.columns import refusals
from cdc.sinks.delta.place import is_bucket, place
from cdc.sinks.delta.scan import SCANNED, Mirror, scan_bucket, scan_mirror, scan_mirrors
from cdc.sinks.delta.tables import Tables

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


class Delta:
    """A warehouse as a destination; see `cdc.sink.contract.Sink` for the methods.

    name: of the sink in the pipeline file.
    path: folder of the warehouse, or the URL of one in a bucket.
    generation_names: by table, of the generation that is written; None for the live one.
    without_deletion_vectors: tables, or patterns of them, whose mirror is for readers that don't
    support deletion vectors.
    """

    row_format: RowFormat = "events"
    promotes_all_tables = False

    def __init__(
        self,
        name: str,
        path: str,
        pipeline: str,
        generation_names: Mapping[str, str] | None = None,
        without_deletion_vectors: Collection[str] = (),
    ) -> None:
        self.name, self.pipeline = name, pipeline
        self._tables = Tables(name, path, generation_names, without_deletion_vectors)
        self._commits = self._tables.commits
        self._cleanups = Cleanups(self._commits)

    @property
    def path(self) -> str:
        """The warehouse's folder, absolute."""
        return self._tables.path

    def folder(self, table: Table, kind: str) -> str:
        """Return the folder of `changes` or `mirror` of a table."""
        return self._tables.folder(table, kind)

    def examine(self, tables: Sequence[Table]) -> list[Finding]:  # noqa: ARG002  # one folder for all
        """See `health.check_folder`; a bucket must answer. Raises SinkUnavailable."""
        if is_bucket(self.path):
            place(self.path).folders()
            return []
        return list(check_folder(self.name, read_folder(self.path)))

    def refusals(self, table: Table) -> list[str]:
        """List why a table can't be stored, one sentence a column."""
        return refusals(table)

    def prepare(self, table: Table) -> None:
        """Create what doesn't exist, without rows: readers find all captured tables and columns."""
        self._tables.prepare(table)

    def position(self, table: Table) -> ViewCheckpoint | None:
        """Return the older of the two positions, where reading has to start again.

        Raises SchemaMismatch: it is lost, see `table_commit.load_position`.
        """
        return load_position(self._tables, table)

    def archived(self, table: Table) -> ViewCheckpoint | None:
        """Return the position of the log of changes, whatever the mirror's is."""
        return self._commits.last_commit(self.folder(table, "changes")).checkpoint

    def apply(self, batch: Batch) -> Outcome:
        """Commit a batch's events and rows. A table that fails doesn't keep the others from it."""
        steps, failures = begin_steps(self._tables, batch)
        outcome = Outcome()
        if steps:
            outcome = BatchCommit(self._tables, self._cleanups, batch, steps).apply()
        if failures:
            raise failures[0]
        applied = {advance.table.qualified: Applied() for advance in batch.advances}
        return replace(outcome, applied=applied | outcome.applied, writer_results={})

    def clear(self, table: Table) -> None:
        """Empty a table's mirror."""
        self._tables.clear(table)

    def scan(
        self, table: Table, spark: "SparkSession", ids: Sequence[str] | None = None
    ) -> "DataFrame":
        """Read a mirror's rows as documents: SCANNED."""
        folder = self.folder(table, "mirror")
        state = self._commits.state(folder)
        if state is None:
            return spark.createDataFrame([], SCANNED)
        if is_bucket(folder):
            return scan_bucket(spark, Mirror(table, folder, state.version), ids)
        return scan_mirror(spark, table, folder, ids)

    def scan_group(self, tables: Sequence[Table], spark: "SparkSession") -> "DataFrame":
        """Read the rows of many small mirrors in one job."""
        folders = {table: self.folder(table, "mirror") for table in tables}
        return scan_mirrors(spark, folders, self._commits)

    def close(self) -> None:
        """Close the Delta tables."""
        self._commits.close()

    def for_generation(self, names: Mapping[str, str]) -> "Delta":
        """Return a sink that writes the generations of these names, by table."""
        without_vectors = self._tables.without_deletion_vectors
        return Delta(self.name, self.path, self.pipeline, dict(names), without_vectors)

    def check_capacity(self, tables: Sequence[Table]) -> None:
        """Check the space for the files, and for the rows as text where Spark spills.

        Raises SinkRejected when there is too little.
        """
        check_capacity(self._tables, tables)

    def promote(self, tables: Sequence[Table], names: Mapping[str, str]) -> Mapping[str, str]:
        """Make generations live in one commit a view; see `generations.promote`."""
        return generations.promote(self._tables, tables, names)

    def generations(self, table: Table) -> list[str]:
        """List the generations of a view, the live one first."""
        return generations.list_names(self._tables, table)

    def drop_unreferenced(self, tables: Sequence[Table], keep: Mapping[str, str]) -> None:
        """Remove the folders of generations that are neither live nor in `keep`."""
        generations.drop_unreferenced(self._tables, tables, keep)

    def remains(self, tables: Sequence[Table]) -> list[str]:
        """List the folders of the views, which hold all of their generations."""
        return [f"folder {folder}" for folder in self._tables.view_folders(tables)]

    def remove(self, tables: Sequence[Table]) -> None:
        """Remove the folders of the views, and the warehouse's own where nothing else is in it."""
        self._tables.remove(tables)


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


LEAST_FREE = 0.1


@dataclass(frozen=True)
class WarehouseFacts:
    """What was read of the warehouse's folder, or of the first folder above it that exists."""

    folder: str
    writable: bool
    free_share: float


def read_folder(path: str) -> WarehouseFacts:
    """Read the facts."""
    location = Path(path).absolute()
    folder = next(parent for parent in (location, *location.parents) if parent.exists())
    usage = shutil.disk_usage(folder)
    writable = os.access(folder, os.W_OK | os.X_OK) and folder.is_dir()
    return WarehouseFacts(str(folder), writable, usage.free / usage.total)


def check_folder(sink: str, facts: WarehouseFacts) -> Iterator[Finding]:
    """Judge the folder. Pure."""
    if not facts.writable:
        message = f"{sink}: {facts.folder} can't be written by this user."
        fix = f"ls -ld {facts.folder}"
        yield find("sink-unfit/folder", facts.folder, message, fix, sink=sink)
    if facts.free_share < LEAST_FREE:
        message = f"{sink}: {facts.free_share:.0%} of the disk of {facts.folder} is free."
        fix = f"df -h {facts.folder}"
        yield find("disk-low/warehouse", facts.folder, message, fix, sink=sink)
