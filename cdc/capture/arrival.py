"""Wait until a heartbeat comes through the connector with its new configuration, or raise the
reason why none does.

In:  the connections of a registration. Out: the heartbeat, or an error with the command that
repairs the cause. Invariant: a heartbeat counts only if the new task has sent it.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from cdc.config.settings import Pipeline
from cdc.connectors.client import Connect, ConnectorState
from cdc.control.heartbeat import Heartbeat, last_heartbeat
from cdc.errors import ConnectorError
from cdc.kafka.topics import Topics
from cdc.model.session_settings import WORKER_ZONE
from cdc.model.table import Table
from cdc.postgres import source
from cdc.readiness import replication_slot

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


@dataclass
class Arrival:
    """The wait for the first heartbeat of a registration. One thread uses it."""

    pipeline: Pipeline
    tables: Sequence[Table]
    conn: source.Connection
    connect: Connect
    topics: Topics
    progress: Callable[[str], None]
    min_offset: int = 0
    """Offset in the heartbeat topic: a heartbeat at or after it is newer than the registration."""
    old_pid: int | None = None
    """The process that reads the slot for the old task. Heartbeats don't count until another
    process reads it.
    """
    stale_until: float = 0.0
    state: ConnectorState | None = None

    def begin(self) -> None:
        """Count only heartbeats that arrive from now on."""
        self.min_offset = self._end_offset()

    def excuse_failures(self) -> None:
        """Ignore failures for STALE_S, because failed tasks were just asked to restart."""
        self.stale_until = time.monotonic() + STALE_S

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
            slot = replication_slot.slot(self.conn, self.pipeline.pipeline)
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
