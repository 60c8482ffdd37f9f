"""Whether deletes of a captured table name their rows.

In:  the catalogue, the tables with their keys. Out: an error for each whose replica identity lacks the
key.
"""

from collections.abc import Iterable
from typing import Any

import psycopg
from psycopg.types.json import Jsonb

from cdc.errors import SourceError
from cdc.model.table import Table

Connection = psycopg.Connection[tuple[Any, ...]]

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
