"""The order of values of documents, as Postgres has it with COLLATE "C"."""

import re
from collections.abc import Callable
from decimal import Decimal
from typing import Any

TEXTS = ("text", "uuid", "name", "character varying", "character(")
"""Beginnings of the types whose values are ordered as texts, by code points."""
TIMES = ("date", "timestamp")
YEAR = re.compile(r"([+-]?\d+)(.*)", re.DOTALL)


def sort_key(type_: str) -> Callable[[Any], Any]:
    """Return the conversion from a value of a document to what Python orders as Postgres does.

    `type_` is one that can be ordered: `resolve` refuses others.
    """
    if type_.startswith("numeric"):
        return number_key
    if type_.startswith(TIMES):
        return time_key
    return code_points if type_.startswith(TEXTS) else _itself


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


def _itself(value: Any) -> Any:
    return value
