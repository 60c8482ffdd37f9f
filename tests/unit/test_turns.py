"""What a turn of the continuous proof decides: damage is found, and no change is taken for it. What ends
a proof.
"""

from dataclasses import replace
from types import SimpleNamespace
from typing import cast
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cdc.control.control_topics import Control
from cdc.control.floors import Floors
from cdc.generations.registry import Proof, Sweep
from cdc.model.position import Position
from cdc.model.table import Column, Projection, Table
from cdc.postgres.table_definition import ColumnDefinition, Definition
from cdc.sink.contract import Sink
from cdc.verify import turns
from cdc.verify.proof import view_shapes
from cdc.verify.turns import (
    Differing,
    Moment,
    ProvedView,
    begin,
    judge,
    mark_of,
    next_slice,
    range_end,
)
from tests.support.budget import budget

NONE = frozenset[str]()
EQUAL: Differing = {}
ROW: Differing = {"5": 1}
PROVED = Proof("", 1.0, 1.0, "topic", (10,), "shape")


def moment(number: int) -> Moment:
    return Moment(float(number), Position("topic", (number * 10,)), 1.0)


def turn(
    view: ProvedView, number: int, differing: Differing, explained: frozenset[str] = NONE
) -> tuple[ProvedView, frozenset[str]]:
    mark = moment(number)
    return judge(view, mark, mark.position, differing, explained)


def test_equal_rows_prove_a_view_through_the_mark() -> None:
    view, wrong = turn(begin(PROVED), 2, EQUAL)
    assert (view.proved, view.reached, wrong) == (moment(2), moment(2).position, NONE)


def test_a_row_that_differs_is_wrong_only_if_the_log_has_no_later_record_of_it() -> None:
    suspected, wrong = turn(begin(PROVED), 2, ROW)
    assert (suspected.suspects, wrong) == (ROW, NONE)
    # Until then the view isn't proved any further: a run that ends here compares the row again.
    assert suspected.proved == moment(1)
    # The row has changed in the view, too.
    later: Differing = {"5": 2}
    changed, wrong = turn(suspected, 3, later, explained=frozenset(ROW))
    assert (changed.suspects, wrong) == (later, NONE)
    # What the second turn has explained, the mark of the first one doesn't need any more.
    assert changed.proved == moment(2)
    _, wrong = turn(changed, 4, later)
    assert wrong == frozenset(ROW)


def test_a_view_that_takes_no_change_of_a_row_is_proved_no_further() -> None:
    """A row that changes all the time always has a later record, whether the view takes it or not."""
    view, _ = turn(begin(PROVED), 2, ROW)
    for number in (3, 4, 5):
        view, wrong = turn(view, number, ROW, explained=frozenset(ROW))
        assert (view.proved, wrong) == (moment(1), NONE)
    moved, _ = turn(view, 6, {"5": 2}, explained=frozenset(ROW))
    assert moved.proved == moment(5)
    _, wrong = turn(view, 6, ROW)
    assert wrong == frozenset(ROW)


def test_a_suspect_that_is_equal_later_is_forgotten() -> None:
    suspected, _ = turn(begin(PROVED), 2, ROW)
    view, wrong = turn(suspected, 3, EQUAL)
    assert (view.suspects, view.proved, wrong) == (EQUAL, moment(3), NONE)
    again, wrong = turn(view, 4, ROW)
    assert (again.suspects, wrong) == (ROW, NONE)


def test_a_range_that_ends_before_its_mark_decides_and_proves_nothing() -> None:
    suspected, _ = turn(begin(PROVED), 2, ROW)
    mark = moment(9)
    end = range_end(suspected.reached, mark.position, 5)
    assert end == Position("topic", (25,))
    cut, wrong = judge(suspected, mark, end, ROW, NONE)
    assert (cut.proved, cut.reached, cut.suspects, wrong) == (moment(1), end, ROW, NONE)
    whole, wrong = judge(cut, mark, mark.position, EQUAL, NONE)
    assert (whole.proved, wrong) == (mark, NONE)


