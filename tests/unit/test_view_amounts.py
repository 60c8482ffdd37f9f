"""Sums of numerics from counters that rows add to and take from: exact, with the decimals that
Postgres shows.
"""

from collections import Counter
from collections.abc import Mapping
from decimal import Context, Decimal

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from cdc.scalar.amounts import decode_amount, encode_amount, total

WIDE = Context(prec=5000, traps=[])
LARGEST = 2**63
numbers = st.one_of(
    st.decimals(places=2, min_value=-(10**7), max_value=10**7),
    st.decimals(places=20, min_value=-(10**30), max_value=10**30),
    st.integers(-(2**63), 2**63 - 1).map(Decimal),
    st.sampled_from([Decimal(text) for text in ("0", "-0.00", "1E+300", "1.0", "1E-300")]),
)
specials = st.sampled_from([Decimal(text) for text in ("NaN", "Infinity", "-Infinity")])


def add_up(added: list[Decimal], removed: list[Decimal]) -> Mapping[str, int]:
    """As the state does it: what becomes 0 is left out."""
    counters: Counter[str] = Counter()
    for sign, values in ((1, [*added, *removed]), (-1, removed)):
        for value in values:
            for name, amount in decode_amount(encode_amount("numeric", format(value, "f"))):
                counters[name] += sign * amount
                assert abs(counters[name]) < LARGEST
    return {name: amount for name, amount in counters.items() if amount}


def added_one_by_one(values: list[Decimal]) -> Decimal:
    result = Decimal(0)
    for value in values:
        result = WIDE.add(result, Decimal(format(value, "f")))
    return result


@given(st.lists(numbers | specials), st.lists(numbers | specials))
@example([Decimal("1.5")], [Decimal("2.25")])
@example([Decimal("0.50"), Decimal("-0.50")], [])
@example([Decimal("-Infinity")], [Decimal("NaN")])
def test_a_sum_has_every_digit_and_the_decimals_of_what_is_there(
    added: list[Decimal], removed: list[Decimal]
) -> None:
    assert str(total(add_up(added, removed))) == str(added_one_by_one(added))


@pytest.mark.parametrize("digits", [5_000, 131_072])
def test_the_longest_numeric(digits: int) -> None:
    """Python refuses to read an integer of so many digits; Postgres doesn't."""
    value = Decimal((1, (9,) * digits, 0))
    assert total(add_up([value], [Decimal("0.1")])) == value


def test_a_sum_of_whole_numbers_is_one_counter() -> None:
    assert [encode_amount("integer", value) for value in (-5, 0)] == ["-5", "0"]
    assert encode_amount("bigint", -(2**63)) == "0:1,0.0:-854775808,0.1:-223372036,0.2:-9"
