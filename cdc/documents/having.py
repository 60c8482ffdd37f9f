"""What a view's `having` may name: members of its documents, and members of their objects.

name           a column of the root, an aggregate, or a member that `flatten` made a value
member.name    a column of an object
member         an object itself: only whether it is NULL can be asked
"""

import json
from collections.abc import Mapping
from decimal import Decimal
from typing import Any

from cdc.codec.table import codec
from cdc.documents.aggregates import result_type
from cdc.documents.plan import FINAL, WINDOW_END, WINDOW_START, Node, View, narrowed

OBJECT = "object"
"""The type of a member that is an object."""


def shown_types(root: Node) -> dict[str, str]:
    """Return the Postgres types of what `having` may name, by name."""
    types = {column.name: column.type for column in root.shown}
    for child in root.children:
        types |= {part.name: result_type(part, child.table) for part in child.aggregates}
        if not child.shows or child.many:
            continue
        if child.flatten is not None:
            if child.flatten in child.columns:
                types[child.field] = child.table.column(child.flatten).type
            continue
        types[child.field] = OBJECT
        for name in child.columns:
            # A column of the root may have the name with a dot.
            types.setdefault(f"{child.field}.{name}", child.table.column(name).type)
    for step, places in root.steps.items():
        if len(places) == 1:
            types[step] = OBJECT
            for name in root.earlier[0].columns:
                types.setdefault(f"{step}.{name}", root.table.column(name).type)
    return types


def grouped_types(view: View) -> dict[str, str]:
    """Return the Postgres types of the members of a grouped view's documents, by name."""
    grouping = view.grouping
    assert grouping is not None
    types = {column.name: column.type for column in view.keyed.columns}
    if grouping.window is not None:
        types[WINDOW_END] = types[WINDOW_START]
    if grouping.closing is not None:
        types[FINAL] = "boolean"
    for part in grouping.aggregates:
        types[part.name] = result_type(part, view.root.table)
    return types


def shown_values(
    root: Node, names: tuple[str, ...], row: bytes, nested: Mapping[str, bytes]
) -> dict[str, Any]:
    """Return the values of these names in a document, in the form of documents.

    row: of the root, as the connector writes it. nested: its other members, as JSON
    """
    # A member may have the name of a column that isn't shown.
    own = {column.name for column in root.shown}.intersection(names)
    document = codec(narrowed(root.table, own)).document
    values: dict[str, Any] = _decoded(document(row)) if own else {}
    for name in names:
        if name in own:
            continue
        # An aggregate may have a name with a dot.
        member = name if name in nested else name.partition(".")[0]
        inner = name.removeprefix(member).removeprefix(".")
        value = _decoded(nested[member])
        # A nested member travels as the text of its JSON.
        is_nested = member in root.steps or any(
            child.field == member and child.shows for child in root.children
        )
        if is_nested and isinstance(value, str):
            value = _decoded(value.encode())
        values[name] = value.get(inner) if inner and value is not None else value
    return values


def _decoded(text: bytes) -> Any:
    return json.loads(text, parse_float=Decimal)