@budget(100)
@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=4),
    st.integers(1, 12),
)
def test_the_ends_of_short_ranges_reach_the_mark(sizes: list[tuple[int, int]], limit: int) -> None:
    start = Position("topic", tuple(first for first, _ in sizes))
    end = Position("topic", tuple(first + size for first, size in sizes))
    for _ in range(200):
        if start == end:
            return
        after = range_end(start, end, limit)
        assert after != start
        assert all(
            first <= middle <= last
            for first, middle, last in zip(start.offsets, after.offsets, end.offsets, strict=True)
        )
        start = after
    raise AssertionError(start)


SLICE = 2


class Swept:
    """A view of a table, and turns over both. Values are numbers that only grow; -1 is damage."""

    def __init__(self) -> None:
        self.source = dict.fromkeys("abcdef", 0)
        self.view = dict(self.source)
        self.log: list[str] = []
        self.compared_at = dict.fromkeys(self.source, 0)
        self.changed_at = dict.fromkeys(self.source, 0)
        self.number = 0
        self.state = begin(Proof("", 0.0, 0.0, "topic", (0,)))
        self.found: set[str] = set()

    def change(self, key: str, value: int | None) -> None:
        """Change a row; None deletes it. The view gets all of it: that mends it."""
        self.log.append(key)
        self.changed_at[key] = self.number
        for side in (self.source, self.view):
            if value is None:
                side.pop(key, None)
            else:
                side[key] = value

    def list_slice(self, start: Sweep) -> tuple[set[str], Sweep]:
        side = self.view if start.side == "view" else self.source
        page = [key for key in sorted(side) if key > (start.cursor or "")][:SLICE]
        ids = set(page) if start.side == "view" else set(page) - self.view.keys()
        if len(page) == SLICE:
            return ids, replace(start, cursor=page[-1])
        return ids, Sweep(start.since, "source" if start.side == "view" else "end")

    def turn(self, before: str = "", between: str = "", *, fails: bool = False) -> None:
        """Take a turn. before: rows that change before its mark; between: those that change after Postgres was
        read, and before the view is. fails: no slice can be listed.
        """
        self.number += 1
        for key in before:
            self.change(key, self.number * 10 if key < "e" else None)
        position = Position("topic", (len(self.log),))
        slice_begin = next_slice(self.state, float(self.number), 3.0)
        slice_ids: set[str] = set()
        after = None
        if slice_begin and not fails:
            slice_ids, after = self.list_slice(slice_begin)
        changed = set(self.log[self.state.reached.offsets[0] :])
        ids = changed | self.state.suspects.keys() | slice_ids
        expected = {key: self.source.get(key) for key in ids}
        for key in between:
            self.change(key, self.number * 10 + 1)
        differing = {
            key: hash(self.view.get(key)) for key in ids if self.view.get(key) != expected[key]
        }
        self.compared_at |= dict.fromkeys(ids, self.number)
        mark = turns.mark_of(self.state, float(self.number), position, after)
        explained = frozenset(self.state.suspects.keys() & changed)
        self.state, wrong = turns.judge(self.state, mark, position, differing, explained)
        for key in wrong:
            assert self.source.get(key) != self.view.get(key), f"a false alarm: {key}"
            self.found.add(key)
            self.change(key, self.source.get(key))
        since = self.state.proved.complete_at
        for key in self.source.keys() | self.view.keys():
            known = max(self.compared_at.get(key, 0), self.changed_at.get(key, 0))
            assert since == 0 or known >= since, f"{key} wasn't compared"


STEPS = st.lists(st.tuples(st.text("abcdef", max_size=2), st.text("abcdef", max_size=2)))


@budget(100)
@given(STEPS, st.sets(st.integers(0, 30), max_size=8), st.sampled_from("abcdef"))
def test_a_sweep_finds_what_is_wrong_in_rows_that_nobody_changes(
    steps: list[tuple[str, str]], failing: set[int], damaged: str
) -> None:
    assert_swept(steps, failing, damaged)


