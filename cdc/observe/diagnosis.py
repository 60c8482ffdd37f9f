"""Diagnosis of a pipeline: its findings, the worst first, each in one sentence with the command to
run next.
"""

from collections.abc import Collection, Iterator
from dataclasses import asdict, replace
from typing import Any

from cdc.apply.progress import WORKING
from cdc.capture.connector import ALIKE
from cdc.config.view_settings import SCHEMA, STATE
from cdc.model.finding import LOOK_AGAIN, Finding, exit_code, find, verdict, worst_first
from cdc.model.wording import UNKNOWN, clock, duration, full_stopped
from cdc.observe.forecast import find_memory_risk
from cdc.observe.status import NEVER_RUN, SinkStatus, Status, ViewStatus
from cdc.readiness.checks import LOOK_AT_TRANSACTIONS, check_slot_risk

SLOW_S = 5.0
"""Seconds of lag below which a hop isn't called slow."""
LATE_S = 60.0
"""Seconds of lag above which a view is degraded. Until then it may be catching up."""
HUNG_S = 10.0
"""Seconds without an answer after which a sink is reported: its own requests run into their timeout
only later.
"""
STILL_S = 20.0
"""Seconds after which a batch that has moved no position is reported: twice what one is meant to
take, and less than a request to a destination may.
"""
REGISTER = "cdc -p FILE register"
NEW_SNAPSHOT = f"{REGISTER} --new-snapshot"
WATCH = "cdc -p FILE status --watch"
ASIDE = "A running `run`, or `register`, sets that table aside, and the others go on."
IDLE = ("not running", "stopped")
STATES = {
    "caught up": "its run ended when it had caught up",
    NEVER_RUN: "and no `cdc run` has ever been at work on it",
    UNKNOWN: "and whether a `cdc run` is at work on it couldn't be read",
}


def diagnose(status: Status) -> Status:
    """Complete a status with all of its findings: the worst first, then in the order a change
    travels.
    """
    findings = [
        *status.findings,
        *_find_source_troubles(status),
        *(finding for sink in status.sinks for finding in _find_sink_troubles(status, sink)),
        *find_memory_risk(status),
    ]
    findings += _find_clock_troubles(status, findings)
    return replace(status, findings=worst_first(findings))


def document(status: Status) -> dict[str, Any]:
    """Make the document of `cdc status --json`, which monitors read."""
    judgement = {
        "verdict": verdict(status.findings),
        "exit_code": exit_code(status.findings),
        "slow_hop": slow_hop(status),
    }
    return {**asdict(status), **judgement}


def slow_hop(status: Status) -> str:
    """Say in one sentence, for a diagnosed status, the worst finding or else the slowest hop, and
    what to run next.
    """
    return status.findings[0].sentence if status.findings else _slowest(status)


def proof_sentence(status: Status) -> str:
    """Say through which moment all views are proved equal to Postgres, and which never were. Empty
    where none is.
    """
    views = [
        (sink.name, view) for sink in status.sinks if sink.name != STATE for view in sink.views
    ]
    proved = [view.proved_through for _, view in views if view.proved_through is not None]
    complete = [view.complete_at for _, view in views if view.complete_at is not None]
    if not proved:
        return ""
    text = f"proved through {clock(min(proved))}, all rows since {clock(min(complete))}"
    if repaired := sum(view.repaired for _, view in views):
        text += f", {repaired:,} {'row' if repaired == 1 else 'rows'} repaired"
    unproved = [f"{view.table} in {sink}" for sink, view in views if view.proved_through is None]
    if not unproved:
        return text
    others = f" and {len(unproved) - 1} more" if len(unproved) > 1 else ""
    return f"{text}; not proved: {unproved[0]}{others}: cdc -p FILE verify"


