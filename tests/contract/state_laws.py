"""The laws of a state of documents, each a function of a harness: run over the state, and over broken
ones that must fail them.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest

from cdc.codec.decode_options import DecodeOptions
from cdc.config.view_settings import Order
from cdc.documents.closing import SAID
from cdc.documents.plan import NO_JOIN, Aggregate, Join, Node, StatePlan, View
from cdc.documents.rows import Entries
from cdc.documents.state import Span, State, StateSink, Turn
from cdc.errors import CdcError
from cdc.model.outcome import Advance
from cdc.model.position import Position, ViewCheckpoint
from cdc.model.table import Column, Table
from cdc.scalar.operators import Term
from cdc.scalar.type_groups import OTHER
from cdc.sink.contract import Batch, Outcome
from cdc.sink.lane import ChunkLimits, Failure, Lane, Verdicts
from cdc.sink.lane_run import collect_outcome
from cdc.sink.lane_task import LaneRun

PARTITIONS, MANY = 2, 4_500
"""MANY: rows, more than two of a state's pages."""


def table(name: str, /, **types: str) -> Table:
    columns = tuple(Column(column, type_) for column, type_ in types.items())
    return Table("lib", name, columns, ("id",), f"lib.lib.{name}")


AUTHORS = table("authors", id="integer", name="text")
BOOKS = table("books", id="integer", author_id="integer", title="text", year="integer")


def column(name: str) -> Term:
    return Term("column", OTHER, (), name)


def node(field: str, table: Table, on: tuple[str, str] | None = None, **options: Any) -> Node:
    join = Join((column(on[0]),), (column(on[1]),)) if on else NO_JOIN
    return Node(field, table, tuple(column.name for column in table.columns), join, **options)


AUTHOR_DOCS = node(
    "author_docs",
    AUTHORS,
    children=(
        node(
            "books",
            BOOKS,
            ("id", "author_id"),
            many=True,
            order_by=(Order("year", descending=True),),
            aggregates=(Aggregate("count", "count"), Aggregate("years", "sum", "year")),
        ),
    ),
)
BOOK_DOCS = node("book_docs", BOOKS, children=(node("author", AUTHORS, ("author_id", "id")),))
TAG_DOCS = node("tag_docs", table("tags", id="integer", name="text"))


def plan_of(*roots: Node) -> StatePlan:
    return StatePlan(tuple(View(root.field, root, ()) for root in roots))


PLAN = plan_of(AUTHOR_DOCS, BOOK_DOCS)
AUTHOR_VIEW, BOOK_VIEW = "author_docs", "book_docs"
Row = dict[str, Any]
Record = tuple[bytes, bytes | None]


class Crash(Exception):
    """The process ends here."""


def do_nothing() -> None:
    """What happens at each step of a writer, unless a law says otherwise."""


