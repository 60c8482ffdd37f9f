"""The commits of one table in a batch.

They begin before executors write its files, and the driver ends them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from cdc.model.outcome import Advance
from cdc.model.position import ViewCheckpoint
from cdc.model.table import Table
from cdc.sink.contract import PositionLost
from cdc.sinks.delta.executor import Staged, ViewState
from cdc.sinks.delta.files import parquet
from cdc.sinks.delta.files.columns import merged, schema, to_arrow
from cdc.sinks.delta.files.failures import commit_conflict
from cdc.sinks.delta.files.parquet import DataFile, FileNames
from cdc.sinks.delta.log import actions, positions
from cdc.sinks.delta.log.commits import LastCommit
from cdc.sinks.delta.log.table_log import (
    NO_TABLE,
    Action,
    Identity,
    TableLog,
    TableState,
    removal,
)
from cdc.sinks.delta.mirror import marks
from cdc.sinks.delta.mirror.logged import find_logged
from cdc.sinks.delta.mirror.rewrite import Rewrite, Source, rewrite, sources
from cdc.sinks.delta.mirror.superseded import Search
from cdc.sinks.delta.place import locate
from cdc.sinks.delta.tables import Tables

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

BATCH = "STREAMING UPDATE"
"""The operation of a batch's commits, by Delta's name."""

SEARCHED_BYTES = 16 * 2**20
"""The files of a mirror that each task of a batch searches for what it supersedes. Without another job of Spark
a batch of 200 changes of 20,000 rows took 0.16 s of CPU instead of 0.25; but the tasks of such a job divide a
large mirror.
"""


@dataclass(eq=False)
class TableCommit:
    """What a batch is going to commit to one table's view.

    pending: by kind, our last commit in those parts of the view that gain something.
    identities: by kind, of the Delta tables as they were read then; NO_TABLE where there was none. A
    commit since then has to be a conflict.
    view: what executors get to know.
    names: of the batch's files.
    """

    advance: Advance
    tables: Tables
    pending: Mapping[str, LastCommit]
    identities: Mapping[str, Identity]
    view: ViewState
    names: FileNames
    staged: Staged = field(default_factory=Staged)
    """What executors have written."""
    rewritten: Sequence[tuple[str, DataFile | None]] = ()
    """Files of the mirror that were written again: by its path each, and what replaces it."""

    @property
    def table(self) -> Table:
        """The source's table."""
        return self.advance.table

    def log(self, kind: str) -> TableLog:
        """Return the log of a part of the view."""
        return self.tables.commits.log(self.tables.folder(self.table, kind))

    def discard(self, *, committed: bool) -> None:
        """Remove the files of a batch that wasn't applied.

        committed: whether a commit may have added some to a table. Those stay.
        """
        for kind in self.pending:
            folder = self.tables.folder(self.table, kind)
            # Where nothing was committed no table is opened: what can't be read now must not hide
            # the failure that led here.
            if not committed or self._is_unchanged(kind, folder):
                parquet.remove_files(folder, parquet.names_with(folder, self.names.common))

    def _is_unchanged(self, kind: str, folder: str) -> bool:
        state = TableLog(folder).refresh()
        return (state.identity if state else NO_TABLE) == self.identities[kind]

    def append(self, spark: "SparkSession", checkpoint: ViewCheckpoint) -> None:
        """Commit the events to the log of changes; of a repair's events those that it lacks."""
        folder = self.tables.folder(self.table, "changes")
        events: list[DataFile] = self.staged.events
        if self.advance.is_repair and events:
            events = self._missing_events(spark, folder)
        self._commit("changes", actions.additions(events), checkpoint)
        committed = _names(events)
        staged = _names(self.staged.events)
        parquet.remove_files(folder, [name for name in staged if name not in committed])

    def _missing_events(self, spark: "SparkSession", folder: str) -> list[DataFile]:
        """Return files of the staged events that the log of changes lacks: those that have none that is
        logged already, and new ones in the place of the others.
        """
        log = self.log("changes")
        state = log.refresh()
        staged = {f"{folder}/{file.name}": file for file in self.staged.events}
        logged = find_logged(
            spark,
            list(staged),
            sources(log.place, state.files.values() if state else ()),
            self.view.topic_id,
        )
        columns = to_arrow(schema(self.table, "changes"))
        requests = [
            Rewrite(folder, [Source(path, rows)], columns, self.names.generate())
            for path, rows in logged.items()
        ]
        unchanged = [file for path, file in staged.items() if path not in logged]
        return unchanged + [file for file in rewrite(spark, requests) if file]

    def search(self) -> Search | None:
        """Describe the search for the rows that the batch supersedes; None where there can be none, or
        the tasks that wrote the batch have found them.
        """
        if "mirror" not in self.pending or self.view.files is not None:
            return None
        state = self._mirror_state()
        folder = self.tables.folder(self.table, "mirror")
        return self.staged.search(self.table.qualified, folder, list(state.files) if state else [])

    def rewrites(self) -> list[tuple[str, Rewrite]]:
        """List the files of the mirror that are to be written again, by their paths: where readers
        don't support deletion vectors those with superseded rows, or with marks of earlier merges.
        """
        if "mirror" not in self.pending or self._may_have_marks:
            return []
        log = self.log("mirror")
        state = self._mirror_state()
        added = {file.name: actions.addition(file)["add"] for file in self.staged.rows}
        files = {**(state.files if state else {}), **added}
        columns = schema(self.table, "mirror")
        if state:
            columns = merged(state.columns, columns)
        folder = log.place.location
        rewrites = []
        for path, file in files.items():
            superseded = self.staged.superseded.get(path)
            if superseded or "deletionVector" in file:
                rows = marks.marked_rows(log.place, file, superseded)
                source = Source(locate(folder, path), rows.serialize())
                name = self.names.generate()
                rewrites.append((path, Rewrite(folder, [source], to_arrow(columns), name)))
        return rewrites

    def merge(self, checkpoint: ViewCheckpoint) -> None:
        """Commit the rows to the mirror."""
        state = self._mirror_state()
        added = self._marking(state) if self._may_have_marks else self._replacing(state)
        self._commit("mirror", added, checkpoint)
        folder = self.tables.folder(self.table, "mirror")
        committed = {action["add"]["path"] for action in added if "add" in action}
        staged = _names([*self.staged.rows, *self.staged.deleted])
        parquet.remove_files(folder, [name for name in staged if name not in committed])

    def _marking(self, state: TableState | None) -> list[Action]:
        place = self.log("mirror").place
        present = state or TableState()
        return marks.mark(place, present, self.staged.rows, self.staged.superseded, self.names)

    def _replacing(self, state: TableState | None) -> list[Action]:
        """Make the actions where files with superseded rows have been written again."""
        present = state.files if state else {}
        former = {path for path, _ in self.rewritten}
        removed = [removal(file) for path, file in present.items() if path in former]
        files = [file for file in self.staged.rows if file.name not in former]
        files += [file for _, file in self.rewritten if file]
        return [*removed, *actions.additions(files)]

    def _commit(self, kind: str, changes: Sequence[Action], checkpoint: ViewCheckpoint) -> None:
        """Commit to a part of the view, which is created, or gets columns and features that it lacks.

        Raises CommitConflict, SinkUnavailable.
        """
        log = self.log(kind)
        state = log.refresh()
        columns = schema(self.table, kind)
        features = self.tables.features(self.table, kind)
        # All files of such a mirror that had marks have been written again.
        is_unmarked = kind == "mirror" and not self._may_have_marks
        dropped = [actions.DELETION_VECTORS] if is_unmarked else []
        shape = (
            actions.extension(state, columns, features, dropped=dropped)
            if state
            else actions.creation(columns, features)
        )
        log.commit(self.identities[kind], [*shape, *changes], BATCH, checkpoint)

    def _mirror_state(self) -> TableState | None:
        """Return the mirror as it was when the batch began. Raises CommitConflict."""
        state = self.log("mirror").refresh()
        if (state.identity if state else NO_TABLE) != self.identities["mirror"]:
            raise commit_conflict()
        return state

    @property
    def _may_have_marks(self) -> bool:
        return self.tables.may_have_deletion_vectors(self.table.qualified)


