"""Raise the floor of a table: all its earlier records are dead, in the stream and in every later
rebuild.

In:  a connection of the tables' owner. Out: rows of cdc.truncation.
Invariant: no transaction that has written below the floor is still open when the floor is set; its
changes would come after the floor and be taken for dead.
"""

from collections.abc import Sequence

from psycopg import sql

from cdc.postgres.source import Connection
from cdc.readiness.facts import bounded_locks

LOCK_TIMEOUT = "10s"
"""Writers of the table wait as long as this lock request waits."""

RAISE = """
INSERT INTO cdc.truncation AS t (table_name, at, lsn)
SELECT name, clock_timestamp(), pg_current_wal_insert_lsn() FROM unnest(%s::text[]) AS name
ON CONFLICT (table_name) DO UPDATE SET at = excluded.at, lsn = excluded.lsn, n = t.n + 1
"""


def raise_floor(conn: Connection, tables: Sequence[str]) -> None:
    """Set the floor of tables, named schema.table, to where the log stands; together with the
    caller's transaction.

    Raises:
        SourceError: a table stayed locked by an open transaction that has written to it.
    """
    names = [sql.Identifier(*table.split(".", 1)) for table in sorted(tables)]
    with bounded_locks(conn, LOCK_TIMEOUT, f"One of {', '.join(tables)}"):
        conn.execute(sql.SQL("LOCK TABLE {} IN SHARE MODE").format(sql.SQL(", ").join(names)))
        conn.execute(RAISE, [list(tables)])
