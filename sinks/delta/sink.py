"""Delta Lake: per table a folder <path>/<schema>.<table> with `changes` and `mirror`.

`changes` is the log of all events, `mirror` has the current rows.

Each of the two has its own position, in the metadata of the very commit that brought its rows.
Events below it are filtered out before the write. Executors write the files of a batch
(`executor`) and find the rows that it supersedes (`mirror`), the driver commits them (`batch`). A
commit is a file of the table's log that didn't exist before (`log`): of two writers one fails, and reads
the position again.
"""

import os
import shutil
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from cdc.errors import SinkUnavailable
from cdc.model.finding import Finding, find
from cdc.model.outcome import Applied
from cdc.model.position import ViewCheckpoint
from cdc.model.table import Table
from cdc.sink.contract import Batch, ListIds, Outcome, ReadRows, SchemaMismatch
from cdc.sink.promotion import require_free_space
from cdc.sinks.delta.cleanup import Cleanups
from cdc.sinks.delta.columns import differs, refusals, schema
from cdc.sinks.delta.generations import generation_names, promote
from cdc.sinks.delta.log import (
    CLEARED,
    DELETION_VECTORS,
    NO_TABLE,
    Logs,
    creation,
    extension,
    removal_of_all,
)
from cdc.sinks.delta.place import Bucket, CommitConflict, is_bucket, place
from cdc.sinks.delta.positions import WriterFence, oldest

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

KINDS = ("changes", "mirror")
LEAST_FREE = 0.1
"""Of the disk of a warehouse."""
TEXT_FACTOR = 8
"""How much larger the newest rows are as the connector's text than in the mirror.

Spark keeps them as that text until they are written.
"""
SPARK_FOLDER = "/tmp"  # noqa: S108
"""Where Spark spills unless it is configured: the default of spark.local.dir."""


