"""The one sentence that an SRE needs first: which hop holds changes back, and what to run next."""

from cdc.status import Status

SLOW_S = 5.0
"""A hop below this isn't called slow."""
HUNG_S = 10.0
"""A sink that hasn't answered for so long is named; its requests end in an error only later."""
LOOK_AT_SOURCE = "look for a long transaction in pg_stat_activity, then at the worker's log"


def slow_hop(status: Status) -> str:
    """One sentence: the hop that holds changes back most, and the command to run next."""
    return _stopped(status) or _slowest(status)


def _stopped(status: Status) -> str | None:
    """A hop that doesn't move at all, the first one on the way."""
    connector, slot = status.connector, status.slot
    for problem in status.problems:
        if problem.part in ("postgres", "connect", "kafka"):
            return f"Postgres -> Kafka can't be judged: {problem.message} Next: {problem.hint}."
    if connector and (connector.state != "RUNNING" or set(connector.tasks) != {"RUNNING"}):
        states = f"connector {connector.state}, task {', '.join(connector.tasks) or 'none'}"
        why = f": {connector.trace}" if connector.trace else ""
        return f"Postgres -> Kafka has stopped ({states}){why}. Next: cdc -p FILE register."
    if slot is None or slot.wal_status == "lost":
        return (
            f"Postgres -> Kafka has stopped: the slot is {'lost' if slot else 'missing'}. Next: cdc -p FILE register."
        )
    return _stopped_sink(status)


def _stopped_sink(status: Status) -> str | None:
    for sink in status.sinks:
        for view in sink.views:
            if view.problem:
                return f"Kafka -> {sink.name} has stopped for {view.table}: {view.problem} Next: {view.hint}."
        for table, (what, hint) in sink.aside.items():
            return f"Kafka -> {sink.name} has stopped for {table}: {what} Next: {hint}."
        if sink.error:
            following = sink.hint or f"cdc -p FILE run --sink {sink.name}"
            what = "waits" if sink.state == "waiting" else "has stopped"
            return f"Kafka -> {sink.name} {what}: {sink.error} Next: {following}."
        if sink.looked_s > HUNG_S and sink.state == "running":
            return (
                f"Kafka -> {sink.name} can't be judged: it hasn't answered for {sink.looked_s:.0f} s."
                " Next: look at that server, and at the way to it."
            )
    for problem in status.problems:
        what = "Views may miss records" if problem.part == "topics" else f"Kafka -> {problem.part} can't be judged"
        return f"{what}: {problem.message} Next: {problem.hint}."
    return None


def _slowest(status: Status) -> str:
    beat = status.heartbeat
    if beat is None:
        return "Postgres -> Kafka is slowest: no heartbeat has arrived yet. Next: cdc -p FILE register."
    hops = {"Kafka": beat.age_s if beat.late else beat.delay_s}
    hops |= {sink.name: sink.lag_seconds for sink in status.sinks}
    name = max(hops, key=lambda hop: hops[hop])
    way = "Postgres -> Kafka" if name == "Kafka" else f"Kafka -> {name}"
    if hops[name] < SLOW_S:
        return f"No hop is slow; the slowest is {way} with {hops[name]:.1f} s. Next: nothing to do."
    if name == "Kafka":
        behind = f", {status.slot.lag_bytes} bytes of log behind" if status.slot else ""
        return f"{way} is slowest: at least {hops[name]:.0f} s{behind}. Next: {LOOK_AT_SOURCE}."
    sink = next(sink for sink in status.sinks if sink.name == name)
    running = sink.state not in ("not running", "stopped", "failed")
    following = "give cdc run more cores (--master)" if running else f"cdc -p FILE run --sink {name}"
    return f"{way} is slowest: at least {hops[name]:.0f} s behind, {sink.state}. Next: {following}."
