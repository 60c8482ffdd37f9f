"""What the connector is asked for so that it sends the rows of a table right: read beside the log, or with it held up.

In:  a table, the catalogue. Out: the data of a row of cdc.signal.
Invariant: what is sent again reads as it did in the first snapshot and does in the log.
"""

import json
import re
from collections.abc import Sequence

from psycopg import sql

from cdc.change import Table
from cdc.source import Connection
from cdc.type_names import base
from connectors.snapshot import overrides

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

# Debezium gives the bounds of a chunk as text, which Postgres doesn't compare with these; it would skip the table, and
# all that was asked for after it, with a line in its log.
UNCOMPARED = (
    *("timestamp without time zone", "timestamp with time zone", "time without time zone", "time with time zone"),
    *("bit", "money"),
)


def request(conn: Connection, table: Table) -> str:
    name = table.qualified
    columns = conn.execute(COLUMNS, [name]).fetchall()
    if _has_odd_dates(conn, name, [column for column, kind, _ in columns if kind == "date"]):
        (statement,) = (text for setting, text in overrides([table]).items() if setting.endswith(f".{name}"))
        return _data(name, "blocking", statement)
    stored = any(generated == "s" for _, _, generated in columns) and conn.info.server_version >= 180000
    uncompared = any(base(table.column(one).type) in UNCOMPARED for one in table.key)
    return _data(name, "blocking" if stored or uncompared else "incremental")


def _has_odd_dates(conn: Connection, table: str, dates: Sequence[str]) -> bool:
    if not dates:
        return False
    odd = sql.SQL(" OR ").join(sql.SQL(ODD).format(sql.Identifier(column)) for column in dates)
    where = sql.Identifier(*table.split(".", 1))
    found = conn.execute(sql.SQL("SELECT EXISTS (SELECT FROM {} WHERE {})").format(where, odd))
    return found.fetchone() == (True,)


def _data(table: str, kind: str, statement: str | None = None) -> str:
    data: dict[str, object] = {"type": kind, "data-collections": [re.escape(table)]}
    # Compared as text, unlike the name above.
    if statement:
        data["additional-conditions"] = [{"data-collection": table, "filter": statement}]
    return json.dumps(data)
