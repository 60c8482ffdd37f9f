"""The screen of `cdc up`: the addresses of the local servers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import RenderableType

from cdc.cli.screens.grid import make_grid

if TYPE_CHECKING:
    from collections.abc import Mapping


def draw_endpoints(addresses: Mapping[str, str]) -> RenderableType:
    """Draw the addresses of the local servers."""
    grid = make_grid("", "")
    for name, value in addresses.items():
        grid.add_row(name, value)
    return grid
