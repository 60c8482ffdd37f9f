"""Decoding of Kafka records: bytes of the connector's key and value to a change of a row."""

import json
import re
import uuid
from base64 import b64encode
from collections.abc import Callable, Sequence
from dataclasses import replace
from hashlib import md5
from typing import NamedTuple

import msgspec

from cdc.codec.members import NULL, joined, members
from cdc.codec.problem import EventChanged, Undecided, Unreadable, ValueNotRepresentable
from cdc.codec.table import NO_KEY, codec, document_words
from cdc.codec.types import kind
from cdc.model.mask import SURE
from cdc.model.table import RowCondition, Table

__all__ = ["Change", "RecordDecoder", "Unreadable", "ValueNotRepresentable"]

NO_EVENT = "its value is no change event"
WRITES = ("u", "c", "r")
SNAPSHOT = "r"
DELETE = "d"
_sequence = msgspec.json.Decoder(list[str | None]).decode
HALF = re.compile(rb'(?<!\\)((?:\\\\)*)\\u[Dd][89ABab][0-9A-Fa-f]{2}(?=")')
"""The first half of a surrogate pair at the end of a text: a mask has cut the character apart."""
TEXT_ONLY = (
    *(
        "smallint",
        "integer",
        "bigint",
        "real",
        "double",
        "boolean",
        "text",
        "numeric",
        "money",
        "json",
    ),
    *("date", "time", "timetz", "timestamp", "timestamptz", "interval"),
)
"""Kinds whose value is never missing, or has the placeholder as plain text."""


class Change(msgspec.Struct, gc=False):
    """A change of one row. `op` is r, c, u or d; None for a tombstone."""

    id: str
    """The row's id in every view."""
    op: str | None
    row: bytes | None
    """The row as the connector's JSON, null in the place of every placeholder; None for both kinds
    of delete.
    """
    missing: tuple[str, ...]
    """The columns whose value the record doesn't carry, by their names in the view; none when it carries
    all.
    """
    lsn: int | None
    commit_us: int | None
    """Microseconds since 1970."""
    undecided: bool = False
    """Whether the record lacks a value that the condition of the table's rows needs."""


class _Source(msgspec.Struct, gc=False):
    lsn: int | None = None
    ts_us: int | None = None
    schema: str | None = None
    table: str | None = None
    sequence: str | None = None


class _Envelope(msgspec.Struct, gc=False):
    op: str | None = None
    source: _Source | None = None
    # Within a union Raw would be decoded.
    after: msgspec.Raw = msgspec.Raw(b"null")


_envelope = msgspec.json.Decoder(_Envelope).decode
_NOWHERE = _Source()


class _Topic:
    """Whatever decoding needs of a table, prepared once for all of its records."""

    __slots__ = ("carried", "events", "meets", "name", "row_id", "schema", "table")

    def __init__(self, table: Table, placeholder: str) -> None:
        self.row_id = codec(table).row_id
        self.carried = Placeholder(placeholder, table).carried
        self.events = table.events
        self.meets = None if table.where is None else _check_of(table, table.where)
        self.name = table.topic
        # The connector names topics after tables. A table with another topic is compared by the end
        # of its topic's name.
        has_connector_name = table.topic.endswith(f".{table.qualified}")
        self.schema = table.schema if has_connector_name else None
        self.table = table.name if has_connector_name else None

    def holds(self, source: _Source) -> bool:
        """Say whether a change is of this table; a change that doesn't name a table counts as
        one.
        """
        if source.table == self.table and source.schema == self.schema:
            return True
        if source.table is None or source.schema is None:
            return True
        return self.name.endswith(f".{source.schema}.{source.table}")


class RecordDecoder:
    """Decodes the records of some tables' topics.

    Keeps no state between records; any thread may use it.
    """

    def __init__(self, tables: Sequence[Table], placeholder: str) -> None:
        self._topics = {table.topic: _Topic(table, placeholder) for table in tables}

    def decode(self, topic: str, key: bytes | None, value: bytes | None) -> Change:
        """Decode a record; called for each record of a lane.

        Raises:
            Unreadable: it isn't what the connector writes of the topic's table. EventChanged: it
                is an update of an event.
        """
        if key is None:
            raise Unreadable("it has no key")
        if not key.isascii() or not (value is None or value.isascii()):
            _validate(key, value)
        table = self._topics.get(topic)
        if table is None:
            raise Unreadable(NO_KEY)
        row_id = table.row_id(key)
        if value is None:
            return Change(row_id, None, None, (), None, None)
        try:
            event = _envelope(value)
        except (msgspec.DecodeError, RecursionError):
            event = _cut_event(value)
        source = event.source or _NOWHERE
        op = event.op
        row = None
        missing: tuple[str, ...] = ()
        undecided = False
        if op in WRITES:
            row = bytes(event.after)
            if row[:1] != b"{":
                raise Unreadable("it lacks the row")
            # A snapshot selects its rows, so it has all values; a placeholder in one is the user's own
            # text. A create need not: an update of a key becomes a delete and a create.
            if op != SNAPSHOT and (carried := table.carried(row)):
                row, missing, undecided = carried
        elif op != DELETE:
            raise Unreadable(NO_EVENT if op is None else "its operation is unknown")
        if not table.holds(source):
            raise Unreadable("it is of another table")
        if op == "u" and table.events:
            raise EventChanged
        lsn = source.lsn if source.lsn is not None else _lsn(source.sequence)
        return Change(row_id, op, row, missing, lsn, source.ts_us, undecided)

    def select(self, topic: str, change: Change) -> Change:
        """Return a change as the view has it: a row that doesn't meet the view's condition is deleted
        there.

        Raises:
            Undecided: the record lacks a value of the condition. Unreadable: one is none of its
                column's type.
        """
        meets = self._topics[topic].meets
        if meets is None or change.row is None:
            return change
        if change.undecided:
            raise Undecided
        if meets(change.row):
            return change
        return Change(change.id, DELETE, None, (), change.lsn, change.commit_us)

    def row_id(self, topic: str, key: bytes | None) -> str | None:
        """Return the id of the row that a key names; None when the key isn't one of the topic's
        table.
        """
        table = self._topics.get(topic)
        if table is None or key is None:
            return None
        try:
            _validate(key, None)
            return table.row_id(key)
        except Unreadable:
            return None


