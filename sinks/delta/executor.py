"""Writer of the executors: files in the folders of Delta tables, which the driver commits.

A task writes a file of events for the log of changes, and for the mirror one of rows and one of the
ids of deleted rows. Every chunk adds to them. None of them is part of a table yet. A row that comes
in several chunks is staged several times: `Staged.repeated` says so. At its end the task finds the rows
of a small mirror that it supersedes.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa

from cdc.codec.forms import Values
from cdc.codec.record import Change, Unreadable
from cdc.codec.table import codec
from cdc.codec.types.arrow import countable
from cdc.errors import SinkRejected, SinkUnavailable
from cdc.model.outcome import Advance
from cdc.model.table import Table
from cdc.sink.lane import SUPERSEDED, ChunkLimits, Failure, FoldedRow, Part, Verdicts
from cdc.sink.rejection import Source
from cdc.sinks.delta import parquet
from cdc.sinks.delta.columns import arrow_schema
from cdc.sinks.delta.log import File, FileNames
from cdc.sinks.delta.mirror import Search, search_files
from cdc.sinks.delta.parquet import ID, FileWriter
from cdc.sinks.delta.place import reading, writing
from cdc.sinks.delta.scan import Mirror
from cdc.sinks.delta.vectors import bitmap

LIMITS = ChunkLimits(rows=50_000, bytes=64 * 2**20)
FILE_BYTES = 512 * 2**20
"""Memory that the rows of a file have taken when it is closed; on disk it is far smaller."""
EVENT_BYTES = 300
"""Memory that an event takes in addition to its row's values."""
MissingColumns = Mapping[str, Sequence[str]]
"""By id of a row: the columns whose values its change doesn't carry."""
Newest = dict[str, tuple[int, tuple[Any, ...] | None]]
"""By id of a row: its newest offset, and the values there; None for a deleted row."""


@dataclass(frozen=True)
class ViewState:
    """One table's view as the driver has read it before a batch.

    changes, mirror: folders; there is no log of changes where only a mirror is written.
    logged, mirrored: by partition, the offset below which the log or the mirror has all events.
    version: of the mirror; None while it has no rows.
    files: paths of the mirror's files as its log has them, where the task is to search them; None where
    another job does (`mirror.find_superseded`).
    """

    table: Table
    topic_id: str
    changes: str | None
    mirror: str
    logged: tuple[int, ...]
    mirrored: tuple[int, ...]
    version: int | None
    files: Sequence[str] | None = None


class Staged(msgspec.Struct):
    """Files of one view that are in no commit yet: of events, of rows, of the ids of deleted rows.

    repeated: whether a row may be in them several times; the one of the greatest offset counts.
    superseded: by path of a file of the mirror, or of rows: the bitmap of its rows that are superseded.
    """

    events: list[File] = []
    rows: list[File] = []
    deleted: list[File] = []
    repeated: bool = False
    superseded: dict[str, bytes] = {}

    def add(self, staged: "Staged") -> None:
        self.events.extend(staged.events)
        self.rows.extend(staged.rows)
        self.deleted.extend(staged.deleted)
        self.repeated |= staged.repeated
        for path, rows in staged.superseded.items():
            both = bitmap(self.superseded.get(path)) | bitmap(rows)
            self.superseded[path] = both.serialize()

    def search(self, table: str, folder: str, files: Sequence[str]) -> Search | None:
        """Describe the search for the rows of a mirror that these files supersede; None where there can
        be none.

        files: paths of the mirror's files.
        """
        rows = [file["path"] for file in self.rows]
        deleted = [file["path"] for file in self.deleted]
        if not (rows or deleted):
            return None
        return Search(table, folder, files, rows, deleted, repeated=self.repeated)


