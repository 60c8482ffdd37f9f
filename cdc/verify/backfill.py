"""Backfill single rows of a table.

The connector sends them again, so that the log itself holds them in full.

In:  ids of rows, as views have them. Out: records in the table's topic.
Invariant: requests carry keys alone. The values of a row go from Postgres through the connector, in
order with its changes.
"""

import json
import time
from collections.abc import Sequence
from contextlib import ExitStack
from uuid import uuid4

import psycopg
from psycopg import sql

from cdc.config.settings import Pipeline
from cdc.errors import ConnectorError
from cdc.kafka.records import Record
from cdc.kafka.topics import Topics
from cdc.kafka.transactions import writing_records
from cdc.model.position import distance
from cdc.model.table import Table
from cdc.postgres import source
from cdc.postgres.row_query import id_condition, own_rows, text_condition
from cdc.postgres.snapshot_request import MARKS, resend

IDS_PER_REQUEST = 200
"""Bounds a request: the connector stores it with every offset while it works on it, in one record
of the worker."""
POLL_S = 0.1
PENDING_S = 60.0
"""Seconds that tombstones may wait for the rows behind them. The table's views wait for the outcome
as long."""


def backfill(
    pipeline: Pipeline,
    kafka: Topics,
    table: Table,
    ids: Sequence[str],
    *,
    timeout_s: float,
    delete_keys: Sequence[bytes] = (),
) -> int:
    """Send rows again and return their number: as many of the ids as the source has.

    Returns once their records can be read. `delete_keys` get a tombstone before the rows, so that a
    row which was inserted meanwhile exists in the end. A row that changes at this very moment may
    arrive as that change alone, which needn't carry all values.

    Raises:
        SourceError: the source can't read the table.
        ConnectorError: not within timeout_s, with `delete_keys` within a minute; or another repair
        has begun.
    """
    deadline = time.monotonic() + timeout_s
    with ExitStack() as stack:
        limit_s = timeout_s
        if delete_keys:
            limit_s = min(timeout_s, PENDING_S)
            # Tombstones count once the rows are in the log behind them, all or none: a crash at any
            # moment loses nothing.
            tombstones = [(key, None) for key in delete_keys]
            # By its name the next repair ends one that a killed repair left open.
            transaction = f"{pipeline.pipeline}.repair"
            stack.enter_context(
                writing_records(pipeline.kafka, transaction, table.topic, tombstones, limit_s)
            )
        request_deadline = time.monotonic() + limit_s
        total = 0
        conn = stack.enter_context(source.connect_to_read(pipeline.source))
        for start in range(0, len(ids), IDS_PER_REQUEST):
            count, condition = _find_rows(conn, table, ids[start : start + IDS_PER_REQUEST])
            if count:
                _request_rows(pipeline, kafka, conn, table, condition, request_deadline)
                total += count
    if total or delete_keys:
        # Until the topic has the transaction's markers, which arrive one by one.
        end = kafka.log_ends([table.topic])[table.topic]
        while not distance(kafka.ends([table.topic])[table.topic], end).reached:
            _sleep_until(table, deadline)
    return total


def _find_rows(
    conn: source.Connection, table: Table, ids: Sequence[str]
) -> tuple[int, sql.Composable]:
    """Count the rows with these ids; return a condition that selects them and raises no error."""
    condition = id_condition(table, ids)
    try:
        return _count_rows(conn, table, condition), condition
    except psycopg.DataError:
        # An id is no value of the key's type. Sent to the connector, such a condition would end its
        # task.
        condition = text_condition(table, ids)
        return _count_rows(conn, table, condition), condition


def _count_rows(conn: source.Connection, table: Table, condition: sql.Composable) -> int:
    row = conn.execute(
        sql.SQL("SELECT count(*) FROM {} WHERE {}").format(own_rows(table), condition)
    ).fetchone()
    assert row is not None
    return int(row[0])


def _request_rows(
    pipeline: Pipeline,
    kafka: Topics,
    conn: source.Connection,
    table: Table,
    condition: sql.Composable,
    deadline: float,
) -> None:
    """Request rows from the connector, and wait for the mark that it sends after them."""
    mark_topics = [pipeline.topic(mark) for mark in MARKS]
    request_id = f"keys-{uuid4().hex}"
    read_ends = kafka.ends(mark_topics)
    resend(conn, table, reader=pipeline.replication_user, id=request_id, where=condition)
    while True:
        ends = kafka.ends(mark_topics)
        for topic in mark_topics:
            records = kafka.read_range(topic, read_ends[topic].offsets[0], ends[topic].offsets[0])
            if any(_is_mark(record, request_id) for record in records):
                return
        read_ends = ends
        _sleep_until(table, deadline)


def _is_mark(record: Record, request: str) -> bool:
    """Whether a record is the mark of that request.

    The mark is a row that was read (op r), not the request's own insert.
    """
    if not (record.key and record.value):
        return False
    return json.loads(record.value)["op"] == "r" and request in json.loads(record.key).values()


def _sleep_until(table: Table, deadline: float) -> None:
    if time.monotonic() > deadline:
        raise ConnectorError(
            f"The rows of {table.qualified} that were asked for have not come in time.",
            hint="is the connector running? cdc -p FILE status says; the rows come once it is",
            table=table.qualified,
        )
    time.sleep(POLL_S)