def assert_swept(steps: list[tuple[str, str]], failing: set[int], damaged: str) -> None:
    swept = Swept()
    del swept.view[damaged]
    swept.view["x"] = -1
    planted = {damaged, "x"} - {key for step in steps for part in step for key in part}
    for number, (before, between) in enumerate(steps):
        swept.turn(before, between, fails=number in failing)
    for number in range(len(steps), len(steps) + 60):
        swept.turn(fails=number in failing)
    assert swept.found >= planted
    assert swept.view == swept.source
    assert swept.state.proved.complete_at > len(steps)


def no_failure(view: ProvedView, at: float, position: Position, after: Sweep | None) -> Moment:
    """Takes a slice that couldn't be listed for the last one."""
    return Moment(at, position, at) if after is None else mark_of(view, at, position, after)


def no_explanation(
    view: ProvedView, mark: Moment, end: Position, differing: Differing, _: object
) -> tuple[ProvedView, frozenset[str]]:
    return judge(view, mark, end, differing, NONE)


def nothing_listed(_: Swept, start: Sweep) -> tuple[set[str], Sweep]:
    return set(), Sweep(start.since, "source" if start.side == "view" else "end")


@pytest.mark.parametrize(
    ("place", "bug"),
    [
        ("cdc.verify.turns.mark_of", no_failure),
        ("cdc.verify.turns.judge", no_explanation),
        (f"{__name__}.Swept.list_slice", nothing_listed),
    ],
)
def test_planted_sweeps(place: str, bug: object) -> None:
    busy = [("a", "a")] * 12
    with mock.patch(place, bug), pytest.raises(AssertionError):
        assert_swept(busy, {1, 4}, "c")


def test_a_sweep_that_is_killed_goes_on_before_its_suspects() -> None:
    """What a turn has left open, the next run compares again."""
    swept = Swept()
    swept.turn()
    swept.turn()
    del swept.view["a"]
    while not swept.state.suspects:
        swept.turn()
    proved = swept.state.proved
    assert swept.state.last.sweep != proved.sweep
    stored = Proof("", proved.at, proved.complete_at, "topic", (0,), "", proved.sweep)
    swept.state = begin(stored)
    for _ in range(3):
        swept.turn()
    assert swept.found == {"a"}


TABLE = Table("public", "t", (Column("id", "integer"), Column("n", "integer")), ("id",), "topic")
COLUMNS = (ColumnDefinition("id", "integer", 1, key=1), ColumnDefinition("n", "integer", 2))
CREATED = Definition(1, "public.t", 7, 1, "PUBLISH", COLUMNS, None, streamed=False)


def shape(table: Table, *later: Definition, truncated_at: int = 0) -> str:
    control = SimpleNamespace(
        definitions=(CREATED, *later), floors=Floors(lsns={"public.t": truncated_at})
    )
    sink = cast("Sink", SimpleNamespace(name="cache"))
    return view_shapes([table], [sink], cast("Control", control))["cache", "public.t"]


@pytest.mark.parametrize(
    ("entry", "ends"),
    [
        (replace(CREATED, id=2, command="ALTER TABLE", streamed=True), False),
        # ALTER COLUMN n TYPE int USING -n: the columns are the same, the rows aren't.
        (replace(CREATED, id=2, command="REWRITE TABLE", streamed=True), True),
        (replace(CREATED, id=2, table="public.other", relation=8, streamed=True), False),
    ],
)
def test_what_changes_rows_without_records_ends_a_proof(entry: Definition, ends: bool) -> None:
    assert (shape(TABLE, entry) != shape(TABLE)) == ends


def test_a_proof_is_of_one_table_without_a_truncate_and_of_one_projection() -> None:
    more = replace(TABLE, columns=(*TABLE.columns, Column("m", "integer")))
    fewer = replace(TABLE, projections={"cache": Projection(columns=("id",))})
    of_even = replace(TABLE, projections={"cache": Projection(where="n % 2 = 0")})
    texts = [shape(table) for table in (TABLE, more, fewer, of_even)]
    assert len({*texts, shape(TABLE, truncated_at=5)}) == 5
