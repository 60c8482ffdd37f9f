"""The reference that states of documents are tested against: rows and marks in dictionaries. Indexes,
lists and tallies are made of the rows again for each question.
"""

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from cdc.model.outcome import Advance, Applied
from cdc.model.position import Position, ViewCheckpoint
from cdc.model.table import RowEstimate, Table
from cdc.sink.contract import Batch, Outcome
from cdc.sink.fencing import checkpoint_after, must_apply
from cdc.sink.lane import ChunkLimits, Failure, FoldedRow, Part, Verdicts
from cdc.sink.lane_run import run_on_executors
from cdc.sinks.memory import Memory
from cdc.views.closing import SAID
from cdc.views.plan import StatePlan
from cdc.views.rows import (
    GROUP,
    LISTING,
    TALLY,
    ConnectorRows,
    StoredRow,
    entry_maker,
    latest_times,
    split_entries,
    unescape,
)
from cdc.views.scalar.amounts import count_amounts
from cdc.views.state import (
    NEVER_DUE,
    NOTHING_SENT,
    Chunk,
    LateChange,
    Pane,
    Place,
    SentDigests,
    Span,
    StateSizes,
    Turn,
)

NO_ROW, NO_PLAN, NO_TURN = StoredRow(b"", b"", b""), StatePlan(()), Turn("", 0)


def in_list(place: Place) -> bytes:
    return place.member.encode()


