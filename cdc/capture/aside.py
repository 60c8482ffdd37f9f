"""Set a table aside: the connector resumes from its stored offset without the table, and the other
tables continue.

In:  a connector whose task has failed. Out: its settings without the table, and a registration that
has the reason.
Invariant: the registration lists a table as set aside before the connector passes a change of it. A
table that is captured again is treated as new: a floor is set, and all of its rows are sent.
"""

import time
from collections.abc import Callable, Collection

from cdc.capture.stuck import StuckTransaction
from cdc.capture.unsendable import find_table, read_causes
from cdc.config.settings import Pipeline
from cdc.connectors.client import Connect, ConnectorState
from cdc.connectors.debezium import name_patterns, parse_names
from cdc.control import registrations
from cdc.control.heartbeat import last_heartbeat
from cdc.errors import ConnectorError
from cdc.kafka.topics import Topics
from cdc.model.obstacle import Obstacle
from cdc.postgres import source, table_survey

POLL_S = 0.25
STILL_S = 60.0
"""Seconds without a heartbeat after which a resumed connector counts as stuck."""
INCLUDED = "table.include.list"
LSN = "SELECT pg_current_wal_insert_lsn() - '0/0'::pg_lsn"


def set_aside(
    pipeline: Pipeline,
    *,
    stuck: StuckTransaction | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> dict[str, Obstacle]:
    """Set aside each table with a change that fails the connector's task, and wait until the
    connector has read everything that is committed now. Returns the tables set aside by this call.

    Sets nothing aside while the task runs, or if the table can't be found. A caller that calls this
    repeatedly passes the same `stuck` each time.

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
            with source.connect(pipeline.source.dsn) as conn, Topics(pipeline.kafka) as topics:
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
        with source.connect(pipeline.source.dsn) as conn, Connect(pipeline.connect) as connect:
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