@dataclass
class Harness:
    """A state and the log that is applied to it. `make` makes a sink of the state as a new run
    would; `step` is called before and after each write, and may raise Crash.
    """

    make: Callable[[], StateSink]
    log: dict[str, list[list[Record]]] = field(default_factory=dict)
    step: Callable[[], None] = do_nothing
    chunk_rows: int = 500

    def __post_init__(self) -> None:
        self.begin()

    def begin(self, plan: StatePlan = PLAN, **needs: str) -> None:
        """Begin as a run does: adopt a plan, start over tables that lack something, make all ready.

        needs: by table, other than "1".
        """
        self.adopt(plan, **needs)
        for table in plan.tables:
            if self.sink.position(table) is None:
                self.sink.clear(table)
            self.sink.prepare(table)

    def adopt(self, plan: StatePlan = PLAN, **needs: str) -> None:
        self.sink = self.make()
        self.sink.adopt(
            plan, {table.qualified: needs.get(table.name, "1") for table in plan.tables}, {}
        )

    @property
    def state(self) -> State:
        return self.sink.open_state()

    def write(self, table: Table, **row: Any) -> None:
        """Write a row to the log."""
        source = {"lsn": 1, "schema": table.schema, "table": table.name}
        self._append(table, row, json.dumps({"op": "u", "after": row, "source": source}).encode())

    def delete(self, table: Table, row_id: int) -> None:
        self._append(table, {"id": row_id}, None)

    def _append(self, table: Table, row: Row, value: bytes | None) -> None:
        parts = self.log.setdefault(table.name, [[] for _ in range(PARTITIONS)])
        parts[row["id"] % PARTITIONS].append((json.dumps({"id": row["id"]}).encode(), value))

    def library(self) -> None:
        """Two authors, of whom one has three books."""
        self.write(AUTHORS, id=1, name="A")
        self.write(AUTHORS, id=2, name="B")
        for number, year in ((10, 1), (11, None), (12, 3)):
            self.write(BOOKS, id=number, author_id=1, title="t", year=year)
        self.apply()

    def position(self, table: Table) -> Position | None:
        stored = self.sink.position(table)
        return stored.position if stored else None

    def batch(self, writer: str = "one") -> Batch:
        """All that the log has, from where the state stands."""
        advances, records = [], []
        for planned in self.sink.plan.tables:
            parts = self.log.get(planned.name, [[] for _ in range(PARTITIONS)])
            end = Position("1", tuple(map(len, parts)))
            start = self.position(planned)
            if end.offsets != (start.offsets if start else (0,) * PARTITIONS):
                advances.append(Advance(planned, start, end))
                records += [(planned.topic, number, part) for number, part in enumerate(parts)]
        return Batch(writer, tuple(advances), records, DecodeOptions("placeholder"))  # type: ignore[arg-type]

    def apply(self, writer: str = "one") -> None:
        self.sink.apply(self.batch(writer))

    def run(self, lane: Lane, records: Any, sink: str, hints: Mapping[str, str]) -> Outcome:
        """Stand for `run_on_executors`: records by topic and partition, folded in this process."""
        writer: Any = lane.writer
        write, writer.limits = writer.write, ChunkLimits(self.chunk_rows, 1 << 20)

        def write_with_steps(parts: Any) -> Verdicts:
            self.step()
            verdicts: Verdicts = write(parts)
            self.step()
            return verdicts

        writer.write = write_with_steps
        run = LaneRun(lane)
        for topic, partition, part in records:
            numbered = [(key, value, offset) for offset, (key, value) in enumerate(part)]
            run.fold(topic, partition, numbered)
        return collect_outcome(lane, run.finish(), sink, hints)

    def settle(self) -> None:
        """Forget all that is pending and dirty, as if it were sent."""
        state = self.state
        for chunk in list(state.pending()):
            state.climbed(chunk, {})
        turn = state.take("sender")
        for view in (view.name for view in self.sink.plan.views):
            while marks := state.dirty(view, 1000):
                state.sent(turn, view, marks)
        assert state.is_clean()

    def pending(self) -> dict[tuple[str, str], Entries]:
        """The entries that rows had before the first chunk that they are pending in."""
        entries: dict[tuple[str, str], Entries] = {}
        for chunk in self.state.pending():
            for row_id, former in chunk.rows.items():
                entries.setdefault((chunk.table, row_id), former)
        return entries

    def rows(self, table: Table) -> dict[str, Row]:
        """All of a table's rows that ever were in the log, as the state has them."""
        ids = {str(json.loads(key)["id"]) for part in self.log[table.name] for key, _ in part}
        stored = self.state.rows(table.qualified, sorted(ids))
        return {row_id: json.loads(row.row) for row_id, row in stored.items()}

    def expected(self, table: Table) -> dict[str, Row]:
        """The rows that the log makes up to where the state stands."""
        position, rows = self.position(table), dict[str, Row]()
        for part, end in zip(
            self.log[table.name], position.offsets if position else (0,) * PARTITIONS, strict=True
        ):
            for key, value in part[:end]:
                row_id = str(json.loads(key)["id"])
                rows.pop(row_id, None)
                if value is not None:
                    rows[row_id] = json.loads(value)["after"]
        return rows


# Rows, and what they make pending and dirty


def changed_rows_are_dirty_and_pending(harness: Harness) -> None:
    """A root's row is dirty itself. For the documents that hold it a row is pending, with the
    entries that it had before.
    """
    harness.library()
    state = harness.state
    assert set(state.dirty(AUTHOR_VIEW, 99)) == {"1", "2"}
    assert set(state.dirty(BOOK_VIEW, 99)) == {"10", "11", "12"}
    pending = harness.pending()
    assert {row_id for _, row_id in pending} == {"1", "2", "10", "11", "12"}
    assert not any(entries.slots for entries in pending.values())
    harness.settle()
    harness.write(BOOKS, id=10, author_id=2, title="t", year=1)
    harness.delete(BOOKS, 12)
    harness.apply()
    former = {row: entries.slots for row, entries in harness.pending().items()}
    assert former == {("lib.books", "10"): {0: "1"}, ("lib.books", "12"): {0: "1"}}
    assert set(state.dirty(BOOK_VIEW, 99)) == {"10", "12"}
    assert state.dirty(AUTHOR_VIEW, 99) == {}


