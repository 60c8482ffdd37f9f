"""Register the connector, and wait until a heartbeat has come through it.

In:  the pipeline file and its tables. Out: `RegistrationResult`, or the first error, with the
command that repairs the cause.
Invariant: everything that can be checked is checked before the first topic is created. A heartbeat
counts only if the task with the new configuration has sent it.
"""

import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from cdc.capture.configuration import configuration
from cdc.config.settings import Pipeline
from cdc.connectors.client import Connect, ConnectorState, takes_snapshot
from cdc.control import registrations
from cdc.control.heartbeat import Heartbeat, last_heartbeat
from cdc.control.registrations import Captured, Registration
from cdc.errors import ConnectorError
from cdc.kafka.ledger import Ledger
from cdc.kafka.log_continuity import request_name
from cdc.kafka.topic_setup import ensure_topics
from cdc.kafka.topics import Topics
from cdc.migrations.removal import drop_slot
from cdc.migrations.runner import require_capturable
from cdc.migrations.statement import carry_out
from cdc.migrations.truncation import reset_floors
from cdc.model.position import Position
from cdc.model.session_settings import WORKER_ZONE
from cdc.model.table import Table
from cdc.postgres import source, table_survey
from cdc.postgres.snapshot_request import raise_floor, resend
from cdc.postgres.source import Connection
from cdc.quarantine.log import settle_topics
from cdc.readiness.checks import check_source, refuse
from cdc.readiness.facts import Slot, bounded_locks, read_slot, read_source

RELEASE_S = 10.0
"""Seconds until Postgres notices that a deleted connector is gone."""
DEADLINE_S = 60.0
"""Seconds without any progress after which a registration fails. There is no limit while a snapshot
progresses or topics are being created.
"""
STALE_S = 10.0
"""Seconds for which Connect may still report a failure of a task after it was asked to restart it.
"""
SILENT_S = 4.0
"""Seconds between two messages while waiting for the heartbeat."""
POLL_S = 0.25
ALIKE = "columns that differ only by case"
"""Part of the message with which Debezium refuses a table, even one that it doesn't capture."""

HINTS = (
    (
        ALIKE,
        "rename one of them, then: cdc -p FILE register --new-snapshot, because the log keeps the description"
        " of the table that the connector refuses",
    ),
    (
        "no longer available on the server",
        "the slot has lost changes, which only a new snapshot makes up for: cdc -p FILE register --new-snapshot",
    ),
    (
        "password authentication failed",
        "check source.replication_password, then: cdc -p FILE migrate",
    ),
    (WORKER_ZONE, "the worker goes on once it is started with that option"),
    ("publication", "cdc -p FILE migrate"),
    ("permission denied", "cdc -p FILE migrate"),
    (
        "RecordTooLarge",
        "a row exceeds the largest message (16 MiB): shorten it, or leave its column out with `exclude`",
    ),
)


@dataclass(frozen=True)
class RegistrationResult:
    """The outcome of a registration. `changed` is false if the connector already had this
    configuration.
    """

    connector: str
    changed: bool
    created: list[str]
    """Topics that were created."""
    sent: list[str]
    """Tables that are backfilled: new tables of a running pipeline, and tables with another key or
    other columns.
    """
    waited_s: float
    beat: Heartbeat


