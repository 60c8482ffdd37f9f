"""What the connector is asked for so that it sends the rows of a table right: read beside the log, or with it held up.

In:  tables, the catalogue. Out: the data of rows of cdc.signal.
Invariant: what is sent again reads as it did in the first snapshot and does in the log.
"""

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from psycopg import sql

from cdc.change import Column, Table
from cdc.source import Connection
from connectors.snapshot import overrides

CHARACTERS = 2048
"""Of one request for several tables."""

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


@dataclass(frozen=True)
class _Request:
    table: str
    kind: str
    statement: str | None = None


def requests(conn: Connection, tables: Sequence[Table | str]) -> Iterator[str]:
    """As few as fit; the connector takes several one after the other."""
    found = [_request(conn, table) for table in tables]
    for kind in ("incremental", "blocking"):
        yield from _joined([one for one in found if one.kind == kind])


def _request(conn: Connection, table: Table | str) -> _Request:
    name = table if isinstance(table, str) else table.qualified
    columns = conn.execute(COLUMNS, [name]).fetchall()
    if _has_odd_dates(conn, name, [column for column, kind, _ in columns if kind == "date"]):
        if isinstance(table, str):
            schema, _, relation = table.partition(".")
            known = tuple(Column(column, kind) for column, kind, generated in columns if generated != "v")
            table = Table(schema, relation, known, (), "")
        (statement,) = (text for setting, text in overrides([table]).items() if setting.endswith(f".{name}"))
        return _Request(name, "blocking", statement)
    stored = any(generated == "s" for _, _, generated in columns)
    return _Request(name, "blocking" if stored and conn.info.server_version >= 180000 else "incremental")


def _has_odd_dates(conn: Connection, table: str, dates: Sequence[str]) -> bool:
    if not dates:
        return False
    odd = sql.SQL(" OR ").join(sql.SQL(ODD).format(sql.Identifier(column)) for column in dates)
    where = sql.Identifier(*table.split(".", 1))
    found = conn.execute(sql.SQL("SELECT EXISTS (SELECT FROM {} WHERE {})").format(where, odd))
    return found.fetchone() == (True,)


def _joined(asked: Sequence[_Request]) -> Iterator[str]:
    taken: list[_Request] = []
    for one in asked:
        if taken and len(_data([*taken, one])) > CHARACTERS:
            yield _data(taken)
            taken = []
        taken.append(one)
    if taken:
        yield _data(taken)


def _data(asked: Sequence[_Request]) -> str:
    data: dict[str, object] = {"type": asked[0].kind, "data-collections": [re.escape(one.table) for one in asked]}
    # These are compared as text, unlike the names above.
    if conditions := [{"data-collection": one.table, "filter": one.statement} for one in asked if one.statement]:
        data["additional-conditions"] = conditions
    return json.dumps(data)
