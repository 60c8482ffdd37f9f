"""The screens of `cdc views`: what documents are made of, and what the next run makes again."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType
from rich.text import Text
from rich.tree import Tree

from cdc.cli.screens.grid import make_grid
from cdc.cli.screens.phrases import age
from cdc.config.view_settings import TIME_KINDS

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from cdc.views.state import LateChange


def draw_views(rows: Sequence[Mapping[str, Any]]) -> RenderableType:
    """Draw views of several tables, with what they are made of."""
    table = make_grid("view", "made of", "in")
    for row in rows:
        sinks = ", ".join(row["sinks"]) or "its topic only"
        for number, name in enumerate(row["tables"]):
            table.add_row(*((row["view"], name, sinks) if number == 0 else ("", name, "")))
    waiting = [Text(f"{row['view']} waits: {row['waits']}") for row in rows if row["waits"]]
    return Group(table, *waiting)


def draw_view(described: Mapping[str, Any]) -> RenderableType:
    """Draw a view as a tree of its tables, and what the state keeps of their rows."""
    tree = Tree(Text(_place(described["view"], described)))
    _add_places(tree, described)
    state = make_grid("table in the state", "columns", "indexed by")
    for table in described["state"]:
        indexes = "; ".join(", ".join(index) for index in table["indexes"])
        state.add_row(table["table"], ", ".join(table["columns"]), indexes or "its key only")
    return Group(tree, Text(), state)


def _add_places(tree: Tree, described: Mapping[str, Any]) -> None:
    for name, place in described.get("include", {}).items():
        _add_places(tree.add(Text(_place(name, place))), place)


def _place(name: str, place: Mapping[str, Any]) -> str:
    """Say what a member is made of, on one line."""
    parts = [f"{name}: {'list of ' if place.get('many') else ''}{place['table']}"]
    pairs = place.get("on", {}).items()
    parts += [f"on {' and '.join(f'{left} = {right}' for left, right in pairs)}"] if pairs else []
    parts += _times(place)
    parts += [f"where {place['where']}"] if "where" in place else []
    parts += _pattern(place["pattern"]) if "pattern" in place else []
    parts += [f"by {', '.join(place['order_by'])}"] if "order_by" in place else []
    parts += [f"{place['limit']:,} at most"] if "limit" in place else []
    shown = [place["flatten"]] if "flatten" in place else place.get("columns", [])
    parts += [f"({', '.join(shown)})"] if shown else []
    window = place.get("window", {}).items()
    parts += [f"{'by' if name == 'time' else name} {text}" for name, text in window]
    groups = place.get("group_by", {}).items()
    named = (name if name == text else f"{name} = {text}" for name, text in groups)
    parts += [f"grouped by {' and '.join(named)}"] if groups else []
    numbers = {**place.get("aggregates", {}), **place.get("select", {})}
    parts += [f"{member} = {call_}" for member, call_ in numbers.items()]
    parts += [f"having {place['having']}"] if "having" in place else []
    parts += [f"now() is the latest {place['clock']}"] if "clock" in place else []
    parts += ["each change sent once"] if "alerts" in place else []
    return ", ".join(parts)


def _pattern(pattern: Mapping[str, Any]) -> list[str]:
    """Say which rows complete a pattern."""
    between = "rows" if pattern.get("rows") == "any" else "rows in succession"
    parts = [f"{between} of the same {', '.join(pattern['by'])} by {pattern['order_by']}"]
    for name, step in pattern["steps"].items():
        times = f", {step['times']} times" if "times" in step else ""
        parts.append(f"{name}: {step['where']}{times}")
    parts.append(f"within {pattern['within']}")
    parts += [f"unless {pattern['unless']}"] if "unless" in pattern else []
    return parts


def _times(place: Mapping[str, Any]) -> list[str]:
    """Say which of the joined rows a join in time chooses."""
    parts = []
    for kind in TIME_KINDS:
        for left, right in place.get(kind, {}).items():
            parts.append(f"{kind} {left}: {right}")
    parts += [f"{name} {place[name]}" for name in ("within", "before", "after") if name in place]
    return parts


def draw_late(changes: Sequence[LateChange]) -> RenderableType:
    """Draw changes that came after windows had closed."""
    grid = make_grid("row", "of", "came")
    for change in changes:
        grid.add_row(Text(change.id), Text(change.pane), age(change.at))
    return grid


def draw_views_plan(rows: Mapping[str, Mapping[str, Any]]) -> RenderableType:
    """Draw what the next run makes again, and which views wait."""
    grid = make_grid("", "", "by the next cdc run")
    for name, is_remade in rows["views"].items():
        grid.add_row("view", name, "all documents are made again" if is_remade else "goes on")
    for name, is_remade in rows["tables"].items():
        grid.add_row("table", name, "read again from its topic" if is_remade else "goes on")
    waiting = [Text(f"view {name} waits: {reason}") for name, reason in rows["waiting"].items()]
    return Group(grid, *waiting)
