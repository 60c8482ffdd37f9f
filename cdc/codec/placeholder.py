"""The placeholder: what Debezium writes for a large value that an update left alone.

It does so without REPLICA IDENTITY FULL, because the log doesn't carry the value. Its shape follows
the column's type (UnchangedToastedPlaceholder.java). Each deployment has a secret of 128 bits as
its placeholder, so data can't look like it.
"""

import json
import re
import uuid
from base64 import b64encode
from collections.abc import Callable
from hashlib import md5
from typing import NamedTuple

from cdc.codec.members import NULL, joined, members
from cdc.codec.table import document_words
from cdc.codec.types import kind
from cdc.model.table import Table


class CarriedRow(NamedTuple):
    """A row with null in the place of every placeholder, and the names of the columns that had
    one.
    """

    row: bytes
    missing: tuple[str, ...]


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
        self._text = _finder(text)
        # A table that was reshaped had other columns; one whose rows pass through may have some
        # that nobody knows yet.
        text_only = document_words(table) is None and all(
            kind(item.type).name in TEXT_ONLY for item in table.columns
        )
        text_only &= not table.reshaped
        other_marks = () if text_only else (encoded, uuid_text, _compact(list(raw))[1:-1])
        self._other_marks = tuple(map(_finder, other_marks))
        self._reshaped = table.reshaped
        self._names = frozenset(column.name for column in table.columns)

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
        masked = [name for name, value in values.items() if bytes(value) in self._shapes]
        if not masked:
            return None
        # Views leave out columns that a reshaped table has no more, so these need no value.
        missing = tuple(name for name in masked if name in self._names or not self._reshaped)
        return CarriedRow(joined({**values, **dict.fromkeys(masked, NULL)}), missing)


def _finder(mark: str) -> Callable[[bytes], object]:
    """Return a search for a mark in rows: a regular expression takes less than half the time of
    `in` here.
    """
    return re.compile(re.escape(mark.encode())).search


def _compact(value: object) -> str:
    return json.dumps(value, separators=(",", ":"))