def chunks_are_pending_in_their_order(harness: Harness) -> None:
    """Also from the tenth on, by whatever text they are numbered."""
    for number in range(12):
        harness.write(AUTHORS, id=2, name=str(number))
        harness.write(BOOKS, id=2, author_id=number, title="t", year=1)
        harness.apply()
    books = [chunk for chunk in harness.state.pending() if chunk.table == "lib.books"]
    assert [chunk.rows["2"].slots.get(0) for chunk in books] == [None, *map(str, range(11))]


def a_row_that_stays_the_same_makes_nothing_dirty(harness: Harness) -> None:
    harness.library()
    harness.settle()
    harness.write(AUTHORS, id=1, name="A")
    harness.delete(BOOKS, 99)
    harness.apply()
    assert harness.state.is_clean()
    assert harness.rows(AUTHORS) == harness.expected(AUTHORS)


def applying_twice_equals_once(harness: Harness) -> None:
    harness.write(AUTHORS, id=1, name="A")
    harness.write(AUTHORS, id=1, name="B")
    batch = harness.batch()
    harness.sink.apply(batch)
    pending, sizes = harness.pending(), contents(harness)
    harness.sink.apply(batch)
    assert (harness.pending(), contents(harness)) == (pending, sizes)
    assert harness.rows(AUTHORS) == {"1": {"id": 1, "name": "B"}}


def a_second_writer_is_fenced(harness: Harness) -> None:
    harness.library()
    harness.write(AUTHORS, id=1, name="C")
    stale = harness.batch("two")
    harness.apply()
    with pytest.raises(CdcError):
        harness.sink.apply(stale)
    harness.write(AUTHORS, id=1, name="D")
    harness.apply("two")
    assert harness.rows(AUTHORS)["1"]["name"] == "D"


def a_stopped_writer_changes_nothing(harness: Harness) -> None:
    """One that goes on after another run has taken over, and has older rows."""
    harness.library()
    harness.write(AUTHORS, id=1, name="older")
    batch = harness.batch("stopped")

    def take_over() -> None:
        harness.step = do_nothing
        harness.write(AUTHORS, id=1, name="newer")
        harness.apply("another")
        harness.settle()

    harness.step = take_over
    with pytest.raises(CdcError):
        harness.sink.apply(batch)
    assert harness.rows(AUTHORS)["1"]["name"] == "newer"
    assert harness.rows(AUTHORS) == harness.expected(AUTHORS)
    assert harness.state.is_clean()


def rows_and_position_move_in_one_step(harness: Harness) -> None:
    """Wherever a run ends, rows are those of the position, and what has changed is dirty and
    pending; the next run misses nothing.
    """
    harness.chunk_rows = 2
    harness.library()
    harness.settle()
    for run in range(9):
        crash_at(harness, run)
        for number in range(4):
            harness.write(BOOKS, id=number, author_id=run, title=str(run), year=run)
        harness.delete(BOOKS, run + 8)
        former = harness.rows(BOOKS)
        with pytest.raises(Crash):
            harness.apply(f"run {run}")
        rows = harness.rows(BOOKS)
        assert rows == harness.expected(BOOKS), run
        changed = {key for key in rows | former if rows.get(key) != former.get(key)}
        assert changed <= harness.state.dirty(BOOK_VIEW, 99).keys()
        assert changed <= {row_id for _, row_id in harness.pending()}
        harness.step = do_nothing
        harness.begin()
        harness.apply(f"after {run}")
        assert harness.rows(BOOKS) == harness.expected(BOOKS)
        harness.settle()


def crash_at(harness: Harness, number: int) -> None:
    """Let a run end at its step of this number, or at a later one of as many as there are."""
    steps: Iterator[int] = iter(range(number % 5, -1, -1))

    def step() -> None:
        if next(steps) == 0:
            raise Crash

    harness.step = step


def entries_are_those_of_the_rows(harness: Harness) -> None:
    """By value, in lists and in numbers; what a former version of a row had is undone."""
    harness.library()
    assert entries(harness, "1") == (
        {"10", "11", "12"},
        ["12", "10", "11"],
        {"n": 3, "c0": 2, "s0": 4},
    )
    harness.write(BOOKS, id=10, author_id=2, title="t", year=7)
    harness.write(BOOKS, id=11, author_id=1, title="t", year=9)
    harness.delete(BOOKS, 12)
    harness.write(BOOKS, id=13, author_id=None, title="t", year=7)
    harness.apply()
    assert entries(harness, "1") == ({"11"}, ["11"], {"n": 1, "c0": 1, "s0": 9})
    assert entries(harness, "2") == ({"10"}, ["10"], {"n": 1, "c0": 1, "s0": 7})
    harness.delete(BOOKS, 10)
    harness.apply()
    assert entries(harness, "2") == (set(), [], {})
    assert harness.state.members("lib.books", 0, ["2"]) == {}


