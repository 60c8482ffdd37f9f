"""Set a table aside: the connector resumes from its stored offset without the table, and the other
tables continue.

In:  a connector whose task has failed; the causes in the task's trace; the slot, which still has the
change. Out: its settings without the table, and a registration that has the reason.
Invariant: the registration lists a table as set aside before the connector passes a change of it. A
table that is captured again is treated as new: a floor is set, and all of its rows are sent. For an
unknown cause no table is set aside.
"""

import re
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass

import psycopg

from cdc.config.settings import Pipeline
from cdc.connectors.client import Connect, ConnectorState
from cdc.connectors.debezium import name_patterns, parse_names
from cdc.control import registrations
from cdc.control.heartbeat import last_heartbeat
from cdc.errors import ConnectorError
from cdc.kafka.topics import Topics
from cdc.kafka.transactions import OpenTransaction, end_transaction, find_open
from cdc.model.obstacle import Obstacle
from cdc.postgres import source, table_survey

POLL_S = 0.25
STILL_S = 60.0
"""Seconds without a heartbeat after which a resumed connector counts as stuck."""
INCLUDED = "table.include.list"
LSN = "SELECT pg_current_wal_insert_lsn() - '0/0'::pg_lsn"
RELEASE_S = 10.0
"""Seconds within which Postgres releases the slot of a task that has ended."""
KEYLESS_TOPIC = re.compile(r"without key in topic partition (\S+)-\d+'")
EVENT_LSN = re.compile(r"Error while processing event at offset \{.*?\blsn=(\d+)", re.DOTALL)
# Bytes 2 to 5 of a message hold the relation's oid; the first is the kind of change.
PENDING = """
SELECT n.nspname || '.' || c.relname
FROM pg_logical_slot_peek_binary_changes(%(slot)s::text::name, NULL, NULL, 'proto_version', '1',
                                         'publication_names', quote_ident(%(slot)s::text)) AS change
JOIN pg_class c ON c.oid::bigint = ('x' || encode(substr(change.data, 2, 4), 'hex'))::bit(32)::bigint
JOIN pg_namespace n ON n.oid = c.relnamespace
WHERE chr(get_byte(change.data, 0)) IN ('I', 'U', 'D')
      AND (%(lsn)s::numeric IS NULL OR change.lsn = '0/0'::pg_lsn + %(lsn)s::numeric)
ORDER BY length(change.data) DESC LIMIT 1
"""
OPEN_S = 3.0
"""Seconds after which an open transaction counts as stuck. It has one batch of the connector, and
normally takes milliseconds.
"""
FAILS_S = 5.0
"""Seconds within which a task fails whose transaction was aborted, and Connect reports it."""
LONGEST_S = 60.0
"""Seconds after which the broker aborts an open transaction."""


class StuckTransaction:
    """Finds a transaction of the pipeline that stays open, and aborts it. Not thread-safe.

    A task that fails while it commits records reads its stored offsets before it gives up its
    transaction. That read waits for open transactions, and so for the task's own. Until the broker
    aborts it, after a minute, Connect reports the task as RUNNING. The worker's other connectors wait
    too, because the offsets of all are in one topic.

    A healthy task loses a transaction only if it was open for seconds. The task then reads the same
    changes again.
    """

    def __init__(self, pipeline: Pipeline) -> None:
        self._bootstrap = pipeline.kafka
        self._name = pipeline.pipeline
        self._seen: OpenTransaction | None = None
        self._since = 0.0
        self._patience_s = OPEN_S
        self._fails_until = 0.0

    def look(self) -> bool:
        """Look once, and abort a transaction that has been open for too long. Returns whether to
        look again soon: a transaction stays open, or was just aborted and the task is about to
        fail.

        Raises:
            KafkaUnavailable: the broker can't be reached, or refuses.
        """
        # Connect's name for the writer of a task: its group, the connector, the task's number.
        opened = find_open(self._bootstrap, f"-{self._name}-0", f"{self._name}.")
        former = self._seen
        self._seen = opened[0] if opened else None
        if self._seen is None:
            return time.monotonic() < self._fails_until
        if self._seen != former:
            self._since = time.monotonic()
            return former is None
        if time.monotonic() - self._since >= self._patience_s:
            end_transaction(self._bootstrap, self._seen.name)
            self._fails_until = time.monotonic() + FAILS_S
            # If the task was healthy after all, its next transaction gets more time.
            self._patience_s = min(2 * self._patience_s, LONGEST_S)
        return True


