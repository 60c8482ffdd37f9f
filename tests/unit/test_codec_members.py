"""Documents as the text of their members, in bytes: no value changes on the way."""

import json
import pickle
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cdc.codec.forms import Documents, FilledValue, Values
from cdc.codec.members import joined, members
from cdc.codec.problem import EventChanged, Undecided, Unreadable, ValueNotRepresentable
from cdc.model.table import Column, Table
from tests.support.budget import budget

TABLE = Table("public", "x", (), (), "t")
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
WHITE = st.sampled_from(["", " ", "\n", "\t \r\n"])
NUMBERS = st.sampled_from(
    ["0", "-0", "1e400", "1.10", "-1E-7", "12345678901234567890.000000000000000000010", "9" * 400]
)
STRINGS = st.builds(json.dumps, TEXT, ensure_ascii=st.booleans())
SCALARS = st.one_of(
    NUMBERS, STRINGS, st.sampled_from(["true", "false", "null", '"\\u00e9\\/"', '"}]\\"{["'])
)


def spaced(parts: list[str], between: list[str]) -> str:
    """Parts with white space around each."""
    texts = [f"{white}{part}" for part, white in zip(parts, between, strict=False)]
    return "".join(texts) + between[-1]


def listed(values: list[str], spaces: list[str]) -> str:
    parts = [part for value in values for part in (value, ",")][:-1]
    return spaced(["[", *parts, "]"], spaces)


def object_of(pairs: list[tuple[str, str]], spaces: list[str]) -> str:
    parts = [part for name, value in pairs for part in (name, ":", value, ",")][:-1]
    return spaced(["{", *parts, "}"], spaces)


SPACES = st.lists(WHITE, min_size=40, max_size=40)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.builds(listed, st.lists(inner, max_size=3), SPACES),
        st.builds(object_of, st.lists(st.tuples(STRINGS, inner), max_size=3), SPACES),
    ),
    max_leaves=6,
)


NAMES = st.sampled_from(["a", "b", "c", 'q"', "é"])
LAYER = st.tuples(st.dictionaries(NAMES, SCALARS, max_size=5), st.frozensets(NAMES))


def text_of(row: dict[str, str]) -> str:
    return "{" + ",".join(f"{json.dumps(name)}:{value}" for name, value in row.items()) + "}"


def texts(document: bytes) -> dict[str, str]:
    return {name: bytes(value).decode() for name, value in members(document).items()}


@given(
    pairs=st.lists(st.tuples(TEXT, VALUES), max_size=6, unique_by=lambda pair: pair[0]),
    spaces=SPACES,
)
@budget(150)
def test_members_give_back_the_very_text(pairs: list[tuple[str, str]], spaces: list[str]) -> None:
    document = object_of([(json.dumps(name), value) for name, value in pairs], spaces).encode()
    expected = {name: value.strip(" \t\r\n") for name, value in pairs}
    assert texts(document) == expected
    assert texts(joined(members(document))) == expected


BROKEN = [
    b"", b"7", b"[]", b'{"a":1', b'{"a"}', b'{"a":}', b"{a:1}", b'"{}"', b'{"a":1 "b":2}', b'{"a":NaN}', b"{} {}",
]  # fmt: skip
BROKEN += [b'{"a":01}', b'{"a":"\n"}', b'{"\xff":1}', b'{"a":' + b"[" * 5000 + b"]" * 5000 + b"}"]


@pytest.mark.parametrize("text", BROKEN)
def test_anything_else_is_an_error(text: bytes) -> None:
    with pytest.raises(Unreadable):
        members(text)


def test_of_a_member_twice_the_last_counts() -> None:
    assert texts(b'{"a":1,"b":2,"a":3.0}') == {"a": "3.0", "b": "2"}


@given(
    row=st.dictionaries(NAMES, SCALARS, max_size=5),
    missing=st.frozensets(NAMES, min_size=1),
    older=st.lists(LAYER, max_size=5),
)
@budget(400)
def test_filling_equals_a_model_of_dicts(
    row: dict[str, str], missing: frozenset[str], older: Any
) -> None:
    """Each missing value from the newest older change that has it; a null doesn't count."""
    expected, unfilled = {**row, **dict.fromkeys(missing, "null")}, set(missing)
    filled = FilledValue(text_of(expected).encode(), tuple(sorted(missing)))
    for values, lacking in older:
        filled = Documents().fill(TABLE, *filled, text_of(values).encode(), sorted(lacking))
        known = {name for name, text in values.items() if text != "null"} - set(lacking)
        for name in unfilled & known:
            expected[name] = values[name]
            unfilled.discard(name)
    assert (texts(filled.value), set(filled.missing)) == (expected, unfilled)


@pytest.mark.parametrize("json", [rb'"\ud83d"', b"[" * 3000 + b"]" * 3000], ids=["half", "deep"])
def test_what_cannot_be_taken_apart_is_not_filled(json: bytes) -> None:
    """Then the record is rejected, and others go on."""
    whole, broken = b'{"a":1,"b":"x"}', b'{"a":1,"b":null,"c":%b}' % json
    for value, older in ((broken, whole), (whole, broken)):
        assert Documents().fill(TABLE, value, ["b"], older, ()) == FilledValue(value, ("b",))


def test_columns_are_filled_by_name() -> None:
    table = Table("public", "x", tuple(Column(name, "text") for name in "abc"), ("a",), "t")
    filled = Values().fill(table, ("k", None, None), ["b", "c"], ("k", "old", "gone"), ["c"])
    assert filled == FilledValue(("k", "old", None), ("c",))


@pytest.mark.parametrize("value", [1, "x" * 500, b"x" * 500, ["x" * 50] * 9, {"a": "x" * 500}])
def test_a_row_is_counted_as_large_as_python_holds_it(value: Any) -> None:
    """A chunk is limited by this, and so is the memory of a task."""
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    held = sum(map(sys.getsizeof, (value, *parts)))
    single = Values().size((value,))
    assert 0.5 * held < single < 2 * held + 200
    assert Values().size((value,) * 9) - single == 8 * (single - Values().size(()))


@pytest.mark.parametrize(
    "problem",
    [Unreadable("p"), EventChanged(), Undecided(), ValueNotRepresentable("p", "public.x.a (text)")],
)
def test_a_problem_comes_back_from_a_worker(problem: Unreadable) -> None:
    copy = pickle.loads(pickle.dumps(problem))
    assert (type(copy), copy.problem, vars(copy)) == (type(problem), problem.problem, vars(problem))