def register(
    pipeline: Pipeline,
    tables: Sequence[Table],
    *,
    another_server: bool = False,
    new_snapshot: bool = False,
    by_run: bool = False,
    progress: Callable[[str], None] = lambda _: None,
) -> RegistrationResult:
    """Create or update the connector.

    With `another_server`, Postgres may have been replaced by another server. With `new_snapshot`,
    the connector and its slot are created again. In both cases the new snapshot replaces everything
    that the topics have; with a new slot in place, so that readers keep their rows. `by_run`: a run
    captures tables again, and has no more rights in Postgres than that takes.

    Raises:
        SourceError, ConnectorError: with the command that repairs the cause. Topics are created
        only
            for a valid configuration.
    """
    name = pipeline.pipeline
    started = time.monotonic()
    with (
        source.connect_to_read(pipeline.source, as_owner=not by_run) as conn,
        Topics(pipeline.kafka, DEADLINE_S) as topics,
        Connect(pipeline.connect) as connect,
    ):
        require_capturable(conn)
        server = source.server(conn)
        previous = registrations.read(topics, pipeline)
        if not another_server:
            registrations.refuse_another(previous, server, pipeline)
        if new_snapshot:
            _remove_connector(pipeline, conn, connect, progress)
        previous_config = connect.config(name)
        slot = _require_ready(conn, pipeline, tables, connected=previous_config is not None)
        unpublished = table_survey.unreplicated_columns(conn, pipeline)
        config = configuration(
            pipeline,
            tables=tables,
            server_version=conn.info.server_version,
            cluster_id=topics.cluster_id(),
            unpublished=unpublished,
        )
        connect.validate(config)
        created = [topic for topic, is_new in ensure_topics(topics, pipeline).items() if is_new]
        progress(f"{len(created)} topics created")
        registration = registrations.describe(
            topics, pipeline, server, registrations.captured_tables(pipeline, unpublished)
        )
        attempt = _RegistrationAttempt(
            pipeline,
            tables,
            registration,
            previous,
            conn,
            connect,
            topics,
            progress,
            another_server,
        )
        backfilled = attempt.put(config, previous_config, created, slot)
        beat = attempt.wait()
    waited_s = round(time.monotonic() - started, 3)
    return RegistrationResult(name, config != previous_config, created, backfilled, waited_s, beat)


