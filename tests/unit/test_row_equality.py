"""When rows are equal; sums over rows, equal exactly for equal rows; which tables are looked at together."""

import pytest

from cdc.model.table import Table
from cdc.verify.census import (
    GROUP_BYTES,
    GROUP_TABLES,
    SMALL_BYTES,
    SumsByView,
    add_sums,
    group_tables,
    proved_equal,
)
from cdc.verify.row_equality import DEEPEST, SOURCE, Comparable, RowSums, sum_rows

COMPARED = {"id": "text", "d": "double", "r": "real", "l": "doubles", "j": "json", "v": "text"}
DEEP = 1500
"""Lists within lists: Python's parser takes some 1,000, jsonb several thousand."""
LONG = 10_000_000
ROW = '{"id":1,"d":1.5,"r":0.1,"l":[1,2.5],"j":{"a":[1,2]},"v":"x"}'
RULES = Comparable(tuple(COMPARED.items()))


def leaf(*rows: tuple[str, str], rules: Comparable = RULES) -> RowSums:
    return sum_rows([(row_id.encode(), document.encode()) for row_id, document in rows], rules)


@pytest.mark.parametrize(
    "text",
    [
        '{"id":1, "d":1.50,"r":1e-1,"l":[1.0, 2.5],"j":{"a":[1,2]},"v":"x"}',
        ROW.replace("[1,2]", "[1, 2]"),
        ROW.replace("x", "\\u0078"),
        '{"v":"x","id":1,"_cdc_id":"1","d":1.5,"r":0.10000000149011612,"l":[1,2.5],"j":{"a":[1,2]}}',
    ],
)
def test_equal_rows_have_equal_sums(text: str) -> None:
    assert RULES.equals(ROW, text)
    assert RULES.state_hash(ROW) == RULES.state_hash(text)
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
        ROW.replace('"x"', '"x","v":"y"'),
        ROW.replace('"v"', '"w"'),
        "nonsense",
        "[]",
        "{}",
    ],
)
def test_different_rows_have_different_sums(text: str) -> None:
    assert not RULES.equals(ROW, text)
    assert RULES.state_hash(ROW) != RULES.state_hash(text)
    assert leaf(("1", ROW)) != leaf(("1", text))


def test_a_column_that_is_lacking_counts_as_null() -> None:
    nulls = '{"id":1,"d":null,"r":null,"l":null,"j":null,"v":null}'
    assert leaf(("1", '{"id":1}')) == leaf(("1", nulls))


@pytest.mark.parametrize(
    ("first", "second"),
    [("é", "\\u00e9"), ('\\"/', '\\"\\/'), ("\\b\\u001f", "\\u0008\\u001F"), ("\\\\", "\\u005c")],
)
def test_an_escape_is_the_character(first: str, second: str) -> None:
    """Servers escape differently. A text with other characters differs."""
    rows = [ROW.replace("x", text) for text in (first, second, f"{second}n")]
    sums = [leaf(("1", row)) for row in rows]
    assert sums[0] == sums[1] != sums[2]


def test_zero_has_no_sign() -> None:
    assert leaf(("1", '{"id":1,"d":-0.0,"r":-0}')) == leaf(("1", '{"id":1,"d":0,"r":0.0}'))


def test_deep_documents() -> None:
    """They are compared as they are written."""
    rules = Comparable((("id", "text"), ("v", "json"), ("n", "double")))
    deep = nested(DEEP)
    assert rules.equals(deep, nested(DEEP))
    for different in (nested(DEEP, "1"), nested(1), "nonsense", "{}"):
        assert not rules.equals(deep, different)
        assert rules.first_difference(deep, different) is None
        assert rules.state_hash(deep) != rules.state_hash(different)


@pytest.mark.parametrize("depth", [100, DEEPEST - 2, 400, 500, 900])
def test_a_deep_value_is_compared_by_itself(depth: int) -> None:
    """The row's other values are compared as ever."""
    rules = Comparable((("id", "text"), ("v", "json"), ("n", "double"), ("later", "text")))
    deep = f"{'[' * depth}{']' * depth}"
    source_row = f'{{"id":1,"v":{deep},"n":1e20,"later":null}}'
    view_row = f'{{"_seq":7,"v":{deep},"id":1,"n":100000000000000000000}}'
    assert rules.equals(source_row, view_row)
    assert rules.state_hash(source_row) == rules.state_hash(view_row)
    assert rules.first_difference(source_row, view_row.replace("[]", "[1]")) == "v"
    assert rules.first_difference(source_row, view_row.replace("1000", "2000")) == "n"


def row_with(value: str) -> str:
    return f'{{"id":1,"v":{value}}}'


def nested(depth: int, inner: str = "") -> str:
    return f'{{"id":1,"v":{"[" * depth}{inner}{"]" * depth}}}'