def entries(harness: Harness, text: str) -> tuple[set[str], list[str], dict[str, int]]:
    """What the state finds of the books of an author: members, list, numbers."""
    state, texts = harness.state, [text, "of nobody"]
    spans = [Span(text), Span("of nobody")]
    listed, nothing = state.ranged("lib.books", 0, spans, 99)
    tallied = state.tallied("lib.books", 0, texts)
    pages = list(state.scan_members("lib.books", 0, texts))
    members = state.members("lib.books", 0, texts).get(text, set())
    assert members == {row_id for page in pages for row_id in page}
    assert state.ranged("lib.books", 0, spans, 1) == [listed[:1], nothing]
    assert nothing == []
    return members, [place.id for place in listed], tallied.get(text, {})


def a_part_of_a_list_is_read_from_either_end(harness: Harness) -> None:
    for number in range(5):
        harness.write(BOOKS, id=number, author_id=1, title="t", year=2000 - number)
    harness.apply()
    state = harness.state
    (places,) = state.ranged("lib.books", 0, [Span("1")], 99)
    assert sorted(place.id for place in places) == ["0", "1", "2", "3", "4"]
    part = Span("1", places[1].member, places[4].member)
    spans = [part, Span("of nobody"), part._replace(high=places[1].member)]
    assert state.ranged("lib.books", 0, spans, 2) == [places[1:3], [], []]
    assert state.ranged("lib.books", 0, spans, 2, last_first=True) == [places[3:1:-1], [], []]


def all_pages_are_read(harness: Harness) -> None:
    for number in range(MANY):
        harness.write(BOOKS, id=number, author_id=1, title="t", year=number)
    harness.apply()
    state, ids = harness.state, [str(number) for number in range(MANY)]
    assert len(state.rows("lib.books", [*ids, "none"])) == MANY
    assert state.members("lib.books", 0, ["1"]) == {"1": set(ids)}
    pages = list(state.scan_members("lib.books", 0, ["1"]))
    assert {row_id for page in pages for row_id in page} == set(ids)
    assert state.dirty_among(BOOK_VIEW, [*ids, "none"]) == set(ids)
    state.mark_rows(AUTHOR_VIEW, ids)
    assert state.dirty_among(AUTHOR_VIEW, ids) == set(ids)
    state.mark(AUTHOR_VIEW, {row_id: row_id.encode() for row_id in ids})
    assert state.deleted_keys(AUTHOR_VIEW, ids)[ids[-1]] == ids[-1].encode()
    marks = state.dirty(AUTHOR_VIEW, MANY)
    state.sent(state.take("sender"), AUTHOR_VIEW, marks)
    assert (len(marks), state.dirty(AUTHOR_VIEW, 9)) == (MANY, {})


def sizes_are_those_of_the_rows(harness: Harness) -> None:
    harness.library()
    harness.write(BOOKS, id=10, author_id=1, title="a longer one", year=1)
    harness.delete(BOOKS, 11)
    harness.apply()
    sizes, ids = contents(harness), [str(number) for number in range(20)]
    assert sizes["rows"] == {"lib.authors": 2, "lib.books": 2, "lib.unknown": 0}
    for name in ("lib.authors", "lib.books"):
        rows = harness.state.rows(name, ids).values()
        assert sizes["bytes"][name] == sum(sum(map(len, row)) + 2 for row in rows)
    assert sizes["dirty"] == {AUTHOR_VIEW: 2, BOOK_VIEW: 3}
    assert sizes["pending"] == len(list(harness.state.pending()))
    harness.settle()
    assert contents(harness)["dirty"] == {AUTHOR_VIEW: 0, BOOK_VIEW: 0}


def contents(harness: Harness) -> dict[str, Any]:
    sizes = harness.state.sizes(
        ["lib.authors", "lib.books", "lib.unknown"], [AUTHOR_VIEW, BOOK_VIEW]
    )
    # Without when a position was written last: writing it again may change that alone.
    applied = {name: place and place.position for name, place in sizes.applied.items()}
    return {**sizes._asdict(), "used_bytes": None, "applied": applied}


# Marks