@dataclass
class _RegistrationAttempt:
    """A registration in progress: its connections, what it has done so far, and which heartbeats
    count. One thread uses it.
    """

    pipeline: Pipeline
    tables: Sequence[Table]
    registration: Registration
    previous: Registration | None
    """The previous registration, if it was recorded."""
    conn: source.Connection
    connect: Connect
    topics: Topics
    progress: Callable[[str], None]
    another_server: bool
    """Whether Postgres may have been replaced since the last registration."""
    stopped: bool = False
    """Whether this registration has stopped the connector."""
    min_offset: int = 0
    """Offset in the heartbeat topic: a heartbeat at or after it is newer than the registration."""
    old_pid: int | None = None
    """The process that reads the slot for the old task. Heartbeats don't count until another
    process reads it.
    """
    stale_until: float = 0.0
    """Until then, by the monotonic clock, failures are ignored: tasks were just asked to restart."""
    state: ConnectorState | None = None
    """The last one that was seen while waiting."""

    @property
    def server_changed(self) -> bool:
        """Whether the topics have the log of another server."""
        previous = self.previous
        server = self.registration.server
        return self.another_server and (
            previous is None or server is None or previous.server != server
        )

    def put(
        self,
        config: dict[str, str],
        previous_config: dict[str, str] | None,
        created: list[str],
        slot: Slot | None,
    ) -> list[str]:
        """Put the configuration if it has changed, and restart failed tasks.

        Returns the tables that are backfilled.
        """
        name = self.pipeline.pipeline
        state_before = self.connect.state(name)
        failed = state_before.failed
        if previous_config is None:
            self.connect.create_stopped(name, config)
            self.stopped = True
        if self.server_changed:
            self._start_over()
        captured = self.previous.tables if self.previous else {}
        backfilled, void_ends = self._send_missing_rows(
            captured,
            created,
            slot,
            # One that is stopped takes the snapshot from its beginning.
            restarts=failed
            or config != previous_config
            or self.server_changed
            or state_before.connector == "STOPPED",
        )
        self.min_offset = self._end_offset()
        if previous_config is not None and config != previous_config:
            self.connect.put(name, config)
            self.old_pid = slot.active_pid if slot else None
        # A redrive of their quarantine entries would overwrite the rows that are sent now.
        settle_topics(self.topics, self.pipeline, self._new_topics(created) | void_ends.keys())
        # Last, so that a registration that is killed before finds the same backfills again.
        next_registration = (self.previous or self.registration).renew(
            self.registration, captured, void_ends, moved=self.server_changed
        )
        if next_registration != self.previous:
            registrations.write(self.topics, self.pipeline, next_registration)
        # An earlier registration may have left the connector stopped, or somebody may have paused
        # it. Connect reports that late, and briefly reports another state after a configuration was
        # put.
        idle = {state_before.connector, self.connect.state(name).connector} & {"STOPPED", "PAUSED"}
        if self.stopped or idle:
            self.connect.resume(name)
        # A stop ends failed tasks, a pause doesn't.
        if failed and not self.stopped:
            self.connect.restart_failed(name)
            self.stale_until = time.monotonic() + STALE_S
        return backfilled

    def wait(self) -> Heartbeat:
        """Wait for a heartbeat that the new task has sent. Raises ConnectorError."""
        deadline = time.monotonic() + DEADLINE_S
        previous_records = self._count_records()
        reported_at = time.monotonic()
        while True:
            beat = self._check_heartbeat()
            if beat is not None:
                return beat
            records = self._count_records()
            if records != previous_records:
                previous_records = records
                deadline = time.monotonic() + DEADLINE_S
            if time.monotonic() > reported_at + SILENT_S:
                self.progress(
                    f"waiting for a heartbeat to come through; {records} records in the topics"
                )
                reported_at = time.monotonic()
            if time.monotonic() > deadline:
                raise _timeout_error(self.pipeline, self.state or ConnectorState("MISSING"))
            time.sleep(POLL_S)

    def _check_heartbeat(self) -> Heartbeat | None:
        state = self.connect.state(self.pipeline.pipeline)
        if state != self.state:
            self.progress(
                f"connector {state.connector}, task {', '.join(state.tasks) or 'not started'}"
            )
            self.state = state
        if state.failed and time.monotonic() > self.stale_until:
            raise _failure_error(self.pipeline, state)
        end = self._end_offset()
        if not state.running or end <= self.min_offset:
            return None
        if self.old_pid is not None:
            slot = read_slot(self.conn, self.pipeline.pipeline)
            if slot and slot.active and slot.active_pid != self.old_pid:
                self.old_pid = None
                self.min_offset = end
            return None
        beat = last_heartbeat(self.topics, self.pipeline)
        return beat if beat and beat.offset >= self.min_offset else None

    def _end_offset(self) -> int:
        topic = self.pipeline.heartbeat_topic
        return self.topics.ends([topic])[topic].offsets[0]

    def _count_records(self) -> int:
        ends = self.topics.ends([table.topic for table in self.tables])
        return sum(sum(end.offsets) for end in ends.values())

    def _send_missing_rows(
        self,
        previous: Mapping[str, Captured],
        created: list[str],
        slot: Slot | None,
        *,
        restarts: bool,
    ) -> tuple[list[str], Mapping[str, Position]]:
        """Request the rows that are missing from the topics, while the connector is stopped.

        Returns the tables that are backfilled, and the ends of topics whose records are all dead.
        """
        name = self.pipeline.pipeline
        # Tables whose topics have events under the keys of now.
        events = (self.previous or self.registration).events
        known_keys = {name: captured.key for name, captured in previous.items()}
        current = self.registration.tables
        events &= {
            name
            for name, captured in current.items()
            if captured.events and known_keys.get(name, captured.key) == captured.key
        }
        if takes_snapshot(self.connect.offsets(name)):
            if not restarts:
                return [], {}
            # Checked again with the task stopped: if the snapshot has just ended, a floor would
            # make all of its records dead.
            self._stop_connector()
            if takes_snapshot(self.connect.offsets(name)):
                sent = [table for table in self.tables if table.qualified not in events]
                # A slot that is there sends earlier changes after the snapshot; a floor makes them dead.
                is_new_slot = slot is None and not self.server_changed
                updated = [
                    table for table in sent if is_new_slot and _is_same(table, previous, current)
                ]
                self._begin_snapshot([table.topic for table in updated])
                replaced = [table for table in sent if table not in updated]
                # Control topics have entries of the other server; the snapshot sends this one's.
                control = ("cdc.truncation", "cdc.ddl") if self.server_changed else ()
                if void_ends := set_floor_before_snapshot(
                    self.conn, self.topics, replaced, [*map(self.pipeline.topic, control)]
                ):
                    self.progress(f"a new snapshot replaces what is in {', '.join(void_ends)}")
                return [], void_ends
        backfills = find_backfills(
            self.topics,
            self.tables,
            previous,
            self.registration.tables,
            self._new_topics(created),
            events,
        )
        if not backfills:
            return [], {}
        for request in backfills:
            self.progress(f"sending all rows of {request.table.qualified}: {request.reason}")
        self._stop_connector()
        return [request.table.qualified for request in backfills], request_backfills(
            self.conn, self.topics, backfills, self.pipeline.replication_user
        )

    def _begin_snapshot(self, topics: Sequence[str]) -> None:
        """Note where topics end whose rows a new snapshot updates in place."""
        ends = {
            topic: end for topic, end in self.topics.log_ends(topics).items() if any(end.offsets)
        }
        if ends:
            Ledger(self.pipeline, self.topics).begin_snapshot(ends)
            self.progress(
                f"a new snapshot updates the rows of {', '.join(ends)}; once it has ended, `cdc run` deletes those"
                " that Postgres no longer has"
            )

    def _new_topics(self, created: list[str]) -> set[str]:
        """The topics created since the last registration: by this one, or by one that failed."""
        known_ids = self.previous.topic_ids if self.previous else {}
        return {
            topic
            for topic, topic_id in self.registration.topic_ids.items()
            if topic in created or known_ids.get(topic, topic_id) != topic_id
        }

    def _start_over(self) -> None:
        """Delete the connector's offsets, which belong to another server's log."""
        self.progress("another server: its rows replace what the topics hold")
        self._stop_connector()
        self.connect.delete_offsets(self.pipeline.pipeline)
        for line in carry_out(self.conn, reset_floors(self.conn)).messages:
            self.progress(line)

    def _stop_connector(self) -> None:
        if not self.stopped:
            self.connect.stop(self.pipeline.pipeline)
            self.stopped = True


