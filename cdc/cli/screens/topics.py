"""The screens of `cdc topics`: the topics, and what their audit finds."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType
from rich.text import Text

from cdc.cli.screens.grid import make_grid
from cdc.cli.screens.phrases import with_advice

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from cdc.audit.finding import Audit

SHOWN = 5
"""Most keys on one line."""


def draw_topics(rows: Sequence[Mapping[str, Any]]) -> RenderableType:
    """Draw the topics with their partitions and ends."""
    grid = make_grid("topic", ">partitions", ">end offsets", "")
    for row in rows:
        grid.add_row(
            row["topic"],
            str(row["partitions"]),
            f"{sum(row['end_offsets']):,}",
            "created" if row["created"] else "",
        )
    return grid


def draw_audits(results: Sequence[Audit]) -> RenderableType:
    """Draw the results of `cdc topics audit`, and its findings."""
    grid = make_grid("table", ">records", ">keys", ">compaction saves", ">dirty", "")
    for result in results:
        verdict = (
            Text("can't be replayed", "red")
            if not result.replayable
            else Text("replayable", "green")
        )
        grid.add_row(
            result.table,
            f"{result.records:,}",
            f"{result.keys:,}",
            f"{result.saved:,}",
            f"{result.dirty_ratio:.0%}",
            verdict,
        )
    findings = [
        Text(
            f"{result.table}: {with_advice(flaw.what + _list_keys(flaw.keys), flaw.hint)}"
            f" ({finding.code})",
            "red" if flaw.defect else "yellow",
        )
        for result in results
        for flaw, finding in zip(result.flaws, result.findings, strict=True)
    ]
    return Group(grid, *findings)


def _list_keys(keys: Sequence[str]) -> str:
    more = " and more" if len(keys) > SHOWN else ""
    return f": {', '.join(keys[:SHOWN])}{more}" if keys else ""
