"""Ask the connector to send the rows of a table again: beside the log, or with the log held up.

In:  a connection of the tables' owner or of `source.reader`, a table, which of its rows. Out: rows of cdc.signal, which
the connector reads from the log, and of cdc.truncation.
Invariant: rows that are sent again read as in the first snapshot and as in the log. After the rows
of a request comes a mark with its id, as a row read from one of MARKS: once the mark has arrived, so
have the rows. A request has an id and is made once; a crash before the commit makes none.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

from psycopg import sql

from cdc.errors import SourceError
from cdc.model.pg_types import base_type
from cdc.model.table import Table
from cdc.postgres.row_query import own_rows, snapshot_query
from cdc.postgres.source import Connection
from cdc.readiness.checks import hidden_rows
from cdc.readiness.facts import HIDDEN_BY, bounded_locks

# Debezium 3.7 forgets stored generated columns of a table that it reads incrementally; from
# Postgres 18 on the log has them, and the next change ends its task ("Index out of bounds"). Such
# tables are read with the log held up.
COLUMNS = """
SELECT a.attname::text, format_type(a.atttypid, a.atttypmod), a.attgenerated::text
FROM pg_attribute a JOIN pg_class c ON c.oid = a.attrelid JOIN pg_namespace n ON n.oid = c.relnamespace
WHERE n.nspname || '.' || c.relname = %s AND a.attnum > 0 AND NOT a.attisdropped
ORDER BY a.attnum
"""
# An incremental snapshot has no statement of its own, so that nothing could turn such a date into a
# number.
UNCARRIED_DATE = "({0} IS NOT NULL AND (NOT isfinite({0}) OR {0} < DATE '1582-10-15'))"


# Most rows have never been touched by a transaction that changed or locked them: their xmax is 0.
# The snapshot is asked for once a statement, because nothing in that query depends on the row.
CURRENT = """
(xmax = '0' OR cdc.is_current({}, tableoid, ctid, xmax, (SELECT pg_current_snapshot())))
""".strip()
"""The rows of a table that the log has no later change of, as a condition on a statement over it."""

CHILDREN = """
SELECT c.relkind = 'r', c.relkind = 'r' AND c.relhassubclass
FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace WHERE n.nspname = %s AND c.relname = %s
"""
# An incremental snapshot also reads the rows of tables that inherit from this one. Such a table may
# be created after the request, so every request leaves them out.
OWN = "tableoid = {}::regclass"

MARKS = ("cdc.signal", "cdc.heartbeat")
"""The tables that a mark comes from: beside the log the request's own row, with the log held up a
row made by a query.

Debezium never snapshots its signals; it reads tables in the order in which its settings list them.
"""


# Debezium gives the bounds of a chunk as text, which Postgres doesn't compare with these; it would
# skip the table, and all that was asked for after it, with a line in its log.
UNCOMPARED = (
    "timestamp without time zone",
    "timestamp with time zone",
    "time without time zone",
    "bit",
    "money",
)
# A type of an extension brings its operators along. If the path doesn't lead to them, Postgres
# compares citext as text, which isn't the order of the rows, and ltree not at all. Enums and arrays
# use the operators of Postgres.
UNREACHED = """
SELECT EXISTS (
    SELECT FROM pg_type WHERE oid = ANY (%s::text[]::regtype[]) AND typtype = 'b' AND typcategory <> 'A'
    AND typnamespace <> 'pg_catalog'::regnamespace AND NOT pg_type_is_visible(oid))
"""
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
LOCK_TIMEOUT = "10s"
"""Writers of the table wait as long as this lock request waits."""

MAY_RAISE = "SELECT has_table_privilege('cdc.truncation', 'INSERT')"
RAISE = """
INSERT INTO cdc.truncation AS t (table_name, at, lsn)
SELECT name, clock_timestamp(), pg_current_wal_insert_lsn() FROM unnest(%s::text[]) AS name
ON CONFLICT (table_name) DO UPDATE SET at = excluded.at, lsn = excluded.lsn, n = t.n + 1
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