def _is_same(
    table: Table, previous: Mapping[str, Captured], current: Mapping[str, Captured]
) -> bool:
    """Whether the records that a table's topic has are of the same rows as those that come."""
    before = previous.get(table.qualified)
    now = current[table.qualified]
    return before is not None and before.key == now.key and before.events == now.events


def _failure_error(pipeline: Pipeline, state: ConnectorState) -> ConnectorError:
    trace = (state.trace or "it gives no reason").rstrip(".")
    hint = next(
        (hint for word, hint in HINTS if word in trace),
        "look at the worker's log, then run: cdc -p FILE register",
    )
    return ConnectorError(
        f"The connector {pipeline.pipeline} has failed: {trace}.",
        hint=hint,
        connector=pipeline.pipeline,
    )


def _timeout_error(pipeline: Pipeline, state: ConnectorState) -> ConnectorError:
    missing = f"no heartbeat has arrived in {pipeline.heartbeat_topic}"
    if not state.running:
        missing = (
            f"it doesn't run (connector {state.connector}, task {', '.join(state.tasks) or 'none'})"
        )
    return ConnectorError(
        f"The connector {pipeline.pipeline} was put, but nothing moved for {DEADLINE_S:.0f} s: {missing}.",
        hint="run cdc -p FILE status, and look at the worker's log",
        connector=pipeline.pipeline,
    )


def _remove_connector(
    pipeline: Pipeline, conn: source.Connection, connect: Connect, progress: Callable[[str], None]
) -> None:
    """Remove the connector with its offsets, and its slot. Repeating it is safe: a registration
    without them takes a new snapshot.
    """
    name = pipeline.pipeline
    connect.reset(name)
    progress(f"connector {name} removed, with its offsets")
    if drop_slot(conn, name):
        progress(f"slot {name} dropped")


