"""What an SRE needs first: what is the matter, the worst first, in one sentence each with the command to run next."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from cdc.apply.progress import WORKING
from cdc.errors import ConnectorError, DecodeError, SinkError, SourceError
from cdc.model.wording import advice
from cdc.observe.status import Problem, Sink, Status

SLOW_S = 5.0
"""A hop below this isn't called slow."""
LATE_S = 60.0
"""A view that is further behind than this is degraded; until then it may be catching up."""
HUNG_S = 10.0
"""A sink that hasn't answered for so long is named; its requests end in an error only later."""
LOOK_AT_SOURCE = "look for a long transaction in pg_stat_activity, then at the worker's log"
SERVERS = ("postgres", "connect", "kafka")
IDLE = ("not running", "stopped")
STATES = {
    "caught up": "its run ended when it had caught up",
    "not known here": "and no `cdc run` on this machine has told of it",
}


def judged(status: Status) -> Status:
    """With everything that is the matter as its problems: what is down first, else along the way of a change."""
    names = {sink.name for sink in status.sinks}
    unread = [replace(one, sink=one.part if one.part in names else one.sink) for one in status.problems]
    problems = [*unread, *_before(status), *(one for sink in status.sinks for one in _of_sink(status, sink))]
    return replace(status, problems=tuple(sorted(problems, key=lambda problem: problem.severity != "down")))


def verdict(status: Status) -> str:
    """Of a status that was judged: ok, degraded or down."""
    return status.problems[0].severity if status.problems else "ok"


def exit_code(status: Status) -> int:
    """Of a status that was judged: the code of the worst problem's class."""
    return status.problems[0].code if status.problems else 0


def document(status: Status) -> dict[str, Any]:
    """What a monitor reads."""
    judgement = {"verdict": verdict(status), "exit_code": exit_code(status), "slow_hop": slow_hop(status)}
    return {**status.to_dict(), **judgement}


def slow_hop(status: Status) -> str:
    """One sentence, of a status that was judged: the worst problem, or the slowest hop; and what to run next."""
    return sentence(status.problems[0]) if status.problems else _slowest(status)


def sentence(problem: Problem) -> str:
    return advice(_hop(problem) + problem.message, problem.hint)


def _hop(problem: Problem) -> str:
    """Which part of the way isn't known, where a problem is about what couldn't be read."""
    if problem.part in SERVERS:
        return "Postgres -> Kafka can't be judged: "
    if problem.part == problem.sink:
        return f"Kafka -> {problem.sink} can't be judged: "
    return "Views may miss records: " if problem.part == "topics" else ""


def _before(status: Status) -> Iterator[Problem]:
    """What holds changes up before the views; nothing of what couldn't be read."""
    way, connector, slot = "Postgres -> Kafka has stopped", status.connector, status.slot
    unread = {one.part for one in status.problems}
    moves = True
    if connector and (connector.state != "RUNNING" or set(connector.tasks) != {"RUNNING"}):
        states = f"connector {connector.state}, task {', '.join(connector.tasks) or 'none'}"
        why = f": {connector.trace}" if connector.trace else ""
        moves = False
        yield Problem("connector", f"{way} ({states}){why}", "cdc -p FILE register", ConnectorError.exit_code)
    if "postgres" not in unread and (slot is None or slot.wal_status == "lost"):
        what = f"{way}: the slot is {'lost' if slot else 'missing'}."
        moves = False
        yield Problem("slot", what, "cdc -p FILE register", SourceError.exit_code)
    if status.definitions == "nothing":
        what = "Nothing notes how tables change their definitions: views may become wrong."
        yield Problem("definitions", what, "cdc -p FILE migrate", SourceError.exit_code, "degraded")
    # What nobody compares may change unseen; that no run is at work is told of each sink.
    ages = [sink.compared_s for sink in status.sinks if sink.state in WORKING and sink.compared_s is not None]
    if status.definitions == "comparison" and ages and min(ages) > LATE_S:
        what = f"Table definitions haven't been compared for {min(ages):.0f} s: how they change isn't noted."
        hint = "look for definitions_not_compared in the log of cdc run: it says why"
        yield Problem("definitions", what, hint, SourceError.exit_code, "degraded")
    if moves and "kafka" not in unread:
        yield from _of_heartbeat(status)


