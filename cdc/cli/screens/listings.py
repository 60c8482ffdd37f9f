"""Short lists that a single command prints: the local servers, and the views of several tables."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.console import RenderableType

from cdc.cli.screens.grid import make_grid

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


def draw_endpoints(addresses: Mapping[str, str]) -> RenderableType:
    """Draw the addresses of the local servers."""
    grid = make_grid("", "")
    for name, value in addresses.items():
        grid.add_row(name, value)
    return grid


def draw_views(rows: Sequence[Mapping[str, Any]]) -> RenderableType:
    """Draw views of several tables, with what they are made of."""
    table = make_grid("view", "made of", "in")
    for row in rows:
        sinks = ", ".join(row["sinks"]) or "its topic only"
        for number, name in enumerate(row["tables"]):
            table.add_row(*((row["view"], name, sinks) if number == 0 else ("", name, "")))
    return table
