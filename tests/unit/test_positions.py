"""Positions, ids and reports as plain data."""

import json
from typing import Any

import pytest

from cdc.control.floors import Floors
from cdc.errors import Fenced
from cdc.model.outcome import Advance, Applied
from cdc.model.position import Distance, Position, Reach, ViewCheckpoint, distance
from cdc.model.table import Column, Table, row_id
from cdc.sink.contract import PositionLost
from cdc.sink.fencing import checkpoint_after, mismatch, must_apply

ITEMS = "public.items"
TABLE = Table("public", "items", (Column("id", "bigint"),), ("id",), "t")
START, END = Position("id", (1, 2)), Position("id", (3, 2))
STEP = Advance(TABLE, START, END)


def test_what_is_stored_comes_back() -> None:
    stored = ViewCheckpoint(END, "me", 7, 12.5)
    assert ViewCheckpoint.from_json(stored.to_json()) == stored
    assert stored.to_json().startswith(ViewCheckpoint.JSON_START)


CHECKPOINT = ViewCheckpoint(Position("id", (3, 2)), floor=7)


@pytest.mark.parametrize(
    ("view", "end", "floor", "expected"),
    [
        (CHECKPOINT, END, 7, Distance(Reach.REACHED)),
        (CHECKPOINT, Position("id", (1, 1)), 0, Distance(Reach.REACHED)),
        (CHECKPOINT, Position("id", (4, 9)), 0, Distance(Reach.BEHIND, 8)),
        (CHECKPOINT, Position("id", (4, 0)), 0, Distance(Reach.BEHIND, 1)),
        (CHECKPOINT, END, 8, Distance(Reach.BEFORE_FLOOR)),
        (CHECKPOINT, Position("id", (4, 2)), 8, Distance(Reach.BEFORE_FLOOR, 1)),
        (CHECKPOINT, Position("other", (3, 2)), 0, Distance(Reach.OTHER_TOPIC)),
        (CHECKPOINT, Position("other", (3, 2, 1)), 8, Distance(Reach.OTHER_TOPIC)),
        (CHECKPOINT, Position("id", (3, 2, 0)), 0, Distance(Reach.REPARTITIONED)),
        (CHECKPOINT, Position("id", (3,)), 8, Distance(Reach.REPARTITIONED)),
        (None, Position("id", (0, 0)), 0, Distance(Reach.REACHED)),
        (None, END, 8, Distance(Reach.BEHIND, 5)),
        (START, END, 8, Distance(Reach.BEHIND, 2)),
    ],
)
def test_one_comparison_says_whether_a_view_has_got_there(
    view: ViewCheckpoint | Position | None, end: Position, floor: int, expected: Distance
) -> None:
    """Findings 12 and B5: a difference in shape is an answer, never a ValueError."""
    result = distance(view, end, floor)
    assert result == expected
    assert result.reached == (expected.reach is Reach.REACHED)
    assert result.comparable == (expected.reach not in (Reach.OTHER_TOPIC, Reach.REPARTITIONED))


@pytest.mark.parametrize(
    ("floors", "now", "reach"),
    [
        (Floors(0, {ITEMS: 7}), Floors(0, {ITEMS: 7}), Reach.REACHED),
        (Floors(0, {ITEMS: 7}), Floors(0, {ITEMS: 8}), Reach.BEFORE_FLOOR),
        # Another server begins low again: what was made before is from before, whatever its LSN.
        (Floors(0, {ITEMS: 2**63}), Floors(1), Reach.BEFORE_FLOOR),
        (Floors(0, {ITEMS: 2**63}), Floors(1, {ITEMS: 3}), Reach.BEFORE_FLOOR),
        (Floors(1), Floors(1, {ITEMS: 3}), Reach.BEFORE_FLOOR),
        (Floors(1, {ITEMS: 3}), Floors(1, {"public.others": 9}), Reach.REACHED),
        (Floors(1, {ITEMS: 3}), Floors(2), Reach.BEFORE_FLOOR),
        # Neither a TRUNCATE nor another server takes events from a view.
        (Floors(0), Floors(2, {}, frozenset({ITEMS})), Reach.REACHED),
    ],
)
def test_floors_are_compared_across_servers(floors: Floors, now: Floors, reach: Reach) -> None:
    stored = ViewCheckpoint(END, floor=floors.number(ITEMS)).to_json()
    assert distance(ViewCheckpoint.from_json(stored), END, now.number(ITEMS)).reach is reach


def test_the_position_decides_who_may_write() -> None:
    assert must_apply(STEP, ViewCheckpoint(START, "anybody"), "me")
    assert must_apply(Advance(TABLE, None, END), None, "me")
    assert not must_apply(STEP, ViewCheckpoint(END, "me"), "me")
    with pytest.raises(Fenced):
        must_apply(STEP, ViewCheckpoint(END, "other"), "me")
    with pytest.raises(PositionLost):
        must_apply(STEP, ViewCheckpoint(Position("id", (0, 2)), "me"), "me")
    with pytest.raises(PositionLost):
        must_apply(STEP, None, "me")


def test_only_the_own_lost_writes_are_a_rewind() -> None:
    assert isinstance(mismatch(TABLE, START, Position("id", (0, 0)), ours=False), Fenced)
    assert isinstance(mismatch(TABLE, START, Position("other", (0, 0)), ours=True), Fenced)


def test_rows_add_up() -> None:
    first = checkpoint_after(STEP, None, Applied(written=2, deleted=1), "me")
    second = checkpoint_after(STEP, first, Applied(written=4, stale=9), "me")
    assert (first.rows, second.rows, second.position) == (3, 7, END)


@pytest.mark.parametrize(
    ("key", "identity"),
    [
        (["UA"], "UA"),
        ([2**63 - 1], "9223372036854775807"),
        ([""], ""),
        (["a", 1], '["a",1]'),
        (['a"b', "ü,"], '["a\\"b","ü,"]'),
    ],
)
def test_the_id_of_a_row(key: list[Any], identity: str) -> None:
    assert row_id(key) == identity
    if len(key) > 1:
        assert json.loads(identity) == key


def test_no_two_keys_share_an_id() -> None:
    pairs = (
        ("a_b", "c"),
        ("a", "b_c"),
        ("a,b", "c"),
        ("a", "b,c"),
        ("", ""),
        ("", '"'),
        ("1", "1"),
        (1, 1),
    )
    assert len({row_id(list(pair)) for pair in pairs}) == len(pairs)
