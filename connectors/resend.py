"""Have the running connector send all rows of some tables again, while it goes on with the log.

In:  a connection of the tables' owner, the tables. Out: rows of cdc.signal, which the connector reads from the log.
Invariant: a request has an id and is made once; a crash before the commit makes none.
"""

import json
import re
from collections.abc import Iterator, Sequence

from cdc.errors import SourceError
from cdc.source import Connection
from connectors.floor import raise_floor

DATA_CHARACTERS = 2048
"""What cdc.signal holds of one request."""
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


# Debezium 3.7 forgets stored generated columns of a table that it reads incrementally; from Postgres 18 on the log has
# them, and the next change ends its task ("Index out of bounds"). Such tables are read with the log held up.
GENERATED = """
SELECT n.nspname || '.' || c.relname
FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
WHERE n.nspname || '.' || c.relname = ANY (%s) AND EXISTS (
    SELECT FROM pg_attribute a WHERE a.attrelid = c.oid AND a.attgenerated = 's' AND NOT a.attisdropped)
"""


def resend(
    conn: Connection,
    tables: Sequence[str],
    *,
    id: str,  # noqa: A002  # the column's name
    cleanse: bool = False,
) -> bool:
    """Ask for all rows of tables, named schema.table; false when the request of that id was made before.

    A table with stored generated columns holds up the log while it is read, and a connector that is restarted meanwhile
    forgets it; all others are read beside the log, also across restarts. With `cleanse` rows that vanished without an
    event vanish from the views as well: a floor is set, so that only what is sent again counts.

    Raises:
        SourceError: for a table without a key, or one that stays locked; nothing has been asked then.
    """
    _check(conn, tables, id)
    with conn.transaction():
        conn.execute("SELECT pg_advisory_xact_lock(hashtextextended('cdc.resend', 0))")
        if conn.execute("SELECT FROM cdc.signal WHERE id = %s", [id]).fetchone() is not None:
            return False
        # Before the request: what is sent again has the position of the request, or a later one.
        if cleanse:
            raise_floor(conn, tables)
        conn.execute(SWEEP)
        for number, data in enumerate(_requests(conn, tables)):
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


def _requests(conn: Connection, tables: Sequence[str]) -> Iterator[str]:
    """As few as fit; the connector takes several one after the other."""
    generated: set[str] = set()
    if conn.info.server_version >= 180000:
        generated = {table for (table,) in conn.execute(GENERATED, [list(tables)])}
    yield from _split("incremental", [table for table in tables if table not in generated])
    yield from _split("blocking", [table for table in tables if table in generated])


def _split(kind: str, tables: Sequence[str]) -> Iterator[str]:
    taken: list[str] = []
    for table in tables:
        if taken and len(_request(kind, [*taken, table])) > DATA_CHARACTERS:
            yield _request(kind, taken)
            taken = []
        taken.append(table)
    if taken:
        yield _request(kind, taken)


def _request(kind: str, tables: Sequence[str]) -> str:
    return json.dumps({"type": kind, "data-collections": [re.escape(table) for table in tables]})
