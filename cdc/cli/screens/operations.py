"""The screen of `cdc operations`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cdc.cli.screens.grid import make_grid
from cdc.model.wording import clock, duration

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import RenderableType

    from cdc.control.operations import Operation


def draw_operations(operations: Sequence[Operation]) -> RenderableType:
    """Draw a line for each operation, the oldest first."""
    grid = make_grid("when", "who", "command", ">took", "result")
    for operation in operations:
        words = [f"{name}={value}" for name, value in operation.arguments.items()]
        grid.add_row(
            clock(operation.at),
            operation.by,
            " ".join([operation.verb, *words]),
            duration(operation.took_s),
            operation.result,
        )
    return grid
