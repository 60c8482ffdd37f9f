"""The screen of `cdc status`: problems with the command to run, then each hop, then each view.

What isn't known is shown as unknown.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.filesize import decimal
from rich.text import Text

from cdc.apply.progress import WORKING
from cdc.cli.console import call
from cdc.cli.screens.grid import make_grid
from cdc.cli.screens.phrases import age, with_since
from cdc.cli.screens.run import COLOURS
from cdc.model.wording import UNKNOWN, duration, since_text

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from cdc.observe.status import Problem, SinkStatus, Status, ViewStatus

LISTED = 20
"""Most problems on one screen."""
WATCHED = {
    "comparison": "Table definitions are compared while cdc run runs: there are no event triggers.",
}
ENDED = {"caught up": "ended, caught up", "stopped": "ended"}


def draw_status(snapshot: Status, verdict: str, lines: Sequence[str]) -> RenderableType:
    """Draw the screen of `cdc status`: problems with the command to run, then each hop, then each
    view.

    `lines`: a sentence for each problem, or the one that says that there is none.
    """
    views = make_grid("table", "sink", ">waiting", ">behind for", ">changes", ">last change")
    for sink in snapshot.sinks:
        for view in sink.views:
            measured = view.changes is not None
            views.add_row(
                view.table,
                sink.name,
                UNKNOWN if view.lag_records is None else f"{view.lag_records:,}",
                _view_lag(view),
                f"{view.changes:,}" if measured else UNKNOWN,
                age(view.at) if measured else UNKNOWN,
            )
    colour = {"ok": "green", "degraded": "yellow"}.get(verdict, "red")
    first = Text.assemble(
        (f"{verdict}: ", f"bold {colour}"), (_sentence(snapshot.problems[:1], lines[0]), "bold")
    )
    problems = [
        Text(_sentence([problem], line), "red" if problem.severity == "down" else "yellow")
        for problem, line in zip(snapshot.problems[1:LISTED], lines[1:LISTED], strict=False)
    ]
    more = (
        [Text(f"and {len(lines) - LISTED} more: --json has all of them")]
        if len(lines) > LISTED
        else []
    )
    watch = (
        [Text(WATCHED[snapshot.definitions], "yellow")] if snapshot.definitions in WATCHED else []
    )
    return Group(
        first, *problems, *more, Text(), _hops(snapshot), Text(), views, *watch, *_holes(snapshot)
    )


def _view_lag(view: ViewStatus) -> str:
    if view.lag_seconds is None:
        return UNKNOWN
    return duration(view.lag_seconds) if view.lag_seconds else "-"


def _sentence(problems: Sequence[Problem], line: str) -> str:
    """Complete the sentence of a problem: its commands, and since when it has been there."""
    return with_since(call.complete_commands(line), problems[0].since if problems else None)


def _holes(snapshot: Status) -> Iterator[Text]:
    for sink in snapshot.sinks:
        for view in sink.views:
            for hole in view.holes:
                text = f"The log of changes of {view.table} in {sink.name} may lack superseded records: {hole}."
                yield Text(text, "yellow")


def _account(sink: SinkStatus) -> str:
    """Balance the records that `cdc run` has read against what became of them."""
    if not (counts := sink.applied):
        return ""
    parts = {
        "applied": counts.rows,
        "folded": counts.folded,
        "stale": counts.stale,
        "quarantined": counts.quarantined,
    }
    return f"{counts.read:,} read = " + " + ".join(
        f"{count:,} {name}" for name, count in parts.items()
    )


def _hops(snapshot: Status) -> RenderableType:
    grid = make_grid("hop", "state", "")
    unread = {problem.part for problem in snapshot.problems}
    if slot := snapshot.slot:
        bytes_ = (
            f"{_size(slot.lag_bytes)} not yet confirmed, {_size(slot.retained_bytes)} of log kept"
        )
        grid.add_row(
            "slot",
            "active" if slot.active else Text("not read", "red"),
            f"{bytes_}, {slot.wal_status}",
        )
    else:
        grid.add_row("slot", Text(UNKNOWN if "postgres" in unread else "missing", "red"))
    if connector := snapshot.connector:
        tasks = ", ".join(connector.tasks) or "none"
        grid.add_row(
            "connector",
            Text(connector.state, "" if connector.state == "RUNNING" else "red"),
            f"task {tasks}",
        )
    else:
        grid.add_row("connector", Text(UNKNOWN, "red"))
    if heartbeat := snapshot.heartbeat:
        ages = f"{heartbeat.age_s:.1f} s ago, {heartbeat.delay_s:.3f} s under way"
        grid.add_row("heartbeat", "late" if heartbeat.late else "beats", ages)
    else:
        grid.add_row("heartbeat", Text(UNKNOWN if "kafka" in unread else "none yet", "red"))
    for sink in snapshot.sinks:
        grid.add_row(
            sink.name,
            Text(ENDED.get(sink.state, sink.state), COLOURS.get(sink.state, "yellow")),
            _activity(sink),
        )
    return grid


def _activity(sink: SinkStatus) -> str:
    """Say what a sink's `cdc run` does: its rate and counts only while it is at work."""
    parts = [since_text(sink.since)]
    if sink.state in WORKING and sink.rows_per_s is not None:
        parts += [f"{sink.rows_per_s:,.0f} changes/s", _account(sink)]
        parts += [f"last restarted for: {sink.restarted}"] if sink.restarted else []
    return ", ".join(filter(None, parts))


def _size(count: int | None) -> str:
    return UNKNOWN if count is None else decimal(count)
