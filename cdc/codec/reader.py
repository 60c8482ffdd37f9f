"""Readers of some members of a JSON object, by name and type; the other members are skipped."""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from cdc.codec.members import NULL, encode, joined, members

UNNAMEABLE = re.compile(r'["\\\x00-\x1f]')
"""Characters that a msgspec field's name can't have."""
NULL_TEXT = bytes(NULL)


def reader(fields: Mapping[str, Any]) -> Callable[[bytes], Sequence[Any]]:
    """Build a function from the text of an object to the values of these members, in their order.

    Types are msgspec's; Raw gives a value's own text. A member that the object lacks is null; one
    that is no string where a text is asked for is its JSON text: the log holds numbers from before
    a column became a text or a numeric. The function raises msgspec.DecodeError, ValueError or
    RecursionError for what is no such object.
    """
    strict, texts = _strict(fields), [name for name, type_ in fields.items() if type_ is str]

    def read(text: bytes) -> Sequence[Any]:
        try:
            return strict(text)
        except msgspec.ValidationError:
            return strict(_with_texts(text, texts))

    return read if texts else strict


def checker(fields: Mapping[str, Any]) -> Callable[[bytes], None]:
    """Build a function that raises as `reader`'s does where a member isn't of its type, and returns
    nothing.
    """
    texts = [name for name, type_ in fields.items() if type_ is str]
    if any(map(UNNAMEABLE.search, fields)):
        read = reader(fields)

        def check_by_reading(text: bytes) -> None:
            read(text)

        return check_by_reading
    decode = _decoder(fields)

    def check(text: bytes) -> None:
        try:
            decode(text)
        except msgspec.ValidationError:
            decode(_with_texts(text, texts))

    return check


def _with_texts(text: bytes, names: Sequence[str]) -> bytes:
    values: dict[str, msgspec.Raw | bytes] = {**members(text)}
    for name in names:
        value = bytes(values.get(name, NULL))
        if value != NULL_TEXT and not value.startswith(b'"'):
            values[name] = encode(value.decode())
    return joined(values)


def _strict(fields: Mapping[str, Any]) -> Callable[[bytes], Sequence[Any]]:
    if any(map(UNNAMEABLE.search, fields)):
        return _decode_as_list(list(fields), _types(fields))
    decode, values = _decoder(fields), msgspec.structs.astuple

    def read(text: bytes) -> Sequence[Any]:
        return values(decode(text))

    return read


def _types(fields: Mapping[str, Any]) -> list[Any]:
    return [type_ if type_ is msgspec.Raw else type_ | None for type_ in fields.values()]


def _decoder(fields: Mapping[str, Any]) -> Callable[[bytes], Any]:
    """Build a decoder to a struct of these members."""
    slots = {f"f{index}": name for index, name in enumerate(fields)}
    struct_fields = [
        (slot, type_, NULL if type_ is msgspec.Raw else None)
        for slot, type_ in zip(slots, _types(fields), strict=True)
    ]
    return msgspec.json.Decoder(
        msgspec.defstruct("Row", struct_fields, rename=slots, gc=False)
    ).decode


def _decode_as_list(names: Sequence[str], types: Sequence[Any]) -> Callable[[bytes], Sequence[Any]]:
    """Build the same function for names that no struct can have: it decodes the members' texts as a
    list.
    """
    decode = msgspec.json.Decoder(tuple[tuple(types)]).decode  # type: ignore[misc]

    def read(text: bytes) -> Sequence[Any]:
        values = members(text)
        result: tuple[Any, ...] = decode(
            b"[" + b",".join([values.get(name, NULL) for name in names]) + b"]"
        )
        return result

    return read
