"""Screens of the command line, drawn from plain data: tables that fit 80 columns where names are
short.

No cell is wrapped or cut, so that its content can be copied and searched. What isn't known is shown
as unknown.
"""

from __future__ import annotations

import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from rich.console import Console, Group, RenderableType
from rich.filesize import decimal
from rich.live import Live
from rich.status import Status as Spinner
from rich.text import Text

from cdc.apply.progress import WORKING
from cdc.cli.console import call
from cdc.model.finding import folded, verdict
from cdc.model.wording import UNKNOWN, advice, clock, duration, since_text

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from cdc.apply.progress import Progress
    from cdc.audit.finding import Audit
    from cdc.generations.registry import GenerationBuild
    from cdc.model.finding import Finding
    from cdc.observe.status import SinkStatus, Status, ViewStatus
    from cdc.quarantine.log import QuarantinedRecord
    from cdc.verify.comparison import Comparison

OCCASIONALLY_S = 10.0
"""Seconds between two lines about the same sink, where only its numbers change and output is no
terminal.
"""
SILENT_S = 4.0
"""Seconds between two progress lines of a rebuild where output is no terminal."""
HUNG_S = 10.0
"""Seconds after which a measurement counts as unknown."""
SHOWN = 5
"""Most keys on one line."""
LISTED, LISTED_VIEWS = 6, 12
"""Most findings, and most views, on one screen."""
WATCHED = {
    "comparison": "Table definitions are compared while cdc run runs: there are no event triggers.",
}
COLOURS_OF_VERDICTS = {
    "ok": "green",
    "info": "dim",
    "warning": "yellow",
    "degraded": "yellow",
    "down": "red",
}
VERDICTS = {"equal": "green", "differs": "red", "undecided": "yellow"}
ENDED = {"caught up": "ended, caught up", "stopped": "ended"}
COLOURS = {
    "running": "green",
    "caught up": "green",
    "stopped": "dim",
    "waiting": "yellow",
    "failed": "red",
}


def endpoints(addresses: Mapping[str, str]) -> RenderableType:
    """Draw the addresses of the local servers."""
    grid = _grid("", "")
    for name, value in addresses.items():
        grid.add_row(name, value)
    return grid


def topics(rows: Sequence[Mapping[str, Any]]) -> RenderableType:
    """Draw the topics with their partitions and ends."""
    grid = _grid("topic", ">partitions", ">end offsets", "")
    for row in rows:
        grid.add_row(
            row["topic"],
            str(row["partitions"]),
            f"{sum(row['end_offsets']):,}",
            "created" if row["created"] else "",
        )
    return grid


def views(rows: Sequence[Mapping[str, Any]]) -> RenderableType:
    """Draw views of several tables, with what they are made of."""
    table = _grid("view", "made of", "in")
    for row in rows:
        sinks = ", ".join(row["sinks"]) or "its topic only"
        for number, name in enumerate(row["tables"]):
            table.add_row(*((row["view"], name, sinks) if number == 0 else ("", name, "")))
    return table


def progress(sinks: Sequence[Progress]) -> RenderableType:
    """Draw one line per sink, as `cdc run` shows it on a terminal, and what the sinks wait for."""
    grid = _grid("sink", "state", ">changes", ">per s", ">waiting", ">behind for")
    for sink in sinks:
        state = Text(sink.state, COLOURS.get(sink.state, ""))
        grid.add_row(
            sink.sink,
            state,
            f"{sink.applied.rows:,}",
            f"{sink.rows_per_s:,.0f}",
            _waiting(sink),
            _behind(sink),
        )
    return Group(grid, *(Text(trouble, "yellow") for sink in sinks for trouble in _troubles(sink)))


def _waiting(sink: Progress) -> str:
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
        yield _with_since(
            f"{sink.sink}: {_with_advice(sink.error, sink.hint or '')}", sink.state_since
        )
    for table, (message, hint) in sink.aside.items():
        yield _with_since(
            f"{sink.sink}: {table} waits: {_with_advice(message, hint)}",
            sink.aside_since.get(table),
        )


def _with_advice(message: str, hint: str) -> str:
    return advice(message, call.complete_commands(hint)) if hint else message