@dataclass
class WarehouseWriter:
    """Writes the records of a task into the warehouse; see `cdc.sink.lane.Writer`.

    views: by topic. archives: whether it also takes changes from before a TRUNCATE.
    """

    views: Mapping[str, ViewState]
    names: FileNames
    archives: bool
    limits: ChunkLimits = LIMITS
    form = Values()
    _stages: dict[str, "_Stage"] = field(default_factory=dict)

    def start_offset(self, advance: Advance, partition: int) -> int:
        return advance.start_offsets[partition]

    def observe(self, part: Part, change: Change, source: Source, value: Any) -> int:
        """Stage an event unless the log of changes has it; return the memory that it takes."""
        stage = self._stages.get(part.topic) or self._stage(part.topic)
        if change.op is None or source.offset < stage.logged[part.partition]:
            return 0
        stage.add(part.partition, change, source, value)
        return EVENT_BYTES

    def read_stored(self, part: Part, rows: Sequence[FoldedRow]) -> Mapping[str, Any]:
        """Look up stored values of rows that miss some; SUPERSEDED where the mirror is newer."""
        first_unknown = self.views[part.topic].mirrored[part.partition]
        values: dict[str, Any] = {row.id: SUPERSEDED for row in rows if row.offset < first_unknown}
        missing = {row.id: row.missing for row in rows if row.id not in values}
        return {**values, **self._stage(part.topic).values(missing)}

    def write(self, parts: Sequence[Part]) -> Sequence[Verdicts]:
        """Write a chunk to the files of its views."""
        for topic in {part.topic: None for part in parts}:
            self._stage(topic).write([part for part in parts if part.topic == topic])
        return [Verdicts(stale=self._stale(part)) for part in parts]

    def finish(self) -> Mapping[str, Sequence[str]]:
        """Close the files and return them by topic, as the JSON of `Staged`."""
        return {
            topic: [msgspec.json.encode(stage.end()).decode()]
            for topic, stage in self._stages.items()
        }

    def _stale(self, part: Part) -> frozenset[str]:
        first_unknown = self.views[part.topic].mirrored[part.partition]
        return frozenset(row.id for row in part.rows.values() if row.offset < first_unknown)

    def _stage(self, topic: str) -> "_Stage":
        if topic not in self._stages:
            self._stages[topic] = _Stage(self.views[topic], self.names)
        return self._stages[topic]


