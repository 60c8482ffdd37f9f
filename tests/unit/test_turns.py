"""What a turn of the continuous proof decides: damage is found, and no change is taken for it. What ends
a proof.
"""

from dataclasses import replace
from types import SimpleNamespace
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cdc.control.control_topics import Control
from cdc.control.floors import Floors
from cdc.generations.registry import Proof
from cdc.model.position import Position
from cdc.model.table import Column, Projection, Table
from cdc.postgres.table_definition import ColumnDefinition, Definition
from cdc.sink.contract import Sink
from cdc.verify.proof import view_shapes
from cdc.verify.turns import Differing, Moment, ProvedView, begin, judge, range_end
from tests.support.budget import budget

NONE = frozenset[str]()
EQUAL: Differing = {}
ROW: Differing = {"5": 1}
PROVED = Proof("", 1.0, 1.0, "topic", (10,), "shape")


def moment(number: int) -> Moment:
    return Moment(float(number), Position("topic", (number * 10,)))


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
