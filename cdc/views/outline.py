"""A view and the state that it needs, as plain data to show; and what a changed file makes again.

In:  resolved views. Out: dicts and lists for JSON, in the words of the pipeline file.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from cdc.sink.contract import positions
from cdc.views.plan import Node, Order, StatePlan, View
from cdc.views.state import StateSink


def outline(view: View) -> dict[str, Any]:
    """Describe a view as a tree of its tables. What a place doesn't have is left out."""
    return {"view": view.name, **_place(view.root)}


def _place(node: Node) -> dict[str, Any]:
    pairs = zip(node.join.parent, node.join.child, strict=True) if node.join is not None else ()
    described = {
        "table": node.table.qualified,
        "key": list(node.table.key) if node.join is None else [],
        "on": {left.text: right.text for left, right in pairs},
        "many": node.many,
        "where": node.where.text if node.where else None,
        "order_by": [_order(order) for order in node.order_by],
        "limit": node.limit if node.many and node.shows else None,
        "columns": list(node.columns),
        "flatten": node.flatten,
        "aggregates": {
            part.name: f"{part.function}({part.argument or '*'})" for part in node.aggregates
        },
        "include": {child.field: _place(child) for child in node.children},
    }
    return {name: value for name, value in described.items() if value}


def _order(order: Order) -> str:
    return f"{order.column} desc" if order.descending else order.column


def state_outline(plan: StatePlan, names: Sequence[str]) -> list[dict[str, Any]]:
    """Describe what the state keeps of these tables, for all views of the file together."""
    return [
        {
            "table": table.qualified,
            "columns": [column.name for column in table.columns],
            "indexes": [[value.text for value in values] for values in plan.slots[table.qualified]],
        }
        for table in plan.tables
        if table.qualified in names
    ]


def rebuilds(
    sink: StateSink, needs: Mapping[str, str], empty: Collection[str]
) -> tuple[dict[str, bool], dict[str, bool]]:
    """Say what the next run makes again: by table, whether its topic is read again from its start;
    by view, whether all its documents are made again. Else only changed ones are.

    `needs`: by table of the sink's plan, see `engine.needs`. `empty`: topics that never had a record.
    They give no batch and so no position, and nothing in them can be read again.
    """
    sink.needs = needs
    stored = positions(sink, sink.plan.tables)
    tables = {
        table.qualified: stored[table.qualified] is None and table.topic not in empty
        for table in sink.plan.tables
    }
    return tables, {
        view.name: any(tables[name] for name in view.topics) for view in sink.plan.views
    }
