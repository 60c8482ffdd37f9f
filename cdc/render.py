"""What the command line shows, from plain data: tables and lines that fit 80 columns."""

from __future__ import annotations

import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from rich.console import Console, Group, RenderableType
from rich.filesize import decimal
from rich.live import Live
from rich.status import Status as Spinner
from rich.table import Table as Grid
from rich.text import Text

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from cdc.change import Progress
    from cdc.comparison import Comparison
    from cdc.finding import Audit
    from cdc.generations import Building
    from cdc.held import Held
    from cdc.status import Sink, Status

OCCASIONALLY_S = 10.0
SHOWN = 5
"""Keys on one line."""
WATCHED = {
    "comparison": "Table definitions are compared while cdc run runs: there are no event triggers.",
    "nothing": "Nothing notes how tables change their definitions. Next: cdc -p FILE migrate.",
}
VERDICTS = {"equal": "green", "differs": "red", "undecided": "yellow"}
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
            f"{one.applied.rows:,}",
            f"{one.rows_per_s:,.0f}",
            f"{one.lag_records:,}",
            f"{one.lag_seconds:.1f}",
        )
    troubles = [Text(f"{one.sink}: {one.error}", "yellow") for one in sinks if one.error]
    aside = [
        Text(f"{one.sink}: {table}: {what} Next: {hint}.", "yellow")
        for one in sinks
        for table, (what, hint) in one.aside.items()
    ]
    return Group(grid, *troubles, *aside)


def generations(listed: Sequence[Mapping[str, Any]]) -> RenderableType:
    grid = _grid("sink", "table", "live", "beside", "")
    for one in listed:
        live, *others = one["generations"] or [""]
        grid.add_row(one["sink"], one["table"], live or "first", ", ".join(others), one["phase"] or "")
    return grid


@contextmanager
def building(console: Console, *, quiet: bool) -> Iterator[Callable[[Building], None]]:
    """A line for each phase of a rebuild, with how far it is."""
    if quiet:
        yield lambda _: None
        return
    with Spinner("", console=console) as status:
        seen: list[str] = []

        def show(build: Building) -> None:
            if build.phase not in seen:
                seen.append(build.phase)
                console.print(f"{build.sink}: {build.phase}", highlight=False)
            left = f", {build.left_s:.0f} s left" if build.left_s is not None and build.phase == "replay" else ""
            done = f"{build.done:,} of {build.total:,} records, {build.rows_per_s:,.0f}/s{left}"
            status.update(f"{build.sink}: {build.phase} {done}")

        yield show


@contextmanager
def live(console: Console, *, quiet: bool) -> Iterator[Callable[[Sequence[Progress]], None]]:
    """One line per sink: kept up to date on a terminal, every few seconds and at each change of state elsewhere."""
    if quiet:
        yield lambda _: None
    elif console.is_terminal:
        with Live(console=console, refresh_per_second=4) as screen:
            yield lambda sinks: screen.update(progress(sinks))
    else:
        yield _occasionally(lambda sinks: console.print(progress(sinks)))


def _occasionally(show: Callable[[Sequence[Progress]], None]) -> Callable[[Sequence[Progress]], None]:
    last: list[Any] = [0.0, None]

    def maybe(sinks: Sequence[Progress]) -> None:
        states = [one.state for one in sinks]
        if states != last[1] or time.monotonic() - last[0] > OCCASIONALLY_S:
            last[:] = [time.monotonic(), states]
            show(sinks)

    return maybe


def quarantine(found: Sequence[Held]) -> RenderableType:
    grid = _grid("place", "row", "since", "reason")
    for one in found:
        grid.add_row(one.entry.place, one.entry.id or "?", _ago(one.at), one.reason)
    return grid


def comparisons(found: Sequence[Comparison]) -> RenderableType:
    grid = _grid("table", "sink", ">source", ">view", ">missing", ">extra", ">different", "")
    for one in found:
        counts = (one.source_rows, one.view_rows, one.missing, one.extra, one.different)
        grid.add_row(one.table, one.sink, *(f"{count:,}" for count in counts), _verdict(one))
    samples = [
        Text(f"{one.table} in {one.sink}: {d.kind} {d.id}" + (f", column {d.column}" if d.column else ""))
        for one in found
        for d in one.sample
    ]
    return Group(grid, *samples)


def _verdict(one: Comparison) -> Text:
    """What isn't decided is said of a view that differs as well."""
    undecided = f"{one.undecided:,} undecided" if one.undecided else ""
    words = {"equal": "equal", "undecided": undecided, "differs": ", ".join(filter(None, ("differs", undecided)))}
    return Text(words[one.verdict], VERDICTS[one.verdict])


