"""What the command line shows, from plain data: tables and lines that fit 80 columns."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType
from rich.table import Table as Grid
from rich.text import Text

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from cdc.change import Progress
    from cdc.status import Status
    from cdc.verify import Comparison

OCCASIONALLY_S = 10.0
COLOURS = {"running": "green", "caught up": "green", "stopped": "dim", "waiting": "yellow", "failed": "red"}


def endpoints(found: Mapping[str, str]) -> RenderableType:
    grid = _grid("", "")
    for name, value in found.items():
        grid.add_row(name, value)
    return grid


def topics(listed: Sequence[Mapping[str, Any]]) -> RenderableType:
    grid = _grid("topic", ">partitions", ">end offsets", "")
    for one in listed:
        grid.add_row(
            one["topic"],
            str(one["partitions"]),
            f"{sum(one['end_offsets']):,}",
            "created" if one["created"] else "",
        )
    return grid


def progress(sinks: Sequence[Progress]) -> RenderableType:
    """One line per sink: what `cdc run` shows."""
    grid = _grid("sink", "state", ">rows", ">rows/s", ">lag, records", ">lag, s")
    for one in sinks:
        grid.add_row(
            one.sink,
            Text(one.state, COLOURS.get(one.state, "")),
            f"{one.rows:,}",
            f"{one.rows_per_s:,.0f}",
            f"{one.lag_records:,}",
            f"{one.lag_seconds:.1f}",
        )
    troubles = [Text(f"{one.sink}: {one.error}", "yellow") for one in sinks if one.error]
    return Group(grid, *troubles)


def occasionally(show: Callable[[Sequence[Progress]], None]) -> Callable[[Sequence[Progress]], None]:
    """For logs: show at most every few seconds, and every change of state."""
    last: list[Any] = [0.0, None]

    def maybe(sinks: Sequence[Progress]) -> None:
        states = [one.state for one in sinks]
        if states != last[1] or time.monotonic() - last[0] > OCCASIONALLY_S:
            last[:] = [time.monotonic(), states]
            show(sinks)

    return maybe


def comparisons(found: Sequence[Comparison]) -> RenderableType:
    grid = _grid("table", "sink", ">source", ">view", ">missing", ">extra", ">different", "")
    for one in found:
        verdict = Text("equal", "green") if one.equal else Text("differs", "red")
        counts = (one.source_rows, one.view_rows, one.missing, one.extra, one.different)
        grid.add_row(one.table, one.sink, *(f"{count:,}" for count in counts), verdict)
    samples = [
        Text(f"{one.table} in {one.sink}: {d.kind} {d.id}" + (f", column {d.column}" if d.column else ""))
        for one in found
        for d in one.sample
    ]
    return Group(grid, *samples)


def _grid(*headings: str) -> Grid:
    """A table without lines; a heading that begins with > is set to the right."""
    grid = Grid(box=None, pad_edge=False, show_header=any(headings), header_style="bold")
    for heading in headings:
        right = heading.startswith(">")
        grid.add_column(heading.removeprefix(">"), justify="right" if right else "left", no_wrap=right, overflow="fold")
    return grid


def status(found: Status, slow: str) -> RenderableType:
    """The SRE's one screen."""
    raise NotImplementedError
