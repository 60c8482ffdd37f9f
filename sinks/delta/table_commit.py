"""The commits of one table in a batch.

They begin before executors write its files, and the driver ends them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import deltalake

from cdc.model.outcome import Advance
from cdc.model.position import ViewCheckpoint
from cdc.model.table import Table
from cdc.sink.contract import PositionLost
from cdc.sinks.delta.executor import Staged, ViewState
from cdc.sinks.delta.files import parquet
from cdc.sinks.delta.files.columns import NO_COLUMNS, schema
from cdc.sinks.delta.files.failures import commit_conflict, writing
from cdc.sinks.delta.files.parquet import ChangedRows, DataFile, FileNames
from cdc.sinks.delta.log import add_files, positions
from cdc.sinks.delta.log.commits import CommitInfo, LastCommit
from cdc.sinks.delta.mirror import frames
from cdc.sinks.delta.mirror.merge import merge_marking, merge_rewriting
from cdc.sinks.delta.mirror.rewrite import Rewrite
from cdc.sinks.delta.tables import Tables

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@dataclass(frozen=True, eq=False)
class TableCommit:
    """What a batch is going to commit to one table's view.

    pending: by kind, our last commit in those parts of the view that gain something.
    opened, versions: by kind, the Delta tables as they were read then. A commit since then has to
    be a conflict.
    view: what executors get to know.
    """

    advance: Advance
    tables: Tables
    pending: Mapping[str, LastCommit]
    opened: Mapping[str, deltalake.DeltaTable | None]
    versions: dict[str, int | None]
    view: ViewState

    @property
    def table(self) -> Table:
        """The source's table."""
        return self.advance.table

    def discard(self, names: FileNames, *, committed: bool) -> None:
        """Remove the files of a batch that wasn't applied.

        committed: whether a commit may have added some to a table. Those stay.
        """
        for kind in self.pending:
            folder = self.tables.folder(self.table, kind)
            # Where nothing was committed no table is opened: what can't be read now must not hide
            # the failure that led here.
            if not committed or self._is_unchanged(kind, folder):
                parquet.remove_files(folder, parquet.names_with_prefix(folder, names.prefix))

    def _is_unchanged(self, kind: str, folder: str) -> bool:
        return _version(folder) == self.versions[kind]

    def append(self, spark: "SparkSession", staged: Staged, checkpoint: ViewCheckpoint) -> None:
        """Commit the events to the log of changes; of a repair's events those that it lacks."""
        folder, columns = self.tables.folder(self.table, "changes"), schema(self.table, "changes")
        events: list[DataFile] = staged.events
        if self.advance.is_repair and events:
            staged_events = frames.read_files(spark, folder, _names(events), columns)
            log = spark.read.format("delta").load(folder)
            missing = frames.missing_events(staged_events, log, self.view.topic_id)
            events = add_files.write_files(folder, missing, columns)
        self._add("changes", events, columns, checkpoint)
        if events is not staged.events:
            parquet.remove_files(folder, _names(staged.events))

    def plan_rewrite(self, staged: Staged, names: FileNames, limit_bytes: int) -> Rewrite | None:
        """Plan to write a mirror again that stays smaller than the limit; None for any other.

        When rows are staged repeatedly, the new file has the other rows alone.
        """
        id_files, table = _names([*staged.rows, *staged.deleted]), self.opened["mirror"]
        if not id_files or table is None or "mirror" not in self.pending:
            return None
        add_files.add_columns(self._unchanged("mirror", table), schema(self.table, "mirror"))
        self.versions["mirror"] = table.version()
        size_bytes = add_files.size_bytes(table) + sum(file.size for file in staged.rows)
        if size_bytes >= limit_bytes or not self._is_plain(table):
            return None
        import pyarrow as pa

        folder = self.tables.folder(self.table, "mirror")
        columns = pa.schema(table.schema().to_arrow())
        row_files = [] if staged.repeated else _names(staged.rows)
        paths = add_files.local_paths(table, folder)
        return Rewrite(folder, paths, id_files, row_files, columns, names.generate())

    def merge(
        self,
        spark: "SparkSession",
        staged: Staged,
        checkpoint: ViewCheckpoint,
        rewritten: list[DataFile] | None,
    ) -> None:
        """Commit the rows to the mirror.

        rewritten: the result of `plan_rewrite`; None where there was none.
        """
        folder, columns = self.tables.folder(self.table, "mirror"), schema(self.table, "mirror")
        table, last_commit = self._opened("mirror"), self.pending["mirror"]
        info = CommitInfo(checkpoint, last_commit.number + 1)
        rows = self._newest(spark, folder, staged) if staged.repeated else staged.rows
        changed = ChangedRows(rows, _names([*staged.rows, *staged.deleted]))
        if table is not None and rewritten is not None:
            rows = [*rows, *rewritten] if staged.repeated else rewritten
            actions = add_files.add_actions(rows)
            add_files.commit(table, actions, "overwrite", table.schema(), info)
        elif table is None or last_commit.checkpoint is None or not changed.id_files:
            self._add("mirror", rows, columns, checkpoint)
        else:
            merge = merge_marking if self._may_have_marks else merge_rewriting
            with writing(folder):
                merge(spark, table, folder, changed, info)
        parquet.remove_files(
            folder, [name for name in changed.id_files if name not in _names(rows)]
        )

    @property
    def _may_have_marks(self) -> bool:
        return self.tables.may_have_deletion_vectors(self.table.qualified)

    def _is_plain(self, table: deltalake.DeltaTable) -> bool:
        """Tell whether the rows of the mirror are those of its files, for all of its readers."""
        if add_files.has_deleted_rows(table):
            return False
        features = add_files.reader_features(table)
        return self._may_have_marks or add_files.DELETION_VECTORS not in features

    def _opened(self, kind: str) -> deltalake.DeltaTable | None:
        """Return a part's table. Raises SinkUnavailable when it has changed since `begin`."""
        table = self.opened[kind]
        return self._unchanged(kind, table) if table else None

    def _unchanged(self, kind: str, table: deltalake.DeltaTable) -> deltalake.DeltaTable:
        if table.version() != self.versions[kind]:
            raise commit_conflict()
        return table

    def _add(
        self,
        kind: str,
        files: list[DataFile],
        columns: deltalake.Schema,
        checkpoint: ViewCheckpoint,
    ) -> None:
        """Add files to a part of the view in a commit."""
        table = self._opened(kind)
        info = CommitInfo(checkpoint, self.pending[kind].number + 1)
        actions = add_files.add_actions(files)
        if table is None:
            add_files.create(self.tables.folder(self.table, kind), actions, columns, info)
        else:
            add_files.add_columns(table, columns)
            add_files.commit(table, actions, "append", table.schema(), info)

    def _newest(self, spark: "SparkSession", folder: str, staged: Staged) -> list[DataFile]:
        """Write the newest version of rows that are staged repeatedly to other files."""
        columns = schema(self.table, "mirror")
        rows = frames.read_files(spark, folder, _names(staged.rows), columns)
        deleted = frames.read_files(
            spark, folder, _names(staged.deleted), schema(NO_COLUMNS, "mirror")
        )
        return add_files.write_files(folder, frames.newest_rows(rows, deleted), columns)


def begin(tables: Tables, writer: str, advance: Advance) -> TableCommit:
    """Read where a view's parts stand, and register the step with the writer fence.

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
    opened = {kind: commits.opened_table(folder) for kind, folder in folders.items()}
    versions = {
        kind: delta_table.version() if delta_table else None for kind, delta_table in opened.items()
    }
    view = ViewState(
        table,
        advance.end.topic_id,
        folders.get("changes"),
        folders["mirror"],
        known_offsets(advance, last_commits.get("changes")),
        known_offsets(advance, last_commits["mirror"]),
        versions["mirror"] if last_commits["mirror"].checkpoint else None,
    )
    return TableCommit(advance, tables, pending, opened, versions, view)


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


def _names(files: Sequence[DataFile]) -> list[str]:
    return [file.name for file in files]


def _version(folder: str) -> int | None:
    try:
        return deltalake.DeltaTable(folder).version()
    except deltalake.exceptions.TableNotFoundError:
        return None
