"""What the executors do for the warehouse: files in the folders of its tables, which the driver then commits.

A task gives a file of events to the log of changes, and to the mirror one of rows and one of the ids of deleted rows,
each grown by every chunk. None of them is part of a table yet. A row that comes in several chunks is there several
times: `Staged.repeated` says so.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec

from cdc.codec.forms import Values
from cdc.codec.record import Change, Unreadable
from cdc.codec.table import codec
from cdc.model.outcome import Advance
from cdc.model.table import Table
from cdc.sink.lane import SUPERSEDED, ChunkLimits, Failure, FoldedRow, Part, Verdicts
from cdc.sink.rejection import Source
from sinks.delta.files.columns import arrow_schema
from sinks.delta.files.failures import unwritable
from sinks.delta.files.parquet import File, Growing, Name
from sinks.delta.mirror.stored_rows import Held

if TYPE_CHECKING:
    import pyarrow as pa

LIMITS = ChunkLimits(rows=50_000, bytes=64 * 2**20)
FILE_BYTES = 512 * 2**20
"""Of memory that the rows of a file have taken; the file is smaller by far."""
EVENT_BYTES = 300
"""Of memory, besides its row's values."""


@dataclass(frozen=True)
class View:
    """One table's view as the driver has seen it.

    Folders: that of the log of changes is None where only a mirror is made. `logged` and `mirrored`: by partition, the
    offset below which the log or the mirror knows all events. version: of the mirror, None while it has no rows.
    """

    table: Table
    topic_id: str
    changes: str | None
    mirror: str
    logged: tuple[int, ...]
    mirrored: tuple[int, ...]
    version: int | None


class Staged(msgspec.Struct):
    """Files of one view that are in no commit yet: of events, of rows, and of the ids of deleted rows.

    repeated: whether a row is in them several times; the one of the greatest offset counts.
    """

    events: list[File] = []
    rows: list[File] = []
    gone: list[File] = []
    repeated: bool = False

    def add(self, other: "Staged") -> None:
        for mine, others in zip(self._lists(), other._lists(), strict=True):
            mine.extend(others)
        self.repeated |= other.repeated

    def _lists(self) -> tuple[list[File], ...]:
        return self.events, self.rows, self.gone


@dataclass
class WarehouseWriter:
    """The way of rows into the warehouse; views by topic. `archives`: whether it has use for changes that are dead."""

    views: Mapping[str, View]
    name: Name
    archives: bool
    limits: ChunkLimits = LIMITS
    form = Values()
    _stages: dict[str, "_Stage"] = field(default_factory=dict)

    def start_offset(self, advance: Advance, partition: int) -> int:
        return advance.start_offsets[partition]

    def observe(self, part: Part, change: Change, source: Source, value: Any) -> int:
        stage = self._stage(part.topic)
        if change.op is None or source.offset < stage.logged[part.partition]:
            return 0
        stage.add(part.partition, change, source, value)
        return EVENT_BYTES

    def read_stored(self, part: Part, rows: Sequence[FoldedRow]) -> Mapping[str, Any]:
        stage, known = self._stage(part.topic), self.views[part.topic].mirrored[part.partition]
        found: dict[str, Any] = {row.id: SUPERSEDED for row in rows if row.offset < known}
        found.update(stage.values({row.id: row.missing for row in rows if row.id not in found}))
        return found

    def write(self, parts: Sequence[Part]) -> Sequence[Verdicts]:
        for topic in {part.topic: None for part in parts}:
            self._stage(topic).write([part for part in parts if part.topic == topic])
        return [Verdicts(stale=self._stale(part)) for part in parts]

    def finish(self) -> Mapping[str, Sequence[str]]:
        return {topic: [msgspec.json.encode(stage.end()).decode()] for topic, stage in self._stages.items()}

    def _stale(self, part: Part) -> frozenset[str]:
        known = self.views[part.topic].mirrored[part.partition]
        return frozenset(row.id for row in part.rows.values() if row.offset < known)

    def _stage(self, topic: str) -> "_Stage":
        if topic not in self._stages:
            self._stages[topic] = _Stage(self.views[topic], self.name)
        return self._stages[topic]


