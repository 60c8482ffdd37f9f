"""Members of views as the warehouse holds them: structs and lists, instead of the text of their JSON.

In:  what such a member is made of (`cdc.model.table.Shape`). Out: its codec. Whole numbers, truth
values and floats are columns of their types, everything else is the text that documents have for it
(docs/use/types.md). json of which nothing is known stays text.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import msgspec

from cdc.codec.types.kind import TypeCodec
from cdc.codec.types.numeric import json_number
from cdc.codec.types.registry import kind
from cdc.codec.types.text import JSON_VALUE
from cdc.model.table import Column, Shape

FORBIDDEN = frozenset(" ,;{}()\n\t=<>")
"""Characters that the name of a struct's field can't have, in Delta or in the text of its type."""
COLUMNS = {
    "smallint": "smallint",
    "integer": "int",
    "bigint": "bigint",
    "oid": "bigint",
    "boolean": "boolean",
    "real": "double",
    "double precision": "double",
}
"""Types whose document form is no text, and the columns for them. A `real` would get other digits as
a number of four bytes.
"""
_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder().decode
_object = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_list = msgspec.json.Decoder(list[msgspec.Raw]).decode
_text = msgspec.json.Decoder(str).decode
Raw = msgspec.Raw


@dataclass(frozen=True)
class _Part:
    """A part of a member: the column's type, and the conversions from and to JSON that isn't null."""

    column: str
    read: Callable[[Raw], Any]
    write: Callable[[Any], bytes]


def column_kind(column: Column) -> TypeCodec:
    """Return the codec of a column of a table, or of a member of a view."""
    if column.shape is None or not _is_named(column.shape):
        return kind(column.type)
    return _member_kind(column.shape)


@cache
def _member_kind(shape: Shape) -> TypeCodec:
    part = _shaped(shape)

    def read(text: str) -> Any:
        try:
            return part.read(Raw(text.encode()))
        except msgspec.DecodeError as error:
            # A document of a former definition, say, whose member had another type.
            raise ValueError(str(error)) from None

    return replace(
        JSON_VALUE,
        column=part.column,
        to_column=read,
        from_column=lambda value: Raw(part.write(value)),
    )


def _is_named(shape: Shape) -> bool:
    """Whether Delta takes the names of all its fields; else the member stays text."""
    return all(
        not (shape.is_object and FORBIDDEN & set(member.name))
        and (member.shape is None or _is_named(member.shape))
        for member in shape.members
    )


def _shaped(shape: Shape) -> _Part:
    part = _struct(shape) if shape.is_object else _plain(shape.members[0])
    return _list_of(part) if shape.many else part


def _member(member: Column) -> _Part:
    return _plain(member) if member.shape is None else _shaped(member.shape)


def _struct(shape: Shape) -> _Part:
    parts = {member.name: _member(member) for member in shape.members}
    fields = ", ".join(f"{name} {part.column}" for name, part in parts.items())

    def read(value: Raw) -> Mapping[str, Any]:
        members = _object(value)
        return {
            name: part.read(member) if (member := members.get(name, NULL)) != NULL else None
            for name, part in parts.items()
        }

    def write(value: Mapping[str, Any]) -> bytes:
        members = [
            _encode(name) + b":" + (b"null" if value[name] is None else part.write(value[name]))
            for name, part in parts.items()
        ]
        return b"{" + b",".join(members) + b"}"

    return _Part(f"struct<{fields}>", read, write)


def _list_of(part: _Part) -> _Part:
    def read(value: Raw) -> list[Any]:
        return [None if item == NULL else part.read(item) for item in _list(value)]

    def write(items: list[Any]) -> bytes:
        return (
            b"[" + b",".join(b"null" if item is None else part.write(item) for item in items) + b"]"
        )

    return _Part(f"array<{part.column}>", read, write)


def _plain(column: Column) -> _Part:
    """A value that is no object and no list of several rows."""
    if column.type.endswith("[]"):
        return _list_of(_plain(Column(column.name, column.type.removesuffix("[]"))))
    type_codec = kind(column.type)
    if number := COLUMNS.get(column.type):
        if number == "double":
            return _Part(
                number, lambda value: float(_decode(value)), lambda v: _encode(json_number(v))
            )
        return _Part(number, _decode, _encode)
    if type_codec.raw or "<" in type_codec.column:
        return _Part("string", lambda value: bytes(value).decode(), str.encode)
    return _Part("string", _text, _encode)


NULL = Raw(b"null")
