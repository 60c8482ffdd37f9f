"""Have the running connector send all rows of some tables again, while it goes on with the log.

In:  a connection of the tables' owner, the tables. Out: rows of cdc.signal, which the connector reads from the log.
Invariant: a request has an id and is made once; a crash before the commit makes none.
"""

from collections.abc import Sequence

from cdc.change import Table
from cdc.errors import SourceError
from cdc.source import Connection
from connectors.floor import raise_floor
from connectors.requests import requests

ID_CHARACTERS = 42

# Debezium writes two rows for each chunk that it reads, and never looks at them again: it takes them from the log.
SWEEP = "DELETE FROM cdc.signal WHERE type IN ('snapshot-window-open', 'snapshot-window-close')"
# A table is read in chunks by its key; without one the connector would skip it with a line in its log.
UNREADABLE = """
SELECT name FROM unnest(%s::text[]) WITH ORDINALITY AS wanted (name, at)
WHERE NOT EXISTS (
    SELECT FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace JOIN pg_index i ON i.indrelid = c.oid
    WHERE n.nspname || '.' || c.relname = name AND i.indisunique AND i.indimmediate AND i.indisvalid
      AND i.indpred IS NULL AND i.indexprs IS NULL
      AND NOT EXISTS (SELECT FROM pg_attribute a
                      WHERE a.attrelid = c.oid AND a.attnum = ANY (i.indkey) AND NOT a.attnotnull))
ORDER BY at
"""


def resend(
    conn: Connection,
    tables: Sequence[Table | str],
    *,
    id: str,  # noqa: A002  # the column's name
    cleanse: bool = False,
) -> bool:
    """Ask for all rows of tables, named schema.table; false when the request of that id was made before.

    A table with stored generated columns, or with dates that JDBC can't carry (infinite, before 1582-10-15), holds up
    the log while it is read, and a connector that is restarted meanwhile forgets it; all others are read beside the
    log, also across restarts. Of a table given by name all columns are taken to be captured.

    With `cleanse` rows that vanished without an event vanish from the views as well: a floor is set, so that only what
    is sent again counts.

    Raises:
        SourceError: for a table without a key, or one that stays locked; nothing has been asked then.
    """
    names = [table if isinstance(table, str) else table.qualified for table in tables]
    _check(conn, names, id)
    with conn.transaction():
        conn.execute("SELECT pg_advisory_xact_lock(hashtextextended('cdc.resend', 0))")
        if conn.execute("SELECT FROM cdc.signal WHERE id = %s", [id]).fetchone() is not None:
            return False
        # Before the request: what is sent again has the position of the request, or a later one.
        if cleanse:
            raise_floor(conn, names)
        conn.execute(SWEEP)
        for number, data in enumerate(requests(conn, tables)):
            name = f"{id}.{number}" if number else id
            conn.execute("INSERT INTO cdc.signal VALUES (%s, 'execute-snapshot', %s)", [name, data])
    return True


def _check(conn: Connection, tables: Sequence[str], name: str) -> None:
    if not tables or len(name) > ID_CHARACTERS - 3:
        raise ValueError("no tables, or an id that is too long")
    unreadable = conn.execute(UNREADABLE, [list(tables)]).fetchall()
    if unreadable:
        listed = ", ".join(table for (table,) in unreadable)
        raise SourceError(
            f"{listed} can't be sent again: no table of that name has a primary key or a unique index without nulls.",
            hint="add one, or delete the connector with its offsets, then run cdc -p FILE register: a new snapshot",
        )
