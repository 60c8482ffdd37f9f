"""What a value adds to a sum, as whole numbers under names: a store adds and subtracts these, and the
sum is exact for every numeric.

    smallint, integer   the value itself, without a name
    bigint, numeric     <decimals>          1: a value with so many decimals
                        <decimals>.<group>  its digits in groups of nine, group 0 the last, each signed
                        NaN, Infinity, -Infinity  1: such a value

Each number of decimals is counted separately, because a sum of numerics has as many decimals as the
value with the most of them that is still there. A group has nine digits so that nine thousand
million of them fit into a counter of 64 bits.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from decimal import Context, Decimal
from hashlib import blake2b
from typing import Any

INTEGERS = ("smallint", "integer")
"""Types whose sum is a bigint, a number in a document; other sums are numerics, texts there."""
EXACT = Context(prec=200_000, traps=[])
"""Enough for every numeric. Nothing is raised: infinity minus infinity is NaN, as in Postgres."""
DIGITS = 9
COUNTED = "+"
"""The amount of a value that is counted, and not added."""


def encode_amount(type_: str, value: Any) -> str:
    """Write what a value, in the form of documents, adds to the sum of its column."""
    if type_ in INTEGERS:
        return str(value)
    return ",".join(f"{name}:{amount}" for name, amount in _parts(Decimal(value)))


def encode_distinct(type_: str, value: Any) -> str:
    """Write that a value counts once, under a digest of 128 bits, since texts may be long."""
    text = trimmed(value) if type_.startswith("numeric") else str(value)
    return f"{blake2b(text.encode('utf-8', 'surrogatepass'), digest_size=16).hexdigest()}:1"


def trimmed(number: str) -> str:
    """Write a numeric without zeros at its end: equal ones then have one text."""
    return number.rstrip("0").rstrip(".") if "." in number else number


def decode_amount(text: str) -> Iterator[tuple[str, int]]:
    """Yield names and amounts of `encode_amount`, none of COUNTED; the name of a value itself is empty."""
    for part in text.split(",") if text != COUNTED else ():
        name, _, amount = part.rpartition(":")
        yield name, int(amount)


def count_amounts(amounts: Sequence[str]) -> dict[str, int]:
    """Turn the amounts of a row, by column, into the numbers of a tally: see `State.tallied`."""
    numbers = Counter(n=1)
    for place, amount in enumerate(amounts):
        if amount:
            numbers[f"c{place}"] += 1
            for name, part in decode_amount(amount):
                numbers[f"s{place}:{name}" if name else f"s{place}"] += part
    return numbers


def _parts(number: Decimal) -> Iterator[tuple[str, int]]:
    if not number.is_finite():
        yield str(number), 1
        return
    exponent = number.as_tuple().exponent
    assert isinstance(exponent, int)
    decimals = max(-exponent, 0)
    sign = -1 if number.is_signed() else 1
    yield str(decimals), 1
    digits = format(EXACT.scaleb(number.copy_abs(), decimals), "f")
    for group, end in enumerate(range(len(digits), 0, -DIGITS)):
        if amount := int(digits[max(end - DIGITS, 0) : end]):
            yield f"{decimals}.{group}", sign * amount


def total(amounts: Mapping[str, int]) -> Decimal:
    """Return the sum of bigints or numerics whose amounts, by name, were added up; a name whose
    amounts are 0 may lack.
    """
    groups_by_decimals: dict[int, dict[int, int]] = {}
    number = Decimal(0)
    for name, amount in amounts.items():
        head, _, group = name.partition(".")
        if not head.isdigit():
            number = EXACT.add(number, Decimal(name))
        elif group:
            groups_by_decimals.setdefault(int(head), {})[int(group)] = amount
        else:
            groups_by_decimals.setdefault(int(head), {})
    for decimals, groups in groups_by_decimals.items():
        number = EXACT.add(number, EXACT.scaleb(_joined(groups), -decimals))
    return number


def _joined(groups: Mapping[int, int]) -> Decimal:
    """Return the number that has these groups of digits, by group; 0 if there are none.

    It joins their texts, with a carry: adding powers of ten takes 40 s for the longest numeric.
    """
    texts = []
    carry = 0
    for group in range(max(groups, default=0) + 1):
        carry, digits = divmod(groups.get(group, 0) + carry, 10**DIGITS)
        texts.append(f"{digits:0{DIGITS}}")
    above = EXACT.scaleb(Decimal(carry), DIGITS * len(texts))
    return EXACT.add(above, Decimal("".join(reversed(texts))))