def _find_source_troubles(status: Status) -> Iterator[Finding]:
    """Find what holds up changes between Postgres and Kafka. A server that couldn't be read gives
    no finding here.
    """
    stopped = "Postgres -> Kafka has stopped"
    slot = status.slot
    pipeline = status.pipeline
    unread = {finding.code for finding in status.findings}
    slot_away = "source-unreachable" not in unread and (slot is None or slot.wal_status == "lost")
    # The first thing that a first snapshot does is to make the slot.
    slot_away = slot_away and (slot is not None or status.snapshot_records is None)
    # A connector that isn't there goes on from what it has stored, or has never begun.
    is_missing = status.connector is not None and status.connector.state == "MISSING"
    starts_over = slot_away and (slot is not None or not is_missing)
    fix = NEW_SNAPSHOT if starts_over else REGISTER
    connector_trouble = _find_connector_trouble(status, stopped, fix)
    if connector_trouble:
        yield connector_trouble
    if slot_away:
        state = "lost" if slot else "missing"
        yield find("slot-lost", pipeline, f"{stopped}: the slot is {state}.", fix)
    elif slot:
        risks = check_slot_risk(
            pipeline, slot.safe_wal_size, slot.retained_bytes, status.slot_loss_s
        )
        yield from (risk.finding for risk in risks)
    # Without a comparison a definition may change unseen. That no run is at work is a finding on
    # each sink.
    ages = [
        sink.compared_s
        for sink in status.sinks
        if sink.state in WORKING and sink.compared_s is not None
    ]
    if status.definitions == "comparison" and ages and min(ages) > LATE_S:
        message = (
            f"Table definitions haven't been compared for {min(ages):.0f} s: changes of them aren't"
            " recorded. The run's log gives the reason as definitions_not_compared."
        )
        yield find("definitions-uncompared", "cdc.ddl", message, WATCH)
    # With Postgres or Kafka away no heartbeat can come: that is said already.
    silent = {"source-unreachable", "kafka-unreachable"} & unread
    if not (connector_trouble or slot_away or silent):
        yield from _find_heartbeat_trouble(status)


def _find_connector_trouble(status: Status, stopped: str, fix: str) -> Finding | None:
    connector = status.connector
    name = status.pipeline
    if connector is None or connector.running:
        return None
    has_failed = "FAILED" in (connector.state, *connector.tasks)
    key = "connector-failed" if has_failed else "connector-stopped"
    if connector.unsendable:
        message = f"{stopped} at a change that can't be sent, of {connector.unsendable}."
        return find("table-unsendable", name, f"{message} {ASIDE}", fix)
    if ALIKE in (connector.trace or ""):
        fix = NEW_SNAPSHOT
    states = f"connector {connector.state}, task {', '.join(connector.tasks) or 'none'}"
    reason = f": {connector.trace}" if connector.trace else ""
    return find(key, name, f"{stopped} ({states}){reason}", fix)


def _find_heartbeat_trouble(status: Status) -> Iterator[Finding]:
    heartbeat = status.heartbeat
    slot = status.slot
    if status.snapshot_records is not None:
        message = (
            f"The first snapshot is under way: about {status.snapshot_records:,} records by now."
        )
        yield find("snapshot-running", status.pipeline, message, "cdc -p FILE status")
    elif heartbeat is None:
        message = "Postgres -> Kafka can't be judged: no heartbeat has arrived yet."
        yield find("heartbeat-missing", status.pipeline, message, REGISTER)
    elif (heartbeat.late and heartbeat.age_s >= SLOW_S) or heartbeat.delay_s >= LATE_S:
        behind = f", {slot.lag_bytes} bytes of log not yet confirmed" if slot else ""
        if slot and (slot.oldest_transaction_s or 0.0) >= SLOW_S:
            behind += f", a transaction is open for {slot.oldest_transaction_s:.0f} s"
        delay_s = heartbeat.age_s if heartbeat.late else heartbeat.delay_s
        message = f"Postgres -> Kafka is slow: at least {delay_s:.0f} s{behind}."
        yield find("heartbeat-late", status.pipeline, message, LOOK_AT_TRANSACTIONS)


