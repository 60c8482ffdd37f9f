"""The Delta tables of a warehouse's views: created, emptied, repaired, and checked before use."""

import shutil
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from cdc.errors import SinkRejected, SinkUnavailable
from cdc.model.position import ViewCheckpoint
from cdc.model.table import Table
from cdc.sink.contract import SchemaMismatch
from cdc.sinks.delta.files.columns import differs, reader_features, refusals, schema
from cdc.sinks.delta.log import add_files
from cdc.sinks.delta.log.commits import CommitInfo, Commits, LastCommit
from cdc.sinks.delta.log.history import CLEARED
from cdc.sinks.delta.log.writer_fence import WriterFence

KINDS = ("changes", "mirror")


class Tables:
    """The Delta tables of one sink: `changes` and `mirror` of each view.

    generation_names: by table, of the generation that is written; None for the live one. Such a
    generation is a mirror alone. The log of changes has one generation, because a compacted topic
    couldn't restore it.
    without_deletion_vectors: tables, or patterns of them, whose mirror is for readers that don't
    support deletion vectors.
    """

    def __init__(
        self,
        sink: str,
        path: str,
        generation_names: Mapping[str, str] | None,
        without_deletion_vectors: Collection[str] = (),
    ) -> None:
        self.sink, self._generation_names = sink, generation_names
        self.without_deletion_vectors = without_deletion_vectors
        # Absolute, because executors have a working directory of their own.
        self.path = str(Path(path).absolute())
        self.kinds = KINDS if generation_names is None else ("mirror",)
        self.commits, self.fence = Commits(), WriterFence()

    def folder(self, table: Table, kind: str) -> str:
        """Return where a part of a view lies."""
        suffix = ""
        if self._generation_names and kind == "mirror":
            suffix = f"@{self._generation_names[table.qualified]}"
        return f"{self.path}/{table.qualified}/{kind}{suffix}"

    def folders(self, table: Table) -> dict[str, str]:
        """Return the folders of a view's parts by kind."""
        return {kind: self.folder(table, kind) for kind in self.kinds}

    def generation(self, table: Table) -> str | None:
        """Return the name of the generation that is written; None when it is the live one."""
        return self._generation_names[table.qualified] if self._generation_names else None

    def may_have_deletion_vectors(self, table: str) -> bool:
        """Tell whether a table's mirror is for readers that support deletion vectors."""
        return not add_files.matches_any(table, self.without_deletion_vectors)

    def prepare(self, table: Table) -> None:
        """Create what doesn't exist, without rows: readers find all captured tables and columns.

        Raises SchemaMismatch: a table can't be stored, or what exists can't take it.
        """
        if reasons := refusals(table):
            raise SchemaMismatch(
                table,
                self.sink,
                f"{table.qualified} can't be held in {self.sink}: {'; '.join(reasons)}.",
                hint=f"rename it, or write exclude: [COLUMN] for {table.qualified} in the pipeline file, then run"
                " cdc -p FILE migrate and cdc -p FILE register",
            )
        for kind in self.kinds:
            self.create(table, kind)

    def create(self, table: Table, kind: str) -> None:
        """Create a Delta table with the source's columns, if there is none.

        Raises SchemaMismatch: there is one that can't be used.
        """
        folder = self.folder(table, kind)
        self.create_folder(folder)
        delta_table = self.commits.table(folder)
        if delta_table is None:
            try:
                add_files.create(folder, [], schema(table, kind), CommitInfo(CLEARED, 1))
            except SinkUnavailable:
                # Another process may have created it.
                if self.commits.table(folder) is None:
                    raise
        elif differs(delta_table, table):
            if not self.is_empty(folder):
                raise SchemaMismatch(table, self.sink)
            self.empty(table, kind, CLEARED)
        if (last_commit := self.commits.last_commit(folder)).trouble:
            raise self._unusable(table, kind, last_commit)

    def create_folder(self, folder: str) -> None:
        """Create the folder of a Delta table. Raises SinkRejected when it can't be created."""
        try:
            Path(folder).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise SinkRejected(
                f"The warehouse folder {self.path} can't be written: {error.strerror}.",
                hint="see the sink's path",
            ) from None

    def is_empty(self, folder: str) -> bool:
        """Tell whether a Delta table has neither rows nor a position."""
        last_commit, delta_table = (
            self.commits.last_commit(folder),
            self.commits.opened_table(folder),
        )
        if last_commit.checkpoint or last_commit.trouble:
            return False
        return not (delta_table and add_files.paths(delta_table))

    def last_commit(self, table: Table, kind: str) -> LastCommit:
        """Return our last commit in a part of a view.

        Raises SchemaMismatch when there is one, but its position can't be found out.
        """
        last_commit = self.commits.last_commit(self.folder(table, kind))
        if last_commit.trouble and last_commit.checkpoint is None:
            raise self._unusable(table, kind, last_commit)
        return last_commit

    def clear(self, table: Table) -> None:
        """Empty the mirror in one commit.

        The log of changes keeps its rows, unless its columns can't take the table's.
        """
        if refusals(table):
            return
        for kind, folder in self.folders(table).items():
            delta_table = self.commits.table(folder)
            if delta_table is None:
                continue
            fits = not differs(delta_table, table)
            if fits and (kind == "changes" or self.is_empty(folder)):
                continue
            try:
                self.empty(table, kind, CLEARED)
            except SinkUnavailable:
                # A running stream that finds a view without a position clears it as well. Either
                # commit does.
                if self.commits.last_commit(folder).checkpoint is not None:
                    raise

    def repair_changes(self, table: Table) -> None:
        """Repair a log of changes that can't continue.

        Nothing but this does it while a mirror is rebuilt. A log whose columns can't take the
        table's is emptied and continues with the events after those that it had; its earlier
        versions keep them for a week, or until VACUUM. A log that somebody else has changed keeps
        its rows.
        """
        folder = self.folder(table, "changes")
        last_commit = self.commits.last_commit(folder)
        delta_table = self.commits.opened_table(folder)
        if delta_table is None:
            return
        checkpoint, number = last_commit.checkpoint, last_commit.number
        if differs(delta_table, table) or (last_commit.trouble and checkpoint is None):
            self.empty(table, "changes", checkpoint or CLEARED)
        elif last_commit.trouble and checkpoint:
            add_files.commit(
                delta_table, [], "append", delta_table.schema(), CommitInfo(checkpoint, number + 1)
            )

    def empty(self, table: Table, kind: str, checkpoint: ViewCheckpoint) -> None:
        """Remove all rows of a Delta table and give it the source's columns, in one commit."""
        folder, columns = self.folder(table, kind), schema(table, kind)
        self.fence.forget(folder)
        last_commit, delta_table = (
            self.commits.last_commit(folder),
            self.commits.opened_table(folder),
        )
        if delta_table is None:
            return
        if features := reader_features(columns) - add_files.reader_features(delta_table):
            from pyspark.sql import SparkSession

            from cdc.sinks.delta.log import spark_generations

            spark_generations.enable_features(SparkSession.active(), folder, features)
            delta_table.update_incremental()
        add_files.commit(
            delta_table, [], "overwrite", columns, CommitInfo(checkpoint, last_commit.number + 1)
        )

    def view_folders(self, tables: Sequence[Table]) -> list[Path]:
        """List the folders of these views that exist."""
        folders = (Path(self.path, table.qualified) for table in tables)
        return [folder for folder in folders if folder.exists()]

    def remove(self, tables: Sequence[Table]) -> None:
        """Remove views with all generations; the warehouse's folder, too, where it is empty then."""
        self.commits.close()
        try:
            for folder in self.view_folders(tables):
                shutil.rmtree(folder)
        except OSError as error:
            raise SinkRejected(
                f"The warehouse folder {self.path} can't be written: {error.strerror}.",
                hint="see the sink's path, then run the command again",
            ) from None
        with suppress(OSError):
            Path(self.path).rmdir()

    def _unusable(self, table: Table, kind: str, last_commit: LastCommit) -> SchemaMismatch:
        """Make the error that says that the mirror has to be rebuilt."""
        folder = self.folder(table, kind)
        return SchemaMismatch(
            table,
            self.sink,
            f"The Delta table {folder} can't be gone on with: {last_commit.trouble}.",
        )
