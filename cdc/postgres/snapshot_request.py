"""Write the request for the connector to send the rows of a table again: beside the log, or with
the log held up.

In:  a table, which of its rows, the catalogue. Out: the data of a row of cdc.signal. Invariant:
rows that are sent again read as in the first snapshot and as in the log. After the rows of a
request comes a mark with its id, as a row read from one of MARKS: once the mark has arrived, so
have the rows.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

from psycopg import sql

from cdc.model.pg_types import base_type
from cdc.model.table import Table
from cdc.postgres.row_query import own_rows
from cdc.postgres.snapshot_query import query
from cdc.postgres.source import Connection

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
    selection = query(table) + (sql.SQL(" WHERE ") + where if where else sql.SQL(""))
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