def a_chunk_is_climbed_from_once(harness: Harness) -> None:
    """Its marks are there when it is forgotten; a task that comes late marks nothing."""
    harness.library()
    harness.settle()
    harness.write(BOOKS, id=10, author_id=2, title="t", year=1)
    harness.apply()
    (chunk,) = harness.state.pending()
    harness.state.climbed(chunk, {AUTHOR_VIEW: ["1"], BOOK_VIEW: []})
    harness.state.climbed(chunk, {AUTHOR_VIEW: ["2"]})
    assert (list(harness.state.pending()), set(harness.state.dirty(AUTHOR_VIEW, 9))) == ([], {"1"})


def a_newer_mark_stays(harness: Harness) -> None:
    """What has changed since the marks were read is sent again, whatever has marked it."""
    harness.library()
    state = harness.state
    marks = state.dirty(BOOK_VIEW, 99)
    turn = state.take("sender")
    harness.write(BOOKS, id=10, author_id=1, title="newer", year=1)
    harness.apply()
    state.mark(BOOK_VIEW, {"11": b'{"id":11}'})
    state.sent(turn, BOOK_VIEW, marks)
    assert set(state.dirty(BOOK_VIEW, 99)) == {"10", "11"}
    assert state.deleted_keys(BOOK_VIEW, ["11"]) == {"11": b'{"id":11}'}
    state.sent(turn, BOOK_VIEW, state.dirty(BOOK_VIEW, 99))
    assert (state.dirty(BOOK_VIEW, 99), state.deleted_keys(BOOK_VIEW, ["11"])) == ({}, {})


def no_more_marks_are_read_than_asked_for(harness: Harness) -> None:
    """The longest dirty one is among them, and of several the newest."""
    for number in range(9):
        harness.state.mark(AUTHOR_VIEW, {str(number): b"{}"})
    for limit in (1, 2, 3, 5, 9, 99):
        marks = harness.state.dirty(AUTHOR_VIEW, limit)
        assert len(marks) == min(limit, 9)
        assert "0" in marks
        assert limit == 1 or "8" in marks
    assert harness.state.dirty_among(AUTHOR_VIEW, ["3", "77"]) == {"3"}


def a_deleted_root_leaves_its_key(harness: Harness) -> None:
    """Until its deletion is sent; one that is marked besides has the key that it is given."""
    harness.library()
    harness.settle()
    harness.delete(AUTHORS, 1)
    harness.apply()
    state = harness.state
    state.mark(AUTHOR_VIEW, {"77": b'{"id":77}'})
    ids = ["1", "2", "77"]
    assert set(state.dirty(AUTHOR_VIEW, 9)) == {"1", "77"}
    keys = {row_id: json.loads(key) for row_id, key in state.deleted_keys(AUTHOR_VIEW, ids).items()}
    assert keys == {"1": {"id": 1}, "77": {"id": 77}}
    state.sent(state.take("sender"), AUTHOR_VIEW, state.dirty(AUTHOR_VIEW, 9))
    assert (state.deleted_keys(AUTHOR_VIEW, ids), state.dirty(AUTHOR_VIEW, 9)) == ({}, {})


def all_is_unsent_until_a_mark_is_forgotten(harness: Harness) -> None:
    """Who takes a view for unsent finds no document by what it includes."""
    assert not harness.state.is_unsent(AUTHOR_VIEW)
    harness.library()
    state = harness.state
    assert state.is_unsent(AUTHOR_VIEW)
    state.sent(state.take("sender"), AUTHOR_VIEW, state.dirty(AUTHOR_VIEW, 1))
    assert (state.is_unsent(AUTHOR_VIEW), state.is_unsent(BOOK_VIEW)) == (False, True)
    harness.sink.clear(AUTHORS)
    harness.sink.prepare(AUTHORS)
    harness.apply()
    assert state.is_unsent(AUTHOR_VIEW)


def a_document_is_dirty_once_it_is_due(harness: Harness) -> None:
    state = harness.state
    harness.library()
    turn = state.take("sender")
    due = {"1": 100, "2": 200}
    state.sent(turn, AUTHOR_VIEW, state.dirty(AUTHOR_VIEW, 9), due)
    assert (state.is_due(AUTHOR_VIEW, 99), state.is_due(AUTHOR_VIEW, 100)) == (False, True)
    state.ripen(turn, AUTHOR_VIEW, 99)
    assert state.dirty(AUTHOR_VIEW, 9) == {}
    state.ripen(turn, AUTHOR_VIEW, 100)
    marks = state.dirty(AUTHOR_VIEW, 9)
    assert set(marks) == {"1"}
    # Without a time it is never due again.
    state.sent(turn, AUTHOR_VIEW, marks)
    state.ripen(turn, AUTHOR_VIEW, 150)
    assert state.dirty(AUTHOR_VIEW, 9) == {}
    assert state.is_due(AUTHOR_VIEW, 200)