def _of_heartbeat(status: Status) -> Iterator[Problem]:
    beat, code = status.heartbeat, ConnectorError.exit_code
    if beat is None:
        what = "Postgres -> Kafka can't be judged: no heartbeat has arrived yet."
        yield Problem("heartbeat", what, "cdc -p FILE register", code)
    elif (beat.late and beat.age_s >= SLOW_S) or beat.delay_s >= LATE_S:
        behind = f", {status.slot.lag_bytes} bytes of log behind" if status.slot else ""
        what = f"Postgres -> Kafka is slow: at least {beat.age_s if beat.late else beat.delay_s:.0f} s{behind}."
        yield Problem("heartbeat", what, LOOK_AT_SOURCE, code, "degraded")


def _of_sink(status: Status, sink: Sink) -> Iterator[Problem]:
    way, code = f"Kafka -> {sink.name}", SinkError.exit_code
    if sink.error:
        what = "waits" if sink.state == "waiting" else "has stopped"
        following = sink.hint or f"cdc -p FILE run --sink {sink.name}"
        yield Problem("run", f"{way} {what}: {sink.error}", following, code, "down", None, sink.name, sink.since)
    elif sink.looked_s > HUNG_S and sink.state == "running":
        what = f"{way} can't be judged: it hasn't answered for {sink.looked_s:.0f} s."
        yield Problem("run", what, "look at that server, and at the way to it", code, "down", None, sink.name)
    elif sink.state in IDLE:
        what = f"{way} has stopped: no `cdc run` is at work on it{_behind(sink)}."
        yield Problem("run", what, _start(status, sink), code, "down", None, sink.name, sink.since)
    else:
        yield from _of_lag(status, sink)
    yield from _of_tables(sink)


def _of_lag(status: Status, sink: Sink) -> Iterator[Problem]:
    """Of one that is at work, as far as that is known."""
    patience_s = LATE_S if sink.state in ("running", "starting") else SLOW_S
    if (sink.lag_seconds or 0.0) < patience_s:
        return
    what = f"Kafka -> {sink.name} is slow{_behind(sink)}, {STATES.get(sink.state, sink.state)}."
    hint = _start(status, sink)
    if patience_s == LATE_S:
        hint = "if that doesn't get less, run it with more cores (--master)"
    elif sink.state == "not known here":
        hint += ", unless it is at work elsewhere: only there its state is known"
    yield Problem("lag", what, hint, SinkError.exit_code, "degraded", None, sink.name)


def _behind(sink: Sink) -> str:
    return f", at least {sink.lag_seconds:.0f} s behind" if (sink.lag_seconds or 0.0) >= 1 else ""


def _start(status: Status, sink: Sink) -> str:
    """Of several that nobody applies to, one command starts all."""
    idle = [one for one in status.sinks if one.state in (*IDLE, "not known here", "caught up")]
    return "cdc -p FILE run" if len(idle) == len(status.sinks) else f"cdc -p FILE run --sink {sink.name}"


def _of_tables(sink: Sink) -> Iterator[Problem]:
    """What makes single tables of a sink less than whole."""
    for view in sink.views:
        where = (view.table, sink.name)
        if view.problem:
            what = f"Kafka -> {sink.name} has stopped for {view.table}: {view.problem}"
            yield Problem("table", what, view.hint or "", ConnectorError.exit_code, "degraded", *where)
        if view.quarantined:
            count = f"{view.quarantined} record{'s' if view.quarantined > 1 else ''}"
            what = f"{view.table} in {sink.name} is degraded: {count} in quarantine."
            yield Problem("quarantine", what, "cdc -p FILE quarantine list", DecodeError.exit_code, "degraded", *where)
    for table, (why, hint) in sink.aside.items():
        if not any(view.table == table and view.problem for view in sink.views):
            what = f"Kafka -> {sink.name} has stopped for {table}: {why}"
            since = sink.aside_since.get(table)
            yield Problem("table", what, hint, SinkError.exit_code, "degraded", table, sink.name, since)


def _slowest(status: Status) -> str:
    """Nothing is the matter."""
    beat = status.heartbeat
    hops = {"Postgres -> Kafka": beat.age_s if beat.late else beat.delay_s} if beat else {}
    hops |= {f"Kafka -> {one.name}": one.lag_seconds for one in status.sinks if one.lag_seconds is not None}
    way = max(hops, key=lambda hop: hops[hop], default="")
    if not way:
        return "Nothing was measured. Next: cdc -p FILE status."
    if hops[way] < SLOW_S:
        return f"No hop is slow; the slowest is {way} with {hops[way]:.1f} s. Next: nothing to do."
    return f"{way} is slowest: at least {hops[way]:.0f} s behind. Next: nothing to do yet, it may be catching up."
