"""No query of a table reads the rows of tables that inherit from it: the log has them under their own names."""

import json
from collections.abc import Callable

from psycopg import sql

from cdc.migrations import migrate
from cdc.model.table import Table
from cdc.postgres import row_query, source, table_survey
from cdc.postgres.snapshot_request import request
from cdc.postgres.source import Connection
from tests.support.pipelines import pipeline

ITEMS, VISITS = "shop.items", "shop.visits"
SHOP = f"""
CREATE SCHEMA shop;
CREATE TABLE {ITEMS} (id int PRIMARY KEY);
CREATE TABLE shop.archived () INHERITS ({ITEMS});
CREATE TABLE {VISITS} (id timestamptz PRIMARY KEY);
CREATE TABLE shop.seldom () INHERITS ({VISITS});
INSERT INTO {ITEMS} VALUES (1);
INSERT INTO shop.archived VALUES (900);
INSERT INTO {VISITS} VALUES ('2026-01-01');
INSERT INTO shop.seldom VALUES ('2020-01-01');
"""


def of_snapshot(_: Connection, table: Table) -> str:
    settings = row_query.snapshot_overrides([table])
    return settings[f"snapshot.select.statement.overrides.{table.qualified}"]


def of_comparison(_: Connection, table: Table) -> str:
    return row_query.row_query(table).as_string(None)


def of_resend(conn: Connection, table: Table) -> str:
    """The query itself, or a condition that the connector adds to its own."""
    data = json.loads(request(conn, table, "again"))
    text = next(
        condition["filter"]
        for condition in data["additional-conditions"]
        if condition["data-collection"] == table.qualified
    )
    if data["type"] == "blocking":
        return str(text)
    return f'SELECT * FROM "{table.schema}"."{table.name}" WHERE {text}'


QUERIES: tuple[Callable[[Connection, Table], str], ...] = (of_snapshot, of_comparison, of_resend)


def test_rows_of_a_child_are_not_its_parents(postgres_dsn: str, unique: str) -> None:
    statement = sql.SQL("SELECT count(*) FROM ({}) AS rows")
    with source.connect(postgres_dsn) as conn:
        migrate(conn)
        conn.execute(SHOP.encode())
        for table in table_survey.describe(conn, pipeline(unique, postgres_dsn, ITEMS, VISITS)):
            for query in QUERIES:
                text = sql.SQL(query(conn, table))
                counted = conn.execute(statement.format(text)).fetchone()
                assert counted == (1,), (table.name, query.__name__)
