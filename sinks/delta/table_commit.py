"""One table's step in a batch: begun before the executors write its files, ended by the commits that take them in."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import deltalake

from cdc.model.outcome import Advance
from cdc.model.position import ViewCheckpoint
from cdc.model.table import Table
from cdc.sink.contract import PositionLost
from sinks.delta.executor import Staged, View
from sinks.delta.files import parquet
from sinks.delta.files.columns import NOTHING, schema
from sinks.delta.files.failures import contended
from sinks.delta.files.parquet import Changed, File, Name
from sinks.delta.log import add_files, positions
from sinks.delta.log.commits import Found
from sinks.delta.mirror import frames
from sinks.delta.mirror.rewrite import Rewrite
from sinks.delta.tables import Tables

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@dataclass(frozen=True, eq=False)
class Step:
    """By kind, of those parts of the view that gain something by it: how they stand, and the Delta tables as they are.

    The tables must be what was looked at: a commit since then has to be a conflict.
    """

    advance: Advance
    tables: Tables
    due: Mapping[str, Found]
    opened: Mapping[str, deltalake.DeltaTable | None]
    versions: dict[str, int | None]
    view: View

    @property
    def table(self) -> Table:
        return self.advance.table

    def discard(self, name: Name, *, committed: bool) -> None:
        """Remove the files of a batch that wasn't applied; committed: whether a commit may have taken some in."""
        for kind in self.due:
            folder = self.tables.folder(self.table, kind)
            if not committed or ("://" not in folder and _version(folder) == self.versions[kind]):
                parquet.remove(folder, parquet.beginning(folder, name.beginning))

    def append(self, spark: "SparkSession", staged: Staged, stored: ViewCheckpoint) -> None:
        """Commit the events to the log of changes; those of a repair as far as it lacks them."""
        folder, columns = self.tables.folder(self.table, "changes"), schema(self.table, "changes")
        events: list[File] = staged.events
        if self.advance.is_repair and events:
            brought = frames.read(spark, folder, _names(events), columns)
            log = spark.read.format("delta").load(folder)
            events = add_files.written(folder, frames.lacking(brought, log, self.view.topic_id), columns)
        self._add("changes", events, columns, stored)
        if events is not staged.events:
            parquet.remove(folder, _names(staged.events))

    def rewrite(self, staged: Staged, name: Name, limit_bytes: int, *, marks: bool) -> Rewrite | None:
        """What to make of a mirror that stays smaller than the limit: one file of all its rows; None of any other.

        Of rows that are in several of the staged files the others alone. Without `marks` none of a mirror's rows may
        be marked as deleted.
        """
        changed, table = _names([*staged.rows, *staged.gone]), self.opened["mirror"]
        if not changed or table is None or "mirror" not in self.due:
            return None
        add_files.extend(self._looked_at("mirror", table), schema(self.table, "mirror"))
        self.versions["mirror"] = table.version()
        size = add_files.size(table) + sum(file.size for file in staged.rows)
        if size >= limit_bytes or not add_files.plain(table, marks):
            return None
        import pyarrow as pa

        folder = self.tables.folder(self.table, "mirror")
        columns, new = pa.schema(table.schema().to_arrow()), [] if staged.repeated else _names(staged.rows)
        return Rewrite(folder, add_files.places(table, folder), changed, new, columns, name.new())

    def merge(
        self, spark: "SparkSession", staged: Staged, stored: ViewCheckpoint, made: list[File] | None, *, marks: bool
    ) -> None:
        """Commit the rows to the mirror; made: what `rewrite` has led to, None where it is too large for that."""
        folder, columns = self.tables.folder(self.table, "mirror"), schema(self.table, "mirror")
        table, before = self._opened("mirror"), self.due["mirror"]
        rows = self._newest(spark, folder, staged) if staged.repeated else staged.rows
        changed = Changed(rows, _names([*staged.rows, *staged.gone]))
        if table is not None and made is not None:
            rows = [*rows, *made] if staged.repeated else made
            whole = add_files.actions(rows)
            add_files.commit(table, whole, "overwrite", table.schema(), stored, before.number + 1)
        elif table is None or before.stored is None or not changed.names:
            self._add("mirror", rows, columns, stored)
        else:
            from sinks.delta.mirror.merge import merge

            merge(spark, table, folder, changed, stored, before.number + 1, marks)
        parquet.remove(folder, [one for one in changed.names if one not in _names(rows)])

    def _opened(self, kind: str) -> deltalake.DeltaTable | None:
        """A part's table as it was when the step was begun. Raises SinkUnavailable when it isn't that any more."""
        table = self.opened[kind]
        return self._looked_at(kind, table) if table else None

    def _looked_at(self, kind: str, table: deltalake.DeltaTable) -> deltalake.DeltaTable:
        if table.version() != self.versions[kind]:
            raise contended()
        return table

    def _add(self, kind: str, added: list[File], columns: deltalake.Schema, stored: ViewCheckpoint) -> None:
        """Commit files to a part of the view, beside what it has."""
        table, number = self._opened(kind), self.due[kind].number + 1
        if table is None:
            folder = self.tables.folder(self.table, kind)
            add_files.create(folder, add_files.actions(added), columns, stored, number)
        else:
            add_files.extend(table, columns)
            add_files.commit(table, add_files.actions(added), "append", table.schema(), stored, number)

    def _newest(self, spark: "SparkSession", folder: str, staged: Staged) -> list[File]:
        """Other files, where one row is in several."""
        rows = frames.read(spark, folder, _names(staged.rows), schema(self.table, "mirror"))
        gone = frames.read(spark, folder, _names(staged.gone), schema(NOTHING, "mirror"))
        return add_files.written(folder, frames.newest(rows, gone), schema(self.table, "mirror"))


