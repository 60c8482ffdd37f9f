"""The pipeline as hops with words and a state each: what the picture draws and a screen reader
reads.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.filesize import decimal

from cdc.apply.progress import WORKING
from cdc.config.view_settings import STATE
from cdc.model.finding import Finding, Severity
from cdc.model.finding_codes import CAPTURE, LOG, SOURCE
from cdc.model.wording import clock, duration
from cdc.observe.status import SinkStatus, Status

UNREAD = "could not be read"
SYMBOLS = {"ok": "✓", "info": "✓", "warning": "!", "degraded": "!", "down": "✕", "unknown": "?"}
"""The sign of each state: none is told by its colour alone."""
UNREAD_CODES = {"source-unreachable", "connect-unreachable", "kafka-unreachable"}


@dataclass(frozen=True)
class Part:
    """A server or a hop: its name, its state, and a few short lines. `state` is a severity, `ok` or
    `unknown`.
    """

    name: str
    state: str
    lines: tuple[str, ...]

    @property
    def symbol(self) -> str:
        """The sign of its state."""
        return SYMBOLS[self.state]


@dataclass(frozen=True)
class Branch:
    """What comes after Kafka: the hop to a sink, and the sink. `returns`: it writes documents back
    into Kafka.
    """

    hop: Part
    sink: Part
    returns: bool


@dataclass(frozen=True)
class Hops:
    """A pipeline from its source to its views."""

    source: Part
    capture: Part
    kafka: Part
    branches: tuple[Branch, ...]


def describe_hops(status: Status) -> Hops:
    """Describe each part of a diagnosed status. A part that couldn't be read says so."""
    return Hops(
        _source(status),
        _capture(status),
        _kafka(status),
        tuple(_branch(status, sink) for sink in status.sinks),
    )


def _state(findings: Sequence[Finding], *hops: str, unread: bool = False) -> str:
    """Choose the worst severity of the findings on hops; `unknown` where the hop wasn't read."""
    if unread:
        return "unknown"
    severities = [finding.severity for finding in findings if finding.hop in hops]
    return min(severities, key=list(Severity).index, default="ok")


def _source(status: Status) -> Part:
    slot, codes = status.slot, {finding.code for finding in status.findings}
    if "source-unreachable" in codes:
        return Part("Postgres", "unknown", (UNREAD,))
    state = _state(status.findings, SOURCE)
    if slot is None:
        return Part("Postgres", "down", ("no replication slot",))
    retained = "" if slot.retained_bytes is None else f"{decimal(slot.retained_bytes)} of log kept"
    state_of_slot = "active" if slot.active else "not read"
    if status.slot_loss_s is not None:
        state_of_slot = f"is lost in {duration(status.slot_loss_s)}"
    words = (f"slot {state_of_slot}", retained)
    return Part("Postgres", state, tuple(filter(None, words)))


def _capture(status: Status) -> Part:
    beat, connector = status.heartbeat, status.connector
    codes = {finding.code for finding in status.findings}
    state = _state(status.findings, CAPTURE, unread=bool(codes & UNREAD_CODES))
    lines = []
    if status.snapshot_records is not None:
        lines.append(f"first snapshot, {status.snapshot_records:,} records")
    elif beat is None:
        lines.append(f"lag {UNREAD}" if "kafka-unreachable" in codes else "no heartbeat yet")
    else:
        lines.append(f"{lag_text(beat.age_s if beat.late else beat.delay_s)} behind")
    if connector is None:
        lines.append(f"connector {UNREAD}")
    else:
        tasks = ", ".join(connector.tasks) or "none"
        at_work = connector.state == tasks == "RUNNING"
        lines.append(f"connector {connector.state}{'' if at_work else f', task {tasks}'}")
    if status.slot and status.slot.lag_bytes is not None:
        lines.append(f"{decimal(status.slot.lag_bytes)} not confirmed")
    return Part(CAPTURE, state, tuple(lines))


def _kafka(status: Status) -> Part:
    if any(finding.code == "kafka-unreachable" for finding in status.findings):
        return Part("Kafka", "unknown", (UNREAD,))
    beat = status.heartbeat
    line = "no heartbeat yet" if beat is None else f"heartbeat {lag_text(beat.age_s)} ago"
    return Part("Kafka", _state(status.findings, LOG), ("the log", line))


def _branch(status: Status, sink: SinkStatus) -> Branch:
    hop, documents = f"Kafka -> {sink.name}", sink.name == STATE
    findings = [finding for finding in status.findings if finding.sink == sink.name]
    codes = {finding.code for finding in findings}
    # Offsets without a record, such as the marks of transactions, aren't waited for.
    measured = [
        view.lag_records if view.lag_seconds else 0
        for view in sink.views
        if view.lag_records is not None
    ]
    unread = not measured and bool(sink.views)
    if unread:
        lines: tuple[str, ...] = (f"lag {UNREAD}",)
    else:
        lines = (_lag(sink), f"{sum(measured):,} records waiting")
    if sink.state in WORKING and sink.rows_per_s:
        remaining = "" if sink.catch_up_s is None else f", {duration(sink.catch_up_s)} left"
        lines = (*lines, f"{sink.rows_per_s:,.0f} changes/s{remaining}")
    state = _state(findings, hop)
    silent = unread and "sink-unreachable" not in codes
    arrow = Part(hop, "unknown" if silent and state == "ok" else state, lines)
    words = tuple(_sink_lines(status, sink, unread="sink-unreachable" in codes))
    shown = "unknown" if unread and state in ("ok", "down") else state
    return Branch(arrow, Part(sink.name, shown, words), documents)


def _sink_lines(status: Status, sink: SinkStatus, *, unread: bool) -> Iterator[str]:
    yield UNREAD if unread else sink.state
    tables = len(sink.views)
    yield f"{tables} table{'' if tables == 1 else 's'}"
    if quarantined := sum(view.quarantined for view in sink.views):
        yield f"{quarantined:,} in quarantine"
    if sink.name == STATE and status.documents:
        yield f"{sum(status.documents.dirty.values()):,} documents to send"
        if late := sum(status.documents.late.values()):
            yield f"{late:,} changes after their windows had closed"
        views_by_time: dict[str, list[str]] = {}
        for view, status_of_clock in status.documents.clocks.items():
            views_by_time.setdefault(clock(status_of_clock.at), []).append(view)
        for time, views in views_by_time.items():
            yield f"clock {time}: {', '.join(views)}"


def _lag(sink: SinkStatus) -> str:
    if sink.lag_seconds is None:
        return f"lag {UNREAD}"
    return f"{lag_text(sink.lag_seconds)} behind"


def lag_text(seconds: float) -> str:
    """A lag as people say it; what is next to nothing is 0 s."""
    return duration(seconds) if seconds >= 0.05 else "0 s"
