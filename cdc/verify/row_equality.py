"""When a row of a view equals its source, and sums of rows that are equal exactly when the rows are.

Plain Python, for executors and for the REPL. A document is parsed, its members are put in the order
of the table's columns, and each value is compared as its type says. One rule for everything that
compares.
"""

import json
import struct
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b, md5
from typing import Any, NamedTuple

import msgspec

from cdc.codec.types import kind
from cdc.model.table import Table
from cdc.postgres.row_query import BUCKET_DIGITS

BITS = (1 << 63) - 1
"""Mask of a hash: a Spark long that is never negative."""
SOURCE = ""
"""The side of Postgres in a comparison, in place of a sink's name."""
LONG_NUMBER = 1000
"""Characters from which on an index gets a number as a string, see `cdc.sinks.elasticsearch.executor`: in
every view the number and the string of its digits count as equal.
"""
DEEPEST = 200
"""Levels of lists and objects in json. A limit far below Python's own, which depends on the caller."""
Normalizer = Callable[[Any], Any]


class Digits(str):
    """A number by its text: 1.0 isn't 1.00, and no number shorter than LONG_NUMBER equals the string
    of its digits.
    """

    __slots__ = ()

    def __repr__(self) -> str:
        return f"#{self!s}"


class RowSums(NamedTuple):
    """Number of rows, and two sums of their hashes: `folded` by exclusive or, `total` by addition.

    The exclusive or alone would miss a row that is there twice, the total alone two errors that
    cancel out.
    """

    rows: int = 0
    folded: int = 0
    total: int = 0

    def plus(self, part: "RowSums") -> "RowSums":
        return RowSums(
            self.rows + part.rows, self.folded ^ part.folded, (self.total + part.total) & BITS
        )


@dataclass(frozen=True)
class Comparable:
    """Compares the documents (JSON) of a table's rows.

    columns     (name, `types.TypeCodec.compare`) of each column of the table

    Members that are no column are left out (a view's bookkeeping); a missing member counts as null,
    since a view made before the column was added holds rows without it. Of a member that comes twice
    the last one counts. Json that is nested deeper than DEEPEST levels is compared as it is written,
    and so is a document that can't be parsed or is no object.
    """

    columns: tuple[tuple[str, str], ...]

    def equals(self, expected: str, actual: str) -> bool:
        """Whether two documents hold the same row."""
        return expected == actual or self._text(expected) == self._text(actual)

    def first_difference(self, expected: str, actual: str) -> str | None:
        """Name the first column that differs. None where a document can't be taken apart."""
        expected_texts = self._column_texts(expected)
        actual_texts = self._column_texts(actual)
        if expected_texts is None or actual_texts is None:
            return None
        differing = (
            name
            for (name, _), expected_text, actual_text in zip(
                self.columns, expected_texts, actual_texts, strict=True
            )
            if expected_text != actual_text
        )
        return next(differing, None)

    def state_hash(self, document: str) -> int:
        """Hash a document: 63 bits, the same ones exactly for equal rows."""
        text = self._text(document).encode("utf-8", "surrogatepass")
        return int.from_bytes(blake2b(text, digest_size=8).digest()) & BITS

    def row_digest(self, row_id: bytes, document: bytes) -> bytes:
        """Hash an id and its document, for sums: 8 bytes. Equal digests mean equal rows; equal rows nearly
        always have equal digests.

        Text without an escape counts as it is written, and json but for its spaces, because parsing
        costs three times as much.
        """
        digest = blake2b(b"%d:%b" % (len(row_id), row_id), digest_size=8)
        digest.update(self._summed_text(document))
        return digest.digest()

    def _text(self, document: str) -> str:
        """Return a text that is equal exactly where the rows are."""
        texts = self._column_texts(document)
        return document if texts is None else "\0".join(texts)

    def _column_texts(self, document: str) -> list[str] | None:
        """Return the comparable text of each column; None if the document can't be taken apart."""
        try:
            members = _MEMBERS.decode(document)
        except (ValueError, RecursionError):
            return self._parsed_texts(document)
        return [
            _value_text(compare, bytes(members.get(name, NULL))) for name, compare in self.columns
        ]

    def _parsed_texts(self, document: str) -> list[str] | None:
        """The same of a document that msgspec refuses: one with half of a surrogate pair."""
        try:
            pairs = _DECODER.decode(document)
            if not isinstance(pairs, tuple):
                return None
            members = dict(pairs)
            return [repr(NORMALIZERS[compare](members.get(name))) for name, compare in self.columns]
        except (ValueError, RecursionError):
            return None

    @cached_property
    def _not_text(self) -> list[tuple[int, str]]:
        """The places of columns that aren't compared as text, with their comparisons."""
        return [
            (place, compare) for place, (_, compare) in enumerate(self.columns) if compare != "text"
        ]

    def _summed_text(self, document: bytes) -> bytes:
        try:
            members = _MEMBERS.decode(document)
            values = [members.get(name, NULL) for name, _ in self.columns]
            if b"\\" in document:
                values = [_unescaped(bytes(value)) for value in values]
            for place, compare in self._not_text:
                value = bytes(values[place])
                if compare == "json":
                    values[place] = msgspec.json.format(value, indent=-1)
                else:
                    values[place] = _value_text(compare, value).encode()
            return b"\0".join(values)
        except (ValueError, RecursionError):
            return document


