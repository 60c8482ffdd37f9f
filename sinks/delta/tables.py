"""The Delta tables of a warehouse's views: created, emptied, repaired, and checked before use."""

from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from fnmatch import fnmatchcase
from pathlib import Path

from cdc.errors import SinkUnavailable
from cdc.model.position import ViewCheckpoint
from cdc.model.table import Table
from cdc.sink.contract import SchemaMismatch
from cdc.sinks.delta.columns import differs, refusals, schema
from cdc.sinks.delta.log import (
    CLEARED,
    DELETION_VECTORS,
    NO_TABLE,
    Commits,
    LastCommit,
    creation,
    extension,
    removal_of_all,
)
from cdc.sinks.delta.place import CommitConflict, is_bucket, place
from cdc.sinks.delta.positions import WriterFence

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
        # Absolute, because executors work in another directory.
        self.path = path if is_bucket(path) else str(Path(path).absolute())
        self.kinds = KINDS if generation_names is None else ("mirror",)
        self.commits, self.fence = Commits(), WriterFence()
        self._is_tried = False

    def folder(self, table: Table, kind: str) -> str:
        """Return the folder of a part of a view."""
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
        """Whether a table's mirror is for readers that support deletion vectors."""
        return not any(fnmatchcase(table, pattern) for pattern in self.without_deletion_vectors)

    def features(self, table: Table, kind: str) -> list[str]:
        """Name the features that readers of a part of a view must support, whatever its columns are.

        From the start: Spark can't run a plan that it made before a table had deletion vectors.
        """
        may_have_marks = kind == "mirror" and self.may_have_deletion_vectors(table.qualified)
        return [DELETION_VECTORS] if may_have_marks else []

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
        self._require_one_winner()
        for kind in self.kinds:
            self.create(table, kind)

    def _require_one_winner(self) -> None:
        """Try out the object store, once. Raises SinkRejected: see `Bucket.require_one_winner`."""
        if not self._is_tried:
            place(self.path).require_one_winner()
            self._is_tried = True

    def create(self, table: Table, kind: str) -> None:
        """Create a Delta table with the source's columns, if there is none.

        Raises SchemaMismatch: there is one that can't be used.
        """
        folder = self.folder(table, kind)
        place(folder).make()
        state = self.commits.state(folder)
        if state is None:
            created = creation(schema(table, kind), self.features(table, kind))
            # Another process may create it meanwhile.
            with suppress(CommitConflict):
                self.commits.log(folder).commit(NO_TABLE, created, "CREATE TABLE", CLEARED)
        elif differs(state.columns, table):
            if not self.is_empty(folder):
                raise SchemaMismatch(table, self.sink)
            self.empty(table, kind, CLEARED)
        if (last_commit := self.commits.last_commit(folder)).trouble:
            raise self._unusable(table, kind, last_commit)

    def is_empty(self, folder: str) -> bool:
        """Whether a Delta table has neither rows nor a position."""
        last_commit = self.commits.last_commit(folder)
        if last_commit.checkpoint or last_commit.trouble:
            return False
        state = self.commits.log(folder).state
        return state is None or not state.files

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
            state = self.commits.state(folder)
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
        state = self.commits.log(folder).state
        if state is None:
            return
        checkpoint = last_commit.checkpoint
        if differs(state.columns, table) or (last_commit.trouble and checkpoint is None):
            self.empty(table, "changes", checkpoint or CLEARED)
        elif last_commit.trouble and checkpoint:
            self.commits.log(folder).commit(state.identity, [], "WRITE", checkpoint)

    def empty(self, table: Table, kind: str, checkpoint: ViewCheckpoint) -> None:
        """Remove all rows of a Delta table and give it the source's columns, in one commit."""
        folder = self.folder(table, kind)
        self.fence.forget(folder)
        state = self.commits.state(folder)
        if state is None:
            return
        shape = extension(state, schema(table, kind), replaced=True)
        changes = [*shape, *removal_of_all(state)]
        self.commits.log(folder).commit(state.identity, changes, "WRITE", checkpoint)

    def view_folders(self, tables: Sequence[Table]) -> list[str]:
        """List the folders of these views that have files."""
        folders = [f"{self.path}/{table.qualified}" for table in tables]
        return [f for f in folders if any(place(f).files()) or place(f).folders()]

    def remove(self, tables: Sequence[Table]) -> None:
        """Remove views with all generations; the warehouse's folder, too, where it is empty then."""
        self.commits.close()
        for table in tables:
            place(f"{self.path}/{table.qualified}").remove_all()
        if not is_bucket(self.path):
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
