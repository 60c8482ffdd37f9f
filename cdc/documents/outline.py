"""A view and the state that it needs, as plain data to show, in the words of the pipeline file."""

from collections.abc import Sequence
from typing import Any

from cdc.config.view_settings import AnyView, IncludeSettings
from cdc.documents.plan import Node, StatePlan, View

UNSHOWN = {"root", "table", "include", "show", "clock", "alerts", "to"}


def outline(view: View, settings: AnyView) -> dict[str, Any]:
    """Describe a view as a tree of its tables. What a place doesn't have is left out."""
    place = {
        "key": list(view.keyed.key),
        **_place(view.root, settings),
        "clock": view.clock,
        "alerts": view.sends_once,
    }
    return {"view": view.name, **{name: value for name, value in place.items() if value}}


def _place(node: Node, settings: AnyView | IncludeSettings) -> dict[str, Any]:
    place = {
        "table": node.table.qualified,
        **settings.model_dump(mode="json", exclude=UNSHOWN, exclude_defaults=True),
        "limit": node.limit if node.many and node.shows else None,
        "columns": list(node.columns),
        "include": {
            child.field: _place(child, settings.include[child.field])
            for child in node.children
            if child.field in settings.include
        },
    }
    return {name: value for name, value in place.items() if value}


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