class Delta:
    """A warehouse as a destination; see `cdc.sink.contract.Sink` for the methods.

    name: of the sink in the pipeline file.
    path: folder of the warehouse, or the URL of one in a bucket.
    generation_names: by table, of the generation that is written; None for the live one. Such a
    generation is a mirror alone. The log of changes has one generation, because a compacted topic
    couldn't restore it.
    without_deletion_vectors: tables, or patterns of them, whose mirror is for readers that don't
    support deletion vectors.
    """

    promotes_all_tables = False

    def __init__(
        self,
        name: str,
        path: str,
        pipeline: str,
        generation_names: Mapping[str, str] | None = None,
        without_deletion_vectors: Collection[str] = (),
    ) -> None:
        self.name = name
        self.pipeline = pipeline
        # Absolute, because executors work in another directory.
        self.path = path if is_bucket(path) else str(Path(path).absolute())
        self.kinds = KINDS if generation_names is None else ("mirror",)
        self.logs = Logs()
        self.fence = WriterFence()
        self.without_deletion_vectors = without_deletion_vectors
        self._generation_names = generation_names
        self.cleanups = Cleanups(self.logs)
        self._is_tried = False

    def folder(self, table: Table, kind: str) -> str:
        suffix = ""
        if self._generation_names and kind == "mirror":
            suffix = f"@{self._generation_names[table.qualified]}"
        return f"{self.path}/{table.qualified}/{kind}{suffix}"

    def folders(self, table: Table) -> dict[str, str]:
        return {kind: self.folder(table, kind) for kind in self.kinds}

    def generation(self, table: Table) -> str | None:
        """Return the name of the generation that is written; None when it is the live one."""
        return self._generation_names[table.qualified] if self._generation_names else None

    def may_have_marks(self, table: Table) -> bool:
        """Whether a table's mirror is for readers that support deletion vectors."""
        patterns = self.without_deletion_vectors
        return not any(fnmatchcase(table.qualified, pattern) for pattern in patterns)

    def features(self, table: Table, kind: str) -> list[str]:
        """Name the features that readers of a part of a view must support, whatever its columns are.

        From the start: Spark can't run a plan that it made before a table had deletion vectors.
        """
        return [DELETION_VECTORS] if kind == "mirror" and self.may_have_marks(table) else []

    def examine(self, tables: Sequence[Table]) -> list[Finding]:  # noqa: ARG002  # one folder for all
        """See `check_folder`; a bucket must answer. Raises SinkUnavailable."""
        if is_bucket(self.path):
            place(self.path).folders()
            return []
        location = Path(self.path)
        folder = next(parent for parent in (location, *location.parents) if parent.exists())
        usage = shutil.disk_usage(folder)
        is_writable = os.access(folder, os.W_OK | os.X_OK) and folder.is_dir()
        return list(check_folder(self.name, str(folder), is_writable, usage.free / usage.total))

    def refusals(self, table: Table) -> list[str]:
        return refusals(table)

    def prepare(self, table: Table) -> None:
        """Create what doesn't exist, without rows: readers find all captured tables and columns.

        Raises SchemaMismatch: a table can't be stored, or what exists can't take it. SinkRejected: the
        object store lets two writers create one file.
        """
        if reasons := self.refusals(table):
            raise SchemaMismatch(
                table,
                self.name,
                f"{table.qualified} can't be held in {self.name}: {'; '.join(reasons)}.",
                hint=f"rename it, or write exclude: [COLUMN] for {table.qualified} in the pipeline file, then run"
                " cdc -p FILE migrate and cdc -p FILE register",
            )
        if is_bucket(self.path) and not self._is_tried:
            Bucket(self.path).require_one_winner()
            self._is_tried = True
        for kind in self.kinds:
            self.create(table, kind)

    def create(self, table: Table, kind: str) -> None:
        """Create a Delta table with the source's columns, if there is none.

        Raises SchemaMismatch: there is one that can't be used.
        """
        folder = self.folder(table, kind)
        place(folder).make()
        state = self.logs[folder].refresh()
        if state is None:
            created = creation(schema(table, kind), self.features(table, kind))
            # Another process may create it meanwhile.
            with suppress(CommitConflict):
                self.logs[folder].commit(NO_TABLE, created, "CREATE TABLE", CLEARED)
        elif differs(state.columns, table):
            if not self.is_empty(folder):
                raise SchemaMismatch(table, self.name)
            self.empty(table, kind, CLEARED)
        if (last_commit := self.logs[folder].last_commit()).trouble:
            raise SchemaMismatch(table, self.name, last_commit.trouble)

    def is_empty(self, folder: str) -> bool:
        """Whether a Delta table has neither rows nor a position."""
        last_commit = self.logs[folder].last_commit()
        if last_commit.checkpoint or last_commit.trouble:
            return False
        state = self.logs[folder].state
        return state is None or not state.files

    def position(self, table: Table) -> ViewCheckpoint | None:
        """Return the older position of a view's parts, where reading starts; the fence records both.

        A position that isn't true of the rows any more is returned too, so that these can be read.

        Raises SchemaMismatch: the position is lost.
        """
        checkpoints = {}
        for kind, folder in self.folders(table).items():
            last_commit = self.logs[folder].last_commit()
            if last_commit.trouble and last_commit.checkpoint is None:
                raise SchemaMismatch(table, self.name, last_commit.trouble)
            checkpoints[kind] = last_commit.checkpoint
        for kind, folder in self.folders(table).items():
            self.fence.record(folder, checkpoints[kind])
        return oldest(checkpoints)

    def archived(self, table: Table) -> ViewCheckpoint | None:
        """Return the position of the log of changes, whatever the mirror's is."""
        return self.logs[self.folder(table, "changes")].last_commit().checkpoint

    def apply(self, batch: Batch) -> Outcome:
        """Commit a batch's events and rows. A table that fails doesn't keep the others from it."""
        from cdc.sinks.delta.batch import apply_batch

        outcome = apply_batch(self, batch)
        applied = {advance.table.qualified: Applied() for advance in batch.advances}
        return replace(outcome, applied=applied | outcome.applied, writer_results={})

    def clear(self, table: Table) -> None:
        """Empty the mirror in one commit.

        The log of changes keeps its rows, unless its columns can't take the table's.
        """
        if self.refusals(table):
            return
        for kind, folder in self.folders(table).items():
            state = self.logs[folder].refresh()
            if state is None:
                continue
            fits = not differs(state.columns, table)
            if fits and (kind == "changes" or self.is_empty(folder)):
                continue
            try:
                self.empty(table, kind, CLEARED)
            except SinkUnavailable:
                # A running stream that finds a view without a position clears it as well. Either
                # commit does.
                if self.logs[folder].last_commit().checkpoint is not None:
                    raise

    def repair_changes(self, table: Table) -> None:
        """Repair a log of changes that can't continue.

        Nothing but this does it while a mirror is rebuilt. A log whose columns can't take the
        table's is emptied and continues with the events after those that it had; its earlier
        versions keep them for a week, or until VACUUM. A log that somebody else has changed keeps
        its rows.
        """
        folder = self.folder(table, "changes")
        last_commit = self.logs[folder].last_commit()
        state = self.logs[folder].state
        if state is None:
            return
        checkpoint = last_commit.checkpoint
        if differs(state.columns, table) or (last_commit.trouble and checkpoint is None):
            self.empty(table, "changes", checkpoint or CLEARED)
        elif last_commit.trouble and checkpoint:
            self.logs[folder].commit(state.identity, [], "WRITE", checkpoint)

    def empty(self, table: Table, kind: str, checkpoint: ViewCheckpoint) -> None:
        """Remove all rows of a Delta table and give it the source's columns, in one commit."""
        folder = self.folder(table, kind)
        self.fence.forget(folder)
        state = self.logs[folder].refresh()
        if state is None:
            return
        shape = extension(state, schema(table, kind), replaced=True)
        changes = [*shape, *removal_of_all(state)]
        self.logs[folder].commit(state.identity, changes, "WRITE", checkpoint)

    def scan(
        self, table: Table, spark: "SparkSession", ids: Sequence[str] | None = None
    ) -> "DataFrame":
        """Read a mirror's rows as documents: SCANNED."""
        from cdc.sinks.delta.scan import SCANNED, SMALL_BYTES, Mirror, scan_files, scan_mirror

        folder = self.folder(table, "mirror")
        state = self.logs[folder].refresh()
        if state is None:
            return spark.createDataFrame([], SCANNED)
        if is_bucket(folder) or state.size_bytes <= SMALL_BYTES:
            return scan_files(spark, Mirror(table, folder, state.version), ids)
        return scan_mirror(spark, table, folder, ids)

    def row_reader(self, table: Table) -> ReadRows:
        """Return a function that reads rows of the mirror's newest version."""
        from cdc.sinks.delta.scan import Mirror, read_ids

        folder = self.folder(table, "mirror")
        state = self.logs[folder].refresh()
        return partial(read_ids, Mirror(table, folder, state.version) if state else None)

    def id_lister(self, table: Table) -> ListIds:
        """Return a function that lists ids of the mirror's newest version."""
        from cdc.sinks.delta.scan import Mirror, list_ids, list_no_ids

        folder = self.folder(table, "mirror")
        checkpoint = self.logs[folder].last_commit().checkpoint
        state = self.logs[folder].state
        if state is None or checkpoint is None:
            return list_no_ids
        mirror = Mirror(table, folder, state.version)
        return partial(list_ids, mirror, checkpoint.position.offsets)

    def scan_group(self, tables: Sequence[Table], spark: "SparkSession") -> "DataFrame":
        """Read the rows of many small mirrors in one job."""
        from cdc.sinks.delta.scan import Mirror, scan_mirrors

        folders = {table: self.folder(table, "mirror") for table in tables}
        states = {table: self.logs[folder].refresh() for table, folder in folders.items()}
        mirrors = [
            Mirror(table, folders[table], state.version) for table, state in states.items() if state
        ]
        return scan_mirrors(spark, mirrors)

    def close(self) -> None:
        self.logs.clear()

    def for_generation(self, names: Mapping[str, str]) -> "Delta":
        return Delta(self.name, self.path, self.pipeline, names, self.without_deletion_vectors)

    def check_capacity(self, tables: Sequence[Table]) -> None:
        """Check the space for the files of second mirrors, and for the rows as text where Spark spills.

        Raises SinkRejected when there is too little.
        """
        mirrors = (self.logs[self.folder(table, "mirror")].refresh() for table in tables)
        size_bytes = sum(mirror.size_bytes for mirror in mirrors if mirror)
        if not is_bucket(self.path):
            Path(self.path).mkdir(parents=True, exist_ok=True)
            free = shutil.disk_usage(self.path).free
            require_free_space(size_bytes, free, self.path, self.name)
        if folder := spill_folder():
            free = shutil.disk_usage(folder).free
            require_free_space(size_bytes * TEXT_FACTOR, free, folder, self.name)

    def promote(self, tables: Sequence[Table], names: Mapping[str, str]) -> Mapping[str, str]:
        """Make generations live in one commit a view; see `generations.promote`."""
        return promote(self, tables, names)

    def generations(self, table: Table) -> list[str]:
        """List the generations of a view, the live one first.

        Without folders that have no table: a killed command had linked files into them, no more.
        """
        live = self.folder(table, "mirror")
        checkpoint = self.logs[live].last_commit().checkpoint
        live_name = [checkpoint.generation] if checkpoint else []
        names = [name for name in generation_names(live) if self.logs[f"{live}@{name}"].refresh()]
        return live_name + [name for name in names if name not in live_name]

    def drop_unreferenced(self, tables: Sequence[Table], keep: Mapping[str, str]) -> None:
        """Remove the folders of generations that are neither live nor in `keep`."""
        for table in tables:
            live = self.folder(table, "mirror")
            for name in generation_names(live):
                if name != keep.get(table.qualified):
                    place(f"{live}@{name}").remove_all()

    def remains(self, tables: Sequence[Table]) -> list[str]:
        """List the folders of the views that have files; they hold all generations."""
        folders = [f"{self.path}/{table.qualified}" for table in tables]
        return [f"folder {f}" for f in folders if any(place(f).files()) or place(f).folders()]

    def remove(self, tables: Sequence[Table]) -> None:
        """Remove views with all generations; the warehouse's folder, too, where it is empty then."""
        self.logs.clear()
        for table in tables:
            place(f"{self.path}/{table.qualified}").remove_all()
        if not is_bucket(self.path):
            with suppress(OSError):
                Path(self.path).rmdir()


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


def check_folder(sink: str, folder: str, is_writable: bool, free_share: float) -> Iterator[Finding]:
    """Judge the warehouse's folder, or the first folder above it that exists. Pure."""
    if not is_writable:
        message = f"{sink}: {folder} can't be written by this user."
        yield find("sink-unfit/folder", folder, message, f"ls -ld {folder}", sink=sink)
    if free_share < LEAST_FREE:
        message = f"{sink}: {free_share:.0%} of the disk of {folder} is free."
        yield find("disk-low/warehouse", folder, message, f"df -h {folder}", sink=sink)