def _with_since(text: str, moment: float | None) -> str:
    return f"{text} ({since_text(moment)})" if moment else text


def generations(rows: Sequence[Mapping[str, Any]]) -> RenderableType:
    """Draw the generations of each view: the live one, the others, and why they are there."""
    grid = _grid("sink", "table", "live", "beside", "")
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
def building(console: Console, *, quiet: bool) -> Iterator[Callable[[GenerationBuild], None]]:
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


@contextmanager
def live(console: Console, *, quiet: bool) -> Iterator[Callable[[Sequence[Progress]], None]]:
    """Show the progress of all sinks: a live table on a terminal, elsewhere a dated line for each
    change.
    """
    if quiet:
        yield lambda _: None
    elif console.is_terminal:
        with Live(console=console, refresh_per_second=4) as screen:
            yield lambda sinks: screen.update(progress(sinks))
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
            numbers = (sink.applied.rows, _waiting(sink))
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
    return f"{sink.sink} {sink.state}: {applied}; waiting: {_waiting(sink)}{behind}"


def quarantine(records: Sequence[QuarantinedRecord]) -> RenderableType:
    """Draw the records in quarantine, without row values."""
    grid = _grid("place", "row", "since", "reason")
    for record in records:
        grid.add_row(record.entry.place, record.entry.id or UNKNOWN, _age(record.at), record.reason)
    return grid


def comparisons(results: Sequence[Comparison]) -> RenderableType:
    """Draw the results of `cdc verify`, and a sample of the differences."""
    grid = _grid("table", "sink", ">source", ">view", ">missing", ">extra", ">different", "")
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
    return Group(grid, *samples)


def _verdict(result: Comparison) -> Text:
    """Say the verdict; undecided rows are counted for a view that differs as well."""
    undecided = f"{result.undecided:,} undecided" if result.undecided else ""
    words = {
        "equal": "equal",
        "undecided": undecided,
        "differs": ", ".join(filter(None, ("differs", undecided))),
    }
    return Text(words[result.verdict], VERDICTS[result.verdict])


def audits(results: Sequence[Audit]) -> RenderableType:
    """Draw the results of `cdc topics audit`, and its findings."""
    grid = _grid("table", ">records", ">keys", ">compaction saves", ">dirty", "")
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
            f"{result.table}: {_with_advice(finding.what + _list_keys(finding.keys), finding.hint)}",
            "red" if finding.defect else "yellow",
        )
        for result in results
        for finding in result.findings
    ]
    return Group(grid, *findings)


def _list_keys(keys: Sequence[str]) -> str:
    more = " and more" if len(keys) > SHOWN else ""
    return f": {', '.join(keys[:SHOWN])}{more}" if keys else ""


def status(snapshot: Status, nothing: str) -> RenderableType:
    """Draw the screen of `cdc status`: findings with the command to run, then each hop, then each
    view. Of many findings and of many views it shows the worst.

    `nothing`: the sentence that stands first where there is no finding.
    """
    return Group(
        *_findings(snapshot.findings, nothing),
        Text(),
        _hops(snapshot),
        Text(),
        *_views(snapshot),
        *_watch(snapshot),
        *_holes(snapshot),
    )


def _findings(findings: Sequence[Finding], nothing: str) -> Iterator[Text]:
    """Draw the verdict, and each finding with its code; findings that are alike on one line."""
    judgement = verdict(findings)
    heading = (f"{judgement}: ", f"bold {COLOURS_OF_VERDICTS.get(judgement, '')}")
    if not findings:
        yield Text.assemble(heading, (call.complete_commands(nothing), "bold"))
    groups = folded(findings)
    for number, finding in enumerate(groups[:LISTED]):
        line = (_finding(finding), "bold" if number == 0 else COLOURS_OF_VERDICTS[finding.severity])
        yield Text.assemble(heading, line) if number == 0 else Text.assemble(line)
    if len(groups) > LISTED:
        yield Text(f"and {len(groups) - LISTED} more: --json has all of them")