def audits(found: Sequence[Audit]) -> RenderableType:
    grid = _grid("table", ">records", ">keys", ">compaction saves", ">dirty", "")
    for one in found:
        verdict = Text("can't be replayed", "red") if not one.replayable else Text("replayable", "green")
        grid.add_row(
            one.table, f"{one.records:,}", f"{one.keys:,}", f"{one.saved:,}", f"{one.dirty_ratio:.0%}", verdict
        )
    told = [
        Text(
            f"{audit.table}: {one.what}{_named(one.keys)}. Next: {one.hint}.",
            "red" if one.defect else "yellow",
        )
        for audit in found
        for one in audit.findings
    ]
    return Group(grid, *told)


def _named(keys: Sequence[str]) -> str:
    more = " and more" if len(keys) > SHOWN else ""
    return f": {', '.join(keys[:SHOWN])}{more}" if keys else ""


def status(found: Status, slow: str) -> RenderableType:
    """The SRE's one screen: what is slow and what to do, then each hop from Postgres to the views."""
    views = _grid("table", "sink", ">lag, records", ">lag, s", ">rows", ">last change")
    for sink in found.sinks:
        for view in sink.views:
            views.add_row(
                view.table,
                sink.name,
                "?" if view.lag_records is None else f"{view.lag_records:,}",
                "?" if view.lag_seconds is None else f"{view.lag_seconds:.1f}",
                f"{view.rows:,}",
                _ago(view.at),
            )
    problems = [Text(f"{one.part}: {one.message} hint: {one.hint}", "red") for one in found.problems]
    troubles = [Text(trouble, "yellow") for sink in found.sinks for trouble in _troubles(sink)]
    watch = [Text(WATCHED[found.definitions], "yellow")] if found.definitions in WATCHED else []
    return Group(Text(slow, "bold"), Text(), _hops(found), Text(), views, *watch, *troubles, *problems)


def _troubles(sink: Sink) -> Iterator[str]:
    """What makes single tables of a sink less than whole."""
    for view in sink.views:
        if view.quarantined:
            count = f"{view.quarantined} record{'s' if view.quarantined > 1 else ''}"
            yield f"{view.table} in {sink.name} is degraded: {count} in quarantine. Next: cdc -p FILE quarantine list."
        if view.problem:
            yield f"{view.table} in {sink.name} has stopped: {view.problem} Next: {view.hint}."
        for hole in view.holes:
            yield f"The log of changes of {view.table} in {sink.name} may lack superseded records: {hole}."
    for table, (what, hint) in sink.aside.items():
        yield f"{table} in {sink.name} waits: {what} Next: {hint}."


def _account(sink: Sink) -> str:
    """Every record that `cdc run` has read, and what became of it."""
    if not (done := sink.applied):
        return ""
    parts = {"applied": done.rows, "folded": done.folded, "stale": done.stale, "quarantined": done.quarantined}
    return f"{done.read:,} read = " + " + ".join(f"{count:,} {name}" for name, count in parts.items())


def _hops(found: Status) -> RenderableType:
    grid = _grid("hop", "state", "")
    if slot := found.slot:
        bytes_ = f"{_size(slot.lag_bytes)} not yet confirmed, {_size(slot.retained_bytes)} of log kept"
        grid.add_row("slot", "active" if slot.active else Text("not read", "red"), f"{bytes_}, {slot.wal_status}")
    else:
        grid.add_row("slot", Text("?", "yellow"), "not known")
    if connector := found.connector:
        colour = COLOURS["running" if connector.state == "RUNNING" else "failed"]
        tasks = ", ".join(connector.tasks) or "none"
        grid.add_row(
            "connector", Text(connector.state.lower(), colour), f"task {tasks.lower()} {connector.trace or ''}"
        )
    if beat := found.heartbeat:
        grid.add_row(
            "heartbeat", "late" if beat.late else "beats", f"{beat.age_s:.1f} s ago, {beat.delay_s:.3f} s under way"
        )
    for sink in found.sinks:
        told = Text(sink.state, COLOURS.get(sink.state, "yellow"))
        grid.add_row(sink.name, told, sink.error or f"{sink.rows_per_s:,.0f} rows/s {_account(sink)}".rstrip())
    return grid


def _size(count: int | None) -> str:
    return "?" if count is None else decimal(count)


def _ago(at: float | None) -> str:
    return "never" if at is None else f"{max(0.0, time.time() - at):,.0f} s ago"


def _grid(*headings: str) -> Grid:
    """A table without lines; a heading that begins with > is set to the right."""
    grid = Grid(box=None, pad_edge=False, show_header=any(headings), header_style="bold")
    for heading in headings:
        right = heading.startswith(">")
        grid.add_column(heading.removeprefix(">"), justify="right" if right else "left", no_wrap=right, overflow="fold")
    return grid
