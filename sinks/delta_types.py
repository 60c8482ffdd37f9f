"""The type of a warehouse column as Spark writes it, and as a Delta table's schema does."""

import re

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
