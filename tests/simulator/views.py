"""Destinations in memory, with what a crash leaves of a batch in each: a warehouse commits a table at once, a
cache chunk by chunk with the position, an index row by row before the position.

Each is held to the laws of a sink, as its server is.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from cdc.codec.forms import Documents
from cdc.errors import Fenced, SinkUnavailable
from cdc.model.outcome import Advance, Applied
from cdc.model.position import Position, ViewCheckpoint, distance
from cdc.model.table import Table
from cdc.sink.contract import Batch, Outcome, PositionLost
from cdc.sink.fencing import checkpoint_after, mismatch, must_apply, require_floor
from cdc.sink.lane import (
    SUPERSEDED,
    ChunkLimits,
    Failure,
    FoldedRow,
    Part,
    Superseded,
    Verdicts,
    Writer,
)
from cdc.sink.lane_run import run_in_process
from cdc.sink.promotion import SWITCH_S, GenerationReplaced, would_go_back
from tests.simulator.processes import Processes


class Link:
    """The way to a server: how long it takes, and whether requests and answers get through."""

    def __init__(self, processes: Processes, seed: int) -> None:
        self.processes = processes
        self.away_until = 0.0
        self.lost_answers = 0
        self._random = random.Random(seed)

    def request(self) -> None:
        """Before the server does something."""
        self.processes.sleep(self._random.choice((0.001, 0.002, 0.004, 0.03)))
        if self.processes.now < self.away_until:
            raise _away()

    def answer(self) -> None:
        """After it has."""
        self.processes.sleep(self._random.choice((0.001, 0.002, 0.004, 0.03)))
        if self.lost_answers:
            self.lost_answers -= 1
            raise _away()


def _away() -> SinkUnavailable:
    return SinkUnavailable("The server doesn't answer.", hint="wait")


@dataclass
class Place:
    """One generation of a view. versions: by id of a row, also of a deleted one, the offset of its newest
    change. owner: who may write. visible: how far readers may see, where rows come before the position.
    """

    rows: dict[str, str] = field(default_factory=dict)
    stored: ViewCheckpoint | None = None
    visible: Position | None = None
    versions: dict[str, int] = field(default_factory=dict)
    owner: str = ""
    takeovers: int = 0


class Server:
    """What is there when all processes are dead: places by table and generation, and which one readers see."""

    def __init__(self) -> None:
        self.places: dict[tuple[str, str], Place] = {}
        self.live: dict[str, str] = {}

    def place(self, table: Table) -> Place:
        """What readers see."""
        return self.places.get((table.qualified, self.live.get(table.qualified, "")), Place())


class View:
    """What all of them have in common, see `cdc.sink.contract.Sink`."""

    name = "cache"
    promotes_all_tables = False
    goes_back: ClassVar[bool] = True
    """Whether the server may lose its newest writes, rows and positions together."""

    def __init__(self, server: Server, link: Link, names: Mapping[str, str] | None = None) -> None:
        self.server = server
        self.link = link
        self.names = names
        self.on_write: Callable[[], object] = lambda: None
        """Called whenever readers may see something else."""

    def refusals(self, table: Table) -> list[str]:
        return []

    def prepare(self, table: Table) -> None:
        self.link.request()
        self.server.live.setdefault(table.qualified, "")
        if self.names:
            self._refuse_replaced(table)
        self.server.places.setdefault((table.qualified, self.generation(table)), Place())
        self.link.answer()

    def generation(self, table: Table) -> str:
        """The name of the generation that this is for."""
        name = table.qualified
        return self.names[name] if self.names else self.server.live.get(name, "")

    def place(self, table: Table) -> Place:
        if self.names:
            self._refuse_replaced(table)
        return self.server.places.get((table.qualified, self.generation(table))) or Place()

    def _refuse_replaced(self, table: Table) -> None:
        generation = self.generation(table)
        if self.server.live.get(table.qualified) == generation:
            raise GenerationReplaced(table.qualified, generation, self.name)

    def position(self, table: Table) -> ViewCheckpoint | None:
        self.link.request()
        stored = self.place(table).stored
        self.link.answer()
        return stored

    def store(self, advance: Advance, applied: Applied, writer: str) -> None:
        """Store a position that a batch has reached."""
        place = self.place(advance.table)
        generation = self.generation(advance.table)
        checkpoint = checkpoint_after(advance, place.stored, applied, writer, generation)
        place.stored = replace(checkpoint, changed_at=self.link.processes.now)

    def apply(self, batch: Batch) -> Outcome:
        raise NotImplementedError

    def clear(self, table: Table) -> None:
        self.link.request()
        self.server.places[table.qualified, self.generation(table)] = Place()
        self.on_write()
        self.link.answer()

    def for_generation(self, names: Mapping[str, str]) -> View:
        return type(self)(self.server, self.link, names)

    def check_capacity(self, tables: Sequence[Table]) -> None:
        """There is."""

    def promote(self, tables: Sequence[Table], names: Mapping[str, str]) -> Mapping[str, str]:
        """Switch a table, or all at once, in the same step in which they are seen to have caught up."""
        live = self.server.live
        waiting = [t for t in tables if live.get(t.qualified, "") != names[t.qualified]]
        previous = {}
        for group in [waiting] if self.promotes_all_tables else [[table] for table in waiting]:
            self._outwait(group, names)
            for table in group:
                previous[table.qualified] = live.get(table.qualified, "")
                live[table.qualified] = names[table.qualified]
            self.on_write()
            self.link.answer()
        return previous

    def _outwait(self, tables: Sequence[Table], names: Mapping[str, str]) -> None:
        until = self.link.processes.now + SWITCH_S
        while any(self._would_go_back(table, names[table.qualified]) for table in tables):
            if self.link.processes.now > until:
                behind = ", ".join(table.qualified for table in tables)
                raise SinkUnavailable(f"The other generation of {behind} is behind.", hint="wait")
            self.link.processes.sleep(0.02)

    def _would_go_back(self, table: Table, generation: str) -> bool:
        live = self.server.place(table)
        shown = live.stored
        if live.visible:
            shown = ViewCheckpoint(live.visible, floor=shown.floor if shown else 0)
        place = self.server.places.get((table.qualified, generation))
        if place is None or shown is None:
            return place is None
        return place.stored is None or would_go_back(place.stored, shown)

    def generations(self, table: Table) -> list[str]:
        live = self.server.live.get(table.qualified, "")
        return [
            live,
            *(g for name, g in self.server.places if name == table.qualified and g != live),
        ]

    def remains(self, tables: Sequence[Table]) -> list[str]:
        names = {table.qualified for table in tables}
        return [f"{name} {generation}" for name, generation in self.server.places if name in names]

    def remove(self, tables: Sequence[Table]) -> None:
        for table in tables:
            for generation in self.generations(table):
                self.server.places.pop((table.qualified, generation), None)

    def drop_unreferenced(self, tables: Sequence[Table], keep: Mapping[str, str]) -> None:
        self.link.request()
        for table in tables:
            for generation in self.generations(table)[1:]:
                if keep.get(table.qualified) != generation:
                    del self.server.places[table.qualified, generation]
        self.link.answer()

    def scan(self, table: Table, spark: Any, ids: Sequence[str] | None = None) -> Any:
        rows = self.place(table).rows
        chosen = rows if ids is None else [key for key in ids if key in rows]
        return Scanned([{"id": key, "document": rows[key]} for key in chosen])

    def close(self) -> None:
        """Nothing is open."""


@dataclass(frozen=True)
class Scanned:
    """What is read of a view, where others give a frame of Spark."""

    rows: list[dict[str, str]]

    def collect(self) -> list[dict[str, str]]:
        return self.rows


@dataclass
class ModelWriter(Writer):
    """Writes into places, by topic. `writer`: the run's name."""

    view: Any
    writer: str
    form = Documents()
    limits = ChunkLimits(5, 1_000_000)

    def start_offset(self, advance: Advance, partition: int) -> int:
        return advance.start_offsets[partition]

    def read_stored(
        self, part: Part, rows: Sequence[FoldedRow]
    ) -> Mapping[str, bytes | Superseded]:
        with _failures():
            self.view.link.request()
        stored = self.view.place(part.advance.table).rows
        return {row.id: stored[row.id].encode() for row in rows if row.id in stored}