def begin(tables: Tables, writer: str, advance: Advance) -> Step:
    """Look at a view's parts, and take note of a step from where they stand; see `Fence` for where that is refused.

    Raises:
        Fenced, PositionLost: see `Sink.apply`.
    """
    table, commits = advance.table, tables.commits
    folders = tables.folders(table)
    found = {kind: commits.found(folder) for kind, folder in folders.items()}
    for kind, standing in found.items():
        if standing.trouble:
            raise PositionLost(
                f"The Delta table {folders[kind]} can't be gone on with: {standing.trouble}.",
                hint=f"cdc -p FILE rebuild {tables.sink} --table {table.qualified}",
                table=table.qualified,
            )
    tables.fence.begin(writer, advance, folders, lambda: look(tables, table))
    due = {
        kind: standing
        for kind, standing in found.items()
        if tables.fence.is_due(writer, advance, folders[kind], standing.stored)
    }
    opened = {kind: commits.opened(folders[kind]) for kind in folders}
    versions = {kind: held.version() if held else None for kind, held in opened.items()}
    view = View(
        table,
        advance.end.topic_id,
        folders.get("changes"),
        folders["mirror"],
        _known(advance, found.get("changes")),
        _known(advance, found["mirror"]),
        versions["mirror"] if found["mirror"].stored else None,
    )
    return Step(advance, tables, due, opened, versions, view)


def look(tables: Tables, table: Table) -> ViewCheckpoint | None:
    """Where reading has to start again: at the older of the two positions, which the fence takes note of.

    Raises:
        SchemaMismatch: it is lost. One that isn't true of the rows any more is told, so that these can be looked at.
    """
    found = {kind: tables.standing(table, kind).stored for kind in tables.kinds}
    for kind, stored in found.items():
        tables.fence.leave(tables.folder(table, kind), stored)
    return positions.oldest_of(found)


def _known(advance: Advance, found: Found | None) -> tuple[int, ...]:
    """By partition, below which offsets a part needs nothing; a repair is for all of it."""
    stored = None if advance.is_repair or found is None else found.stored
    return positions.known(stored, advance.end)


def _names(of: list[File]) -> list[str]:
    return [file.name for file in of]


def _version(folder: str) -> int | None:
    try:
        return deltalake.DeltaTable(folder).version()
    except deltalake.exceptions.TableNotFoundError:
        return None