def test_long_documents() -> None:
    """Ten megabytes of what has to be escaped: one changed character is seen."""
    long = '\\"\\u00e9' * (LONG // 8)
    rules = Comparable((("id", "text"), ("v", "text")))
    document = f'{{"id":1,"v":"{long}"}}'
    assert rules.equals(document, f'{{"v":"{long}","id":1}}')
    changed = f'{{"id":1,"v":"{long[:-1]}8"}}'
    assert not rules.equals(document, changed)
    assert rules.first_difference(document, changed) == "v"


NUMBER = "-1" + "0" * 999 + ".5"
"""A number that an index takes as a string only."""
SHORT = "1" * 900


@pytest.mark.parametrize(
    ("source", "view", "equal"),
    [
        ('{"a":1,"b":3,"a":2}', '{"b":3,"a":2}', True),
        ('[{"a":{"b":1},"a":{"c":1}}]', '[{"a":{"c":1}}]', True),
        ('{"b":{"d":1,"c":[]},"a":2}', '{"a":2,"b":{"c":[],"d":1}}', True),
        (f'{{"n":{NUMBER}}}', f'{{"n":"{NUMBER}"}}', True),
        (NUMBER, f'"{NUMBER}"', True),
        ('{"a":1,"a":2}', '{"a":1}', False),
        ('{"a":1,"a":2}', '{"a":1,"a":3}', False),
        (f'{{"n":{NUMBER}}}', f'{{"n":"{NUMBER}1"}}', False),
        (f'{{"n":{SHORT}}}', f'{{"n":"{SHORT}"}}', False),
        (f'{{"{NUMBER}":1}}', f'{{"{SHORT}":1}}', False),
        ("{}", "[]", False),
        ("1", '"#1"', False),
        ('"a\\nb"', '"a\\\\nb"', False),
        ('"\\ud800"', '"\\ud801"', False),
    ],
)
def test_json_is_compared_as_an_index_can_have_it(source: str, view: str, equal: bool) -> None:
    """Of a key twice the last value counts, and nothing else does; a number that no index takes
    equals the string of its text.
    """
    for last_compare in ("text", "double"):
        rules = Comparable((("id", "text"), ("v", "json"), ("n", last_compare)))
        source_row = row_with(source)
        view_row = row_with(view)
        assert rules.equals(source_row, view_row) is equal
        assert (rules.state_hash(source_row) == rules.state_hash(view_row)) is equal
        assert rules.first_difference(source_row, view_row) == (None if equal else "v")


@pytest.mark.parametrize(
    ("compare", "source", "view", "equal"),
    [
        ("doubles", "[[1,2.50],[-0,1e2]]", "[[1.0,2.5],[0,100]]", True),
        ("doubles", "[[1,2]]", "[1,2]", False),
        ("doubles", '["NaN",null]', '["NaN",null]', True),
        ("doubles", '["NaN"]', '["Infinity"]', False),
        ("reals", "[[0.1]]", "[[0.10000000149011612]]", True),
        ("path", '{"closed":true,"points":[1,2.0]}', '{"points":[1.0,2],"closed":true}', True),
        ("path", '{"closed":true,"points":[1]}', '{"closed":false,"points":[1]}', False),
        ("path", '{"closed":true,"points":[1]}', '{"closed":true,"points":[2]}', False),
        ("path", "null", "null", True),
    ],
)
def test_numbers_at_any_depth_are_compared_by_value(
    compare: str, source: str, view: str, equal: bool
) -> None:
    rules = Comparable((("id", "text"), ("v", compare)))
    source_row = row_with(source)
    view_row = row_with(view)
    assert rules.equals(source_row, view_row) is equal
    assert (leaf(("1", source_row), rules=rules) == leaf(("1", view_row), rules=rules)) is equal


def test_the_first_column_that_differs_is_named() -> None:
    changed = ROW.replace("2.5", "2").replace('"x"', '"y"')
    assert RULES.first_difference(ROW, changed) == "l"
    assert RULES.first_difference(ROW, ROW.replace(',"v":"x"', "")) == "v"
    assert RULES.first_difference(ROW, "nonsense") is None


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
    names = (f"t{number}" for number in range(count))
    return [Table("public", name, (), ("id",), f"x.public.{name}") for name in names]


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
    sides = (SOURCE, *SINKS)
    return {(side, name): leaf(*rows[name]) for side in sides for name in NAMES if rows[name]}


def unproved(leaves: SumsByView) -> set[tuple[str, str]]:
    proved = proved_equal(leaves, NAMES, SINKS).keys()
    return {(sink, name) for sink in SINKS for name in NAMES} - proved


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
    """One fault in one view of a group is reported for that view alone."""
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
