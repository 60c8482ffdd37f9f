"""What the connector is asked for so that it sends the rows of a table right: read beside the log, or with it held up.

In:  a table, which of its rows, the catalogue. Out: the data of a row of cdc.signal.
Invariant: what is sent again reads as it did in the first snapshot and does in the log. After the rows that a request
is for comes a mark with its id, as a row that was read from one of MARKS: when that has come, they have.
"""

import json
import re
from collections.abc import Mapping, Sequence

from psycopg import sql

from cdc.model.pg_types import base_type
from cdc.model.table import Table
from cdc.postgres.snapshot_query import query
from cdc.postgres.source import Connection

# Debezium 3.7 forgets stored generated columns of a table that it reads incrementally; from Postgres 18 on the log has
# them, and the next change ends its task ("Index out of bounds"). Such tables are read with the log held up.
COLUMNS = """
SELECT a.attname::text, format_type(a.atttypid, a.atttypmod), a.attgenerated::text
FROM pg_attribute a JOIN pg_class c ON c.oid = a.attrelid JOIN pg_namespace n ON n.oid = c.relnamespace
WHERE n.nspname || '.' || c.relname = %s AND a.attnum > 0 AND NOT a.attisdropped
ORDER BY a.attnum
"""
# An incremental snapshot has no statement of its own, so that nothing could turn such a date into a number.
ODD = "({0} IS NOT NULL AND (NOT isfinite({0}) OR {0} < DATE '1582-10-15'))"


MARKS = ("cdc.signal", "cdc.heartbeat")
"""Where a mark comes from, as the key of a record: beside the log the request's own row, with it held up a made up one.

Debezium never snapshots its signals; it reads tables in the order in which it is told to capture them.
"""


# Debezium gives the bounds of a chunk as text, which Postgres doesn't compare with these; it would skip the table, and
# all that was asked for after it, with a line in its log.
UNCOMPARED = (
    *("timestamp without time zone", "timestamp with time zone", "time without time zone", "time with time zone"),
    *("bit", "money"),
)


def request(conn: Connection, table: Table, id: str, where: sql.Composable | None = None) -> str:  # noqa: A002
    """The data of the request of that id, for the rows that meet a condition over the table's columns."""
    name = table.qualified
    columns = conn.execute(COLUMNS, [name]).fetchall()
    odd = _has_odd_dates(conn, name, [column for column, kind, _ in columns if kind == "date"])
    stored = any(generated == "s" for _, _, generated in columns)
    uncompared = any(base_type(table.column(name).type) in UNCOMPARED for name in table.key)
    beside, held_up = MARKS
    if not (odd or uncompared or (stored and conn.info.server_version >= 180000)):
        return _data("incremental", {name: where, beside: sql.SQL("id = {}").format(sql.Literal(id))})
    chosen = query(table) + (sql.SQL(" WHERE ") + where if where else sql.SQL(""))
    mark = sql.SQL("SELECT {} AS pipeline, 0 AS beat, now() AS at").format(sql.Literal(id))
    return _data("blocking", {name: chosen if odd or where else None, held_up: mark})


def _has_odd_dates(conn: Connection, table: str, dates: Sequence[str]) -> bool:
    if not dates:
        return False
    odd = sql.SQL(" OR ").join(sql.SQL(ODD).format(sql.Identifier(column)) for column in dates)
    where = sql.Identifier(*table.split(".", 1))
    found = conn.execute(sql.SQL("SELECT EXISTS (SELECT FROM {} WHERE {})").format(where, odd))
    return found.fetchone() == (True,)


def _data(kind: str, filters: Mapping[str, sql.Composable | None]) -> str:
    """By table: a condition for a request that is read beside the log, a whole query for the other."""
    # Patterns above, below names that are compared as text, or patterns too.
    conditions = [{"data-collection": name, "filter": one.as_string(None)} for name, one in filters.items() if one]
    return json.dumps(
        {"type": kind, "data-collections": [re.escape(name) for name in filters], "additional-conditions": conditions}
    )