@contextmanager
def _failures() -> Iterator[None]:
    """Report errors as executors do."""
    try:
        yield
    except PositionLost as error:
        raise Failure("rewound", error.message) from None
    except SinkUnavailable as error:
        raise Failure("unavailable", error.message) from None
    except Fenced as error:
        raise Failure("fenced", error.message) from None


class Warehouse(View):
    """Rows and position of a table are one commit."""

    def apply(self, batch: Batch) -> Outcome:
        self.link.request()
        steps = [
            a for a in batch.advances if must_apply(a, self.place(a.table).stored, batch.writer)
        ]
        if not steps:
            return Outcome()
        writer = StagedWriter(self, batch.writer)
        outcome = run_in_process(batch.lane(writer, steps), batch.records, self.name)
        for step in steps:
            self.link.request()
            place = self.place(step.table)
            if must_apply(step, place.stored, batch.writer):
                place.rows = writer.staged.get(step.table.topic, place.rows)
                self.store(step, outcome.applied[step.table.qualified], batch.writer)
                self.on_write()
            self.link.answer()
        return outcome


@dataclass
class StagedWriter(ModelWriter):
    """Collects rows for the commit."""

    staged: dict[str, dict[str, str]] = field(default_factory=dict)

    def _rows(self, part: Part) -> dict[str, str]:
        if part.topic not in self.staged:
            self.staged[part.topic] = dict(self.view.place(part.advance.table).rows)
        return self.staged[part.topic]

    def read_stored(
        self, part: Part, rows: Sequence[FoldedRow]
    ) -> Mapping[str, bytes | Superseded]:
        stored = self._rows(part)
        return {row.id: stored[row.id].encode() for row in rows if row.id in stored}

    def write(self, parts: Sequence[Part]) -> Sequence[Verdicts]:
        for part in parts:
            _put(self._rows(part), part.rows.values())
        return [Verdicts()] * len(parts)


