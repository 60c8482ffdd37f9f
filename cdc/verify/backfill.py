"""Have single rows of a table sent again, so that the log itself holds them whole.

In:  ids of rows, as views have them. Out: records in the table's topic.
Invariant: only keys travel; what each row holds goes from Postgres through the connector, in order with its changes.
"""

import json
import time
from collections.abc import Sequence
from uuid import uuid4

import psycopg
from psycopg import sql

from cdc.config.settings import Pipeline
from cdc.errors import ConnectorError
from cdc.kafka.records import Record
from cdc.kafka.topics import Topics
from cdc.model.position import distance
from cdc.model.table import Table
from cdc.postgres import source
from cdc.postgres.incremental_snapshot import resend
from cdc.postgres.snapshot_request import MARKS
from cdc.verify.source_rows import by_id, by_text

IDS_PER_REQUEST = 200
"""The connector stores a request with every offset while it is at work on it, in one record of the worker's."""
POLL_S = 0.1
PENDING_S = 60.0
"""So long may deletions wait for the rows behind them, and the table's views for the outcome."""


def reemit(
    pipeline: Pipeline, kafka: Topics, table: Table, ids: Sequence[str], *, timeout_s: float, gone: Sequence[bytes] = ()
) -> int:
    """How many rows were sent again: as many of the ids as the source has. Returns once their records can be read.

    `gone` are keys that get a tombstone before that: a row that came to be meanwhile is there in the end.
    A row that is changed at this very moment may come as that change alone, which needn't be a whole row.

    Raises:
        SourceError: the table can't be asked for.
        ConnectorError: not within timeout_s, with `gone` within a minute; or another repair has begun.
    """
    deadline = time.monotonic() + timeout_s
    if gone:
        # They count once the rows are in the log behind them, all or none: whenever this ends, nothing is lost.
        tombstones = [(key, None) for key in gone]
        with kafka.pending(repair_id(pipeline), table.topic, tombstones, min(timeout_s, PENDING_S)):
            sent = _send_all(pipeline, kafka, table, ids, time.monotonic() + min(timeout_s, PENDING_S))
    else:
        sent = _send_all(pipeline, kafka, table, ids, deadline)
    if sent or gone:
        _await_visible(kafka, table, deadline)
    return sent


def repair_id(pipeline: Pipeline) -> str:
    """The transactions of a pipeline's repairs: the next one ends what a killed one has left open."""
    return f"{pipeline.pipeline}.repair"


def _send_all(pipeline: Pipeline, kafka: Topics, table: Table, ids: Sequence[str], deadline: float) -> int:
    sent = 0
    with source.connect(pipeline.source.dsn) as conn:
        for at in range(0, len(ids), IDS_PER_REQUEST):
            count, where = _chosen(conn, table, ids[at : at + IDS_PER_REQUEST])
            if count:
                _send(pipeline, kafka, conn, table, where, deadline)
                sent += count
    return sent


def _chosen(conn: source.Connection, table: Table, ids: Sequence[str]) -> tuple[int, sql.Composable]:
    """How many rows have one of the ids, and the condition that tells so without an error."""
    where = by_id(table, ids)
    try:
        return _count(conn, table, where), where
    except psycopg.DataError:
        # An id that is no value of the key's type: within the connector it would end its task.
        where = by_text(table, ids)
        return _count(conn, table, where), where


def _count(conn: source.Connection, table: Table, where: sql.Composable) -> int:
    name = sql.Identifier(table.schema, table.name)
    row = conn.execute(sql.SQL("SELECT count(*) FROM {} WHERE {}").format(name, where)).fetchone()
    assert row is not None
    return int(row[0])


def _send(
    pipeline: Pipeline,
    kafka: Topics,
    conn: source.Connection,
    table: Table,
    where: sql.Composable,
    deadline: float,
) -> None:
    """Ask for rows, and wait for the mark that the connector sends after them."""
    topics, name = [pipeline.topic(mark) for mark in MARKS], f"keys-{uuid4().hex}"
    since = kafka.ends(topics)
    resend(conn, table, id=name, where=where)
    while True:
        ends = kafka.ends(topics)
        new = (kafka.between(topic, since[topic].offsets[0], ends[topic].offsets[0]) for topic in topics)
        if any(_marks(record, name) for records in new for record in records):
            return
        since = ends
        _wait(table, deadline)


def _marks(record: Record, request: str) -> bool:
    """Whether it is a row of that key, read from its table: not the request itself, which is in the log before."""
    if not (record.key and record.value):
        return False
    return json.loads(record.value)["op"] == "r" and request in json.loads(record.key).values()


def _await_visible(kafka: Topics, table: Table, deadline: float) -> None:
    """A transaction's marker reaches topics one by one: wait until the table's own has it."""
    written = kafka.ends([table.topic], decided=False)[table.topic]
    while not distance(kafka.ends([table.topic])[table.topic], written).reached:
        _wait(table, deadline)


def _wait(table: Table, deadline: float) -> None:
    if time.monotonic() > deadline:
        raise ConnectorError(
            f"The rows of {table.qualified} that were asked for have not come in time.",
            hint="is the connector running? cdc -p FILE status tells; they come once it is",
            table=table.qualified,
        )
    time.sleep(POLL_S)
