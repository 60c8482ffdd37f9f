"""Sums of a set of rows: equal sums mean equal rows. Plain Python, for executors and for the REPL.

Rows are compared by value: a document is parsed, its members are put in the order of the table's
columns, and floating point numbers are read as such. Rows that differ here may still be equal to
`cdc.verify.canonical`, never the other way round.
"""

import json
import struct
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

BITS = (1 << 63) - 1
"""Mask of a hash: a Spark long that is never negative."""
Normalizer = Callable[[Any], Any]


class Digits(str):
    """A number by its text: 1.0 isn't 1.00, and no number equals the string of its digits."""

    __slots__ = ()

    def __repr__(self) -> str:
        return f"#{self!s}"


@dataclass(frozen=True)
class RowSums:
    """Number of rows, and two sums of their hashes: `folded` by exclusive or, `total` by addition.

    The exclusive or alone would miss a row that is there twice, the total alone two errors that
    cancel out.
    """

    rows: int = 0
    folded: int = 0
    total: int = 0

    def plus(self, part: "RowSums") -> "RowSums":
        """Add the sums of other rows."""
        return RowSums(
            self.rows + part.rows, self.folded ^ part.folded, (self.total + part.total) & BITS
        )


@dataclass(frozen=True)
class Comparable:
    """Turns documents into comparable texts: equal exactly where the rows are equal.

    columns     (name, `types.TypeCodec.compare`) of each column of the table

    Members that are no column are left out, a missing member counts as null. A document that can't
    be parsed, or has a member twice, stays as it is.
    """

    columns: tuple[tuple[str, str], ...]

    def text(self, document: str) -> str:
        """Return the comparable text of a document (JSON)."""
        try:
            pairs = _DECODER.decode(document)
        except (ValueError, RecursionError):
            return document
        members = dict(pairs) if isinstance(pairs, tuple) else {}
        if not members or len(members) != len(pairs):
            return document
        return repr(
            [
                NORMALIZERS.get(compare, _unchanged)(members.get(name))
                for name, compare in self.columns
            ]
        )


def sum_rows(rows: Iterable[tuple[str, str]], comparable: Comparable) -> RowSums:
    """Sum up (id, document) pairs, in any order."""
    count = folded = total = 0
    for row_id, document in rows:
        text = f"{len(row_id)}:{row_id}{comparable.text(document)}".encode("utf-8", "surrogatepass")
        number = int.from_bytes(blake2b(text, digest_size=8).digest()) & BITS
        count, folded, total = count + 1, folded ^ number, total + number
    return RowSums(count, folded, total & BITS)


def _unchanged(value: Any) -> Any:
    return value


def _double(value: Any) -> Any:
    """Compare by value: 1e20 is 100000000000000000000, and -0 is 0 as in Postgres. Text stays."""
    return float(value) + 0.0 if isinstance(value, Digits) else value


def _real(value: Any) -> Any:
    """Compare as `_double`, in four bytes."""
    if not isinstance(value, Digits):
        return value
    try:
        (number,) = struct.unpack("f", struct.pack("f", float(value)))
    except OverflowError:
        return value
    return number + 0.0


def _for_elements(normalize: Normalizer) -> Normalizer:
    return lambda value: (
        [normalize(element) for element in value] if isinstance(value, list) else value
    )


NORMALIZERS: dict[str, Normalizer] = {
    "real": _real,
    "double": _double,
    "reals": _for_elements(_real),
    "doubles": _for_elements(_double),
}
"""By `types.TypeCodec.compare`. Values of other kinds are compared as JSON, numbers by their
text.
"""
_DECODER = json.JSONDecoder(
    object_pairs_hook=tuple, parse_int=Digits, parse_float=Digits, parse_constant=Digits
)