def doctor(findings: Sequence[Finding]) -> RenderableType:
    """Draw all findings of `cdc doctor`: each with its consequence and the command to run next."""
    judgement = verdict(findings)
    lines = [Text(judgement, f"bold {COLOURS_OF_VERDICTS[judgement]}")]
    for finding in findings:
        severity = (f"{finding.severity:<9}", COLOURS_OF_VERDICTS[finding.severity])
        lines += [
            Text.assemble(severity, f"{finding.message} ({finding.code})"),
            Text(f"{'':9}{finding.why}", "dim"),
            Text(f"{'':9}{call.complete_commands(finding.fix)}"),
        ]
    return Group(*lines)


def _finding(finding: Finding) -> str:
    """Say a finding, the command to run next, its code, and since when it has been there."""
    since = f", {since_text(finding.since)}" if finding.since else ""
    return f"{call.complete_commands(finding.sentence)} ({finding.code}{since})"


def _views(snapshot: Status) -> Iterator[RenderableType]:
    grid = _grid("table", "sink", ">waiting", ">behind for", ">changes", ">last change")
    views = [(sink, view) for sink in snapshot.sinks for view in sink.views]
    shown = views
    if len(views) > LISTED_VIEWS:
        shown = sorted(views, key=lambda pair: _rank(*pair), reverse=True)[:LISTED_VIEWS]
    for sink, view in shown:
        measured = view.changes is not None
        grid.add_row(
            view.table,
            sink.name,
            UNKNOWN if view.lag_records is None else f"{view.lag_records:,}",
            _view_lag(view),
            f"{view.changes:,}" if measured else UNKNOWN,
            _age(view.at) if measured else UNKNOWN,
        )
    yield grid
    if len(views) > len(shown):
        yield Text(f"and {len(views) - len(shown)} more, none worse: --json has all of them")


def _rank(sink: SinkStatus, view: ViewStatus) -> tuple[bool, bool, float, int]:
    """Rank a view: the worse, the greater."""
    troubled = bool(view.problem or view.quarantined or view.table in sink.aside)
    unknown = view.lag_seconds is None
    return troubled, unknown, view.lag_seconds or 0.0, view.lag_records or 0


def _watch(snapshot: Status) -> Iterator[Text]:
    if snapshot.definitions in WATCHED:
        yield Text(WATCHED[snapshot.definitions], "yellow")


def _view_lag(view: ViewStatus) -> str:
    if view.lag_seconds is None:
        return UNKNOWN
    return duration(view.lag_seconds) if view.lag_seconds else "-"


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
    grid = _grid("hop", "state", "")
    unread = {finding.code for finding in snapshot.findings}
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
        grid.add_row("slot", Text(UNKNOWN if "source-unreachable" in unread else "missing", "red"))
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
        grid.add_row(
            "heartbeat", Text(UNKNOWN if "kafka-unreachable" in unread else "none yet", "red")
        )
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


def _age(moment: float | None) -> str:
    return "never" if moment is None else f"{duration(max(0.0, time.time() - moment))} ago"


class Grid:
    """A table without lines: columns as wide as their widest cell, no spaces at the end of a
    line.
    """

    def __init__(self, headings: Sequence[str]) -> None:
        self._right = [heading.startswith(">") for heading in headings]
        self._rows: list[list[Text]] = []
        if any(headings):
            self.add_row(*(Text(heading.removeprefix(">"), "bold") for heading in headings))

    def add_row(self, *cells: str | Text) -> None:
        """Add a row; missing cells are empty."""
        row = [cell if isinstance(cell, Text) else Text(cell) for cell in cells]
        self._rows.append(row + [Text()] * (len(self._right) - len(row)))

    def __rich__(self) -> Text:
        widths = [max(cell.cell_len for cell in column) for column in zip(*self._rows, strict=True)]
        return Text("\n").join(self._line(row, widths) for row in self._rows)

    def _line(self, row: Sequence[Text], widths: Sequence[int]) -> Text:
        line = Text()
        for cell, width, right in zip(row, widths, self._right, strict=True):
            room = " " * (width - cell.cell_len)
            line.append_text(
                Text.assemble(room, cell, " ") if right else Text.assemble(cell, room, " ")
            )
        line.rstrip()
        return line


def _grid(*headings: str) -> Grid:
    """Make a table; a heading that begins with > aligns its column to the right."""
    return Grid(headings)
