"""Values that the log doesn't carry: a large value that an update left alone, without REPLICA IDENTITY FULL.

Debezium writes a placeholder in its place, whose shape follows the column's type (UnchangedToastedPlaceholder.java).
Ours is a secret of 128 bits per deployment, so wherever it stands it is one: data can't look like it.
"""

import json
import uuid
from base64 import b64encode
from functools import cache
from hashlib import md5
from typing import NamedTuple

from cdc.codec.members import NULL, joined, members


class Carried(NamedTuple):
    """A row with null in the place of every placeholder, and the names of the columns that had one."""

    row: bytes
    missing: tuple[str, ...]


class Placeholder:
    """One deployment's placeholder, as the connector writes it into rows."""

    def __init__(self, text: str) -> None:
        raw = text.encode()
        encoded = b64encode(raw).decode()
        # java.util.UUID.nameUUIDFromBytes: version 3 without a namespace.
        named = str(uuid.UUID(bytes=md5(raw, usedforsecurity=False).digest(), version=3))
        pair = {text: text}
        texts = (text, encoded, named)
        shapes = (*texts, *([one] for one in texts), list(raw), pair, _compact(pair))
        self._shapes = frozenset(_compact(shape).encode() for shape in shapes)
        # The end of a text, which Python looks for first: of our own the part that is random.
        self._marks = tuple(mark[-32:].encode() for mark in (text, encoded, named, _compact(list(raw))[1:-1]))

    def carried(self, row: bytes) -> Carried | None:
        """What a row carries; None when it carries every value. Raises Unreadable for what is no row."""
        text, encoded, named, numbers = self._marks
        if text not in row and encoded not in row and named not in row and numbers not in row:
            return None
        values = members(row)
        missing = tuple(name for name, value in values.items() if bytes(value) in self._shapes)
        if not missing:
            return None
        return Carried(joined({**values, **dict.fromkeys(missing, NULL)}), missing)


@cache
def placeholder(text: str) -> Placeholder:
    return Placeholder(text)


def _compact(value: object) -> str:
    return json.dumps(value, separators=(",", ":"))