def _find_sink_troubles(status: Status, sink: SinkStatus) -> Iterator[Finding]:
    hop = f"Kafka -> {sink.name}"
    name = sink.name
    if sink.paused_by:
        message = f"{hop} is paused by {sink.paused_by}{_behind(sink)}."
        fix = f"cdc -p FILE resume {name}"
        yield find("sink-paused", name, message, fix, sink=name, since=sink.since)
    elif sink.error:
        code, words = (
            ("sink-waiting", "waits") if sink.state == "waiting" else ("sink-failed", "has stopped")
        )
        if sink.restart_at:
            words += f", and starts again by itself at {clock(sink.restart_at)}"
        following = sink.hint or f"cdc -p FILE run --sink {name}"
        message = f"{hop} {words}: {sink.error}"
        yield find(code, name, message, following, sink=name, since=sink.since)
    elif sink.looked_s > HUNG_S and sink.state == "running":
        message = f"{hop} can't be judged: it hasn't answered for {sink.looked_s:.0f} s."
        yield find("sink-silent", name, message, LOOK_AGAIN, sink=name)
    elif _stands_still(status, sink):
        message = f"{hop} is stuck: its batch has moved no position for {sink.stands_s:.0f} s{_behind(sink)}."
        yield find("sink-stuck", name, message, LOOK_AGAIN, sink=name)
    elif sink.state in IDLE:
        message = f"{hop} has stopped: no `cdc run` is at work on it{_behind(sink)}."
        fix = _start(status, sink)
        yield find("sink-not-running", name, message, fix, sink=name, since=sink.since)
    else:
        yield from _find_lag(status, sink)
    yield from _find_table_troubles(status, sink)


def _stands_still(status: Status, sink: SinkStatus) -> bool:
    """Say whether a batch hangs in a destination that answers: of one that doesn't, that is said."""
    silent = {finding.sink for finding in status.findings if finding.code == "sink-unreachable"}
    return sink.stands_s > STILL_S and sink.state == "running" and sink.name not in silent


def _find_lag(status: Status, sink: SinkStatus) -> Iterator[Finding]:
    """Judge the lag of a sink that is at work, as far as that is known."""
    at_work = sink.state in ("running", "starting")
    # A run may be at work on it without our knowing: its warehouse is some seconds late by design.
    patience_s = LATE_S if at_work or sink.state == UNKNOWN else SLOW_S
    if (sink.lag_seconds or 0.0) < patience_s:
        return
    message = f"Kafka -> {sink.name} is slow{_behind(sink)}, {STATES.get(sink.state, sink.state)}."
    fix = WATCH if at_work or sink.state == UNKNOWN else _start(status, sink)
    if at_work and sink.catch_up_s is not None:
        message += f" At the present pace it has caught up in {duration(sink.catch_up_s)}."
    yield find("sink-behind", sink.name, message, fix, sink=sink.name)


def _behind(sink: SinkStatus) -> str:
    return f", at least {sink.lag_seconds:.0f} s behind" if (sink.lag_seconds or 0.0) >= 1 else ""


def _start(status: Status, sink: SinkStatus) -> str:
    """Choose the command that starts a sink's run: one for all sinks where none of them runs."""
    idle = [
        candidate
        for candidate in status.sinks
        if candidate.state in (*IDLE, NEVER_RUN, UNKNOWN, "caught up")
    ]
    return (
        "cdc -p FILE run"
        if len(idle) == len(status.sinks)
        else f"cdc -p FILE run --sink {sink.name}"
    )


def _difference(view: ViewStatus, sink: str) -> Finding:
    """The finding on a view with rows that differed when they were compared last."""
    one = view.wrong == 1
    keys = ", ".join(view.wrong_ids)
    message = (
        f"{view.table} in {sink}: {view.wrong:,} {'row differs' if one else 'rows differ'} from Postgres,"
        f" with {'key' if one else 'keys such as'} {keys}."
    )
    if view.unrepaired:
        message += f" `cdc run` hasn't repaired them: {full_stopped(view.unrepaired)}"
    fix = f"cdc -p FILE verify --sink {sink} --table {view.table} --repair"
    finding = find(
        "view-differs",
        view.table,
        message,
        fix,
        table=view.table,
        sink=sink,
        since=view.wrong_at,
        count=view.wrong,
    )
    return replace(finding, keys=view.wrong_ids)