def _check_of(table: Table, where: RowCondition) -> Callable[[bytes], bool]:
    """Build the check whether the connector's JSON of a row meets a condition. NULL isn't true."""
    columns = replace(table, columns=where.columns, reshaped=True, where=None)
    values = codec(columns).row_values
    evaluate = where.expression.evaluate
    return lambda row: evaluate(values(row)) is True


def _cut_event(value: bytes) -> _Envelope:
    """Decode an event in which a mask has cut a character apart: the table's mask, or one that it had
    when the record was written. Raises Unreadable for any other.
    """
    try:
        return _envelope(HALF.sub(rb"\1", value))
    except (msgspec.DecodeError, RecursionError):
        raise Unreadable(NO_EVENT) from None


def _validate(key: bytes, value: bytes | None) -> None:
    """Raise Unreadable for bytes that are no UTF-8: decoding an envelope skips the parts that it
    passes through.
    """
    try:
        key.decode()
        if value is not None:
            value.decode()
    except UnicodeDecodeError:
        raise Unreadable("its bytes are no text") from None


def _lsn(sequence: str | None) -> int | None:
    """Parse the LSN of an incremental snapshot's row, which only `sequence` has: [null,"123"]."""
    if sequence is None:
        return None
    try:
        _, lsn = _sequence(sequence)
        return None if lsn is None else int(lsn)
    except (msgspec.DecodeError, ValueError):
        return None


class CarriedRow(NamedTuple):
    """A row with null in the place of every placeholder; the columns that had one, by their names in
    the view; and whether the condition of the table's rows reads one that had.
    """

    row: bytes
    missing: tuple[str, ...]
    undecided: bool


class Placeholder:
    """One deployment's placeholder, as the connector writes it into the rows of a table."""

    def __init__(self, text: str, table: Table) -> None:
        raw = text.encode()
        encoded = b64encode(raw).decode()
        # java.util.UUID.nameUUIDFromBytes: version 3 without a namespace.
        uuid_text = str(uuid.UUID(bytes=md5(raw, usedforsecurity=False).digest(), version=3))
        pair = {text: text}
        texts = (text, encoded, uuid_text)
        shapes = (*texts, *([item] for item in texts), list(raw), pair, _compact(pair))
        self._shapes = frozenset(_compact(shape).encode() for shape in shapes)
        conditional = table.where.columns if table.where else ()
        masked = {
            column.source_name: form
            for column in (*table.columns, *conditional)
            if column.mask and (form := column.mask.placeholder(column.type, text))
        }
        self._masked = {name: _compact(form).encode() for name, form in masked.items()}
        self._unsure = {name for name, form in masked.items() if len(form) < SURE}
        self._text = _finder(text)
        # A table that was reshaped had other columns; one whose rows pass through may have some
        # that nobody knows yet.
        text_only = document_words(table) is None and all(
            kind(item.type).name in TEXT_ONLY for item in table.columns
        )
        text_only &= not table.reshaped
        other_marks = () if text_only else (encoded, uuid_text, _compact(list(raw))[1:-1])
        self._other_marks = tuple(map(_finder, (*other_marks, *masked.values())))
        self._reshaped = table.reshaped
        self._names = {column.source_name: column.name for column in table.columns}
        self._conditional = frozenset(column.source_name for column in conditional)

    def carried(self, row: bytes) -> CarriedRow | None:
        """Replace placeholders in a row; None when it carries every value.

        Raises Unreadable for what is no row.
        """
        if not self._text(row):
            for finder in self._other_marks:
                if finder(row):
                    break
            else:
                return None
        values = members(row)
        masked = [
            name
            for name, value in values.items()
            if (read := bytes(value)) in self._shapes or read == self._masked.get(name)
        ]
        if not masked:
            return None
        if not self._unsure.isdisjoint(masked):
            raise Unreadable("a mask leaves open whether it has the value")
        # Views leave out columns that a reshaped table has no more, so these need no value.
        missing = tuple(
            self._names.get(name, name)
            for name in masked
            if name in self._names or not self._reshaped
        )
        undecided = not self._conditional.isdisjoint(masked)
        return CarriedRow(joined({**values, **dict.fromkeys(masked, NULL)}), missing, undecided)


def _finder(mark: str) -> Callable[[bytes], object]:
    """Return a search for a mark in rows: a regular expression takes less than half the time of
    `in` here.
    """
    return re.compile(re.escape(mark.encode())).search


def _compact(value: object) -> str:
    return json.dumps(value, separators=(",", ":"))
