"""The screens of `cdc rebuild`: the phases of a build, and the generations of views."""

from __future__ import annotations

import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from rich.console import Console, RenderableType
from rich.status import Status as Spinner

from cdc.cli.screens.grid import make_grid

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from cdc.generations.registry import GenerationBuild

SILENT_S = 4.0
"""Seconds between two progress lines of a rebuild where output is no terminal."""


def draw_generations(rows: Sequence[Mapping[str, Any]]) -> RenderableType:
    """Draw the generations of each view: the live one, the others, and why they are there."""
    grid = make_grid("sink", "table", "live", "beside", "")
    for row in rows:
        live, *other_generations = row["generations"] or [""]
        grid.add_row(
            row["sink"],
            row["table"],
            live or "first",
            ", ".join(other_generations),
            row["phase"] or "",
        )
    return grid


@contextmanager
def show_build(console: Console, *, quiet: bool) -> Iterator[Callable[[GenerationBuild], None]]:
    """Show the phases of a rebuild and its progress: a spinner on a terminal, elsewhere a line
    every few seconds.
    """
    if quiet:
        yield lambda _: None
        return
    with Spinner("", console=console) as status:
        phases: list[str] = []
        printed_at = 0.0

        def show(build: GenerationBuild) -> None:
            nonlocal printed_at
            if build.phase not in phases:
                phases.append(build.phase)
                console.print(f"{build.sink}: {build.phase}", highlight=False)
            remaining = (
                f", {build.remaining_s:.0f} s left"
                if build.remaining_s is not None and build.phase == "replay"
                else ""
            )
            counts = (
                f"{build.done:,} of {build.total:,} records, {build.rows_per_s:,.0f}/s{remaining}"
            )
            line = f"{build.sink}: {build.phase} {counts}"
            status.update(line)
            if not console.is_terminal and time.monotonic() > printed_at + SILENT_S:
                printed_at = time.monotonic()
                console.print(line, highlight=False)

        yield show
