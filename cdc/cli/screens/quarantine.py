"""The screen of `cdc quarantine`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import RenderableType

from cdc.cli.screens.grid import make_grid
from cdc.cli.screens.phrases import age
from cdc.model.wording import UNKNOWN

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cdc.quarantine.log import QuarantinedRecord


def draw_quarantine(records: Sequence[QuarantinedRecord]) -> RenderableType:
    """Draw the records in quarantine, without row values."""
    grid = make_grid("place", "row", "since", "reason")
    for record in records:
        grid.add_row(record.entry.place, record.entry.id or UNKNOWN, age(record.at), record.reason)
    return grid