class _Stage:
    """What a task has written for one view."""

    def __init__(self, view: View, name: Name) -> None:
        self._view, self._name = view, name
        # Offsets that no record has reached: without a log of changes none of them is for it.
        self.logged = view.logged if view.changes else (2**63,) * len(view.mirrored)
        self._staged, self._held = Staged(), Held(view.table, view.mirror, view.version)
        self._growing: dict[str, Growing] = {}
        self._values = codec(view.table).values
        self._nothing = (None,) * len(view.table.columns)
        self._events: list[tuple[tuple[Any, ...], tuple[Any, ...]]] = []

    def add(self, partition: int, change: Change, source: Source, value: tuple[Any, ...] | None) -> None:
        """Keep an event until the chunk is written; own columns as `columns.CHANGES`."""
        own = (
            *(change.id, partition, source.offset, change.op, self._view.topic_id),
            *(change.lsn, change.missing or None, change.commit_us),
        )
        self._events.append((own, self._key(source) if value is None else value))

    def write(self, parts: Sequence[Part]) -> None:
        """Write a chunk's events, and its rows that the mirror doesn't know yet. Raises Failure."""
        events, self._events = self._events, []
        fresh = [(part, row) for part in parts for row in self._fresh(part)]
        rows = [((row.id, part.partition, row.offset), row.value) for part, row in fresh if row.value is not None]
        gone = [(row.id, part.partition, row.offset) for part, row in fresh if row.value is None]
        if events and self._view.changes:
            self._grow("changes", self._view.changes, _made(events, arrow_schema(self._view.table, "changes")))
        if fresh:
            self._staged.repeated |= self._held.meet([row.id for _, row in fresh])
        if rows:
            self._grow("rows", self._view.mirror, _made(rows, arrow_schema(self._view.table, "mirror")))
        if gone:
            self._grow("gone", self._view.mirror, _made([(own, ()) for own in gone], arrow_schema(None, "mirror")))

    def values(self, lacking: Mapping[str, Sequence[str]]) -> Mapping[str, tuple[Any, ...]]:
        """See `Held.values`. Raises Failure."""
        if self._held.met(list(lacking)):
            # So that they can be read.
            for kind in ("rows", "gone"):
                self._close(kind)
        return self._held.values(lacking, self._staged.rows, self._staged.gone)

    def end(self) -> Staged:
        """Close what is open. Raises Failure."""
        for kind in list(self._growing):
            self._close(kind)
        return self._staged

    def _fresh(self, part: Part) -> list[FoldedRow]:
        known = self._view.mirrored[part.partition]
        return [row for row in part.rows.values() if row.offset >= known]

    def _grow(self, kind: str, folder: str, made: "pa.Table") -> None:
        with _told(folder):
            if kind not in self._growing:
                self._growing[kind] = Growing(folder, self._name.new())
            self._growing[kind].add(made)
        if self._growing[kind].bytes > FILE_BYTES:
            self._close(kind)

    def _close(self, kind: str) -> None:
        lists = {"changes": self._staged.events, "rows": self._staged.rows, "gone": self._staged.gone}
        if growing := self._growing.pop(kind, None):
            with _told((self._view.changes if kind == "changes" else None) or self._view.mirror):
                closed = growing.close()
            lists[kind].extend([closed] if closed else [])

    def _key(self, source: Source) -> tuple[Any, ...]:
        """Of a deleted row only the key is known for sure."""
        try:
            return self._values(source.key or b"{}")
        except Unreadable:
            return self._nothing


@contextmanager
def _told(folder: str) -> Iterator[None]:
    """Failures of a file system as such of the destination."""
    try:
        yield
    except OSError as error:
        raise Failure("unavailable", unwritable(folder, error).message) from None


def _made(rows: Sequence[tuple[tuple[Any, ...], tuple[Any, ...]]], schema: "pa.Schema") -> "pa.Table":
    """Rows, each as own values and those of the table, as the columns of a schema."""
    import pyarrow as pa

    own, values = zip(*rows, strict=True)
    columns = (*zip(*own, strict=True), *zip(*values, strict=True))
    arrays = [pa.array(column, one.type) for column, one in zip(columns, schema, strict=True)]
    return pa.table(arrays, schema=schema)
