"""Read dates in a snapshot differently from the log, so that both bring the same values.

JDBC reads a date with a calendar that has no years BC, lacks ten days of 1582 and overflows at
infinity. As a number of days it comes through untouched: the connector takes a number for a date as
the days since 1970.
"""

from collections.abc import Sequence

from psycopg import sql

from cdc.model.table import Table

DAYS = sql.SQL(
    "CASE WHEN isfinite({0}) THEN {0} - DATE '1970-01-01' WHEN {0} > DATE '1970-01-01' THEN 2147483647"
    " WHEN {0} IS NOT NULL THEN -2147483648 END AS {0}"
)


def overrides(tables: Sequence[Table]) -> dict[str, str]:
    """The connector's settings that override the snapshot's query for each table with a date."""
    dated = [table for table in tables if any(column.type == "date" for column in table.columns)]
    if not dated:
        return {}
    setting = "snapshot.select.statement.overrides"
    return {
        setting: ",".join(table.qualified for table in dated),
        **{f"{setting}.{table.qualified}": query(table).as_string(None) for table in dated},
    }


def query(table: Table) -> sql.Composed:
    """The query for all rows of a table, each date as a number."""
    columns = [
        DAYS.format(sql.Identifier(column.name))
        if column.type == "date"
        else sql.Identifier(column.name)
        for column in table.columns
    ]
    return sql.SQL("SELECT {} FROM {}").format(
        sql.SQL(", ").join(columns), sql.Identifier(table.schema, table.name)
    )
