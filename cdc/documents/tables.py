"""Views as tables: what sinks apply and `cdc verify` compares, as if they were captured."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from cdc.config.settings import Pipeline
from cdc.config.view_settings import SCHEMA
from cdc.documents.plan import Node, View
from cdc.documents.resolve import resolve, resolve_views
from cdc.documents.sql import clock_setting, document_query
from cdc.errors import SettingsError
from cdc.model.table import Column, Derivation, Shape, Table

NESTED = "jsonb"
"""The type of a member that is made of other tables' rows: its text is JSON in the view's topic."""


def view_table(pipeline: Pipeline, view: View) -> Table:
    """Return the table whose rows are a view's documents."""
    return Table(
        SCHEMA,
        view.name,
        _row_members(view.root)
        if view.grouping is None
        else tuple(Column(name, type_) for name, type_ in view.shown_types.items()),
        view.keyed.key,
        pipeline.view_topic(view.name),
        # The topic may hold documents of an earlier definition, with members of their own.
        reshaped=True,
        derivation=Derivation(
            document_query(view),
            tuple(sorted(view.topics.items())),
            view.sinks,
            clock_setting(view.name) if view.has_clock else None,
            closes=view.grouping is not None and view.grouping.closing is not None,
            events=tuple({node.table for node in view.root.walk() if node.table.events}),
        ),
    )


def _row_members(root: Node) -> tuple[Column, ...]:
    """Return what the document of a row has: its members, and one for each step of a pattern."""
    steps = [
        Column(
            step,
            NESTED,
            shape=Shape(_members(root.earlier[0]), is_object=True, many=len(places) > 1),
        )
        for step, places in root.steps.items()
    ]
    return (*_members(root), *steps)


def _members(node: Node) -> tuple[Column, ...]:
    """Return what the object of a row has: columns, numbers over its children, nested members."""
    return (
        # Its query has them masked already.
        *(replace(column, mask=None) for column in node.shown),
        *(
            Column(part.name, part.result_type(child.table))
            for child in node.children
            for part in child.aggregates
        ),
        *(
            Column(child.field, NESTED, shape=_shape(child))
            for child in node.children
            if child.shows
        ),
    )


def _shape(node: Node) -> Shape:
    members = _members(node)
    if node.flatten is None:
        return Shape(members, is_object=True, many=node.many)
    value = next(column for column in members if column.name == node.flatten)
    if value.shape is None:
        return Shape((value,), is_object=False, many=node.many)
    return replace(value.shape, many=node.many or value.shape.many)


def view_tables(pipeline: Pipeline, captured: Sequence[Table]) -> list[Table]:
    """Return the tables of all views, for the captured tables as they are now. Raises SettingsError."""
    return [view_table(pipeline, view) for view in resolve_views(pipeline, captured)]


Waiting = Mapping[str, list[str]]
"""Views that no longer fit their tables, by name (view.NAME): the reason and a hint."""


def waiting(refused: Mapping[str, SettingsError]) -> dict[str, list[str]]:
    """Say why views wait, see `Waiting`."""
    return {f"{SCHEMA}.{name}": [error.message, error.hint] for name, error in refused.items()}


def with_views(
    pipeline: Pipeline, captured: Sequence[Table], sink: str
) -> tuple[list[Table], Waiting]:
    """Return the tables of a sink: captured ones and views; and the views that wait.

    A view that no longer fits its tables waits, and the other tables go on.
    """
    views, refused = resolve(pipeline, captured)
    tables = [view_table(pipeline, view) for view in views]
    in_sink = {name: error for name, error in refused.items() if sink in pipeline.views[name].to}
    own = [table.for_sink(sink) for table in (*captured, *tables) if table.is_in(sink)]
    return own, waiting(in_sink)