def a_clock_never_goes_back(harness: Harness) -> None:
    state = harness.state
    turn = state.take("sender")
    state.advance(turn, {AUTHOR_VIEW: 100, BOOK_VIEW: 7})
    state.advance(turn, {AUTHOR_VIEW: 50})
    assert state.clocks() == {AUTHOR_VIEW: 100, BOOK_VIEW: 7}
    state.take("another")
    with pytest.raises(Failure, match=r"."):
        state.advance(turn, {AUTHOR_VIEW: 200})
    with pytest.raises(Failure, match=r"."):
        state.ripen(turn, AUTHOR_VIEW, 200)
    assert state.clocks() == {AUTHOR_VIEW: 100, BOOK_VIEW: 7}


def what_a_topic_has_is_known_by_digest(harness: Harness) -> None:
    """Also of documents that are marked again; until it is forgotten."""
    state = harness.state
    turn = state.take("sender")
    state.mark(AUTHOR_VIEW, {"1": b"{}", "2": b"{}", "3": b"{}"})
    former = state.digests(AUTHOR_VIEW, ["1", "2", "3"])
    assert former.by_id == {}
    marks = state.dirty(AUTHOR_VIEW, 9)
    state.begin_sending(turn, former.number)
    state.mark(AUTHOR_VIEW, {"2": b"{}"})
    state.sent(turn, AUTHOR_VIEW, marks, {}, {"1": b"one", "2": b"two", "3": None})
    assert set(state.dirty(AUTHOR_VIEW, 9)) == {"2"}
    assert state.digests(AUTHOR_VIEW, ["1", "2", "3"]).by_id == {"1": b"one", "2": b"two"}
    assert state.digests(BOOK_VIEW, ["1"]).by_id == {}
    state.note_digests(turn, AUTHOR_VIEW, {"1": None, "3": b"three"})
    state.mark(AUTHOR_VIEW, {"2": b"{}"}, send_again=True)
    assert state.digests(AUTHOR_VIEW, ["1", "2", "3"]).by_id == {"2": b"", "3": b"three"}
    state.forget_digests(turn, AUTHOR_VIEW)
    assert state.digests(AUTHOR_VIEW, ["1", "2", "3"]).by_id == {}


def what_is_closed_is_known(harness: Harness) -> None:
    """No clock begins before the latest window that a topic has as closed; and what is final isn't sent again."""
    state = harness.state
    turn = state.take("sender")
    state.note_closed(turn, AUTHOR_VIEW, 100)
    state.note_closed(turn, AUTHOR_VIEW, 50)
    state.advance(turn, {AUTHOR_VIEW: 70, BOOK_VIEW: 70})
    assert state.clocks() == {AUTHOR_VIEW: 100, BOOK_VIEW: 70}
    state.note_digests(turn, AUTHOR_VIEW, {"1": SAID, "2": b"two"})
    state.mark(AUTHOR_VIEW, {"1": b"{}", "2": b"{}"}, send_again=True)
    assert state.digests(AUTHOR_VIEW, ["1", "2"]).by_id == {"1": SAID, "2": b""}
    state.note_closed(turn, BOOK_VIEW, 90)
    state.forget_digests(turn, BOOK_VIEW)
    state.advance(turn, {BOOK_VIEW: 80})
    assert state.clocks() == {AUTHOR_VIEW: 100, BOOK_VIEW: 80}
    state.take("another")
    with pytest.raises(Failure, match=r"."):
        state.note_closed(turn, AUTHOR_VIEW, 200)


def a_transaction_is_begun_once(harness: Harness) -> None:
    """One that isn't noted as sent is known by the next owner alone, who reads the topic first."""
    state = harness.state
    turn = state.take("sender")
    number = state.digests(AUTHOR_VIEW, []).number
    state.begin_sending(turn, number)
    with pytest.raises(Failure) as caught:
        state.begin_sending(turn, number)
    assert caught.value.kind == "rewound"
    with pytest.raises(Failure) as caught:
        state.digests(AUTHOR_VIEW, [])
    assert caught.value.kind == "rewound"
    state.sent(turn, AUTHOR_VIEW, {})
    with pytest.raises(Failure, match=r"."):
        # A task that has read what another one has sent since.
        state.begin_sending(turn, number)
    state.begin_sending(turn, state.digests(AUTHOR_VIEW, []).number)
    later = state.take("another")
    assert state.digests(AUTHOR_VIEW, []).by_id == {}
    number = state.digests(AUTHOR_VIEW, []).number
    with pytest.raises(Failure) as caught:
        state.begin_sending(turn, number)
    assert caught.value.kind == "fenced"
    with pytest.raises(Failure) as caught:
        state.note_digests(turn, AUTHOR_VIEW, {"1": b"one"})
    assert caught.value.kind == "fenced"
    with pytest.raises(Failure) as caught:
        state.forget_digests(turn, AUTHOR_VIEW)
    assert caught.value.kind == "fenced"
    state.begin_sending(later, number)