def sum_rows(rows: Iterable[tuple[bytes, bytes]], rules: Comparable) -> RowSums:
    """Sum up (id, document) pairs, in any order."""
    count = folded = total = 0
    for row_id, document in rows:
        number = int.from_bytes(rules.row_digest(row_id, document)) & BITS
        count += 1
        folded ^= number
        total += number
    return RowSums(count, folded, total & BITS)


def comparable(table: Table) -> Comparable:
    return Comparable(tuple((column.name, kind(column.type).compare) for column in table.columns))


def bucket_digest(row_id: bytes) -> bytes:
    """The bucket of a row's id, in two bytes; Postgres computes the same in `row_query.bucket`."""
    return md5(row_id, usedforsecurity=False).digest()[: BUCKET_DIGITS // 2]


def _value_text(compare: str, value: bytes) -> str:
    """Return a text of a value (JSON) that is equal exactly where the values are."""
    try:
        text = value.decode()
        parsed = Digits(text) if text[0] in "-0123456789" else _DECODER.decode(text)
        return repr(NORMALIZERS[compare](parsed))
    except (ValueError, RecursionError):
        # Nested too deeply. The mark is the beginning of no text of a parsed value.
        return f"={value!r}"


def _unescaped(value: bytes) -> bytes:
    """Write a string (JSON) with the escapes that it needs, and no others."""
    if b"\\" not in value or value[:1] != b'"':
        return value
    return json.dumps(json.loads(value), ensure_ascii=False).encode()


def _json(value: Any, depth: int = 0) -> Any:
    """Compare as `jsonb` does: members in any order, and of a name that comes twice the last one."""
    if depth > DEEPEST:
        raise RecursionError
    if isinstance(value, tuple):
        return tuple(
            sorted((name, _json(member, depth + 1)) for name, member in dict(value).items())
        )
    if isinstance(value, list):
        return [_json(element, depth + 1) for element in value]
    if isinstance(value, Digits) and len(value) >= LONG_NUMBER:
        return str(value)
    return value


def _double(value: Any) -> Any:
    """Compare by value: 1e20 is 100000000000000000000, and -0 is 0 as in Postgres. Text stays."""
    if isinstance(value, list):
        return [_double(element) for element in value]
    return float(value) + 0.0 if isinstance(value, Digits) else value


def _real(value: Any) -> Any:
    """Compare as `_double`, in four bytes."""
    if isinstance(value, list):
        return [_real(element) for element in value]
    if not isinstance(value, Digits):
        return value
    try:
        (number,) = struct.unpack("f", struct.pack("f", float(value)))
    except OverflowError:
        return value
    return number + 0.0


def _path(value: Any) -> Any:
    """Compare an object whose numbers are doubles."""
    if isinstance(value, tuple):
        return sorted((name, _double(member)) for name, member in dict(value).items())
    return value


NORMALIZERS: dict[str, Normalizer] = {
    "text": lambda value: value,
    "json": _json,
    "real": _real,
    "reals": _real,
    "double": _double,
    "doubles": _double,
    "path": _path,
}
"""By `types.TypeCodec.compare`. Numbers of other kinds are compared by their text."""
NULL = b"null"
_MEMBERS = msgspec.json.Decoder(dict[str, msgspec.Raw])
_DECODER = json.JSONDecoder(
    object_pairs_hook=tuple, parse_int=Digits, parse_float=Digits, parse_constant=Digits
)