def _put(rows: dict[str, str], changes: Any) -> None:
    for row in changes:
        if row.value is None:
            rows.pop(row.id, None)
        else:
            rows[row.id] = row.value.decode()


class Index(View):
    """Each row has the offset of its newest change for a version, also a deleted one. The position comes last."""

    goes_back = False

    def apply(self, batch: Batch) -> Outcome:
        self.link.request()
        steps = [
            a for a in batch.advances if must_apply(a, self.place(a.table).stored, batch.writer)
        ]
        if not steps:
            return Outcome()
        before = {step.table: self.place(step.table).stored for step in steps}
        self.link.answer()
        self.link.request()
        for step in steps:
            place = self.place(step.table)
            if place.stored != before[step.table]:
                raise mismatch(step.table, step.start, None, ours=False)
            place.owner = batch.writer
            place.visible = _furthest(place.visible, step.end)
        lane = batch.lane(VersionedWriter(self, batch.writer), steps)
        outcome = run_in_process(lane, batch.records, self.name)
        self.link.request()
        for step in steps:
            place = self.place(step.table)
            if (place.owner, place.stored) != (batch.writer, before[step.table]):
                raise mismatch(step.table, step.start, None, ours=False)
            self.store(step, outcome.applied[step.table.qualified], batch.writer)
        self.link.answer()
        return outcome


def _furthest(visible: Position | None, end: Position) -> Position:
    """How far readers may see: an earlier batch, cut half way, may have been longer."""
    if visible is None or visible.topic_id != end.topic_id:
        return end
    return replace(end, offsets=tuple(map(max, visible.offsets, end.offsets)))


class VersionedWriter(ModelWriter):
    """Writes rows that are no older than what is there."""

    def read_stored(
        self, part: Part, rows: Sequence[FoldedRow]
    ) -> Mapping[str, bytes | Superseded]:
        stored = super().read_stored(part, rows)
        versions = self.view.place(part.advance.table).versions
        newer = [row.id for row in rows if versions.get(row.id, -1) > row.offset]
        return {**stored, **dict.fromkeys(newer, SUPERSEDED)}

    def write(self, parts: Sequence[Part]) -> Sequence[Verdicts]:
        return [self._write(part) for part in parts]

    def _write(self, part: Part) -> Verdicts:
        stale = set()
        with _failures():
            for row in part.rows.values():
                self.view.link.request()
                place = self.view.place(part.advance.table)
                if place.owner != self.writer:
                    raise mismatch(part.advance.table, part.advance.start, None, ours=False)
                if row.offset < place.versions.get(row.id, -1):
                    stale.add(row.id)
                    continue
                place.versions[row.id] = row.offset
                _put(place.rows, [row])
                self.view.on_write()
            self.view.link.answer()
        return Verdicts(stale=frozenset(stale))


