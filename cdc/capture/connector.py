"""Put the connector and wait until a change has come through it.

In:  the pipeline file and its tables. Out: `Registered`, or the first error with what repairs it.
Invariant: everything that can be checked is checked before the first topic is created.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from cdc.capture import new_tables
from cdc.capture.configuration import captured_by, configuration
from cdc.capture.readiness import require_ready
from cdc.config.settings import Pipeline
from cdc.control import registrations
from cdc.control.heartbeat import Beat, last_beat
from cdc.control.registrations import Registration
from cdc.errors import ConnectorError
from cdc.kafka.topics import Created, Topics
from cdc.model.position import Position
from cdc.model.table import Table
from cdc.postgres import source
from connectors.client import Connect, ConnectorState
from migrations.statement import carry_out
from migrations.truncation import reset_floors

DEADLINE_S = 60.0
"""Without any progress; a snapshot that moves may take as long as it takes."""
STALE_S = 10.0
"""How long Connect may still report the failure of a task that it was just told to restart."""
SILENT_S = 4.0
POLL_S = 0.25

HINTS = (
    (
        "no longer available on the server",
        "the slot has lost changes: stop the connector, delete its offsets and itself through Connect's REST"
        " interface, then run cdc -p FILE register and cdc -p FILE rebuild",
    ),
    ("password authentication failed", "check source.replication_password, then: cdc -p FILE migrate"),
    ("publication", "cdc -p FILE migrate"),
    ("permission denied", "cdc -p FILE migrate"),
    (
        "RecordTooLarge",
        "a row exceeds the largest message (16 MiB): shorten it, or leave its column out with `exclude`",
    ),
)


@dataclass(frozen=True)
class Registered:
    """`changed` is false when the connector had this configuration already."""

    connector: str
    changed: bool
    created: list[str]
    """Topics that were created."""
    sent: list[str]
    """Tables that came to a running pipeline, or got another key or other columns: all their rows, beside the log."""
    waited_s: float
    beat: Beat

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def register(
    pipeline: Pipeline,
    tables: Sequence[Table],
    *,
    another_server: bool = False,
    progress: Callable[[str], None] = lambda _: None,
) -> Registered:
    """Create or update the connector.

    With `another_server` Postgres may have been replaced: its rows then stand for all that the topics hold.

    Raises:
        SourceError, ConnectorError: with what repairs it. Topics are made only for a good configuration.
    """
    name, started = pipeline.pipeline, time.monotonic()
    with (
        source.connect(pipeline.source.dsn) as conn,
        Topics(pipeline.kafka) as topics,
        Connect(pipeline.connect) as connect,
    ):
        source.preflight(conn, pipeline)
        server, known = source.server(conn), registrations.read(topics, pipeline)
        if not another_server:
            registrations.refuse_another(known, server, pipeline)
        moved = another_server and (known is None or server is None or known.server != server)
        before = connect.config(name)
        found = require_ready(conn, pipeline, tables, ours=before is not None)
        unpublished = source.unpublished(conn, pipeline)
        config = configuration(pipeline, tables=tables, cluster_id=topics.cluster_id(), unpublished=unpublished)
        connect.validate(config)
        created = [one.topic for one in topics.ensure(pipeline) if isinstance(one, Created)]
        progress(f"{len(created)} topics created")
        now = Registration(server, tables=registrations.captured(pipeline, unpublished))
        waiting = _Waiting(pipeline, tables, now, known, conn, connect, topics, progress, moved)
        sent = waiting.put(config, before, created, found)
        beat = waiting.until_beating()
    return Registered(name, config != before, created, sent, round(time.monotonic() - started, 3), beat)


@dataclass
class _Waiting:
    """One registration on its way: what has to be seen, and what has been seen so far."""

    pipeline: Pipeline
    tables: Sequence[Table]
    now: Registration
    known: Registration | None
    """The one before, if there is a record of it."""
    conn: source.Connection
    connect: Connect
    topics: Topics
    progress: Callable[[str], None]
    moved: bool
    """Whether the topics hold another server's log."""
    offset: int = 0
    """A beat at or after it is newer than the registration."""
    old_pid: int | None = None
    """The slot's user when its task is to restart: the last beats of the old task don't count."""
    stale_until: float = 0.0
    stopped: bool = False
    """It was told to stand still, by this registration."""
    state: ConnectorState | None = None

    def put(
        self, config: dict[str, str], before: dict[str, str] | None, created: list[str], found: source.Slot | None
    ) -> list[str]:
        """Put the configuration, unless it is the one that runs; restart what had failed. The tables that are sent."""
        name = self.pipeline.pipeline
        failed = self.connect.state(name).failed
        if before is None:
            self.connect.create_stopped(name, config)
            self.stopped = True
        if self.moved:
            self._forget()
        captured = self.known.tables if self.known else captured_by(before, self.tables) if before else None
        sent, dead = self._arrivals(captured, created, restarts=failed or config != before or self.moved)
        self.offset = self._end(self.pipeline.heartbeat_topic)
        if before is not None and config != before:
            self.connect.put(name, config)
            self.old_pid = found.active_pid if found else None
        # Last: whoever was ended before this finds again what has to be sent.
        next_one = (self.known or self.now).renewed(
            self.now.server, self.now.tables, captured or {}, dead, moved=self.moved
        )
        if next_one != self.known:
            registrations.write(self.topics, self.pipeline, next_one)
        # Also one that an earlier registration left so; Connect may be late in telling.
        if self.stopped or self.connect.state(name).connector == "STOPPED":
            self.connect.resume(name)
        elif failed:
            self.connect.restart_failed(name)
            self.stale_until = time.monotonic() + STALE_S
        return sent

    def _arrivals(
        self, before: Mapping[str, registrations.Captured] | None, created: list[str], *, restarts: bool
    ) -> tuple[list[str], Mapping[str, Position]]:
        """See to the rows that are not in the topics, or there in vain, while the connector stands still.

        The tables that are sent, and where topics end of which all is dead.
        """
        name = self.pipeline.pipeline
        if new_tables.takes_snapshot(self.connect.offsets(name)):
            if not restarts:
                return [], {}
            # Once more without its task: a floor above a snapshot that ends just now would bury all of it.
            self._stop()
            if new_tables.takes_snapshot(self.connect.offsets(name)):
                if dead := new_tables.bury(self.conn, self.topics, self.tables, self._void()):
                    self.progress(f"a new snapshot replaces what is in {', '.join(dead)}")
                return [], dead
        unsent = new_tables.unsent(self.conn, self.topics, self.tables, before, self.now.tables, created)
        if not unsent:
            return [], {}
        for request in unsent:
            self.progress(f"sending all rows of {request.table.qualified}: {request.what}")
        self._stop()
        return [request.table.qualified for request in unsent], new_tables.send(self.conn, self.topics, unsent)

    def _forget(self) -> None:
        """Begin anew, on a server whose log has nothing to do with what the connector has stored."""
        self.progress("another server: its rows replace what the topics hold")
        self._stop()
        self.connect.forget(self.pipeline.pipeline)
        for line in carry_out(self.conn, reset_floors(self.conn)).done:
            self.progress(line)

    def _void(self) -> list[str]:
        """Control topics in which another server's entries are of no account: they come anew with the snapshot."""
        return [self.pipeline.topic(table) for table in ("cdc.truncation", "cdc.ddl")] if self.moved else []

    def _stop(self) -> None:
        if not self.stopped:
            self.connect.stop(self.pipeline.pipeline)
            self.stopped = True

    def until_beating(self) -> Beat:
        deadline, before = time.monotonic() + DEADLINE_S, self._records()
        told_at = time.monotonic()
        while True:
            beat = self._look()
            if beat is not None:
                return beat
            records = self._records()
            if records != before:
                before, deadline = records, time.monotonic() + DEADLINE_S
            if time.monotonic() > told_at + SILENT_S:
                self.progress(f"waiting for a heartbeat to come through; {records} records in the topics")
                told_at = time.monotonic()
            if time.monotonic() > deadline:
                raise _late(self.pipeline, self.state or ConnectorState("MISSING"))
            time.sleep(POLL_S)

    def _look(self) -> Beat | None:
        state = self.connect.state(self.pipeline.pipeline)
        if state != self.state:
            self.progress(f"connector {state.connector}, task {', '.join(state.tasks) or 'not started'}")
            self.state = state
        if state.failed and time.monotonic() > self.stale_until:
            raise _failed(self.pipeline, state)
        end = self._end(self.pipeline.heartbeat_topic)
        if not state.running or end <= self.offset:
            return None
        if self.old_pid is not None:
            now = source.slot(self.conn, self.pipeline.pipeline)
            if now and now.active and now.active_pid != self.old_pid:
                self.old_pid, self.offset = None, end
            return None
        beat = last_beat(self.topics, self.pipeline)
        return beat if beat and beat.offset >= self.offset else None

    def _end(self, topic: str) -> int:
        return self.topics.ends([topic])[topic].offsets[0]

    def _records(self) -> int:
        ends = self.topics.ends([table.topic for table in self.tables])
        return sum(sum(end.offsets) for end in ends.values())


def _failed(pipeline: Pipeline, state: ConnectorState) -> ConnectorError:
    trace = (state.trace or "it gives no reason").rstrip(".")
    hint = next(
        (hint for word, hint in HINTS if word in trace), "the worker's log says more; then: cdc -p FILE register"
    )
    return ConnectorError(
        f"The connector {pipeline.pipeline} has failed: {trace}.", hint=hint, connector=pipeline.pipeline
    )


def _late(pipeline: Pipeline, state: ConnectorState) -> ConnectorError:
    missing = f"no heartbeat has arrived in {pipeline.heartbeat_topic}"
    if not state.running:
        missing = f"it doesn't run (connector {state.connector}, task {', '.join(state.tasks) or 'none'})"
    return ConnectorError(
        f"The connector {pipeline.pipeline} was put, but nothing moved for {DEADLINE_S:.0f} s: {missing}.",
        hint="cdc -p FILE status, and the worker's log, say more",
        connector=pipeline.pipeline,
    )
