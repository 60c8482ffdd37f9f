"""What joins of views depend on, in addition to columns and types: unique indexes, collations, and
which values the log may leave out. And what their state will take: how many rows tables have, and
how long values are, as Postgres' planner takes it.

In:  a connection, names of tables. Out: `TableFacts`; `RowEstimate` of tables that Postgres knows. No
row is read.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from psycopg import sql

from cdc.model.table import RowEstimate, Table
from cdc.postgres.source import Connection

# Indexes over columns, for all rows; whether a unique one is checked at once doesn't matter.
INDEXES = """
SELECT i.indrelid, i.indisunique, ARRAY(
    SELECT a.attname::text FROM unnest(i.indkey) WITH ORDINALITY AS part (attnum, at)
    JOIN pg_attribute a ON a.attrelid = i.indrelid AND a.attnum = part.attnum
    WHERE part.at <= i.indnkeyatts ORDER BY part.at)
FROM pg_index i
WHERE i.indrelid = ANY (%s) AND i.indisvalid
  AND i.indpred IS NULL AND i.indexprs IS NULL
"""
# 100 is the oid of the default collation, which agrees with every other. A partitioned
# table's rows, and so the identity that counts, are in its partitions. The largest value that stays
# in its row for sure has 24 bytes; four of a bounded text's bytes are a character's.
COLUMNS = """
SELECT a.attrelid, a.attname::text,
       CASE WHEN a.attcollation NOT IN (0, 100) THEN a.attcollation::regcollation::text END,
       coalesce(NOT l.collisdeterministic, false),
       a.attlen = -1 AND a.attstorage <> 'p'
         AND NOT (a.atttypid IN (1042, 1043) AND a.atttypmod BETWEEN 5 AND 9)
         AND EXISTS (SELECT FROM pg_class m WHERE m.relkind = 'r' AND m.relreplident <> 'f' AND (
             m.oid = a.attrelid OR m.oid IN (SELECT relid FROM pg_partition_tree(a.attrelid))))
FROM pg_attribute a LEFT JOIN pg_collation l ON l.oid = a.attcollation
WHERE a.attrelid = ANY (%s) AND a.attnum > 0 AND NOT a.attisdropped
"""
RELATIONS = """
SELECT c.oid, n.nspname || '.' || c.relname FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
WHERE n.nspname || '.' || c.relname = ANY (%s) AND c.relkind IN ('r', 'p')
"""
# Of a table that was never analyzed the planner guesses how long its rows are, and so how many its
# file holds: it may be wrong by any factor. The rows of a partitioned table are its partitions'.
ANALYZED = """
SELECT bool_and(m.reltuples >= 0)
FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
JOIN pg_class m ON m.relkind = 'r'
  AND (m.oid = c.oid OR m.oid IN (SELECT relid FROM pg_partition_tree(c.oid)))
WHERE n.nspname = %s AND c.relname = %s
"""


@dataclass(frozen=True)
class TableFacts:
    """Facts about a table's columns.

    indexes     columns of each index, in their order
    unique      sets of columns of which no two rows have the same values
    collations  by column, its collation if it isn't the database's
    loose       columns whose equal values may be written differently: of nondeterministic
                collations
    unlogged    columns that an update may leave out of the log: large values without
                REPLICA IDENTITY FULL
    """

    indexes: tuple[tuple[str, ...], ...]
    unique: tuple[frozenset[str], ...]
    collations: Mapping[str, str]
    loose: frozenset[str]
    unlogged: frozenset[str]

    def is_unique(self, columns: Collection[str]) -> bool:
        """Whether at most one row has the same values in these columns, none of them NULL."""
        return any(index <= set(columns) for index in self.unique)


def column_facts(conn: Connection, tables: Iterable[str]) -> dict[str, TableFacts]:
    """Read the facts about tables, by name; tables that don't exist are left out."""
    names: dict[int, str] = dict(conn.execute(RELATIONS, [list(tables)]).fetchall())
    indexes = conn.execute(INDEXES, [list(names)]).fetchall()
    rows = conn.execute(COLUMNS, [list(names)]).fetchall()
    return {
        name: TableFacts(
            tuple(tuple(columns) for of, _, columns in indexes if of == oid),
            tuple(frozenset(columns) for of, unique, columns in indexes if of == oid and unique),
            {column: collation for of, column, collation, *_ in rows if of == oid and collation},
            frozenset(column for of, column, _, loose, _ in rows if of == oid and loose),
            frozenset(column for of, column, *_, unlogged in rows if of == oid and unlogged),
        )
        for oid, name in names.items()
    }


def estimate_rows(conn: Connection, tables: Sequence[Table]) -> dict[str, RowEstimate]:
    """Estimate tables, by name; those are left out that were never analyzed. Raises psycopg.Error."""
    estimates = {}
    for table in tables:
        if conn.execute(ANALYZED, [table.schema, table.name]).fetchone() == (True,):
            plans = {column.name: _plan(conn, table, column.name) for column in table.columns}
            rows = max((int(plan["Plan Rows"]) for plan in plans.values()), default=0)
            widths = {name: int(plan["Plan Width"]) for name, plan in plans.items()}
            estimates[table.qualified] = RowEstimate(rows, widths)
    return estimates


def _plan(conn: Connection, table: Table, column: str) -> dict[str, Any]:
    """Let Postgres plan to read one column: the width of the plan's rows is the column's."""
    query = sql.SQL("EXPLAIN (FORMAT JSON) SELECT {} FROM {}").format(
        sql.Identifier(column), sql.Identifier(table.schema, table.name)
    )
    row = conn.execute(query).fetchone()
    assert row is not None
    plan: dict[str, Any] = row[0][0]["Plan"]
    return plan
