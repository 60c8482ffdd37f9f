"""The texts that lists are kept in order by."""

import itertools
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cdc.documents.scalar.ordering import order_text, reversed_order, sort_key
from cdc.documents.scalar.type_groups import group

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


@given(NUMBERS, NUMBERS)
def test_numbers(left: str, right: str) -> None:
    check("numeric", left, right)


@given(st.integers(), st.integers())
def test_integers(left: int, right: int) -> None:
    check("bigint", left, right)


@given(TEXTS, TEXTS)
def test_texts(left: str, right: str) -> None:
    check("text", left, right)


@pytest.mark.parametrize(("left", "right"), [*itertools.product(TIMES, TIMES)])
def test_dates(left: str, right: str) -> None:
    check("date", left, right)


@pytest.mark.parametrize(("left", "right"), [*itertools.product(STAMPS, STAMPS)])
def test_stamps(left: str, right: str) -> None:
    check("timestamp with time zone", left, right)


def test_numbers_that_are_written_in_several_ways() -> None:
    texts = [order_text(sort_key("numeric")(text)) for text in ("1", "1.0", "1.00", "10e-1")]
    assert len(set(texts)) == 1
    assert order_text(Decimal("-0.0")) == order_text(Decimal(0))
