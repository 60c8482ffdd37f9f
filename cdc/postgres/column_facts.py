"""What joins of views depend on besides columns and types: unique indexes, collations, and which
values the log may leave out.

In:  a connection, names of tables. Out: `TableFacts`.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from cdc.postgres.row_identity import Connection

# Of unique indexes those over columns, for all rows; whether one is checked at once doesn't matter.
UNIQUE = """
SELECT i.indrelid, ARRAY(
    SELECT a.attname::text FROM unnest(i.indkey) WITH ORDINALITY AS part (attnum, at)
    JOIN pg_attribute a ON a.attrelid = i.indrelid AND a.attnum = part.attnum
    WHERE part.at <= i.indnkeyatts)
FROM pg_index i
WHERE i.indrelid = ANY (%s) AND i.indisunique AND i.indisvalid
  AND i.indpred IS NULL AND i.indexprs IS NULL
"""
# 100 is the oid of the default collation, which agrees with every other. Of a partitioned table
# the rows, and so the identity, are those of its partitions. The largest value that stays in its
# row for sure has 24 bytes; four of a bounded text's bytes are a character's.
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


@dataclass(frozen=True)
class TableFacts:
    """Facts about a table's columns.

    unique      sets of columns of which no two rows have the same values
    collations  by column, its collation if it isn't the database's
    loose       columns whose equal values may be written differently: of nondeterministic
                collations
    unlogged    columns that an update may leave out of the log: large values without
                REPLICA IDENTITY FULL
    """

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
    unique: dict[int, list[frozenset[str]]] = {oid: [] for oid in names}
    for oid, columns in conn.execute(UNIQUE, [list(names)]):
        unique[oid].append(frozenset(columns))
    rows = conn.execute(COLUMNS, [list(names)]).fetchall()
    return {
        name: TableFacts(
            tuple(unique[oid]),
            {column: collation for of, column, collation, *_ in rows if of == oid and collation},
            frozenset(column for of, column, _, loose, _ in rows if of == oid and loose),
            frozenset(column for of, column, *_, unlogged in rows if of == oid and unlogged),
        )
        for oid, name in names.items()
    }
