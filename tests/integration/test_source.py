"""Postgres as the pipeline sees it: tables, slot, refusals."""

from collections.abc import Iterator
from typing import Any

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

from cdc.capture.connector import register
from cdc.errors import SettingsError, SourceError
from cdc.migrations import migrate
from cdc.model.table import CONTROL_TABLES, Column
from cdc.postgres import catalog, source, table_survey
from cdc.readiness.facts import read_slot
from tests.support.pipelines import NOWHERE, pipeline
from tests.support.postgres import PASSWORD, sibling, strict_postgres
from tests.support.wait import wait_until

TABLES = """
CREATE SCHEMA shop;
CREATE TYPE shop.mood AS ENUM ('good', 'bad');
CREATE TABLE shop.orders (
    note text, region text, dropped int, id int, price numeric(10,2) NOT NULL, mood shop.mood,
    at timestamptz(3)[], twice int GENERATED ALWAYS AS (id * 2) VIRTUAL, total int GENERATED ALWAYS AS (id + 1) STORED,
    PRIMARY KEY (id, region) INCLUDE (note)
);
ALTER TABLE shop.orders DROP COLUMN dropped;
CREATE TABLE shop."Lines" (id bigint PRIMARY KEY);
CREATE TABLE shop.keyless (id int);
CREATE TABLE shop.keyed (a int NOT NULL, b text NOT NULL, c int NOT NULL, d int, e int NOT NULL, "f;g" int NOT NULL);
CREATE UNIQUE INDEX keyed_a_b ON shop.keyed (a, b) INCLUDE (d);
CREATE UNIQUE INDEX ON shop.keyed (c) WHERE a > 0;
CREATE UNIQUE INDEX ON shop.keyed (d);
CREATE UNIQUE INDEX ON shop.keyed ((a + c));
CREATE UNIQUE INDEX ON shop.keyed ("f;g");
ALTER TABLE shop.keyed ADD UNIQUE (e) DEFERRABLE;
CREATE TABLE shop.swappable (id int PRIMARY KEY DEFERRABLE);
CREATE VIEW shop.summary AS SELECT 1 AS id;
CREATE TABLE shop.parts (id int PRIMARY KEY) PARTITION BY RANGE (id);
"""


@pytest.fixture(scope="module")
def shop_dsn(stack: Any) -> Iterator[str]:
    with sibling(stack.endpoints.postgres) as dsn:
        with source.connect(dsn) as connection:
            connection.execute(TABLES)
        yield dsn


@pytest.fixture
def conn(shop_dsn: str) -> Iterator[source.Connection]:
    with source.connect(shop_dsn) as connection:
        yield connection


@pytest.fixture(scope="module")
def strict() -> Iterator[str]:
    """A server that asks for passwords and doesn't decode its log."""
    with strict_postgres(wal_level="replica") as dsn:
        yield dsn


def describe(conn: source.Connection, unique: str, *tables: Any) -> Any:
    return table_survey.describe(conn, pipeline(unique, "", *tables))


def test_columns_types_and_key(conn: source.Connection, unique: str) -> None:
    # A search path that reaches the type must not shorten its name.
    conn.execute("SET search_path = shop, public")
    table, lines_table, parts = describe(conn, unique, "shop.orders", "shop.Lines", "shop.parts")
    assert table.columns == (
        Column("note", "text"),
        Column("region", "text"),
        Column("id", "integer"),
        Column("price", "numeric(10,2)"),
        Column("mood", "shop.mood"),
        Column("at", "timestamp(3) with time zone[]"),
        Column("total", "integer"),
    )
    assert table.key == ("id", "region")
    assert table.topic == f"{unique}.shop.orders"
    assert (lines_table.qualified, parts.key) == ("shop.Lines", ("id",))
    assert conn.execute("SHOW search_path").fetchone() == ("shop, public",)


