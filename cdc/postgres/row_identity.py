"""Identify the rows of a captured table: by its primary key, or by columns with a unique index.

In:  the catalogue, `key` of the pipeline file. Out: the columns; SourceError with the key that the
table could have.
Invariant: at every moment no two rows have the same key, and none has a null in it.
"""

import difflib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import psycopg
from psycopg.types.json import Jsonb

from cdc.errors import SourceError
from cdc.model.table import Table

Connection = psycopg.Connection[tuple[Any, ...]]

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

# Each table of a JSON object, whose values are the columns of its key, with the first of its
# partitions whose replica identity lacks one of them.
UNIDENTIFIED = """
WITH RECURSIVE member (name, key, oid) AS (
    SELECT wanted.name, wanted.key, c.oid FROM jsonb_each(%s) AS wanted (name, key)
    JOIN pg_class c ON true JOIN pg_namespace n ON n.oid = c.relnamespace
    WHERE n.nspname || '.' || c.relname = wanted.name
    UNION ALL
    SELECT member.name, member.key, i.inhrelid FROM member JOIN pg_inherits i ON i.inhparent = member.oid
    JOIN pg_class p ON p.oid = i.inhrelid AND p.relispartition
)
SELECT member.name, min(n.nspname || '.' || c.relname)
FROM member JOIN pg_class c USING (oid) JOIN pg_namespace n ON n.oid = c.relnamespace
WHERE c.relkind = 'r' AND c.relreplident <> 'f' AND NOT EXISTS (
    SELECT FROM pg_index i
    WHERE i.indrelid = c.oid
      AND CASE c.relreplident WHEN 'd' THEN i.indisprimary WHEN 'i' THEN i.indisreplident ELSE false END
      AND member.key <@ (
          SELECT jsonb_agg(a.attname) FROM unnest(i.indkey) WITH ORDINALITY AS part (attnum, at)
          JOIN pg_attribute a ON a.attrelid = i.indrelid AND a.attnum = part.attnum
          WHERE part.at <= i.indnkeyatts))
GROUP BY member.name
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


def unidentified(conn: Connection, tables: Iterable[Table]) -> dict[str, SourceError]:
    """An error for each table, by name, whose replica identity lacks a column of its key.

    If the identity is another index, a delete is logged without the key, and the connector writes it
    with made-up values (`TableSchemaBuilder.createKeyGenerator`): it would delete another row.
    Without an identity Postgres refuses updates and deletes.
    """
    keys = {table.qualified: list(table.key) for table in tables}
    errors = {}
    for name, part in conn.execute(UNIDENTIFIED, [Jsonb(keys)]).fetchall():
        errors[name] = SourceError(
            f"The replica identity of {part} lacks the key ({', '.join(keys[name])}): a delete wouldn't name its row.",
            finding_key="identity-unfit",
            hint="cdc -p FILE migrate",
            table=name,
        )
    return errors


def key_index(conn: Connection, relation: int, table: str, key: Sequence[str]) -> Index:
    """The index that identifies rows: over `key` if the pipeline file has one, else the primary
    key.

    Raises:
        SourceError: there is none, or it is checked only at the end of a transaction.
    """
    candidates = indexes(conn, relation)
    if key:
        return _index_over(table, key, [index for index in candidates if index.immediate])
    if not candidates or not candidates[0].primary:
        raise SourceError(
            f"{table} has no primary key, so its rows have no identity in a view.",
            finding_key="table-refused",
            hint=f"ALTER TABLE {table} ADD PRIMARY KEY (...), or {_suggest_key(table, candidates)}",
            table=table,
        )
    if not candidates[0].immediate:
        # Two rows may swap keys in a transaction; folded per key, a delete would then win over a
        # living row.
        raise SourceError(
            f"The primary key of {table} is deferrable, so it doesn't identify a row at every moment.",
            finding_key="table-refused",
            hint=f"ALTER TABLE {table} DROP CONSTRAINT {candidates[0].name}, ADD PRIMARY KEY (...)",
            table=table,
        )
    return candidates[0]


def _index_over(table: str, key: Sequence[str], indexes: Sequence[Index]) -> Index:
    unsupported = [column for column in key if not re.fullmatch(r"[^\s:;,]+", column)]
    if unsupported:
        raise SourceError(
            f"A key column of {table} has a space, a colon, a semicolon or a comma in its name.",
            finding_key="table-refused",
            hint="the connector can't be told of it: rename the column, or give the table a primary key",
            table=table,
        )
    for index in indexes:
        if sorted(index.columns) == sorted(key):
            return index
    raise SourceError(
        f"{table} has no unique index over exactly {', '.join(key)} that holds for every row at every moment: all of"
        " them NOT NULL, the index neither deferrable nor partial nor over expressions.",
        finding_key="table-refused",
        hint=_suggest_key(table, indexes, key),
        table=table,
    )


def _suggest_key(table: str, indexes: Sequence[Index], key: Sequence[str] = ()) -> str:
    usable = [index for index in indexes if index.immediate]
    if usable:
        by_columns = {", ".join(index.columns): index for index in usable}
        near = difflib.get_close_matches(", ".join(key), by_columns, n=1, cutoff=0.0)
        columns = near[0] if near else ", ".join(usable[0].columns)
        return f"write {{table: {table}, key: [{columns}]}}: {by_columns[columns].name} tells its rows apart"
    columns = ", ".join(key) or "..."
    return f"make the columns NOT NULL and CREATE UNIQUE INDEX ON {table} ({columns}), then name them as its key"
