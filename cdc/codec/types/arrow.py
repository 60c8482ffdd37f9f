"""The types of warehouse columns as Arrow's."""

import re
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pyarrow as pa


def struct_members(column: str) -> list[tuple[str, str]]:
    """Take apart a struct as Spark writes it: name and type of each field; nothing for other
    types.
    """
    members: list[tuple[str, str]] = []
    depth = 0
    start = len("struct<")
    if not column.startswith("struct<"):
        return members
    for place, character in enumerate(column):
        depth += {"<": 1, ">": -1, "(": 1, ")": -1}.get(character, 0)
        if (character == "," and depth == 1) or depth == 0 < place > start:
            name, _, type_ = column[start:place].strip().partition(" ")
            members.append((name, type_))
            start = place + 1
    return members


@cache
def arrow(column: str) -> "pa.DataType":
    """The Arrow type of a column type as Spark writes it."""
    import pyarrow as pa

    if element := re.fullmatch(r"array<(.*)>", column):
        return pa.list_(arrow(element[1]))
    if members := struct_members(column):
        return pa.struct([(name, arrow(type_)) for name, type_ in members])
    if digits := re.fullmatch(r"decimal\((\d+),(\d+)\)", column):
        return pa.decimal128(int(digits[1]), int(digits[2]))
    return {
        "string": pa.string(),
        "smallint": pa.int16(),
        "int": pa.int32(),
        "bigint": pa.int64(),
        "float": pa.float32(),
        "double": pa.float64(),
        "boolean": pa.bool_(),
        "binary": pa.binary(),
        "date": pa.date32(),
        "timestamp_ntz": pa.timestamp("us"),
        "timestamp": pa.timestamp("us", "UTC"),
    }[column]


@cache
def portable(type_: "pa.DataType") -> "pa.DataType":
    """What to cast to, so that Python has a value for all that Arrow can hold: as `countable`.

    A number of four bytes as its shortest text: as a double of Python it would have more digits.
    """
    import pyarrow as pa

    if pa.types.is_list(type_):
        return pa.list_(portable(type_.value_type))
    return pa.string() if pa.types.is_float32(type_) else countable(type_)


@cache
def countable(type_: "pa.DataType") -> "pa.DataType":
    """What to cast to for values that the same column takes again: days and microseconds as
    numbers.
    """
    import pyarrow as pa

    if pa.types.is_list(type_):
        return pa.list_(countable(type_.value_type))
    if pa.types.is_date32(type_):
        return pa.int32()
    return pa.int64() if pa.types.is_timestamp(type_) else type_
