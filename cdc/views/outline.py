"""A view and the state that it needs, as plain data to show.

In:  resolved views. Out: dicts and lists for JSON, in the words of the pipeline file.
"""

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from cdc.config.durations import duration_text
from cdc.views.plan import (
    WINDOW_START,
    Aggregate,
    Grouping,
    Node,
    Order,
    Session,
    StatePlan,
    View,
    Window,
)


def outline(view: View) -> dict[str, Any]:
    """Describe a view as a tree of its tables. What a place doesn't have is left out."""
    described: dict[str, Any] = {"view": view.name, **_place(view.root)}
    if view.grouping is not None:
        described |= _groups(view.grouping)
    if view.pattern is not None:
        described.pop("where")
        described["pattern"] = view.pattern.model_dump(mode="json", exclude_defaults=True)
    if view.sliding is not None:
        del described["include"], described["where"]
        described |= view.sliding.model_dump(
            mode="json", include={"where", "group_by", "select", "window"}, exclude_defaults=True
        )
    if view.having:
        described["having"] = view.having.text
    if view.clock:
        described["clock"] = view.clock
    if view.sends_once:
        described["alerts"] = True
    return described


def _groups(grouping: Grouping) -> dict[str, Any]:
    window = grouping.window
    described: dict[str, Any] = {
        "key": [column.name for column in grouping.columns],
        "group_by": {
            column.name: value.text
            for column, value in zip(grouping.columns, grouping.values, strict=False)
        },
        "select": {part.name: _aggregate(part) for part in grouping.aggregates},
    }
    if window is None and grouping.order_by is not None:
        described["order_by"] = grouping.order_by
    if window is not None:
        described["key"].append(WINDOW_START)
        described["window"] = {**_length(window), "time": window.time}
    if grouping.closing is not None and isinstance(window, Window):
        described["window"]["lateness"] = duration_text(grouping.closing.after - window.size)
    return described


def _length(window: Window | Session) -> dict[str, str]:
    if isinstance(window, Session):
        return {"session": duration_text(window.gap)}
    size = duration_text(window.size)
    every = duration_text(window.every)
    length = {"tumbling": size} if size == every else {"hopping": size, "every": every}
    if window.start:
        length["start"] = str(datetime.fromtimestamp(window.start / 1e6, UTC).date())
    return length


def _aggregate(part: Aggregate) -> str:
    call = f"{part.function}({part.argument or '*'})"
    if part.function == "distinct":
        call = f"count(DISTINCT {part.argument})"
    elif part.function == "percentile_disc":
        call = f"percentile_disc({part.fraction}) WITHIN GROUP (ORDER BY {part.argument})"
    return f"{call} FILTER (WHERE {part.filter.text})" if part.filter else call


def _place(node: Node) -> dict[str, Any]:
    pairs = zip(node.join.parent, node.join.child, strict=True) if node.join is not None else ()
    described = {
        "table": node.table.qualified,
        "key": list(node.table.key) if node.join is None else [],
        "on": {left.text: right.text for left, right in pairs},
        **_time(node),
        "many": node.many,
        "where": node.where.text if node.where else None,
        "order_by": [_order(order) for order in node.order_by],
        "limit": node.limit if node.many and node.shows else None,
        "columns": list(node.columns),
        "flatten": node.flatten,
        "aggregates": {part.name: _aggregate(part) for part in node.aggregates},
        "include": {
            child.field: _place(child) for child in node.children if child.presence is None
        },
    }
    return {name: value for name, value in described.items() if value}


def _time(node: Node) -> dict[str, Any]:
    time = node.time
    if time is None:
        return {}
    described: dict[str, Any] = {time.kind: {time.parent: time.child}}
    if time.kind == "during":
        described["before"] = duration_text(time.before or 0)
        described["after"] = duration_text(time.after or 0)
    elif (within := time.after if time.kind == "next" else time.before) is not None:
        described["within"] = duration_text(within)
    return described


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
