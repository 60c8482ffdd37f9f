"""Find the captured tables that the pipeline file names, and the key that identifies their rows:
the primary key, or columns with a unique index.

In:  the catalogue, `key` of the pipeline file. Out: the index; SourceError with the key that the table
could have.
Invariant: at every moment no two rows have the same key, and none has a null in it.
"""

import difflib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import psycopg

from cdc.errors import TableRefused

Connection = psycopg.Connection[Any]
KINDS = {"v": "a view", "m": "a materialized view", "f": "a foreign table"}
RELATION = """
SELECT c.oid, c.relkind::text, c.relkind = 'r' AND c.relhassubclass
FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
WHERE n.nspname = %s AND c.relname = %s
"""
APPLICATIONS = """
SELECT n.nspname || '.' || c.relname FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
WHERE c.relkind IN ('r', 'p') AND n.nspname !~ '^(pg_|information_schema$|cdc$)' ORDER BY 1
"""
# Indexes of a table or a partition: over columns without nulls, for all rows, checked at once.
INDEXES = """
SELECT c.relname::text, c.oid, i.indisprimary, i.indimmediate,
       ARRAY(SELECT a.attname::text FROM unnest(i.indkey) WITH ORDINALITY AS part (attnum, at)
             JOIN pg_attribute a ON a.attrelid = i.indrelid AND a.attnum = part.attnum
             WHERE part.at <= i.indnkeyatts ORDER BY part.at)
FROM pg_index i JOIN pg_class c ON c.oid = i.indexrelid
WHERE i.indrelid = %s AND i.indisunique AND i.indisvalid AND i.indpred IS NULL AND i.indexprs IS NULL
  AND (i.indisprimary OR i.indimmediate)
  AND NOT EXISTS (SELECT FROM unnest(i.indkey) WITH ORDINALITY AS part (attnum, at)
                  JOIN pg_attribute a ON a.attrelid = i.indrelid AND a.attnum = part.attnum
                  WHERE part.at <= i.indnkeyatts AND NOT a.attnotnull)
ORDER BY i.indisprimary DESC, array_length(i.indkey, 1), 1
"""


@dataclass(frozen=True)
class Index:
    """A unique index over columns without nulls."""

    name: str
    oid: int
    primary: bool
    immediate: bool
    columns: list[str]


def indexes(conn: Connection, relation: int) -> list[Index]:
    """The indexes of a relation that can identify a row, the primary key first."""
    return [Index(*row) for row in conn.execute(INDEXES, [relation])]


def find_table(conn: Connection, schema: str, name: str) -> tuple[int, bool]:
    """Find an application's table: its oid, and whether others inherit from it. Raises
    TableRefused.
    """
    table = f"{schema}.{name}"
    relation = conn.execute(RELATION, [schema, name]).fetchone()
    if relation is None:
        folded = {label.lower(): label for (label,) in conn.execute(APPLICATIONS)}
        near = difflib.get_close_matches(table.lower(), folded, n=1)
        hint = f"did you mean {folded[near[0]]}?" if near else "create it, or correct source.tables"
        raise TableRefused(
            f"There is no table {table} in database {conn.info.dbname}.", hint=hint, table=table
        )
    if re.match(r"pg_|(cdc|information_schema)$", schema):
        raise TableRefused(
            f"{table} isn't an application's table.",
            hint="take it out of source.tables",
            table=table,
        )
    oid, kind, has_children = relation
    if kind not in ("r", "p"):
        hint = "list the tables that it is made from under source.tables"
        if kind == "f":
            hint = "capture it on the server that has its rows, with another pipeline file"
        raise TableRefused(
            f"{table} is {KINDS.get(kind, 'no table')}; the replication log has rows of tables only.",
            hint=hint,
            table=table,
        )
    return oid, has_children


def key_index(conn: Connection, relation: int, table: str, key: Sequence[str]) -> Index:
    """The index that identifies rows: over `key` if the pipeline file has one, else the primary
    key.

    Raises:
        TableRefused: there is none, or it is checked only at the end of a transaction.
    """
    candidates = indexes(conn, relation)
    if key:
        return _index_over(table, key, [index for index in candidates if index.immediate])
    if not candidates or not candidates[0].primary:
        raise TableRefused(
            f"{table} has no primary key, so its rows have no identity in a view.",
            hint=f"ALTER TABLE {table} ADD PRIMARY KEY (...), or {_suggest_key(table, candidates)}",
            table=table,
        )
    if not candidates[0].immediate:
        # Two rows may swap keys in a transaction; folded per key, a delete would then win over a
        # living row.
        raise TableRefused(
            f"The primary key of {table} is deferrable, so it doesn't identify a row at every moment.",
            hint=f"ALTER TABLE {table} DROP CONSTRAINT {candidates[0].name}, ADD PRIMARY KEY (...)",
            table=table,
        )
    return candidates[0]


def _index_over(table: str, key: Sequence[str], indexes: Sequence[Index]) -> Index:
    unsupported = [column for column in key if not re.fullmatch(r"[^\s:;,]+", column)]
    if unsupported:
        raise TableRefused(
            f"A key column of {table} has a space, a colon, a semicolon or a comma in its name.",
            hint="the connector's settings can't name it: rename the column, or give the table a primary key",
            table=table,
        )
    for index in indexes:
        if sorted(index.columns) == sorted(key):
            return index
    raise TableRefused(
        f"{table} has no unique index over exactly {', '.join(key)} that holds for every row at every moment: all of"
        " them NOT NULL, the index neither deferrable nor partial nor over expressions.",
        hint=_suggest_key(table, indexes, key),
        table=table,
    )


def _suggest_key(table: str, indexes: Sequence[Index], key: Sequence[str] = ()) -> str:
    usable = [index for index in indexes if index.immediate]
    if usable:
        by_columns = {", ".join(index.columns): index for index in usable}
        near = difflib.get_close_matches(", ".join(key), by_columns, n=1, cutoff=0.0)
        columns = near[0] if near else ", ".join(usable[0].columns)
        return f"write {{table: {table}, key: [{columns}]}}: {by_columns[columns].name} identifies its rows"
    columns = ", ".join(key) or "..."
    return f"make the columns NOT NULL and CREATE UNIQUE INDEX ON {table} ({columns}), then name them as its key"
