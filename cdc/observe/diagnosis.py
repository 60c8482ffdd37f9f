"""Diagnosis of a pipeline: its problems, the worst first, each in one sentence with the command to
run next.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from cdc.apply.progress import WORKING
from cdc.errors import ConnectorError, DecodeError, SinkError, SourceError
from cdc.model.wording import advice
from cdc.observe.status import Problem, SinkStatus, Status

SLOW_S = 5.0
"""Seconds of lag below which a hop isn't called slow."""
LATE_S = 60.0
"""Seconds of lag above which a view is degraded. Until then it may be catching up."""
HUNG_S = 10.0
"""Seconds without an answer after which a sink is reported: its own requests run into their timeout
only later.
"""
LOOK_AT_SOURCE = "look for a long transaction in pg_stat_activity, then at the worker's log"
SERVERS = ("postgres", "connect", "kafka")
IDLE = ("not running", "stopped")
STATES = {
    "caught up": "its run ended when it had caught up",
    "not known here": "and no `cdc run` on this machine has told of it",
}


def diagnose(status: Status) -> Status:
    """Complete a status with all of its problems: those that are down first, then in the order a
    change travels.
    """
    names = {sink.name for sink in status.sinks}
    unread = [
        replace(problem, sink=problem.part if problem.part in names else problem.sink)
        for problem in status.problems
    ]
    problems = [
        *unread,
        *_find_source_problems(status),
        *(problem for sink in status.sinks for problem in _find_sink_problems(status, sink)),
    ]
    return replace(
        status, problems=tuple(sorted(problems, key=lambda problem: problem.severity != "down"))
    )


def verdict(status: Status) -> str:
    """Judge a diagnosed status: ok, degraded or down."""
    return status.problems[0].severity if status.problems else "ok"


def exit_code(status: Status) -> int:
    """Give the exit code for a diagnosed status: the code of the worst problem's class, 0 without
    one.
    """
    return status.problems[0].code if status.problems else 0


def document(status: Status) -> dict[str, Any]:
    """Make the document of `cdc status --json`, which monitors read."""
    judgement = {
        "verdict": verdict(status),
        "exit_code": exit_code(status),
        "slow_hop": slow_hop(status),
    }
    return {**status.to_dict(), **judgement}


def slow_hop(status: Status) -> str:
    """Say in one sentence, for a diagnosed status, the worst problem or else the slowest hop, and
    what to run next.
    """
    return sentence(status.problems[0]) if status.problems else _slowest(status)


def sentence(problem: Problem) -> str:
    """Say a problem and the command to run next in one sentence."""
    return advice(_hop(problem) + problem.message, problem.hint)


def _hop(problem: Problem) -> str:
    """Name the hop that can't be judged, where a problem is about a server that couldn't be
    read.
    """
    if problem.part in SERVERS:
        return "Postgres -> Kafka can't be judged: "
    if problem.part == problem.sink:
        return f"Kafka -> {problem.sink} can't be judged: "
    return "Views may miss records: " if problem.part == "topics" else ""


def _find_source_problems(status: Status) -> Iterator[Problem]:
    """Find what holds up changes between Postgres and Kafka. A server that couldn't be read gives
    no finding here.
    """
    stopped, connector, slot = "Postgres -> Kafka has stopped", status.connector, status.slot
    unread = {problem.part for problem in status.problems}
    moves = True
    if connector and (connector.state != "RUNNING" or set(connector.tasks) != {"RUNNING"}):
        states = f"connector {connector.state}, task {', '.join(connector.tasks) or 'none'}"
        reason = f": {connector.trace}" if connector.trace else ""
        moves = False
        yield Problem(
            "connector",
            f"{stopped} ({states}){reason}",
            "cdc -p FILE register",
            ConnectorError.exit_code,
        )
    if "postgres" not in unread and (slot is None or slot.wal_status == "lost"):
        message = f"{stopped}: the slot is {'lost' if slot else 'missing'}."
        moves = False
        yield Problem("slot", message, "cdc -p FILE register", SourceError.exit_code)
    if status.definitions == "nothing":
        message = "Changes of table definitions aren't recorded: views may become wrong."
        yield Problem(
            "definitions", message, "cdc -p FILE migrate", SourceError.exit_code, "degraded"
        )
    # Without a comparison a definition may change unseen. That no run is at work is a problem of
    # each sink.
    ages = [
        sink.compared_s
        for sink in status.sinks
        if sink.state in WORKING and sink.compared_s is not None
    ]
    if status.definitions == "comparison" and ages and min(ages) > LATE_S:
        message = f"Table definitions haven't been compared for {min(ages):.0f} s: changes of them aren't recorded."
        hint = "look for definitions_not_compared in the log of cdc run: it gives the reason"
        yield Problem("definitions", message, hint, SourceError.exit_code, "degraded")
    if moves and "kafka" not in unread:
        yield from _find_heartbeat_problem(status)