class _Stage:
    """The files of one view that a task writes."""

    def __init__(self, view: ViewState, names: FileNames) -> None:
        self._view = view
        self._names = names
        # Without a log of changes: an offset that no record reaches, so that none is staged for it.
        self.logged = view.logged if view.changes else (2**63,) * len(view.mirrored)
        self._staged = Staged()
        self._stored_rows = StoredRows(view.table, view.mirror, view.version)
        self._writers: dict[str, FileWriter] = {}
        self._values = codec(view.table).values
        self._nulls = (None,) * len(view.table.columns)
        self._events: list[tuple[Any, ...]] = []
        self._event_values: list[tuple[Any, ...]] = []

    def add(
        self, partition: int, change: Change, source: Source, value: tuple[Any, ...] | None
    ) -> None:
        """Collect an event until the chunk is written."""
        ours = (change.id, partition, source.offset, change.op, self._view.topic_id, change.lsn)
        self._events.append((*ours, change.missing or None, change.commit_us))
        self._event_values.append(self._key_values(source) if value is None else value)

    def write(self, parts: Sequence[Part]) -> None:
        """Write a chunk's events, and its rows that the mirror lacks. Raises Failure."""
        events = self._events
        event_values = self._event_values
        self._events = []
        self._event_values = []
        fresh = [
            (part.partition, row)
            for part in parts
            for row in part.rows.values()
            if row.offset >= self._view.mirrored[part.partition]
        ]
        if fresh:
            self._staged.repeated |= self._stored_rows.note_chunk([row.id for _, row in fresh])
        rows = [(number, row) for number, row in fresh if row.value is not None]
        deleted = [(number, row) for number, row in fresh if row.value is None]
        table = self._view.table
        # Most rows are as an event has them, so the values become columns once for both.
        values, indices = _common_values(event_values, [row.value for _, row in rows])
        fields = [arrow_schema(table, "changes").field(column.name) for column in table.columns]
        columns = _arrow_columns(values, fields)
        if events:
            of_events = [column.slice(0, len(events)) for column in columns]
            self._append("events", _arrow_table(events, of_events, arrow_schema(table, "changes")))
        if rows:
            of_rows = columns if indices is None else [column.take(indices) for column in columns]
            schema = arrow_schema(table, "mirror")
            self._append("rows", _arrow_table(_versions(rows), of_rows, schema))
        if deleted:
            schema = arrow_schema(None, "mirror")
            self._append("deleted", _arrow_table(_versions(deleted), [], schema))

    def values(self, missing: Mapping[str, Sequence[str]]) -> Mapping[str, tuple[Any, ...]]:
        """Look up missing values; see `StoredRows.values`. Raises Failure."""
        if self._stored_rows.staged_ids(list(missing)):
            # Only a closed file can be read.
            for kind in ("rows", "deleted"):
                self._close(kind)
        return self._stored_rows.values(missing, self._staged.rows, self._staged.deleted)

    def end(self) -> Staged:
        """Close the files, and find what they supersede in a mirror that is searched here. Raises Failure."""
        for kind in list(self._writers):
            self._close(kind)
        view = self._view
        if view.files is not None and (
            search := self._staged.search(view.table.qualified, view.mirror, view.files)
        ):
            with _reported(reading(view.mirror)):
                self._staged.superseded = dict(search_files(search))
        return self._staged

    def _append(self, kind: str, table: "pa.Table") -> None:
        """Add a row group to the file of a kind (a list of `Staged`); close it when it is full."""
        folder = self._folder(kind)
        with _reported(writing(folder)):
            if kind not in self._writers:
                self._writers[kind] = FileWriter(folder, self._names.generate(), table)
            self._writers[kind].add(table)
        if self._writers[kind].bytes > FILE_BYTES:
            self._close(kind)

    def _close(self, kind: str) -> None:
        if writer := self._writers.pop(kind, None):
            with _reported(writing(self._folder(kind))):
                getattr(self._staged, kind).append(writer.close())

    def _folder(self, kind: str) -> str:
        return self._view.changes if kind == "events" and self._view.changes else self._view.mirror

    def _key_values(self, source: Source) -> tuple[Any, ...]:
        """Return the values of a deleted row: only its key is certain."""
        try:
            return self._values(source.key or b"{}")
        except Unreadable:
            return self._nulls


@contextmanager
def _reported(access: AbstractContextManager[None]) -> Iterator[None]:
    """Turn the failure of an access to files into one of the destination."""
    try:
        with access:
            yield
    except SinkUnavailable as error:
        raise Failure("unavailable", error.message) from None
    except SinkRejected as error:
        raise Failure("rejected", error.message) from None


def _versions(rows: Sequence[tuple[int, FoldedRow]]) -> list[tuple[Any, ...]]:
    """Make the columns `columns.MIRROR` of rows of partitions."""
    return [(row.id, partition, row.offset) for partition, row in rows]


def _common_values(
    events: Sequence[tuple[Any, ...]], rows: Sequence[tuple[Any, ...]]
) -> tuple[Sequence[tuple[Any, ...]], pa.Array | None]:
    """Put together the values of events and of rows: all of them, the events' first, and for each row
    where its values are; None where the rows' are all of them, in their order.
    """
    places = {id(values): place for place, values in enumerate(events)}
    filled = [values for values in rows if id(values) not in places]
    places.update({id(values): place for place, values in enumerate(filled, len(events))})
    indices = [places[id(values)] for values in rows]
    in_order = len(rows) == len(events) + len(filled) and indices == list(range(len(rows)))
    return [*events, *filled], None if in_order else pa.array(indices, pa.int64())


def _arrow_columns(rows: Sequence[tuple[Any, ...]], fields: Sequence[pa.Field]) -> list[pa.Array]:
    """Put the values of rows into columns."""
    columns = zip(*rows, strict=True) if rows else [()] * len(fields)
    return [pa.array(column, field.type) for column, field in zip(columns, fields, strict=True)]


def _arrow_table(
    bookkeeping: Sequence[tuple[Any, ...]], values: Sequence[pa.Array], schema: pa.Schema
) -> pa.Table:
    """Make a table of rows of our own columns, and of the columns of values, by a schema."""
    fields = list(schema)[: len(schema) - len(values)]
    return pa.table([*_arrow_columns(bookkeeping, fields), *values], schema=schema)


