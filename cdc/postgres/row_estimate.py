"""How many rows tables have and how long their values are, as Postgres' planner takes it. No row is
read.

In:  a connection, tables. Out: `RowEstimate` of those that Postgres knows.
"""

from collections.abc import Sequence
from typing import Any

from psycopg import sql

from cdc.model.table import RowEstimate, Table
from cdc.postgres.row_identity import Connection

# Of a table that was never analyzed the planner guesses how long its rows are, and so how many its
# file holds: it may be wrong by any factor. The rows of a partitioned table are its partitions'.
ANALYZED = """
SELECT bool_and(m.reltuples >= 0)
FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
JOIN pg_class m ON m.relkind = 'r'
  AND (m.oid = c.oid OR m.oid IN (SELECT relid FROM pg_partition_tree(c.oid)))
WHERE n.nspname = %s AND c.relname = %s
"""


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
    """Let Postgres plan to read one column, whose width is that of the plan's rows."""
    query = sql.SQL("EXPLAIN (FORMAT JSON) SELECT {} FROM {}").format(
        sql.Identifier(column), sql.Identifier(table.schema, table.name)
    )
    row = conn.execute(query).fetchone()
    assert row is not None
    plan: dict[str, Any] = row[0][0]["Plan"]
    return plan