# Turns


def another_turn_forgets_no_mark(harness: Harness) -> None:
    """Of a run that isn't the owner any more, of a round that is over, of a state that has gone
    back: documents may have been sent of rows that were older.
    """
    state = harness.state
    first = state.take("run")
    state.mark(AUTHOR_VIEW, {"1": b'{"id":1}'})
    marks = state.dirty(AUTHOR_VIEW, 10)
    state.begin_turn(first.next)
    later = state.take("another")
    turns = {first: "fenced", first.next: "fenced", Turn("run", later.number): "fenced"}
    for turn, kind in {**turns, later.next: "rewound", Turn("run", 99): "rewound"}.items():
        for ask in (
            lambda turn: state.sent(turn, AUTHOR_VIEW, marks),
            lambda turn: state.note_current(turn, {BOOK_VIEW: {"topic": PLACE}}, {}),
            lambda turn: state.begin_turn(turn.next),
            state.require_turn,
        ):
            with pytest.raises(Failure) as caught:
                ask(turn)
            assert caught.value.kind == kind
        assert state.dirty(AUTHOR_VIEW, 10) == marks
    assert state.current() == {}
    state.require_turn(later)
    state.sent(later, AUTHOR_VIEW, marks)
    assert state.is_clean()


def what_is_current_is_noted(harness: Harness) -> None:
    """By view and topic, each as it was noted last; of a topic without records nothing."""
    turn, later = harness.state.take("run"), ViewCheckpoint(Position("2", (3,)), floor=7)
    own: dict[str, ViewCheckpoint | None] = {"a": PLACE, "b": PLACE, "c": None}
    notes: dict[str, dict[str, ViewCheckpoint | None]] = {AUTHOR_VIEW: own, BOOK_VIEW: {"a": PLACE}}
    harness.state.note_current(turn, notes, {AUTHOR_VIEW: 5, BOOK_VIEW: 6})
    harness.state.begin_turn(turn.next)
    harness.state.note_current(turn.next, {AUTHOR_VIEW: {"b": later}}, {AUTHOR_VIEW: 8})
    harness.state.take("another")
    assert harness.state.current() == {
        AUTHOR_VIEW: {"a": PLACE, "b": later},
        BOOK_VIEW: {"a": PLACE},
    }
    assert harness.state.noted_clocks() == {AUTHOR_VIEW: 8, BOOK_VIEW: 6}


# Tables that start over, and other files


def a_cleared_table_is_undone(harness: Harness) -> None:
    """Documents that hold its rows are made again, as if each row had been deleted."""
    harness.library()
    harness.settle()
    note_all(harness)
    noted = harness.state.current()
    books = next(table for table in PLAN.tables if table.name == "books")
    harness.sink.clear(books)
    assert harness.position(books) is None
    assert harness.rows(BOOKS) == {}
    assert entries(harness, "1") == (set(), [], {})
    former = {row: entries.slots for row, entries in harness.pending().items()}
    assert former == {("lib.books", row_id): {0: "1"} for row_id in ("10", "11", "12")}
    assert harness.state.deleted_keys(BOOK_VIEW, ["10"]).keys() == {"10"}
    assert harness.state.current() == {
        view: {topic: place for topic, place in note.items() if topic != BOOKS.topic}
        for view, note in noted.items()
    }
    harness.sink.prepare(books)
    harness.apply("another")
    assert harness.rows(BOOKS) == harness.expected(BOOKS)
    assert contents(harness)["rows"]["lib.books"] == 3


def another_need_starts_a_table_over(harness: Harness) -> None:
    """Also when the file is changed back before its rows are there; nothing else is read again."""
    harness.library()
    note_all(harness)
    harness.begin()
    assert harness.state.current().keys() == {AUTHOR_VIEW, BOOK_VIEW}
    harness.adopt(books="2")
    assert harness.state.current() == {}
    assert harness.state.noted_clocks() == {}
    plan = plan_of(AUTHOR_DOCS, BOOK_DOCS, TAG_DOCS)
    harness.begin(plan)
    note_all(harness)
    harness.adopt(plan, tags="2")
    assert harness.state.current().keys() == {AUTHOR_VIEW, BOOK_VIEW}
    harness.adopt(books="2")
    harness.adopt()
    books, authors = (
        next(table for table in PLAN.tables if table.name == name) for name in ("books", "authors")
    )
    assert harness.position(books) is None
    assert harness.position(authors) is not None
    harness.begin()
    harness.apply()
    assert harness.position(books) is not None


