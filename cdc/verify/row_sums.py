"""A set of rows as three sums: equal sums mean equal rows. Plain Python, for executors and for the REPL.

Rows are compared by value: a document is taken apart, its members put in the order of the table's columns, floating
point numbers read as such. What remains unequal here may still be equal to `cdc.verify.canonical`, never the other way
round.
"""

import json
import struct
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

BITS = (1 << 63) - 1
"""Of a hash: a long of Spark's that is never negative."""
Reader = Callable[[Any], Any]


class Digits(str):
    """A number by its text: 1.0 isn't 1.00, and none is the string of its digits."""

    __slots__ = ()

    def __repr__(self) -> str:
        return f"#{self!s}"


@dataclass(frozen=True)
class Leaf:
    """How many rows there are, and two sums of their hashes: each hides what the other one shows.

    The exclusive or alone would lose what is there twice, the sum what makes up for something else.
    """

    rows: int = 0
    folded: int = 0
    total: int = 0

    def plus(self, other: "Leaf") -> "Leaf":
        return Leaf(self.rows + other.rows, self.folded ^ other.folded, (self.total + other.total) & BITS)


@dataclass(frozen=True)
class Comparable:
    """What makes texts of documents alike whose rows are equal, and of those alone.

    columns     (name, `types.Kind.compare`) of each column of the table

    Members that are no column are left out, one that is lacking counts as null. What can't be taken apart, or has a
    member twice, stays as it is written.
    """

    columns: tuple[tuple[str, str], ...]

    def text(self, document: str) -> str:
        try:
            pairs = _DECODER.decode(document)
        except (ValueError, RecursionError):
            return document
        members = dict(pairs) if isinstance(pairs, tuple) else {}
        if not members or len(members) != len(pairs):
            return document
        return repr([READERS.get(compare, _as_it_is)(members.get(name)) for name, compare in self.columns])


def leaf_of(rows: Iterable[tuple[str, str]], comparable: Comparable) -> Leaf:
    """Of (id, document) pairs, in any order."""
    count = folded = total = 0
    for row_id, document in rows:
        text = f"{len(row_id)}:{row_id}{comparable.text(document)}".encode("utf-8", "surrogatepass")
        number = int.from_bytes(blake2b(text, digest_size=8).digest()) & BITS
        count, folded, total = count + 1, folded ^ number, total + number
    return Leaf(count, folded, total & BITS)


def _as_it_is(value: Any) -> Any:
    return value


def _double(value: Any) -> Any:
    """By value: 1e20 is 100000000000000000000, and -0 is 0 as in Postgres. What is no number stays."""
    return float(value) + 0.0 if isinstance(value, Digits) else value


def _real(value: Any) -> Any:
    """As `_double`, of four bytes."""
    if not isinstance(value, Digits):
        return value
    try:
        (number,) = struct.unpack("f", struct.pack("f", float(value)))
    except OverflowError:
        return value
    return number + 0.0


def _each(reader: Reader) -> Reader:
    return lambda value: [reader(one) for one in value] if isinstance(value, list) else value


READERS: dict[str, Reader] = {
    "real": _real,
    "double": _double,
    "reals": _each(_real),
    "doubles": _each(_double),
}
"""By `types.Kind.compare`; values of the others are compared as JSON, its numbers by their text."""
_DECODER = json.JSONDecoder(object_pairs_hook=tuple, parse_int=Digits, parse_float=Digits, parse_constant=Digits)
