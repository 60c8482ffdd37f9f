"""The screen of `cdc verify`: the verdict for each view, and a sample of the differences."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.text import Text

from cdc.cli.screens.grid import make_grid
from cdc.cli.screens.phrases import with_advice

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cdc.verify.comparison import Comparison

VERDICTS = {"equal": "green", "differs": "red", "undecided": "yellow"}


def draw_comparisons(results: Sequence[Comparison]) -> RenderableType:
    """Draw the results of `cdc verify`, and a sample of the differences."""
    grid = make_grid("table", "sink", ">source", ">view", ">missing", ">extra", ">different", "")
    for result in results:
        counts = (
            result.source_rows,
            result.view_rows,
            result.missing,
            result.extra,
            result.different,
        )
        grid.add_row(
            result.table, result.sink, *(f"{count:,}" for count in counts), _verdict(result)
        )
    samples = [
        Text(
            f"{result.table} in {result.sink}: {difference.kind} {difference.id}"
            + (f", column {difference.column}" if difference.column else "")
        )
        for result in results
        for difference in result.sample
    ]
    closed = [
        Text(
            f"{result.table} in {result.sink}: {result.closed:,} windows are closed, and weren't compared"
        )
        for result in results
        if result.closed
    ]
    purged = [
        Text(
            f"{result.table} in {result.sink}: {result.purged:,} rows of purged events weren't compared"
        )
        for result in results
        if result.purged
    ]
    waiting = [
        Text(with_advice(f"{result.table} in {result.sink}: {result.problem}", result.hint or ""))
        for result in results
        if result.problem
    ]
    return Group(grid, *samples, *closed, *purged, *waiting)


def _verdict(result: Comparison) -> Text:
    """Say the verdict; undecided rows are counted for a view that differs as well."""
    undecided = f"{result.undecided:,} undecided" if result.undecided else ""
    words = {
        "equal": "equal",
        "undecided": "not compared" if result.problem else undecided,
        "differs": ", ".join(filter(None, ("differs", undecided))),
    }
    return Text(words[result.verdict], VERDICTS[result.verdict])