class Cache(View):
    """Each chunk of a partition is stored with its position."""

    promotes_all_tables = True

    def __init__(self, server: Server, link: Link, names: Mapping[str, str] | None = None) -> None:
        super().__init__(server, link, names)
        self.taken: dict[tuple[str, str], int] = {}
        """By table and writer: the number of its takeover."""

    def apply(self, batch: Batch) -> Outcome:
        self.link.request()
        offsets = {}
        for advance in batch.advances:
            if (left := self._take(advance, batch.writer)) is not None:
                offsets[advance] = list(left)
        self.link.answer()
        if not offsets:
            return Outcome()
        writer = ChunkedWriter(self, batch.writer, offsets)
        outcome = run_in_process(batch.lane(writer, list(offsets)), batch.records, self.name)
        self.link.request()
        for advance, reached in offsets.items():
            self.require_taken(advance, batch.writer, reached)
            self.store(advance, Applied(), batch.writer)
        self.link.answer()
        return outcome

    def _take(self, advance: Advance, writer: str) -> tuple[int, ...] | None:
        """Become the one that writes. Returns the offsets to go on from; None if all is done."""
        place = self.place(advance.table)
        stored = place.stored
        start = advance.start_offsets
        key = advance.table.qualified, writer
        is_ours = stored is not None and place.owner == writer
        require_floor(advance, stored)
        if stored and is_ours and distance(stored, advance.end).comparable:
            reached = stored.position.offsets
            if reached == advance.end.offsets and not advance.is_repair:
                return None
            if all(map(_is_between, start, reached, advance.end.offsets)):
                return reached
        position = stored.position if stored else None
        if position != advance.start:
            has_gone_back = place.takeovers < self.taken.get(key, 0)
            ours = stored is None or place.owner == writer or has_gone_back
            raise mismatch(advance.table, advance.start, position, ours=ours)
        if place.owner != writer:
            place.owner = writer
            place.takeovers += 1
        self.taken[key] = place.takeovers
        return start

    def require_taken(self, advance: Advance, writer: str, reached: Sequence[int]) -> None:
        """Require that a position is where this writer has left it."""
        place = self.place(advance.table)
        offsets = place.stored.position.offsets if place.stored else (0,) * len(reached)
        if place.owner == writer and list(offsets) == list(reached):
            return
        position = Position(advance.end.topic_id, tuple(offsets)) if place.stored else None
        expected = Position(advance.end.topic_id, tuple(reached))
        has_gone_back = place.takeovers < self.taken[advance.table.qualified, writer]
        ours = place.owner == writer or has_gone_back
        raise mismatch(advance.table, expected, position, ours=ours)


def _is_between(least: int, offset: int, most: int) -> bool:
    return least <= offset <= most


@dataclass
class ChunkedWriter(ModelWriter):
    """offsets: how far each partition is, by step."""

    offsets: dict[Advance, list[int]] = field(default_factory=dict)

    def start_offset(self, advance: Advance, partition: int) -> int:
        return self.offsets[advance][partition]

    def write(self, parts: Sequence[Part]) -> Sequence[Verdicts]:
        with _failures():
            for part in parts:
                self.view.link.request()
                reached = self.offsets[part.advance]
                self.view.require_taken(part.advance, self.writer, reached)
                place = self.view.place(part.advance.table)
                _put(place.rows, part.rows.values())
                reached[part.partition] = part.end_offset
                end = Position(part.advance.end.topic_id, tuple(reached))
                self.view.store(replace(part.advance, end=end), Applied(), self.writer)
                self.view.on_write()
                self.view.link.answer()
        return [Verdicts()] * len(parts)


KINDS: Mapping[str, type[View]] = {"warehouse": Warehouse, "index": Index, "cache": Cache}
