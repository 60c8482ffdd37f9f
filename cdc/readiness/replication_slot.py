"""Replication slots, as the server reports them."""

from dataclasses import dataclass
from typing import Any

import psycopg
from psycopg.rows import class_row

# Only a transaction that has written holds the slot back; to_jsonb reads what older servers lack.
SLOTS = """
SELECT s.active, s.active_pid, s.restart_lsn::text, s.confirmed_flush_lsn::text, s.wal_status,
       pg_wal_lsn_diff(pg_current_wal_lsn(), s.confirmed_flush_lsn)::bigint AS lag_bytes,
       pg_wal_lsn_diff(pg_current_wal_lsn(), s.restart_lsn)::bigint AS retained_bytes,
       s.safe_wal_size, s.plugin::text, s.database::text,
       to_jsonb(s) ->> 'invalidation_reason' AS lost_because,
       (SELECT extract(epoch FROM clock_timestamp() - min(started))::float8 FROM (
            SELECT xact_start AS started FROM pg_stat_activity WHERE backend_xid IS NOT NULL
            UNION ALL SELECT prepared FROM pg_prepared_xacts) AS writing) AS oldest_transaction_s,
       s.slot_name::text AS name, (to_jsonb(s) ->> 'failover')::bool AS failover
FROM pg_replication_slots s
WHERE %(name)s::text IS NULL OR s.slot_name = %(name)s
"""


@dataclass(frozen=True)
class Slot:
    """A replication slot as the server reports it; bytes are of WAL, None where it gives none."""

    active: bool
    active_pid: int | None
    restart_lsn: str | None
    confirmed_flush_lsn: str | None
    wal_status: str | None
    lag_bytes: int | None
    """Written by the server, not yet confirmed by the connector."""
    retained_bytes: int | None
    safe_wal_size: int | None
    """Bytes that may still be written before the slot is lost; None without
    max_slot_wal_keep_size.
    """
    plugin: str | None
    database: str | None
    lost_because: str | None
    oldest_transaction_s: float | None
    """Age of the oldest open transaction that has written: the connector can't get past it."""
    name: str = ""
    failover: bool | None = None
    """Whether it is copied to standbys; None before Postgres 17."""


def slots(conn: psycopg.Connection[Any], name: str | None = None) -> tuple[Slot, ...]:
    """All slots of the server, of any database, or only the slot of a name."""
    with conn.cursor(row_factory=class_row(Slot)) as cursor:
        return tuple(cursor.execute(SLOTS, {"name": name}).fetchall())


def slot(conn: psycopg.Connection[Any], name: str) -> Slot | None:
    """The slot of that name, in any database; None if there is none."""
    return next(iter(slots(conn, name)), None)
