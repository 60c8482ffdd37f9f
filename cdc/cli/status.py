"""Verbs `cdc status`, what is wrong and the state of each hop, once or again and again; and `cdc doctor`, whether
every server is fit for the pipeline, before `register` and after.
"""

import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console, Group, RenderableType
from rich.filesize import decimal
from rich.live import Live
from rich.text import Text

from cdc.apply.progress import WORKING
from cdc.cli.console import Json, answer, call, out
from cdc.cli.health import check_health, checking_health
from cdc.cli.run import COLOURS
from cdc.cli.screen import Grid, age, with_advice, with_since
from cdc.errors import SettingsError
from cdc.model.finding import exit_code, folded, verdict
from cdc.model.wording import UNKNOWN, clock, duration, since_text

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from cdc.model.finding import Finding
    from cdc.observe.sampler import Failure, Sample
    from cdc.observe.status import ClockStatus, SinkStatus, Status, ViewStatus
    from cdc.runtime.context import Context

LISTED = 6
"""Most findings on one screen."""
LISTED_VIEWS = 12
"""Most views on one screen."""
COLOURS_OF_VERDICTS = {
    "ok": "green",
    "info": "dim",
    "warning": "yellow",
    "degraded": "yellow",
    "down": "red",
}
ENDED = {"caught up": "ended, caught up", "stopped": "ended"}
POLL_S = 0.1
"""Seconds between two questions whether a look has ended."""