def _find_table_troubles(status: Status, sink: SinkStatus) -> Iterator[Finding]:
    """Find troubles of single tables of a sink: stopped, or degraded by the quarantine."""
    name = sink.name
    # Documents that nobody makes wait in each sink: one finding says so.
    unmade = {
        view
        for stream in status.sinks
        for view in stream.aside
        if stream.name == STATE and view.startswith(f"{SCHEMA}.")
    }
    for view in sink.views:
        table = view.table
        if view.problem:
            message = f"Kafka -> {name} has stopped for {table}: {view.problem}"
            yield find("view-stopped", table, message, view.hint or "", table=table, sink=name)
        if view.quarantined:
            count = view.quarantined
            records = f"{count} record{'s' if count > 1 else ''}"
            message = f"{table} in {name}: {records} in quarantine."
            listing = "cdc -p FILE quarantine list"
            yield find(
                "records-quarantined", table, message, listing, table=table, sink=name, count=count
            )
        if view.wrong_at is not None:
            yield _difference(view, name)
    stopped = {view.table for view in sink.views if view.problem}
    for table, (reason, hint) in sink.aside.items():
        if table in unmade and name == STATE:
            code = "documents-waiting"
            message = f"No document of {table} is made: {reason}"
        elif table not in unmade and table not in stopped:
            code = "table-waiting"
            message = f"Kafka -> {name} has stopped for {table}: {reason}"
        else:
            continue
        since = sink.aside_since.get(table)
        yield find(code, table, message, hint, table=table, sink=name, since=since)


def _find_clock_troubles(status: Status, found: Collection[Finding]) -> Iterator[Finding]:
    """Find clocks of views that don't move although heartbeats arrive and a run is at work. That the
    state is away, paused or behind is among the findings that were `found`.

    Clocks are compared with the last heartbeat, since both are times of Postgres. One that is a column
    may be behind for as long as no row comes.
    """
    heartbeat = status.heartbeat
    documents = status.documents
    stream = next((sink for sink in status.sinks if sink.name == STATE), None)
    if not (heartbeat and heartbeat.committed_at and documents and stream):
        return
    is_explained = any(
        finding.sink == STATE and finding.code.startswith("sink-") for finding in found
    )
    if is_explained or stream.state != "running":
        return
    patience_s = max(LATE_S, 3 * heartbeat.interval_s)
    for view, clock_status in documents.clocks.items():
        behind_s = heartbeat.committed_at - clock_status.at
        if behind_s < -patience_s:
            message = (
                f"The clock of {view} is {duration(-behind_s)} ahead of Postgres, and stands until that"
                " time has come: the server's time has gone back, or `lateness` was raised."
            )
            fix = "Make sure that the server's time is right: timedatectl status"
        elif behind_s > patience_s and clock_status.column is None:
            hold, fix = _hold_of(stream)
            message = f"The clock of {view} stands {duration(behind_s)} behind Postgres{hold}."
        else:
            continue
        table = f"{SCHEMA}.{view}"
        since = clock_status.at
        yield find("clock-stands", table, message, fix, table=table, sink=STATE, since=since)


def _hold_of(stream: SinkStatus) -> tuple[str, str]:
    """Say what holds the clocks of views back, and what to do about it: all of them wait for all
    tables of the state.
    """
    held = {view.table: view.hint or "" for view in stream.views if view.problem}
    held |= {
        table: hint
        for table, (_, hint) in stream.aside.items()
        if not table.startswith(f"{SCHEMA}.")
    }
    if held:
        table, hint = next(iter(held.items()))
        return f": it waits for the topic of {table}, which isn't applied", hint
    return ", though no record of its tables waits", WATCH


def _slowest(status: Status) -> str:
    """Name the slowest hop of a status without findings."""
    heartbeat = status.heartbeat
    hops = (
        {"Postgres -> Kafka": heartbeat.age_s if heartbeat.late else heartbeat.delay_s}
        if heartbeat
        else {}
    )
    hops |= {
        f"Kafka -> {sink.name}": sink.lag_seconds
        for sink in status.sinks
        if sink.lag_seconds is not None
    }
    slowest = max(hops, key=lambda hop: hops[hop], default="")
    if not slowest:
        return "Nothing was measured. Next: cdc -p FILE status."
    if hops[slowest] < SLOW_S:
        return f"No hop is slow; the slowest is {slowest} with {hops[slowest]:.1f} s. Next: no action needed."
    return f"{slowest} is slowest: at least {hops[slowest]:.0f} s behind. Next: no action yet, it may be catching up."