def test_generated_columns_are_there_only_when_the_log_has_them(
    conn: source.Connection, unique: str
) -> None:
    orders = pipeline(unique, "", "shop.orders")
    assert table_survey.unreplicated_columns(conn, orders) == {"shop.orders": ("twice",)}
    conn.execute(
        f"CREATE PUBLICATION {unique} FOR TABLE shop.orders WITH (publish_generated_columns = none)"
    )
    (table,) = table_survey.describe(conn, orders)
    assert "total" not in [column.name for column in table.columns]
    assert table_survey.unreplicated_columns(conn, orders) == {"shop.orders": ("twice", "total")}
    conn.execute(f"DROP PUBLICATION {unique}")


def test_excluded_columns_are_left_out(conn: source.Connection, unique: str) -> None:
    (table,) = describe(conn, unique, {"table": "shop.orders", "exclude": ["note", "mood"]})
    assert [column.name for column in table.columns] == ["region", "id", "price", "at", "total"]


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ("shop.order", ["no table shop.order", "did you mean shop.orders?"]),
        ("shop.lines", ["no table shop.lines", "did you mean shop.Lines?"]),
        ("elsewhere.xyzzy", ["no table elsewhere.xyzzy", "create it"]),
        ("shop.keyless", ["no primary key", "ALTER TABLE shop.keyless ADD PRIMARY KEY"]),
        ("shop.swappable", ["deferrable", "DROP CONSTRAINT swappable_pkey"]),
        ("shop.keyed", ["no primary key", "write {table: shop.keyed, key: [f;g]}"]),
        (
            {"table": "shop.keyed", "key": ["a"]},
            ["exactly a that", "write {table: shop.keyed, key: [a, b]}: keyed_a_b"],
        ),
        ({"table": "shop.keyed", "key": ["c"]}, ["partial"]),
        ({"table": "shop.keyed", "key": ["d"]}, ["NOT NULL"]),
        ({"table": "shop.keyed", "key": ["e"]}, ["deferrable"]),
        ({"table": "shop.keyed", "key": ["f;g"]}, ["semicolon", "rename"]),
        ({"table": "shop.keyed", "key": ["a", "b"], "exclude": ["b"]}, ["part of its key"]),
        ({"table": "shop.keyless", "key": ["id"]}, ["no unique index", "CREATE UNIQUE INDEX ON shop.keyless (id)"]),
        ("shop.summary", ["is a view"]),
        ({"table": "shop.orders", "exclude": ["nots"]}, ["no such column", "did you mean note?"]),
        ({"table": "shop.orders", "exclude": ["region"]}, ["part of its key", "take region out"]),
    ],
)  # fmt: skip
def test_a_table_that_cannot_be_captured(
    conn: source.Connection, unique: str, table: Any, words: list[str]
) -> None:
    with pytest.raises(SourceError) as caught:
        describe(conn, unique, "shop.parts", table)
    message = f"{caught.value.message} {caught.value.hint}"
    assert all(word in message for word in words), message


def test_a_key_that_the_file_names(conn: source.Connection, unique: str) -> None:
    """In the order of the file; a primary key may be named as well."""
    keyed, orders = describe(
        conn,
        unique,
        {"table": "shop.keyed", "key": ["b", "a"]},
        {"table": "shop.orders", "key": ["region", "id"]},
    )
    assert keyed.key == ("b", "a")
    assert orders.key == ("region", "id")


def test_a_slot_as_the_server_has_it(conn: source.Connection, shop_dsn: str, unique: str) -> None:
    assert read_slot(conn, unique) is None
    conn.execute("SELECT pg_create_logical_replication_slot(%s, 'pgoutput')", [unique])
    try:
        old_slot = read_slot(conn, unique)
        assert old_slot is not None
        assert (old_slot.active, old_slot.active_pid, old_slot.plugin) == (False, None, "pgoutput")
        assert old_slot.wal_status == "reserved"
        conn.execute("CREATE TABLE shop.grow AS SELECT 1")
        slot = read_slot(conn, unique)
        assert slot is not None
        assert old_slot.lag_bytes is not None
        assert (slot.lag_bytes or 0) > old_slot.lag_bytes
        assert (slot.retained_bytes or 0) >= (slot.lag_bytes or 0)
        assert slot.confirmed_flush_lsn == old_slot.confirmed_flush_lsn
        # A transaction that holds it back.
        with psycopg.connect(shop_dsn) as writer:
            writer.execute("INSERT INTO shop.keyless VALUES (1)")

            def old_enough() -> bool:
                slot = read_slot(conn, unique)
                return slot is not None and (slot.oldest_transaction_s or 0) > 0.2

            wait_until(old_enough, 5, "the open transaction's age")
    finally:
        conn.execute("SELECT pg_drop_replication_slot(%s)", [unique])


