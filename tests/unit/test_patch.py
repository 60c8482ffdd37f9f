"""Documents as the text of their members: no value changes on the way."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cdc.patch import completed, elements, members
from tests.support.budget import budget

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
WHITE = st.sampled_from(["", " ", "\n", "\t \r\n"])
NUMBERS = st.sampled_from(
    ["0", "-0", "1e400", "1.10", "-1E-7", "12345678901234567890.000000000000000000010", "9" * 400]
)
STRINGS = st.builds(json.dumps, TEXT, ensure_ascii=st.booleans())
SCALARS = st.one_of(NUMBERS, STRINGS, st.sampled_from(["true", "false", "null", '"\\u00e9\\/"', '"}]\\"{["']))


def spaced(parts: list[str], between: list[str]) -> str:
    """Parts with white space around each."""
    return "".join(f"{white}{part}" for part, white in zip(parts, between, strict=False)) + between[-1]


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


@given(pairs=st.lists(st.tuples(TEXT, VALUES), max_size=6, unique_by=lambda pair: pair[0]), spaces=SPACES)
@budget(150)
def test_members_give_back_the_very_text(pairs: list[tuple[str, str]], spaces: list[str]) -> None:
    text = object_of([(json.dumps(name), value) for name, value in pairs], spaces)
    assert members(text) == {name: value.strip(" \t\r\n") for name, value in pairs}


@given(values=st.lists(VALUES, max_size=6), spaces=SPACES)
@budget(150)
def test_elements_give_back_the_very_text(values: list[str], spaces: list[str]) -> None:
    assert elements(listed(values, spaces)) == [value.strip(" \t\r\n") for value in values]


@pytest.mark.parametrize("text", ["", "7", "[]", '{"a":1', '{"a"}', '{"a":}', "{a:1}", '"{}"', '{"a":1 "b":2}'])
def test_anything_else_is_an_error(text: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011
        members(text)


NAMES = st.sampled_from(["a", "b", "c", 'q"', "é"])
LAYER = st.tuples(st.dictionaries(NAMES, SCALARS, max_size=5), st.frozensets(NAMES))


def text_of(row: dict[str, str]) -> str:
    return "{" + ",".join(f"{json.dumps(name)}:{value}" for name, value in row.items()) + "}"


def model(
    row: dict[str, str], kept: frozenset[str], older: list[tuple[dict[str, str] | None, frozenset[str]]]
) -> dict[str, str] | None:
    """Each missing value from the first layer that has it; None when a layer without a row comes before that."""
    made = dict(row)
    for name in kept:
        for found, lacking in older:
            if found is None:
                return None
            if name in found and name not in lacking:
                made[name] = found[name]
                break
        else:
            return None
    return made


@given(
    row=st.dictionaries(NAMES, SCALARS, max_size=5),
    kept=st.frozensets(NAMES, min_size=1),
    older=st.lists(st.one_of(LAYER, LAYER, st.just((None, frozenset()))), max_size=5),
)
@budget(400)
def test_completed_equals_a_model_of_dicts(row: dict[str, str], kept: frozenset[str], older: Any) -> None:
    document = text_of({**row, **dict.fromkeys(kept, "null")})
    layers = [(None if found is None else text_of(found), list(lacking) or None) for found, lacking in older]
    found = completed(document, sorted(kept), layers)
    expected = model(row, kept, older)
    assert (None if found is None else members(found)) == expected


def test_a_number_is_never_rounded() -> None:
    found = completed('{"id":1,"v":null}', ["v"], [('{"v":12345678901234567890.10}', None)])
    assert found == '{"id":1,"v":12345678901234567890.10}'