def _require_ready(
    conn: source.Connection, pipeline: Pipeline, tables: Sequence[Table], *, connected: bool
) -> Slot | None:
    """Check the source, and return the slot if it exists. `connected`: Connect has the connector.

    Raises:
        SourceError: the first fault that stops a registration.
    """
    deadline = time.monotonic() + RELEASE_S
    while (
        not connected
        and time.monotonic() < deadline
        and (existing := read_slot(conn, pipeline.pipeline))
        and existing.active
    ):
        time.sleep(0.25)
    captured = [(table.schema, table.name) for table in tables]
    with bounded_locks(conn):
        facts = read_source(
            conn,
            replace(table_survey.requirements(pipeline), tables=captured),
            refused={},
            unidentified=table_survey.unidentified(conn, tables),
            connected=connected,
        )
    refuse(fault for fault in check_source(facts) if fault.stops)
    return facts.slot


@dataclass(frozen=True)
class Backfill:
    """A table whose rows have to be sent. With `reset_floor`, the records that its topic has now
    are dead.
    """

    table: Table
    reason: str
    reset_floor: bool


def find_backfills(
    topics: Topics,
    tables: Sequence[Table],
    previous: Mapping[str, Captured],
    current: Mapping[str, Captured],
    created: Collection[str],
    events: Collection[str],
) -> list[Backfill]:
    """Find tables whose topics lack rows as they are sent from now on, and that no snapshot will
    copy.

    `previous` is how tables were captured until now. `created` are the topics created since then.
    `events` are tables of events whose topics still have all of them.
    """
    ends = topics.ends([table.topic for table in tables])
    backfills = []
    for table in tables:
        if table.topic in created or table.qualified not in previous:
            has_dead = any(ends[table.topic].offsets) and table.qualified not in events
            backfills.append(Backfill(table, "it is new here", has_dead))
        else:
            old_capture = previous[table.qualified]
            new_capture = current[table.qualified]
            if old_capture.key != new_capture.key:
                backfills.append(Backfill(table, "it has another key", True))
            elif old_capture.events != new_capture.events:
                now = "are events now" if new_capture.events else "aren't events any more"
                backfills.append(Backfill(table, f"its rows {now}", True))
            elif old_capture.unsent != new_capture.unsent:
                backfills.append(Backfill(table, "it has other columns", False))
            elif old_capture.mask != new_capture.mask:
                backfills.append(Backfill(table, "it has other masks", False))
    return backfills


def request_backfills(
    conn: Connection, topics: Topics, requests: Iterable[Backfill], reader: str
) -> dict[str, Position]:
    """Request all rows of tables, while the connector is stopped: it then knows each table when it reads
    the request. After a crash at any point, the next registration finds what is missing.

    `reader` is the connector's role. Returns the ends of the topics whose present records are dead.
    """
    listed = list(requests)
    ends = topics.log_ends([request.table.topic for request in listed])
    for request in listed:
        end = ends[request.table.topic]
        name = request_name(request.reason, end)
        resend(conn, request.table, reader=reader, id=name, reset_floor=request.reset_floor)
    return {
        request.table.topic: ends[request.table.topic] for request in listed if request.reset_floor
    }


def set_floor_before_snapshot(
    conn: Connection, topics: Topics, tables: Sequence[Table], control_topics: Sequence[str]
) -> dict[str, Position]:
    """Set a floor before another first snapshot, because a row that was deleted since the last one
    has no record. `tables`: those whose views don't keep such a row.

    Returns the ends of the topics that have records, `control_topics` among them.
    """
    ends = topics.log_ends([*(table.topic for table in tables), *control_topics])
    filled = [table.qualified for table in tables if any(ends[table.topic].offsets)]
    if filled:
        raise_floor(conn, filled)
    return {topic: end for topic, end in ends.items() if any(end.offsets)}
