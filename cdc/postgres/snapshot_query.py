"""The queries with which a snapshot reads a table where the connector's default would bring other
rows or values than the log.

A query of a table also returns the rows of tables that inherit from it. The log has them under
their own names.

JDBC reads a date with a calendar that has no years BC, lacks ten days of 1582 and overflows at
infinity. As a number of days it comes through untouched: the connector takes a number for a date as
the days since 1970.
"""

from collections.abc import Sequence

from psycopg import sql

from cdc.model.table import Table
from cdc.postgres.row_query import own_rows

DAYS = sql.SQL(
    "CASE WHEN isfinite({0}) THEN {0} - DATE '1970-01-01' WHEN {0} > DATE '1970-01-01' THEN 2147483647"
    " WHEN {0} IS NOT NULL THEN -2147483648 END AS {0}"
)


def overrides(tables: Sequence[Table]) -> dict[str, str]:
    """The connector's settings that override the snapshot's query for each table with dates or
    children.
    """
    overridden = [
        table
        for table in tables
        if table.has_children or any(column.type == "date" for column in table.columns)
    ]
    if not overridden:
        return {}
    setting = "snapshot.select.statement.overrides"
    return {
        setting: ",".join(table.qualified for table in overridden),
        **{f"{setting}.{table.qualified}": query(table).as_string(None) for table in overridden},
    }


def query(table: Table) -> sql.Composed:
    """The query for all rows of a table without its children, with each date as a number."""
    columns = [
        DAYS.format(sql.Identifier(column.name))
        if column.type == "date"
        else sql.Identifier(column.name)
        for column in table.columns
    ]
    return sql.SQL("SELECT {} FROM {}").format(sql.SQL(", ").join(columns), own_rows(table))
