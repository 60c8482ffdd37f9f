"""Find the table with the change that failed the connector's task.

In:  the causes in the task's trace; the slot, which still has the change. Out: the obstacle and the
table.
Invariant: for an unknown cause no table is returned.
"""

import re
import time
from collections.abc import Collection
from dataclasses import dataclass

import psycopg

from cdc.model.obstacle import Obstacle
from cdc.postgres.source import Connection

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
    conn: Connection, slot: str, change: Unsendable, captured: Collection[str]
) -> str | None:
    """Find the table of a change that can't be sent. None if it isn't one of `captured`, or if the
    role of `conn` may not read the slot.

    If the trace didn't name the table, this searches the slot for the change at its LSN, or else
    for the largest change. That decodes everything that the connector hasn't confirmed.
    """
    table = change.table or _find_pending(conn, slot, change.lsn)
    return table if table in captured else None


def _find_pending(conn: Connection, slot: str, lsn: int | None) -> str | None:
    deadline = time.monotonic() + RELEASE_S
    while True:
        try:
            row = conn.execute(PENDING, {"slot": slot, "lsn": lsn}).fetchone()
        except psycopg.errors.ObjectInUse:
            if time.monotonic() > deadline:
                return None
            time.sleep(0.25)
            continue
        except (psycopg.errors.InsufficientPrivilege, psycopg.errors.UndefinedObject):
            return None
        return row[0] if row else None
