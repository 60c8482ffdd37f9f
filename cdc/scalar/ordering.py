"""The order of values of documents, as Postgres has it with COLLATE "C"."""

import re
from collections.abc import Callable, Mapping
from decimal import Decimal
from typing import Any

from cdc.scalar import type_groups as types

REVERSED = {code: 0x9F - code for code in range(0x21, 0x7F)}
"""From each printable character of ASCII to the one that is as far from the other end."""
YEAR = re.compile(r"([+-]?\d+)(.*)", re.DOTALL)


def sort_key(type_group: str) -> Callable[[Any], Any]:
    """Return the conversion from a value of a document to what Python compares and orders as Postgres does."""
    return KEYS.get(type_group, lambda value: value)


def code_points(text: str) -> bytes:
    """Return what texts are ordered by."""
    return text.encode("utf-8", "surrogatepass")


def number_key(value: Any) -> tuple[bool, Decimal]:
    """Return what numbers are ordered and compared by: NaN equals itself, and is the largest."""
    number = Decimal(value)
    return (True, Decimal(0)) if number.is_nan() else (False, number)


def time_key(value: str) -> tuple[int, int, str]:
    """Return what dates and times are ordered by, years of other than four digits among them."""
    if value.endswith("infinity"):
        return (0 if value.startswith("-") else 2, 0, "")
    match = YEAR.match(value)
    return (1, int(match[1]), match[2]) if match else (1, 0, value)


KEYS: Mapping[str, Callable[[Any], Any]] = {
    **dict.fromkeys((types.TEXTS, types.ENUM, types.UUID), code_points),
    **dict.fromkeys((types.DATE, types.TIMESTAMP, types.TIMESTAMPTZ), time_key),
    types.NUMERIC: number_key,
    types.CHARACTER: lambda text: code_points(text.rstrip(" ")),
}


def order_text(key: Any) -> str:
    """Write what `sort_key` makes of a value as a text of printable ASCII, without spaces: texts are
    ordered as the keys are, and none begins another.
    """
    if isinstance(key, tuple):
        return "".join(map(order_text, key))
    if isinstance(key, bool):
        return "01"[key]
    if isinstance(key, int):
        digits = str(abs(key))
        text = chr(ord("P") + len(digits)) + digits
        return text if key >= 0 else reversed_order(text)
    if isinstance(key, Decimal):
        return _decimal_text(key)
    # `!` is lower than whatever a longer text has in its place.
    return (key.hex() if isinstance(key, bytes) else key) + "!"


def _decimal_text(number: Decimal) -> str:
    if number.is_infinite() or not number:
        return "2" if not number else "4" if number > 0 else "0"
    digits = "".join(map(str, number.as_tuple().digits)).rstrip("0")
    text = f"{order_text(number.adjusted())}{digits}!"
    return f"3{text}" if number > 0 else f"1{reversed_order(text)}"


def reversed_order(text: str) -> str:
    """Write a text of `order_text` so that the order is the other way round."""
    return text.translate(REVERSED)