def set_aside(
    pipeline: Pipeline,
    *,
    stuck: StuckTransaction | None = None,
    as_owner: bool = False,
    progress: Callable[[str], None] = lambda _: None,
) -> dict[str, Obstacle]:
    """Set aside each table with a change that fails the connector's task, and wait until the
    connector has read everything that is committed now. Returns the tables set aside by this call.

    Sets nothing aside while the task runs, or if the table can't be found. A caller that calls this
    repeatedly passes the same `stuck` each time. `as_owner`: the source is asked as its owner, who
    may read the slot.

    Raises:
        SourceError, ConnectorError: a server can't be reached, or no heartbeat arrives.
    """
    name = pipeline.pipeline
    moved = dict[str, Obstacle]()
    stuck = stuck or StuckTransaction(pipeline)
    with Connect(pipeline.connect) as connect:
        while (state := connect.state(name)).running and stuck.look():
            time.sleep(POLL_S)
        while state.failed:
            with (
                source.connect_to_read(pipeline.source, as_owner=as_owner) as conn,
                Topics(pipeline.kafka) as topics,
            ):
                registration = registrations.read(topics, pipeline)
                config = connect.config(name)
                change = read_causes(state.causes, name)
                if registration is None or config is None or change is None:
                    break
                table = find_table(conn, name, change, registration.tables)
                if table is None:
                    break
                progress(f"{table} is set aside: {change.obstacle.reason}")
                connect.stop(name)
                registrations.write(
                    topics, pipeline, registration.set_aside(table, change.obstacle)
                )
                remaining = [other for other in parse_names(config[INCLUDED]) if other != table]
                connect.put(name, {**config, INCLUDED: name_patterns(remaining)})
                connect.resume(name)
                moved[table] = change.obstacle
                state = _wait_until_passed(pipeline, conn, topics, connect, stuck)
    return moved


def choose_left_out(pipeline: Pipeline, moved: Collection[str]) -> dict[str, Obstacle]:
    """Choose which of the tables set aside can't be captured yet: tables whose definition is still
    refused, and tables of `moved` with an obstacle that isn't in the definition.

    If other tables can be captured again, waits until the connector has read everything that was
    committed before.

    Raises:
        SourceError, ConnectorError: a server can't be reached, or no heartbeat arrives.
    """
    with Topics(pipeline.kafka) as topics:
        registration = registrations.read(topics, pipeline)
        if registration is None or not registration.aside:
            return {}
        with source.connect_to_read(pipeline.source) as conn, Connect(pipeline.connect) as connect:
            resolved = pipeline.with_tables(registration.names)
            refused = table_survey.survey(conn, resolved).refused
            left_out = {
                name: obstacle
                for name, obstacle in registration.aside.items()
                if name in refused or (name in moved and not obstacle.in_definition)
            }
            if len(left_out) < len(registration.aside) and connect.state(pipeline.pipeline).running:
                stuck = StuckTransaction(pipeline)
                _wait_until_passed(pipeline, conn, topics, connect, stuck)
    return left_out


def _wait_until_passed(
    pipeline: Pipeline,
    conn: source.Connection,
    topics: Topics,
    connect: Connect,
    stuck: StuckTransaction,
) -> ConnectorState:
    """Wait until the connector has read everything that is committed now, or its task fails."""
    row = conn.execute(LSN).fetchone()
    committed = int(row[0]) if row else 0
    deadline = time.monotonic() + STILL_S
    newest_lsn = 0
    while True:
        state = connect.state(pipeline.pipeline)
        beat = last_heartbeat(topics, pipeline)
        if state.failed or (beat and beat.lsn >= committed):
            return state
        if beat and beat.lsn > newest_lsn:
            newest_lsn = beat.lsn
            deadline = time.monotonic() + STILL_S
        if time.monotonic() > deadline:
            raise ConnectorError(
                f"The connector {pipeline.pipeline} was resumed without the tables set aside, but sent no"
                f" heartbeat for {STILL_S:.0f} s.",
                hint="run cdc -p FILE status, and read the worker's log",
            )
        if state.running:
            stuck.look()
        time.sleep(POLL_S)


@dataclass(frozen=True)
class Unsendable:
    """A change that can't be sent. The trace has its `table`, its `lsn`, or neither."""

    obstacle: Obstacle
    table: str | None = None
    lsn: int | None = None


def read_causes(causes: str, pipeline: str) -> Unsendable | None:
    """Find the change that failed a task in the causes of its trace. None if there is none."""
    if named := KEYLESS_TOPIC.search(causes):
        return Unsendable(Obstacle.KEYLESS, named[1].removeprefix(f"{pipeline}."))
    if "RecordTooLargeException" in causes:
        return Unsendable(Obstacle.TOO_LARGE)
    if event := EVENT_LSN.search(causes):
        return Unsendable(Obstacle.UNREADABLE, lsn=int(event[1]))
    return None


def find_table(
    conn: source.Connection, slot: str, change: Unsendable, captured: Collection[str]
) -> str | None:
    """Find the table of a change that can't be sent. None if it isn't one of `captured`, or if the
    role of `conn` may not read the slot.

    If the trace didn't name the table, this searches the slot for the change at its LSN, or else
    for the largest change. That decodes everything that the connector hasn't confirmed.
    """
    table = change.table or _find_pending(conn, slot, change.lsn)
    return table if table in captured else None


def _find_pending(conn: source.Connection, slot: str, lsn: int | None) -> str | None:
    deadline = time.monotonic() + RELEASE_S
    while True:
        try:
            row = conn.execute(PENDING, {"slot": slot, "lsn": lsn}).fetchone()
        except psycopg.errors.ObjectInUse:
            if time.monotonic() > deadline:
                return None
            time.sleep(POLL_S)
            continue
        except (psycopg.errors.InsufficientPrivilege, psycopg.errors.UndefinedObject):
            return None
        return row[0] if row else None