def status(
    context: typer.Context,
    watch: Annotated[
        bool, typer.Option("--watch", help="Look again every few seconds, until Ctrl-C.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Show what is wrong, and the state of each hop.

    Each finding comes with the command to run next. Answers within five seconds, even when a server
    hangs. Exit 0 when all is well, otherwise the exit code of the worst finding's class; with
    --watch 0.
    """
    from cdc.observe.diagnosis import document, slow_hop

    if watch and as_json:
        raise SettingsError(
            "--json prints one document, and --watch looks until it is ended.",
            hint="cdc -p FILE serve: /api/status is the document of the last look",
        )
    if watch:
        return _watch(context.obj)
    health = check_health(context.obj)
    answer(as_json, document(health), draw_status(health, slow_hop(health)))
    raise typer.Exit(exit_code(health.findings))


def doctor(context: typer.Context, as_json: Json = False) -> None:
    """Examine the source, Kafka Connect, the topics, the sinks and this machine; change nothing.

    Says before `register` what it would meet. Each finding has a code, with a page in the runbooks,
    and the command to run next. Exit 0 when there is nothing but remarks, otherwise the exit code of
    the worst finding's class.
    """
    from cdc.observe.examination import Examination

    configured = context.obj.pipeline_to_examine
    findings = Examination(configured, context.obj.sinks(None), context.obj.state).findings()
    answer(as_json, doctor_document(configured.pipeline, findings), draw_doctor(findings))
    raise typer.Exit(exit_code(findings))


def doctor_document(pipeline: str, findings: "tuple[Finding, ...]") -> dict[str, Any]:
    return {
        "pipeline": pipeline,
        "verdict": verdict(findings),
        "exit_code": exit_code(findings),
        "findings": findings,
    }


def draw_doctor(findings: "Sequence[Finding]") -> RenderableType:
    """Draw all findings of `cdc doctor`: each with its consequence and the command to run next."""
    judgement = verdict(findings)
    lines = [Text(judgement, f"bold {COLOURS_OF_VERDICTS[judgement]}")]
    for finding in findings:
        severity = (f"{finding.severity:<9}", COLOURS_OF_VERDICTS[finding.severity])
        lines += [
            Text.assemble(severity, f"{call.complete_commands(finding.message)} ({finding.code})"),
            Text(f"{'':9}{finding.why}", "dim"),
            Text(f"{'':9}{call.complete_commands(finding.fix)}"),
        ]
    return Group(*lines)


def _watch(context: "Context") -> None:
    """Show each look until Ctrl-C. If one fails, the screen says so, and keeps the last one."""
    context.load()
    number = 0
    try:
        with checking_health(context, lambda _: None) as looks, show_looks(out) as show:
            while True:
                if looks.number != number:
                    number = looks.number
                    show(draw_look(looks.sample, looks.trouble))
                time.sleep(POLL_S)
    except KeyboardInterrupt:
        return


def draw_status(snapshot: "Status", nothing: str) -> RenderableType:
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
        *_documents(snapshot),
        *_comparison(snapshot),
        *_holes(snapshot),
    )


def _findings(findings: "Sequence[Finding]", nothing: str) -> "Iterator[Text]":
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


def _finding(finding: "Finding") -> str:
    """Say a finding, the command to run next, its code, and since when it has been there."""
    since = f", {since_text(finding.since)}" if finding.since else ""
    return f"{call.complete_commands(finding.sentence)} ({finding.code}{since})"


def _views(snapshot: "Status") -> "Iterator[RenderableType]":
    grid = Grid("table", "sink", ">waiting", ">behind for", ">changes", ">last change")
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
            age(view.at) if measured else UNKNOWN,
        )
    yield grid
    if len(views) > len(shown):
        yield Text(f"and {len(views) - len(shown)} more, none worse: --json has all of them")
    from cdc.observe.diagnosis import proof_sentence

    if proved := proof_sentence(snapshot):
        yield Text(call.complete_commands(proved))


def _rank(sink: "SinkStatus", view: "ViewStatus") -> tuple[bool, bool, float, int]:
    """Rank a view: the worse, the greater."""
    troubled = bool(view.problem or view.quarantined or view.table in sink.aside)
    unknown = view.lag_seconds is None
    return troubled, unknown, view.lag_seconds or 0.0, view.lag_records or 0


def _comparison(snapshot: "Status") -> "Iterator[Text]":
    if snapshot.definitions == "comparison":
        text = "Table definitions are compared while cdc run runs: there are no event triggers."
        yield Text(text, "yellow")


def _documents(snapshot: "Status") -> "Iterator[RenderableType]":
    """Draw what the state of documents holds, and what is to be sent."""
    if not (documents := snapshot.documents):
        return
    has_clocks = bool(documents.clocks)
    clock_headings = ["clock"] if has_clocks else []
    grid = Grid("documents of", ">to send", *clock_headings, "from rows of", ">rows", ">size")
    views = list(documents.dirty.items())
    tables = list(documents.rows.items())
    for number in range(max(len(views), len(tables))):
        view, dirty = views[number] if number < len(views) else ("", None)
        table, rows = tables[number] if number < len(tables) else ("", None)
        grid.add_row(
            view,
            "" if dirty is None else f"{dirty:,}",
            *([_clock(documents.clocks.get(view))] if has_clocks else []),
            table,
            "" if rows is None else f"{rows:,}",
            "" if rows is None else decimal(documents.bytes[table]),
        )
    yield Text()
    yield grid
    if documents.used_bytes is not None:
        limit = documents.limit_bytes
        bound = f"of {decimal(limit)} (maxmemory)" if limit else "of memory, without a limit"
        yield Text(f"the state's server uses {decimal(documents.used_bytes)} {bound}")
    if documents.done_s is not None and any(documents.dirty.values()):
        pace = f"{documents.sent_per_s:,.0f} documents/s are sent"
        yield Text(f"{pace}: done in {duration(documents.done_s)}")
    for view, number in documents.late.items():
        came = f"{number:,} changes of {view} came after their windows had closed"
        listed = call.complete_commands(f"cdc -p FILE views late {view}")
        yield Text(f"{with_since(came, documents.late_since)}: {listed}")


def _clock(status: "ClockStatus | None") -> str:
    return "" if status is None else clock(status.at)


def _view_lag(view: "ViewStatus") -> str:
    if view.lag_seconds is None:
        return UNKNOWN
    return duration(view.lag_seconds) if view.lag_seconds else "-"


def _holes(snapshot: "Status") -> "Iterator[Text]":
    for sink in snapshot.sinks:
        for view in sink.views:
            for hole in view.holes:
                text = f"The log of changes of {view.table} in {sink.name} may lack superseded records: {hole}."
                yield Text(text, "yellow")


def _account(sink: "SinkStatus") -> str:
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


def _hops(snapshot: "Status") -> RenderableType:
    grid = Grid("hop", "state", "")
    unread = {finding.code for finding in snapshot.findings}
    if slot := snapshot.slot:
        bytes_ = (
            f"{_size(slot.lag_bytes)} not yet confirmed, {_size(slot.retained_bytes)} of log kept"
        )
        loss_s = snapshot.slot_loss_s
        loss = "" if loss_s is None else f", given up in {duration(loss_s)} at this pace"
        grid.add_row(
            "slot",
            "active" if slot.active else Text("not read", "red"),
            f"{bytes_}, {slot.wal_status}{loss}",
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
    elif snapshot.snapshot_records is not None:
        grid.add_row("heartbeat", "none yet", "none comes before the first snapshot has ended")
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


def _activity(sink: "SinkStatus") -> str:
    """Say what a sink's `cdc run` does: its rate and counts only while it is at work."""
    parts = [since_text(sink.since)]
    if sink.state in WORKING and sink.rows_per_s is not None:
        parts += [f"{sink.rows_per_s:,.0f} changes/s", _account(sink)]
        parts += [f"caught up in {duration(sink.catch_up_s)}"] if sink.catch_up_s else []
        parts += [f"last restarted for: {sink.restarted}"] if sink.restarted else []
    return ", ".join(filter(None, parts))


def _size(count: int | None) -> str:
    return UNKNOWN if count is None else decimal(count)


def draw_look(sample: "Sample[Status] | None", failure: "Failure | None") -> RenderableType:
    """Draw the last look that has ended well, when that was, and why there is none since."""
    from cdc.observe.diagnosis import slow_hop

    parts: list[RenderableType] = []
    if failure:
        trouble = with_since(with_advice(failure.message, failure.hint), failure.since)
        parts.append(Text(trouble, "bold red"))
    if sample:
        parts += [
            draw_status(sample.value, slow_hop(sample.value)),
            Text(),
            Text(f"as of {clock(sample.taken_at)}; Ctrl-C ends", "dim"),
        ]
    return Group(*parts)


@contextmanager
def show_looks(console: Console) -> "Iterator[Callable[[RenderableType], None]]":
    """Show screens in one place of a terminal, elsewhere one below the other."""
    if console.is_terminal:
        # It redraws its own lines, so it has to know where each of them ends.
        folding = Console(file=console.file, force_terminal=True)
        with Live(console=folding, auto_refresh=False) as screen:
            yield lambda drawn: screen.update(drawn, refresh=True)
    else:
        yield lambda drawn: console.print(Group(drawn, Text()))