def raise_floor(conn: Connection, tables: Sequence[str]) -> None:
    """Set the floor of tables, named schema.table, to where the log stands; together with the
    caller's transaction. All earlier records are dead, in the stream and in every later rebuild.

    No transaction that has written below the floor is still open then: its changes would come after
    the floor and be taken for dead.

    Raises:
        SourceError: a table stayed locked by an open transaction that has written to it.
    """
    names = [sql.Identifier(*table.split(".", 1)) for table in sorted(tables)]
    with bounded_locks(conn, LOCK_TIMEOUT, f"One of {', '.join(tables)}"):
        if conn.execute(MAY_RAISE).fetchone() != (True,):
            conn.execute("SELECT cdc.raise_floor_as_owner(%s)", [list(tables)])
            return
        conn.execute(sql.SQL("LOCK TABLE {} IN SHARE MODE").format(sql.SQL(", ").join(names)))
        conn.execute(RAISE, [list(tables)])


def request(conn: Connection, table: Table, id: str, where: sql.Composable | None = None) -> str:  # noqa: A002
    """The data of the request with this id, for the rows that meet a condition over the table's
    columns.
    """
    name = table.qualified
    columns = conn.execute(COLUMNS, [name]).fetchall()
    row = conn.execute(CHILDREN, [table.schema, table.name]).fetchone()
    is_plain, has_children = row or (True, False)
    table = replace(table, has_children=has_children)
    dates = [column for column, kind, _ in columns if kind == "date"]
    uncarried = _has_uncarried_dates(conn, table, dates)
    stored = any(generated == "s" for _, _, generated in columns)
    key_types = [table.column(name).type for name in table.key]
    uncompared = any(base_type(type_) in UNCOMPARED for type_ in key_types)
    uncompared = uncompared or conn.execute(UNREACHED, [key_types]).fetchone() == (True,)
    concurrent_mark, blocking_mark = MARKS
    if not (uncarried or uncompared or (stored and conn.info.server_version >= 180000)):
        literal = sql.Literal(sql.Identifier(table.schema, table.name).as_string(None))
        conditions = [sql.SQL("({})").format(where)] if where else []
        conditions += [sql.SQL(OWN).format(literal)] if is_plain else []
        conditions += [sql.SQL(CURRENT).format(literal)]
        return _data(
            "incremental",
            {
                name: sql.SQL(" AND ").join(conditions),
                concurrent_mark: sql.SQL("id = {}").format(sql.Literal(id)),
            },
        )
    selection = snapshot_query(table) + (sql.SQL(" WHERE ") + where if where else sql.SQL(""))
    mark = sql.SQL("SELECT {} AS pipeline, 0 AS beat, now() AS at").format(sql.Literal(id))
    own_query = uncarried or where or has_children
    return _data("blocking", {name: selection if own_query else None, blocking_mark: mark})


def _has_uncarried_dates(conn: Connection, table: Table, dates: Sequence[str]) -> bool:
    if not dates:
        return False
    condition = sql.SQL(" OR ").join(
        sql.SQL(UNCARRIED_DATE).format(sql.Identifier(column)) for column in dates
    )
    row = conn.execute(
        sql.SQL("SELECT EXISTS (SELECT FROM {} WHERE {})").format(own_rows(table), condition)
    ).fetchone()
    return row == (True,)


def _data(kind: str, filters: Mapping[str, sql.Composable | None]) -> str:
    """The request as JSON. `filters`, by table: a condition if read beside the log, else a whole
    query.
    """
    # Patterns above, below names that are compared as text, or patterns too.
    conditions = [
        {"data-collection": name, "filter": condition.as_string(None)}
        for name, condition in filters.items()
        if condition
    ]
    return json.dumps(
        {
            "type": kind,
            "data-collections": [re.escape(name) for name in filters],
            "additional-conditions": conditions,
        }
    )