def _find_heartbeat_problem(status: Status) -> Iterator[Problem]:
    heartbeat, code = status.heartbeat, ConnectorError.exit_code
    if heartbeat is None:
        message = "Postgres -> Kafka can't be judged: no heartbeat has arrived yet."
        yield Problem("heartbeat", message, "cdc -p FILE register", code)
    elif (heartbeat.late and heartbeat.age_s >= SLOW_S) or heartbeat.delay_s >= LATE_S:
        behind = f", {status.slot.lag_bytes} bytes of log not yet confirmed" if status.slot else ""
        delay_s = heartbeat.age_s if heartbeat.late else heartbeat.delay_s
        message = f"Postgres -> Kafka is slow: at least {delay_s:.0f} s{behind}."
        yield Problem("heartbeat", message, LOOK_AT_SOURCE, code, "degraded")


def _find_sink_problems(status: Status, sink: SinkStatus) -> Iterator[Problem]:
    hop, code = f"Kafka -> {sink.name}", SinkError.exit_code
    if sink.error:
        message = "waits" if sink.state == "waiting" else "has stopped"
        following = sink.hint or f"cdc -p FILE run --sink {sink.name}"
        yield Problem(
            "run",
            f"{hop} {message}: {sink.error}",
            following,
            code,
            "down",
            None,
            sink.name,
            sink.since,
        )
    elif sink.looked_s > HUNG_S and sink.state == "running":
        message = f"{hop} can't be judged: it hasn't answered for {sink.looked_s:.0f} s."
        yield Problem(
            "run",
            message,
            "look at that server, and at the network to it",
            code,
            "down",
            None,
            sink.name,
        )
    elif sink.state in IDLE:
        message = f"{hop} has stopped: no `cdc run` is at work on it{_behind(sink)}."
        yield Problem(
            "run", message, _start(status, sink), code, "down", None, sink.name, sink.since
        )
    else:
        yield from _find_lag_problem(status, sink)
    yield from _find_table_problems(sink)


def _find_lag_problem(status: Status, sink: SinkStatus) -> Iterator[Problem]:
    """Judge the lag of a sink that is at work, as far as that is known."""
    at_work = sink.state in ("running", "starting")
    # A run on another machine may be at work on it: its warehouse is some seconds late by design.
    patience_s = LATE_S if at_work or sink.state == "not known here" else SLOW_S
    if (sink.lag_seconds or 0.0) < patience_s:
        return
    message = f"Kafka -> {sink.name} is slow{_behind(sink)}, {STATES.get(sink.state, sink.state)}."
    hint = _start(status, sink)
    if at_work:
        hint = "if the lag doesn't shrink, run it with more cores (--master)"
    elif sink.state == "not known here":
        hint += ", unless it runs on another machine: its state is known only there"
    yield Problem("lag", message, hint, SinkError.exit_code, "degraded", None, sink.name)


def _behind(sink: SinkStatus) -> str:
    return f", at least {sink.lag_seconds:.0f} s behind" if (sink.lag_seconds or 0.0) >= 1 else ""


def _start(status: Status, sink: SinkStatus) -> str:
    """Choose the command that starts a sink's run: one for all sinks where none of them runs."""
    idle = [
        candidate
        for candidate in status.sinks
        if candidate.state in (*IDLE, "not known here", "caught up")
    ]
    return (
        "cdc -p FILE run"
        if len(idle) == len(status.sinks)
        else f"cdc -p FILE run --sink {sink.name}"
    )


def _find_table_problems(sink: SinkStatus) -> Iterator[Problem]:
    """Find problems of single tables of a sink: stopped, or degraded by the quarantine."""
    for view in sink.views:
        place = (view.table, sink.name)
        if view.problem:
            message = f"Kafka -> {sink.name} has stopped for {view.table}: {view.problem}"
            yield Problem(
                "table", message, view.hint or "", ConnectorError.exit_code, "degraded", *place
            )
        if view.quarantined:
            count = f"{view.quarantined} record{'s' if view.quarantined > 1 else ''}"
            message = f"{view.table} in {sink.name} is degraded: {count} in quarantine."
            yield Problem(
                "quarantine",
                message,
                "cdc -p FILE quarantine list",
                DecodeError.exit_code,
                "degraded",
                *place,
            )
    for table, (reason, hint) in sink.aside.items():
        if not any(view.table == table and view.problem for view in sink.views):
            message = f"Kafka -> {sink.name} has stopped for {table}: {reason}"
            moment = sink.aside_since.get(table)
            yield Problem(
                "table", message, hint, SinkError.exit_code, "degraded", table, sink.name, moment
            )


def _slowest(status: Status) -> str:
    """Name the slowest hop of a status without problems."""
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