@dataclass
class MemoryState:
    """See `cdc.views.state.State`. By table: tables, needs, writers; by view: marks, deleted."""

    plan: StatePlan = NO_PLAN
    tables: dict[str, dict[str, StoredRow]] = field(default_factory=dict)
    chunks: dict[int, Chunk] = field(default_factory=dict)
    marks: dict[str, dict[str, int]] = field(default_factory=dict)
    deleted: dict[str, dict[str, bytes]] = field(default_factory=dict)
    unsent: set[str] = field(default_factory=set)
    due: dict[str, dict[str, int]] = field(default_factory=dict)
    in_topics: dict[str, dict[str, bytes]] = field(default_factory=dict)
    sending: int = 0
    seen: dict[str, int] = field(default_factory=dict)
    times: dict[str, int] = field(default_factory=dict)
    closed: dict[str, int] = field(default_factory=dict)
    noted_times: dict[str, int] = field(default_factory=dict)
    needs: dict[str, str] = field(default_factory=dict)
    reached: dict[str, dict[str, ViewCheckpoint]] = field(default_factory=dict)
    stored: dict[str, ViewCheckpoint] = field(default_factory=dict)
    waiting_views: Mapping[str, list[str]] = field(default_factory=dict)
    writers: dict[str, str] = field(default_factory=dict)
    turn: Turn = NO_TURN
    number: int = 0

    def take(self, owner: str) -> Turn:
        self.turn = Turn(owner, self.turn.number + 1)
        self.sending += self.sending % 2
        return self.turn

    def begin_turn(self, turn: Turn) -> None:
        self.require_turn(turn._replace(number=turn.number - 1))
        self.turn = turn

    def require_turn(self, turn: Turn) -> None:
        if self.turn != turn:
            raise Failure("rewound" if self.turn.number < turn.number else "fenced", "another turn")

    def pending(self) -> Iterable[Chunk]:
        return [chunk for _, chunk in sorted(self.chunks.items())]

    def mark_rows(self, view: str, ids: Collection[str]) -> None:
        self.number += 1
        self.marks.setdefault(view, {}).update(dict.fromkeys(ids, self.number))

    def climbed(self, chunk: Chunk, marks: Mapping[str, Collection[str]]) -> None:
        if self.chunks.pop(int(chunk.number), None):
            for view, ids in marks.items():
                self.mark_rows(view, ids)

    def rows(self, table: str, ids: Collection[str]) -> dict[str, StoredRow]:
        rows = self.tables.get(table, {})
        return {row_id: rows[row_id] for row_id in ids if row_id in rows}

    def members(self, table: str, slot: int, texts: Collection[str]) -> dict[str, set[str]]:
        members: dict[str, set[str]] = {}
        for row_id, text, _ in self._entries(table, str(slot), texts):
            members.setdefault(text, set()).add(row_id)
        return members

    def scan_members(
        self, table: str, slot: int, texts: Collection[str]
    ) -> Iterable[Collection[str]]:
        return self.members(table, slot, texts).values()

    def listed(
        self, table: str, number: int, texts: Collection[str], limit: int
    ) -> dict[str, list[str]]:
        lists: dict[str, list[Place]] = {}
        for row_id, text, (order,) in self._entries(table, f"{LISTING}{number}", texts):
            lists.setdefault(text, []).append(Place(order, row_id))
        return {
            text: [place.id for place in sorted(places, key=in_list)[:limit]]
            for text, places in lists.items()
        }

    def ranged(
        self,
        table: str,
        number: int,
        spans: Sequence[Span],
        limit: int,
        *,
        last_first: bool = False,
    ) -> list[list[Place]]:
        answers = []
        for span in spans:
            entries = self._entries(table, f"{LISTING}{number}", [span.text])
            places = [Place(order, row_id) for row_id, _, (order,) in entries]
            low = span.low.encode()
            high = span.high.encode()
            chosen = [place for place in places if low <= in_list(place) < high]
            chosen.sort(key=in_list, reverse=last_first)
            answers.append(chosen[span.skipped :][:limit])
        return answers

    def tallied(self, table: str, number: int, texts: Collection[str]) -> dict[str, dict[str, int]]:
        rows: dict[str, list[list[str]]] = {}
        for _, text, amounts in self._entries(table, f"{TALLY}{number}", texts):
            rows.setdefault(text, []).append(amounts)
        return {
            text: {name: value for name, value in count_amounts(of_text).items() if value}
            for text, of_text in rows.items()
        }

    def _entries(
        self, table: str, name: str, texts: Collection[str]
    ) -> Iterator[tuple[str, str, list[str]]]:
        """Yield the entries of such a name, `0`, `l0` or `c0`: the row's id, the text, and what follows."""
        for row_id, row in self.tables.get(table, {}).items():
            for entry in split_entries(row.head.decode()):
                of_entry, escaped, *details = entry.split(GROUP)
                if of_entry == name and (text := unescape(escaped)) in texts:
                    yield row_id, text, details

    def dirty(self, view: str, limit: int) -> dict[str, str]:
        ids = sorted(self.marks.get(view, {}), key=lambda row_id: self.marks[view][row_id])
        newest = ids[len(ids) - limit // 2 :] if limit // 2 < len(ids) else ids
        selected = {*ids[: limit - limit // 2], *newest}
        return {row_id: str(self.marks[view][row_id]) for row_id in selected}

    def dirty_among(self, view: str, ids: Collection[str]) -> set[str]:
        return set(self.marks.get(view, {})).intersection(ids)

    def deleted_keys(self, view: str, ids: Collection[str]) -> dict[str, bytes]:
        keys = self.deleted.get(view, {})
        return {row_id: keys[row_id] for row_id in ids if row_id in keys}

    def is_unsent(self, view: str) -> bool:
        return view in self.unsent

    def digests(self, view: str, ids: Collection[str]) -> SentDigests:
        if self.sending % 2:
            raise Failure("rewound", "a transaction is open")
        held = self.in_topics.get(view, {})
        return SentDigests(self.sending, {row_id: held[row_id] for row_id in ids if row_id in held})

    def begin_sending(self, turn: Turn, number: int) -> None:
        self.require_turn(turn)
        if number != self.sending:
            raise Failure("rewound", "another transaction")
        self.sending += 1

    def note_digests(self, turn: Turn, view: str, digests: Mapping[str, bytes | None]) -> None:
        self.require_turn(turn)
        held = self.in_topics.setdefault(view, {})
        for row_id, digest in digests.items():
            held.pop(row_id, None)
            held |= {row_id: digest} if digest else {}

    def forget_digests(self, turn: Turn, view: str) -> None:
        self.require_turn(turn)
        self.in_topics.pop(view, None)
        self.closed.pop(view, None)

    def note_closed(self, turn: Turn, view: str, closed: int) -> None:
        self.require_turn(turn)
        self.closed[view] = max(closed, self.closed.get(view, closed))

    def late(self, view: str) -> list[LateChange]:
        """No list and no tally is kept, so no change comes too late for one."""
        return []

    def sent(
        self,
        turn: Turn,
        view: str,
        marks: Mapping[str, str],
        due: Mapping[str, int] = NEVER_DUE,
        digests: Mapping[str, bytes | None] = NOTHING_SENT,
        dropped: Collection[Pane] = (),
    ) -> None:
        self.note_digests(turn, view, digests)
        self.sending += self.sending % 2
        self.unsent -= {view} if marks else set()
        for row_id, mark in marks.items():
            if self.marks[view].get(row_id) == int(mark):
                del self.marks[view][row_id]
                self.deleted.get(view, {}).pop(row_id, None)
                self.due.setdefault(view, {}).pop(row_id, None)
                self.due[view].update({row_id: due[row_id]} if row_id in due else {})

    def times_seen(self) -> Mapping[str, int]:
        return dict(self.seen)

    def clocks(self) -> Mapping[str, int]:
        return dict(self.times)

    def advance(self, turn: Turn, clocks: Mapping[str, int]) -> None:
        self.require_turn(turn)
        for view, now in clocks.items():
            self.times[view] = max(now, self.times.get(view, now), self.closed.get(view, now))

    def ripen(self, turn: Turn, view: str, now: int) -> None:
        self.require_turn(turn)
        ripe = [row_id for row_id, time in self.due.get(view, {}).items() if time <= now]
        if ripe:
            self.mark_rows(view, ripe)
        for row_id in ripe:
            del self.due[view][row_id]

    def is_due(self, view: str, now: int) -> bool:
        return any(time <= now for time in self.due.get(view, {}).values())

    def mark(self, view: str, keys: Mapping[str, bytes], *, send_again: bool = False) -> None:
        self.mark_rows(view, keys)
        if send_again:
            held = self.in_topics.setdefault(view, {})
            held |= {row_id: b"" for row_id in keys if held.get(row_id) != SAID}
        self.deleted.setdefault(view, {}).update(keys)

    def is_clean(self) -> bool:
        return not self.chunks and not any(self.marks.values())

    def sizes(self, tables: Collection[str], views: Collection[str]) -> StateSizes:
        rows = {name: self.tables.get(name, {}).values() for name in tables}
        return StateSizes(
            {name: len(rows[name]) for name in tables},
            {name: sum(sum(map(len, row)) + 2 for row in rows[name]) for name in tables},
            {view: len(self.marks.get(view, {})) for view in views},
            len(self.chunks),
            None,
            None,
            {name: self.stored.get(name) for name in tables},
        )

    def note_current(
        self,
        turn: Turn,
        reached: Mapping[str, Mapping[str, ViewCheckpoint | None]],
        clocks: Mapping[str, int],
    ) -> None:
        self.require_turn(turn)
        self.noted_times |= clocks
        for view, positions in reached.items():
            places = {topic: position for topic, position in positions.items() if position}
            self.reached.setdefault(view, {}).update(places)

    def current(self) -> Mapping[str, Mapping[str, ViewCheckpoint]]:
        return {view: dict(positions) for view, positions in self.reached.items()}

    def noted_clocks(self) -> Mapping[str, int]:
        return dict(self.noted_times)

    def waiting(self) -> Mapping[str, list[str]]:
        return self.waiting_views

    def change(self, table: Table, changes: Mapping[str, StoredRow | None]) -> None:
        """Make rows these, None: absent; mark them, and note what their entries were."""
        rows, name = self.tables.setdefault(table.qualified, {}), table.qualified
        former = {row_id: rows.get(row_id) for row_id, row in changes.items()}
        changed = {row_id: row for row_id, row in changes.items() if former[row_id] != row}
        if not changed:
            return
        self.number += 1
        rows.update({row_id: row for row_id, row in changed.items() if row})
        for row_id in (row_id for row_id, row in changed.items() if row is None):
            del rows[row_id]
            for view in self.plan.roots(name):
                key = (former[row_id] or NO_ROW).key
                self.deleted.setdefault(view, {})[row_id] = key
        for view in self.plan.roots(name):
            self.marks.setdefault(view, {}).update(dict.fromkeys(changed, self.number))
        nested = (node for view in self.plan.views for node in view.root.walk() if node.join)
        if any(node.table.qualified == name for node in nested):
            entries = {row_id: (former[row_id] or NO_ROW).entries for row_id in changed}
            self.chunks[self.number] = Chunk(str(self.number), name, entries)


@dataclass
class MemoryStateWriter:
    """Writes parts into a sink's state, each with its position."""

    sink: "MemoryDocuments"
    writer: str
    starts: Mapping[str, tuple[int, ...]]
    step: Callable[[], None] | None = None
    """Called between two steps, if a writer has several."""
    form = ConnectorRows()
    limits = ChunkLimits(100, 1_000_000)
    archives = False

    def start_offset(self, advance: Advance, partition: int) -> int:
        return self.starts[advance.table.topic][partition]

    def read_stored(self, part: Part, rows: Sequence[FoldedRow]) -> Mapping[str, bytes]:
        stored = self.sink.store.rows(part.advance.table.qualified, [row.id for row in rows])
        return {row_id: row.row for row_id, row in stored.items()}

    def observe(self, *_: object) -> int:
        return 0

    def write(self, parts: Sequence[Part]) -> Sequence[Verdicts]:
        for part in parts:
            if self.sink.store.writers[part.advance.table.qualified] != self.writer:
                raise Failure("fenced", "another writer")
            self.write_rows(part)
            self.move(part)
        return [Verdicts()] * len(parts)

    def write_rows(self, part: Part) -> None:
        table, store = part.advance.table, self.sink.store
        make = entry_maker(self.sink.plan, table)
        current = [row.value for row in part.rows.values() if row.value is not None]
        latest = latest_times(self.sink.plan, table, current, time.time_ns() // 1000)
        store.seen |= {view: max(at, store.seen.get(view, at)) for view, at in latest.items()}
        store.change(
            table,
            {
                row.id: row.value
                and StoredRow(make(row.value).encode(), row.sources[-1].key or b"", row.value)
                for row in part.rows.values()
            },
        )
        if table.qualified not in self.sink.stored:
            store.unsent |= set(store.plan.roots(table.qualified))

    def move(self, part: Part) -> None:
        advance, name = part.advance, part.advance.table.qualified
        stored = self.sink.stored.get(name)
        offsets = list(stored.position.offsets if stored else advance.start_offsets)
        offsets[part.partition] = part.end_offset
        step = replace(advance, end=Position(advance.end.topic_id, tuple(offsets)))
        self.sink.stored[name] = checkpoint_after(step, stored, Applied(), self.writer)

    def finish(self) -> Mapping[str, Sequence[str]]:
        return {}


class MemoryDocuments(Memory):
    """See `cdc.views.state.StateSink`."""

    writer_type = MemoryStateWriter

    def __init__(self, store: MemoryState, stored: dict[str, ViewCheckpoint]) -> None:
        super().__init__("documents")
        self.store, self.stored = store, stored
        store.stored = stored
        self.plan = StatePlan(())
        self.needs: Mapping[str, str] = {}

    def adopt(
        self,
        plan: StatePlan,
        needs: Mapping[str, str],
        waiting: Mapping[str, list[str]],
    ) -> None:
        store = self.store
        same = {name for name, text in needs.items() if store.needs.get(name) == text}
        current = {
            view.name
            for view in plan.views
            if same.issuperset(node.table.qualified for node in view.root.walk())
        }
        self.forget_current(lambda view, _: view not in current)
        for name in store.needs.keys() - same:
            del store.needs[name]
        for name in store.marks.keys() - {view.name for view in plan.views}:
            del store.marks[name]
            store.deleted.pop(name, None)
            store.in_topics.pop(name, None)
            store.unsent.discard(name)
        for name in store.tables.keys() - set(needs):
            del store.tables[name]
            self.stored.pop(name, None)
        store.waiting_views = waiting
        self.plan = store.plan = plan
        self.needs = needs

    def forget_current(self, is_stale: Callable[[str, str], bool]) -> None:
        """Forget positions that are stale: told by view and topic."""
        notes = {
            view: {topic: place for topic, place in positions.items() if not is_stale(view, topic)}
            for view, positions in self.store.reached.items()
        }
        self.store.reached = {view: positions for view, positions in notes.items() if positions}
        for view in self.store.noted_times.keys() - self.store.reached.keys():
            del self.store.noted_times[view]

    def require_room(
        self, plan: StatePlan, again: Collection[str], estimates: Mapping[str, RowEstimate]
    ) -> None:
        """It has no limit."""

    def open_state(self) -> Any:
        return lambda: self.store

    def prepare(self, table: Table) -> None:
        self.store.tables.setdefault(table.qualified, {})
        if table.qualified not in self.stored:
            self.store.needs[table.qualified] = self.needs[table.qualified]

    def position(self, table: Table) -> ViewCheckpoint | None:
        name = table.qualified
        is_needed = self.store.needs.get(name) == self.needs[name]
        return self.stored.get(name) if is_needed else None

    def apply(self, batch: Batch) -> Outcome:
        pending, starts = [], {}
        for advance in batch.advances:
            stored = self.stored.get(advance.table.qualified)
            start = advance.start_offsets
            if stored and stored.writer == batch.writer:
                start = stored.position.offsets
            elif not must_apply(advance, stored, batch.writer):
                continue
            pending.append(advance)
            starts[advance.table.topic] = start
            self.store.writers[advance.table.qualified] = batch.writer
        writer = self.writer_type(self, batch.writer, starts)
        return run_on_executors(batch.lane(writer, pending), batch.records, self.name, {})

    def clear(self, table: Table) -> None:
        rows = self.store.tables.get(table.qualified, {})
        self.store.change(table, dict.fromkeys(rows))
        self.stored.pop(table.qualified, None)
        self.forget_current(lambda _, topic: topic == table.topic)

    def remains(self, tables: Sequence[Table]) -> list[str]:
        return [table.qualified for table in tables if table.qualified in self.store.tables]

    def remove(self, tables: Sequence[Table]) -> None:  # all of it
        vars(self.store).update(vars(MemoryState()))
        self.stored.clear()