def begin(tables: Tables, writer: str, advance: Advance, names: FileNames) -> TableCommit:
    """Read the positions of a view's parts, and register the step with the writer fence.

    Raises:
        Fenced, PositionLost: see `Sink.apply`.
    """
    table, commits = advance.table, tables.commits
    folders = tables.folders(table)
    last_commits = {kind: commits.last_commit(folder) for kind, folder in folders.items()}
    for kind, last_commit in last_commits.items():
        if last_commit.trouble:
            raise PositionLost(
                f"The Delta table {folders[kind]} can't be gone on with: {last_commit.trouble}.",
                hint=f"cdc -p FILE rebuild {tables.sink} --table {table.qualified}",
                table=table.qualified,
            )
    tables.fence.begin_step(writer, advance, folders, lambda: load_position(tables, table))
    pending = {
        kind: last_commit
        for kind, last_commit in last_commits.items()
        if tables.fence.gains(writer, advance, folders[kind], last_commit.checkpoint)
    }
    states = {kind: commits.log(folder).state for kind, folder in folders.items()}
    identities = {kind: state.identity if state else NO_TABLE for kind, state in states.items()}
    view = ViewState(
        table,
        advance.end.topic_id,
        folders.get("changes"),
        folders["mirror"],
        known_offsets(advance, last_commits.get("changes")),
        known_offsets(advance, last_commits["mirror"]),
        identities["mirror"][0] if last_commits["mirror"].checkpoint else None,
        _searched_files(states["mirror"]),
    )
    return TableCommit(advance, tables, pending, identities, view, names)


def load_position(tables: Tables, table: Table) -> ViewCheckpoint | None:
    """Return the older position of a view's parts, where reading starts; the fence records both.

    A position that isn't true of the rows any more is returned too, so that these can be read.

    Raises:
        SchemaMismatch: the position is lost.
    """
    checkpoints = {kind: tables.last_commit(table, kind).checkpoint for kind in tables.kinds}
    for kind, checkpoint in checkpoints.items():
        tables.fence.record(tables.folder(table, kind), checkpoint)
    return positions.oldest_of(checkpoints)


def known_offsets(advance: Advance, last_commit: LastCommit | None) -> tuple[int, ...]:
    """Return by partition the offset below which a part needs nothing; 0 for a repair."""
    checkpoint = None if advance.is_repair or last_commit is None else last_commit.checkpoint
    return positions.known_offsets(checkpoint, advance.end)


def _searched_files(mirror: TableState | None) -> list[str] | None:
    """List the files of a mirror that is so small that every task of a batch searches it."""
    if mirror is None:
        return []
    return list(mirror.files) if mirror.size_bytes <= SEARCHED_BYTES else None


def _names(files: Sequence[DataFile]) -> list[str]:
    return [file.name for file in files]
