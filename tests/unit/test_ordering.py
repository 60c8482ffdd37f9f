"""The texts that lists are kept in order by."""

import itertools
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cdc.scalar.ordering import order_text, reversed_order, sort_key
from cdc.scalar.type_groups import group

NUMBERS = st.one_of(
    st.decimals().filter(lambda number: not number.is_snan()).map(str), st.integers().map(str)
)
TEXTS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"))
TIMES = [
    *("-infinity", "-0044-03-15", "-0043-01-01", "0001-01-01", "2013-01-01", "2013-01-02"),
    *("10000-01-01", "+12345-01-01", "infinity"),
]
STAMPS = ["2013-01-01T00:00:00Z", "2013-01-01T00:00:00.12Z", "2013-01-01T00:00:01Z"]


def check(type_: str, left: Any, right: Any) -> None:
    convert = sort_key(group(type_))
    keys = [convert(value) for value in (left, right)]
    texts = [order_text(key) for key in keys]
    assert all("!" <= character <= "~" for text in texts for character in text)
    assert (texts[0] < texts[1], texts[0] == texts[1]) == (keys[0] < keys[1], keys[0] == keys[1])
    # What follows another value decides only between equal ones.
    assert not texts[0].startswith(texts[1]) or keys[0] == keys[1]
    backwards = [reversed_order(text) for text in texts]
    assert (backwards[0] > backwards[1]) == (keys[0] < keys[1])


@pytest.mark.parametrize(
    ("type_", "values"),
    [("numeric", NUMBERS), ("bigint", st.integers()), ("text", TEXTS)],
    ids=["numeric", "bigint", "text"],
)
@given(data=st.data())
def test_any_two_values(type_: str, values: st.SearchStrategy[Any], data: st.DataObject) -> None:
    check(type_, data.draw(values), data.draw(values))


@pytest.mark.parametrize(
    ("type_", "values"), [("date", TIMES), ("timestamp with time zone", STAMPS)]
)
def test_times(type_: str, values: list[str]) -> None:
    for left, right in itertools.product(values, values):
        check(type_, left, right)


def test_numbers_that_are_written_in_several_ways() -> None:
    texts = [order_text(sort_key("numeric")(text)) for text in ("1", "1.0", "1.00", "10e-1")]
    assert len(set(texts)) == 1
    assert order_text(Decimal("-0.0")) == order_text(Decimal(0))
