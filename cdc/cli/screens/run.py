"""The screen of `cdc run`: a line per sink, and what the sinks wait for."""

from __future__ import annotations

import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from cdc.cli.screens.grid import make_grid
from cdc.cli.screens.phrases import with_advice, with_since
from cdc.model.wording import UNKNOWN, clock, duration

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from cdc.apply.progress import Progress

OCCASIONALLY_S = 10.0
"""Seconds between two lines about the same sink, where only its numbers change and output is no
terminal.
"""
HUNG_S = 10.0
"""Seconds after which a measurement counts as unknown."""
COLOURS = {
    "running": "green",
    "caught up": "green",
    "paused": "yellow",
    "stopped": "dim",
    "waiting": "yellow",
    "failed": "red",
}


def draw_progress(sinks: Sequence[Progress]) -> RenderableType:
    """Draw one line per sink, as `cdc run` shows it on a terminal, and what the sinks wait for."""
    grid = make_grid("sink", "state", ">changes", ">per s", ">waiting", ">behind for")
    for sink in sinks:
        state = Text(sink.state, COLOURS.get(sink.state, ""))
        grid.add_row(
            sink.sink,
            state,
            f"{sink.applied.rows:,}",
            f"{sink.rows_per_s:,.0f}",
            waiting_text(sink),
            _behind(sink),
        )
    return Group(grid, *(Text(trouble, "yellow") for sink in sinks for trouble in _troubles(sink)))


def waiting_text(sink: Progress) -> str:
    measured = sink.lag_records is not None and sink.looked_s < HUNG_S
    return f"{sink.lag_records:,}" if measured else UNKNOWN


def _behind(sink: Progress) -> str:
    if sink.lag_seconds is None or sink.looked_s >= HUNG_S:
        return UNKNOWN
    return duration(sink.lag_seconds) if sink.lag_records else "-"


def _troubles(sink: Progress) -> Iterator[str]:
    """Say what a sink and its tables wait for, and since when."""
    if sink.looked_s >= HUNG_S and sink.state == "running":
        yield f"{sink.sink} hasn't answered for {duration(sink.looked_s)}"
    if sink.error:
        yield with_since(
            f"{sink.sink}: {with_advice(sink.error, sink.hint or '')}", sink.state_since
        )
    for table, (message, hint) in sink.aside.items():
        yield with_since(
            f"{sink.sink}: {table} waits: {with_advice(message, hint)}",
            sink.aside_since.get(table),
        )


@contextmanager
def show_progress(
    console: Console, *, quiet: bool
) -> Iterator[Callable[[Sequence[Progress]], None]]:
    """Show the progress of all sinks: a live table on a terminal, elsewhere a dated line for each
    change.
    """
    if quiet:
        yield lambda _: None
    elif console.is_terminal:
        with Live(console=console, refresh_per_second=4) as screen:
            yield lambda sinks: screen.update(draw_progress(sinks))
    else:
        progress_log = ProgressLog()

        def show(sinks: Sequence[Progress]) -> None:
            for line in progress_log.lines(sinks, time.time()):
                console.print(line, highlight=False, markup=False, soft_wrap=True)

        yield show


class ProgressLog:
    """Chooses lines for a log: a new state or error at once, numbers every ten seconds at most."""

    def __init__(self) -> None:
        self._shown: dict[str, tuple[Any, Any, float]] = {}

    def lines(self, sinks: Sequence[Progress], now: float) -> Iterator[str]:
        """Yield the lines that are due at `now`, Unix seconds. Called at every tick of `cdc
        run`.
        """
        for sink in sinks:
            state = (sink.state, sink.error, tuple(sink.aside.items()), sink.looked_s >= HUNG_S)
            numbers = (sink.applied.rows, waiting_text(sink))
            shown_state, shown_numbers, shown_at = self._shown.get(sink.sink, (None, None, 0.0))
            if state != shown_state or (
                numbers != shown_numbers and now - shown_at >= OCCASIONALLY_S
            ):
                self._shown[sink.sink] = state, numbers, now
                yield f"{clock(now)} {_line(sink)}"
                yield from (
                    f"{clock(now)} {trouble}"
                    for trouble in (_troubles(sink) if state != shown_state else ())
                )


def _line(sink: Progress) -> str:
    behind = "" if _behind(sink) in (UNKNOWN, "-") else f" for {_behind(sink)}"
    applied = f"{sink.applied.rows:,} changes applied, {sink.rows_per_s:,.0f}/s"
    return f"{sink.sink} {sink.state}: {applied}; waiting: {waiting_text(sink)}{behind}"