def test_a_server_without_logical_decoding(stack: Any, strict: str, unique: str) -> None:
    servers = stack.endpoints
    shop = pipeline(unique, strict, "shop.orders", kafka=servers.kafka, connect=servers.connect)
    with source.connect(strict) as conn:
        for attempt in (lambda: migrate(conn), lambda: register(shop, [])):
            with pytest.raises(SourceError, match="wal_level = replica") as caught:
                attempt()
            assert "ALTER SYSTEM SET wal_level = 'logical'" in caught.value.hint
            assert "restart" in caught.value.hint
        assert conn.execute("SELECT to_regnamespace('cdc')").fetchone() == (None,)


@pytest.mark.parametrize(
    ("change", "message", "hint"),
    [
        ({"password": "wrong-8472"}, "password authentication failed", "the password of source.dsn"),
        ({"password": ""}, "no password supplied", "names no password"),
        ({"dbname": "nothing_here"}, 'database "nothing_here" does not exist', "names a database"),
        ({"user": "nobody_here", "password": "x"}, "password authentication failed", "the user"),
        ({"port": NOWHERE.rsplit(":", maxsplit=1)[-1]}, "can't be reached", "cdc -p FILE up"),
        ({"host": "no-such-host.invalid"}, "can't be reached", "check host and port"),
    ],
)  # fmt: skip
def test_a_login_that_fails(strict: str, change: dict[str, str], message: str, hint: str) -> None:
    with pytest.raises(SourceError) as caught:
        source.connect(make_conninfo(strict, **change))
    assert message in caught.value.message
    assert hint in caught.value.hint
    assert PASSWORD not in f"{caught.value.message}{caught.value.hint}{caught.value.details}"
    assert "wrong-8472" not in f"{caught.value.message}{caught.value.hint}{caught.value.details}"


def test_a_role_that_the_server_lacks(postgres_dsn: str) -> None:
    with pytest.raises(SourceError, match="does not exist") as caught:
        source.connect(make_conninfo(postgres_dsn, user="nobody_here"))
    assert "names a user" in caught.value.hint


def test_a_dsn_that_is_none() -> None:
    with pytest.raises(SettingsError) as caught:
        source.connect("postgresql://owner:s3cret@@ half/x")
    assert "s3cret" not in caught.value.message


def test_no_pattern_means_the_pipelines_own_tables(postgres_dsn: str) -> None:
    """They are published, and no refusal of a table that a pattern leaves out is about them: its
    advice would be to stop publishing the journal.
    """
    with source.connect(postgres_dsn) as connection:
        connection.execute("CREATE SCHEMA crm; CREATE TABLE crm.orders (id int PRIMARY KEY)")
        migrate(connection)
        tables = ", ".join(["crm.orders", *CONTROL_TABLES])
        connection.execute(f"CREATE PUBLICATION shop FOR TABLE {tables}".encode())
        for pattern in ("*.*", "c*.*"):
            chosen = pipeline("shop", postgres_dsn, pattern)
            catalog.refuse_published(connection, chosen)
            choice = catalog.find_tables(connection, chosen)
            assert choice == catalog.Choice(("crm.orders",), {})
        with pytest.raises(SettingsError, match=r"cdc\.\* in .* matches no table") as caught:
            catalog.find_tables(connection, pipeline("shop", postgres_dsn, "cdc.*"))
    assert "tables are in: crm" in caught.value.hint
