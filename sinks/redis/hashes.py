"""A row as a Redis hash, for tables with `form: hash`: a field for each column that isn't null.

A field holds a text as it is, and anything else as the JSON that a document has for it.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache

import msgspec

from cdc.codec.forms import Documents
from cdc.codec.members import NULL, members
from cdc.codec.problem import Unreadable, ValueNotRepresentable
from cdc.codec.types import kind
from cdc.model.table import Table

BROKEN_JSON = "its json is nested too deeply for a hash, or has half of a character"


@dataclass(frozen=True)
class HashedDocuments(Documents):
    """Documents. Those of the tables in `hashes` can be taken apart."""

    hashes: frozenset[str]

    def converter(self, table: Table) -> Callable[[bytes], bytes]:
        convert = super().converter(table)
        if table.qualified not in self.hashes:
            return convert

        def checked(row: bytes) -> bytes:
            document = convert(row)
            try:
                members(document)
            except Unreadable:
                raise ValueNotRepresentable(BROKEN_JSON, table.qualified) from None
            return document

        return checked


def packed_fields(table: Table, document: bytes) -> bytes:
    """Convert a document to field, value, field, value, ... in MessagePack, as `APPLY` takes it."""
    texts = _text_columns(table)
    words: list[str] = []
    for name, value in members(document).items():
        if value != NULL:
            is_text = name in texts
            text = msgspec.json.decode(value, type=str) if is_text else bytes(value).decode()
            words += [name, text]
    return msgspec.msgpack.encode(words)


def document(table: Table, fields: Mapping[str, str]) -> str:
    """The reverse: the document of a row, from the fields of its hash."""
    texts = _text_columns(table)
    values = {
        column.name: fields.get(column.name)
        if column.name in texts or column.name not in fields
        else msgspec.Raw(fields[column.name].encode())
        for column in table.columns
    }
    return msgspec.json.encode(values).decode()


@lru_cache(maxsize=256)
def _text_columns(table: Table) -> frozenset[str]:
    return frozenset(column.name for column in table.columns if kind(column.type).is_text)