class StoredRows:
    """The stored rows of one view, for one task in its thread: they complete changes that don't carry every
    value. They are in what the task has staged, or in the mirror.

    version: of the mirror that the batch goes on from; None while that has no rows.
    """

    def __init__(self, table: Table, folder: str, version: int | None) -> None:
        self._table = table
        self._folder = folder
        self._mirror = None if version is None else Mirror(table, folder, version)
        self._staged_hashes = np.empty(0, np.int64)

    def note_chunk(self, ids: Sequence[str]) -> bool:
        """Remember the rows of a chunk; return whether one of them is staged repeatedly now."""
        # Two sorted halves one after the other: a stable sort only merges them.
        hashes = np.concatenate([self._staged_hashes, np.sort(_hashes(ids))])
        self._staged_hashes = np.sort(hashes, kind="stable")
        return bool((self._staged_hashes[1:] == self._staged_hashes[:-1]).any())

    def staged_ids(self, ids: Sequence[str]) -> list[str]:
        """Select those ids that earlier chunks may contain (they have the same hash)."""
        staged = np.isin(_hashes(ids), self._staged_hashes)
        return [row_id for row_id, is_staged in zip(ids, staged, strict=True) if is_staged]

    def values(
        self, missing: MissingColumns, rows: Sequence[File], deleted: Sequence[File]
    ) -> Mapping[str, tuple[Any, ...]]:
        """Look up the values of missing columns, by id of those rows that exist.

        A row's values are in the order of the table's columns. rows, deleted: files that the task
        has staged, of rows and of the ids of deleted ones.

        Raises:
            Failure: files can't be read.
        """
        names = {name for columns in missing.values() for name in columns}
        fields = [field for field in codec(self._table).schema if field.name in names]
        key_schema = pa.schema([(ID, pa.string()), ("_cdc_offset", pa.int64())])
        schema = pa.schema([*key_schema, *fields])
        newest: Newest = {}
        with _reported(reading(self._folder)):
            if staged := self.staged_ids(list(missing)):
                ids = pa.array(sorted(staged), pa.string())
                for files, columns in ((rows, schema), (deleted, key_schema)):
                    for file in files:
                        path = f"{self._folder}/{file['path']}"
                        self._collect(newest, parquet.rows_with_ids(path, ids, columns))
            if self._mirror and (wanted := self._mirror_ids(missing, newest)):
                ids = pa.array(sorted(wanted), pa.string())
                self._collect(newest, self._mirror.rows(ids, schema))
        return {row_id: values for row_id, (_, values) in newest.items() if values is not None}

    def _mirror_ids(self, missing: MissingColumns, newest: Mapping[str, object]) -> list[str]:
        """Select the rows that only the mirror can have."""
        assert self._mirror
        # A column that the mirror doesn't have yet: no value of it was ever stored.
        absent = {column.name for column in self._table.columns} - self._mirror.columns
        return [
            row_id
            for row_id, names in missing.items()
            if row_id not in newest and absent.isdisjoint(names)
        ]

    def _collect(self, newest: Newest, tables: Iterable[pa.Table]) -> None:
        """Add rows by their ids where they are newer; without columns of values they are
        deletes.
        """
        names = [column.name for column in self._table.columns]
        for table in tables:
            lists = {
                name: table[name].cast(countable(table[name].type)).to_pylist()
                for name in names
                if name in table.column_names
            }
            nulls = [None] * table.num_rows
            rows = zip(*(lists.get(name, nulls) for name in names), strict=True)
            versions = zip(
                table[ID].to_pylist(), table["_cdc_offset"].to_pylist(), rows, strict=True
            )
            for row_id, offset, values in versions:
                if row_id not in newest or newest[row_id][0] < offset:
                    newest[row_id] = offset, values if lists else None


def _hashes(ids: Sequence[str]) -> np.ndarray:
    return np.fromiter(map(hash, ids), np.int64, len(ids))