def only_rows_that_were_undone_count_for_another_need(harness: Harness) -> None:
    """A table that couldn't be cleared waits, and is made ready to see whether it can go on."""
    harness.library()
    harness.adopt(books="2")
    books = next(table for table in harness.sink.plan.tables if table.name == "books")
    harness.sink.prepare(books)
    assert harness.position(books) is None
    harness.begin(books="2")
    harness.apply()
    assert harness.position(books) is not None


def a_view_that_is_no_more_leaves_nothing(harness: Harness) -> None:
    """Nor does a table that no view needs; the others keep what they have."""
    harness.begin(plan_of(AUTHOR_DOCS, BOOK_DOCS, TAG_DOCS))
    harness.write(TAG_DOCS.table, id=1, name="t")
    harness.library()
    harness.delete(TAG_DOCS.table, 1)
    harness.apply()
    note_all(harness)
    harness.begin()
    state = harness.state
    assert state.current().keys() == {AUTHOR_VIEW, BOOK_VIEW}
    assert (state.dirty("tag_docs", 9), state.deleted_keys("tag_docs", ["1"])) == ({}, {})
    assert not state.is_unsent("tag_docs")
    assert state.rows("lib.tags", ["1"]) == {}
    assert set(state.dirty(AUTHOR_VIEW, 9)) == {"1", "2"}
    assert len(harness.rows(BOOKS)) == 3
    harness.begin(plan_of(AUTHOR_DOCS, BOOK_DOCS, TAG_DOCS))
    assert harness.position(next(t for t in harness.sink.plan.tables if t.name == "tags")) is None


def note_all(harness: Harness) -> None:
    """Note the documents of all views as current."""
    notes = {
        view.name: dict.fromkeys([view.name, *view.topics.values()], PLACE)
        for view in harness.sink.plan.views
    }
    harness.state.note_current(harness.state.take("run"), notes, dict.fromkeys(notes, 5))


PLACE = ViewCheckpoint(Position("1", (1, 1)))


def views_that_wait_are_told(harness: Harness) -> None:
    waits = {"view.tag_docs": ["its table has gone", "do this"]}
    assert harness.state.waiting() == {}
    harness.sink.adopt(PLAN, harness.sink.needs, waits)
    assert harness.state.waiting() == waits
    harness.adopt()
    assert harness.state.waiting() == {}


def a_removed_state_leaves_nothing(harness: Harness) -> None:
    harness.library()
    note_all(harness)
    assert harness.sink.remains(PLAN.tables)
    for _ in range(2):
        harness.sink.remove(PLAN.tables)
        assert harness.sink.remains(PLAN.tables) == []
    assert harness.state.is_clean()
    assert harness.state.current() == {}
    harness.begin()
    harness.apply()
    assert harness.rows(BOOKS) == harness.expected(BOOKS)


LAWS = [
    a_document_is_dirty_once_it_is_due,
    a_clock_never_goes_back,
    changed_rows_are_dirty_and_pending,
    chunks_are_pending_in_their_order,
    a_row_that_stays_the_same_makes_nothing_dirty,
    applying_twice_equals_once,
    a_second_writer_is_fenced,
    a_stopped_writer_changes_nothing,
    rows_and_position_move_in_one_step,
    entries_are_those_of_the_rows,
    a_part_of_a_list_is_read_from_either_end,
    all_pages_are_read,
    sizes_are_those_of_the_rows,
    a_chunk_is_climbed_from_once,
    a_newer_mark_stays,
    no_more_marks_are_read_than_asked_for,
    a_deleted_root_leaves_its_key,
    all_is_unsent_until_a_mark_is_forgotten,
    what_a_topic_has_is_known_by_digest,
    what_is_closed_is_known,
    a_transaction_is_begun_once,
    another_turn_forgets_no_mark,
    what_is_current_is_noted,
    a_cleared_table_is_undone,
    another_need_starts_a_table_over,
    only_rows_that_were_undone_count_for_another_need,
    a_view_that_is_no_more_leaves_nothing,
    views_that_wait_are_told,
    a_removed_state_leaves_nothing,
]
