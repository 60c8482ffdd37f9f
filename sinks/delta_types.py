"""The type of a warehouse column as Spark writes it, and as a Delta table's schema does."""

import json
import re

import deltalake

from cdc.change import Table

NAMES = {"smallint": "short", "int": "integer", "bigint": "long"}


def column_type(table: Table, name: str) -> str:
    """Spark's text for it: decimal(10,2), array<string>."""
    from cdc import types

    return types.kind(table.column(name).type).column


def delta_type(text: str) -> object:
    """The JSON of the same type in a Delta schema; None for a struct, which only types of one shape have."""
    if text.startswith("struct<"):
        return None
    if element := re.fullmatch(r"array<(.*)>", text):
        return {"type": "array", "elementType": delta_type(element[1]), "containsNull": True}
    return NAMES.get(text, text)


def misfits(held: deltalake.DeltaTable, table: Table) -> bool:
    """Whether a Delta table has a column of another type than the source's has now."""
    types = {field.name: json.loads(field.type.to_json()) for field in held.schema().fields}
    wanted = {column.name: delta_type(column_type(table, column.name)) for column in table.columns}
    return any(type_ and types.get(name, type_) != type_ for name, type_ in wanted.items())
