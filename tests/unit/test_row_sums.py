"""Sums over rows: equal exactly for equal rows; and which tables are looked at together."""

import pytest

from cdc.model.table import Table
from cdc.verify.census import SOURCE, SumsByView, add_sums, proved_equal
from cdc.verify.row_sums import Comparable, RowSums, sum_rows
from cdc.verify.source_group import GROUP_BYTES, GROUP_TABLES, SMALL_BYTES, group_tables

COLUMNS = (
    ("id", "text"),
    ("d", "double"),
    ("r", "real"),
    ("l", "doubles"),
    ("j", "json"),
    ("v", "text"),
)
ROW = '{"id":1,"d":1.5,"r":0.1,"l":[1,2.5],"j":{"a":[1,2]},"v":"x"}'


def leaf(*rows: tuple[str, str]) -> RowSums:
    return sum_rows(rows, Comparable(COLUMNS))


@pytest.mark.parametrize(
    "text",
    [
        ROW,
        '{"id":1,"d":1.50,"r":1e-1,"l":[1.0, 2.5],"j":{"a": [1, 2]},"v":"x"}',
        '{"v":"\\u0078","id":1,"_cdc_id":"1","d":1.5,"r":0.10000000149011612,"l":[1,2.5],"j":{"a":[1,2]}}',
    ],
)
def test_equal_rows_have_equal_sums(text: str) -> None:
    assert leaf(("1", ROW)) == leaf(("1", text))


@pytest.mark.parametrize(
    "text",
    [
        ROW.replace('"id":1', '"id":"1"'),
        ROW.replace("1.5", "1.5000000000000002"),
        ROW.replace("1.5", '"1.5"'),
        ROW.replace("0.1", "0.2"),
        ROW.replace("2.5", "2"),
        ROW.replace("[1,2]", "[1,2.0]"),
        ROW.replace("[1,2]", "[2,1]"),
        ROW.replace('{"a":[1,2]}', '[["a",[1,2]]]'),
        ROW.replace('{"a":[1,2]}', '"{\\"a\\":[1,2]}"'),
        ROW.replace('"x"', '"y"'),
        ROW.replace('"x"', "null"),
        ROW.replace('"x"', '"x","v":"x"'),
        ROW.replace('"v"', '"w"'),
        "nonsense",
        "[]",
        "{}",
    ],
)
def test_different_rows_have_different_sums(text: str) -> None:
    assert leaf(("1", ROW)) != leaf(("1", text))


def test_a_column_that_is_lacking_counts_as_null() -> None:
    assert leaf(("1", '{"id":1}')) == leaf(
        ("1", '{"id":1,"d":null,"r":null,"l":null,"j":null,"v":null}')
    )


def test_zero_has_no_sign() -> None:
    assert leaf(("1", '{"id":1,"d":-0.0,"r":-0}')) == leaf(("1", '{"id":1,"d":0,"r":0.0}'))


def test_what_cant_be_taken_apart_is_compared_as_it_is_written() -> None:
    deep = "[" * 100_000
    assert leaf(("1", deep)) == leaf(("1", deep)) != leaf(("1", deep + "["))


def test_rows_are_told_apart_by_id_and_counted() -> None:
    rows = [("1", ROW), ("2", ROW), ("3", ROW)]
    assert leaf(*rows) == leaf(*reversed(rows)) == leaf(rows[0]).plus(leaf(*rows[1:]))
    assert len({leaf(), leaf(*rows[:1]), leaf(*rows[1:2]), leaf(*rows[:2]), leaf(*rows)}) == 5
    assert leaf(*rows[:1] * 3) != leaf(*rows[:1])
    assert leaf(*rows[:1] * 2, *rows[1:2] * 2).folded == 0
    assert leaf(*rows[:1] * 2, *rows[1:2] * 2) != leaf(*rows[:1] * 2, *rows[2:] * 2)


def test_an_id_and_a_document_have_a_border() -> None:
    assert leaf(("1", "2nonsense")) != leaf(("12", "nonsense"))


def tables(count: int) -> list[Table]:
    return [
        Table("public", f"t{number}", (), ("id",), f"x.public.t{number}") for number in range(count)
    ]


def test_small_tables_go_together_in_their_order() -> None:
    listed = tables(6)
    sizes = dict.fromkeys((table.qualified for table in listed), 8192)
    sizes["public.t1"] = SMALL_BYTES + 1
    del sizes["public.t3"]
    assert group_tables(listed, sizes) == [[listed[index] for index in (0, 2, 4, 5)]]


def test_a_group_is_bounded() -> None:
    many = tables(2 * GROUP_TABLES)
    sizes = dict.fromkeys((table.qualified for table in many), SMALL_BYTES)
    parts = group_tables(many, sizes)
    assert [table for part in parts for table in part] == many
    assert max(len(part) for part in parts) * SMALL_BYTES <= GROUP_BYTES
    assert [len(part) for part in group_tables(many, dict.fromkeys(sizes, 0))] == [GROUP_TABLES] * 2


def test_one_small_table_needs_no_group() -> None:
    assert group_tables(tables(1), {"public.t0": 0}) == []


NAMES = [f"public.t{number}" for number in range(5)]
SINKS = ["cache", "search"]


def filled() -> SumsByView:
    """Every table with its number of rows, the first of them with none."""
    rows = {name: [(str(key), ROW) for key in range(number)] for number, name in enumerate(NAMES)}
    return {
        (side, name): leaf(*rows[name]) for side in (SOURCE, *SINKS) for name in NAMES if rows[name]
    }


def unproved(leaves: SumsByView) -> set[tuple[str, str]]:
    return {(sink, name) for sink in SINKS for name in NAMES} - proved_equal(
        leaves, NAMES, SINKS
    ).keys()


def test_equal_views_are_proved_with_their_rows() -> None:
    assert proved_equal(filled(), NAMES, SINKS) == {
        (sink, name): number for sink in SINKS for number, name in enumerate(NAMES)
    }


@pytest.mark.parametrize(
    "planted",
    [
        leaf(("0", ROW.replace("x", "y")), ("1", ROW)),
        leaf(("0", ROW)),
        leaf(("0", ROW), ("1", ROW), ("2", ROW)),
        leaf(("0", ROW), ("1", ROW), ("1", ROW)),
        leaf(),
        None,
    ],
    ids=["different", "missing", "extra", "twice", "empty", "unread"],
)
def test_what_differs_is_one_view_of_many(planted: RowSums | None) -> None:
    """The twin of what is proved equal: one fault in one view of a group, told of that view and no
    other.
    """
    assert unproved(filled() | {("cache", NAMES[2]): planted}) == {("cache", NAMES[2])}


def test_a_source_that_cant_be_read_proves_nothing() -> None:
    leaves = filled() | {(SOURCE, NAMES[2]): None}
    assert unproved(leaves) == {(sink, NAMES[2]) for sink in SINKS}
    assert unproved(leaves | {("cache", NAMES[2]): None}) == {(sink, NAMES[2]) for sink in SINKS}


def test_what_is_unread_in_part_is_unread() -> None:
    leaves: SumsByView = {}
    for part in (leaf(("0", ROW)), None, leaf(("1", ROW))):
        add_sums(leaves, ("cache", NAMES[0]), part)
    assert leaves == {("cache", NAMES[0]): None}
