"""Ask the running connector to send rows of a table again, while it goes on with the log.

In:  a connection of the table's owner, the table. Out: a row of cdc.signal, which the connector
reads from the log.
Invariant: a request has an id and is made once; a crash before the commit makes none.
"""

from psycopg import sql

from cdc.errors import SourceError
from cdc.model.table import Table
from cdc.postgres.snapshot_request import request
from cdc.postgres.source import Connection
from cdc.postgres.truncation_floor import raise_floor
from cdc.readiness.checks import hidden_rows
from cdc.readiness.facts import HIDDEN_BY

ID_CHARACTERS = 42

# Debezium writes two rows for each chunk that it reads, and never looks at them again: it takes
# them from the log.
SWEEP = "DELETE FROM cdc.signal WHERE type IN ('snapshot-window-open', 'snapshot-window-close')"
# A table is read in chunks by its key; without one the connector would skip it with a line in its
# log.
READABLE = """
SELECT FROM pg_index i
WHERE i.indrelid = to_regclass(quote_ident(%s) || '.' || quote_ident(%s))
  AND i.indisunique AND i.indimmediate AND i.indisvalid AND i.indpred IS NULL AND i.indexprs IS NULL
  AND NOT EXISTS (SELECT FROM pg_attribute a
                  WHERE a.attrelid = i.indrelid AND a.attnum = ANY (i.indkey) AND NOT a.attnotnull)
"""
HIDDEN = f"""
SELECT {HIDDEN_BY} FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
WHERE n.nspname || '.' || c.relname = %(table)s
"""


def resend(
    conn: Connection,
    table: Table,
    *,
    reader: str,
    id: str,  # noqa: A002  # the column's name
    reset_floor: bool = False,
    where: sql.Composable | None = None,
) -> bool:
    """Ask for all rows of a table, or those that meet a condition. False if a request with this id
    exists.

    A table holds up the log while it is read if it has stored generated columns, dates that JDBC
    can't carry (infinite, before 1582-10-15), or a key that the connector can't compare: with times,
    time stamps, bits, money, or types of extensions outside of the search path. A connector that is
    restarted meanwhile forgets it. All others are read beside the log, also across restarts.

    `reader` is the connector's role. With `reset_floor` rows that vanished without an event vanish
    from the views as well: a floor is set, so that only rows sent again count.

    Raises:
        SourceError: the table has no key, or stays locked, or policies hide its rows. No request has
            been made then, and no floor set.
    """
    if len(id) > ID_CHARACTERS:
        raise ValueError(f"an id of {len(id)} characters: cdc.signal takes {ID_CHARACTERS}")
    if conn.execute(READABLE, [table.schema, table.name]).fetchone() is None:
        raise SourceError(
            f"{table.qualified} can't be sent again: no table of that name has a primary key or a unique index"
            " without nulls.",
            hint="add one, or have all tables sent again: cdc -p FILE register --new-snapshot",
        )
    row = conn.execute(HIDDEN, {"table": table.qualified, "role": reader}).fetchone()
    if row and row[0]:
        raise hidden_rows(table.qualified, reader, row[0]).error
    with conn.transaction():
        conn.execute("SELECT pg_advisory_xact_lock(hashtextextended('cdc.resend', 0))")
        if conn.execute("SELECT FROM cdc.signal WHERE id = %s", [id]).fetchone() is not None:
            return False
        # Raise the floor before the request: rows sent again have the LSN of the request, or a
        # later one.
        if reset_floor:
            raise_floor(conn, [table.qualified])
        conn.execute(SWEEP)
        conn.execute(
            "INSERT INTO cdc.signal VALUES (%s, 'execute-snapshot', %s)",
            [id, request(conn, table, id, where)],
        )
    return True
