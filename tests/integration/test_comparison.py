"""Definitions where no event trigger journals them: compared with the journal, what differs is
noted.
"""

import json
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import psycopg
import pytest
from psycopg import sql

from cdc.apply.schema_follower import SchemaFollower
from cdc.control import definitions
from cdc.control.registrations import Registration
from cdc.migrations import SourceRequirements, migrate, prepare_source
from cdc.observe.collection import collect
from cdc.postgres import table_survey
from cdc.postgres.row_identity import key_index
from cdc.postgres.schema_changes import consequences
from cdc.postgres.table_definition import Definition, parse
from tests.support.pipelines import pipeline

SHOP = """
CREATE SCHEMA shop;
CREATE TYPE shop.mood AS ENUM ('good', 'bad');
CREATE TABLE shop.orders (id int PRIMARY KEY, note text DEFAULT 'x', n int, m shop.mood);
CREATE TABLE shop.parts (id int PRIMARY KEY, n int) PARTITION BY RANGE (id);
CREATE TABLE shop.low PARTITION OF shop.parts FOR VALUES FROM (0) TO (10);
CREATE TABLE shop.high (id int PRIMARY KEY, n int);
CREATE TABLE shop.other (id int PRIMARY KEY, n int);
INSERT INTO shop.orders VALUES (1, 'a', 1, 'good');
INSERT INTO shop.high VALUES (15, 1);
"""
EVENT_TRIGGERS = ("cdc_ddl", "cdc_ddl_around", "cdc_drop", "cdc_rewrite")
CAPTURED = ("shop.orders", "shop.parts")
Connection = psycopg.Connection[tuple[Any, ...]]


@pytest.fixture
def conn(postgres_dsn: str, unique: str) -> Iterator[Connection]:
    """A prepared source without event triggers, that has been looked at."""
    with psycopg.connect(postgres_dsn, autocommit=True) as connection:
        connection.execute(SHOP)
        migrate(connection)
        requirements = SourceRequirements(
            unique, [("shop", "orders"), ("shop", "parts")], f"{unique}_replication", key_index
        )
        prepare_source(connection, requirements)
        for name in EVENT_TRIGGERS:
            connection.execute(sql.SQL("DROP EVENT TRIGGER {}").format(sql.Identifier(name)))
        assert definitions.compare(connection) == 0
        yield connection
        role = sql.Identifier(requirements.role)
        connection.execute(
            sql.SQL("DROP OWNED BY {role} CASCADE; DROP ROLE {role}").format(role=role)
        )


def history(conn: Connection) -> list[Definition]:
    """The journal as its topic would have it; what `migrate` noted came with the snapshot."""
    fields = ("id", "lsn", "command", "table_name", "relation", "columns", "partitions")
    cursor = conn.execute(
        "SELECT id, lsn::text, command, table_name, relation, columns, partitions FROM cdc.ddl"
    )
    entries = []
    for row in cursor.fetchall():
        entry = dict(zip(fields, row, strict=True))
        op = "r" if entry["command"] == "PUBLISH" else "c"
        entries.append(parse(json.dumps({"op": op, "after": entry}).encode()))
    return [entry for entry in entries if entry]


def verdicts(conn: Connection) -> list[tuple[str, str]]:
    """Return what became of captured tables, without entries that mean nothing for their rows."""
    return [
        (consequence.table, consequence.kind)
        for consequence in consequences(history(conn), CAPTURED)
        if consequence.kind != "none"
    ]


ORDERS, PARTS = CAPTURED


@pytest.mark.parametrize(
    ("statements", "expected"),
    [
        ("ALTER TABLE shop.orders ADD vip boolean NOT NULL DEFAULT false", [(ORDERS, "refresh")]),
        (
            "ALTER TABLE shop.orders ADD c int DEFAULT 7; ALTER TABLE shop.orders ALTER c DROP DEFAULT",
            [(ORDERS, "refresh")],
        ),
        # Rows that were changed before anybody looked have been applied without it.
        ("ALTER TABLE shop.orders ADD plain text", [(ORDERS, "refresh")]),
        ("ALTER TABLE shop.orders RENAME note TO remark", [(ORDERS, "refresh")]),
        ("ALTER TABLE shop.orders ALTER n TYPE text", [(ORDERS, "refresh")]),
        ("ALTER TABLE shop.orders ALTER n TYPE int USING -n", [(ORDERS, "refresh")]),
        ("VACUUM FULL shop.orders", [(ORDERS, "refresh")]),
        (
            "ALTER TABLE shop.orders DROP n; ALTER TABLE shop.orders ADD n int",
            [(ORDERS, "refresh")],
        ),
        ("ALTER TYPE shop.mood RENAME VALUE 'bad' TO 'worse'", [(ORDERS, "refresh")]),
        (
            "ALTER TABLE shop.orders DROP CONSTRAINT orders_pkey, ADD PRIMARY KEY (id, n)",
            [(ORDERS, "cleanse")],
        ),
        ("ALTER TABLE shop.orders RENAME TO requests", [(ORDERS, "gone")]),
        ("DROP TABLE shop.orders", [(ORDERS, "gone")]),
        (
            "DROP TABLE shop.orders; CREATE TABLE shop.orders (id int PRIMARY KEY)",
            [(ORDERS, "gone"), (ORDERS, "gone")],
        ),
        ("ALTER SCHEMA shop RENAME TO store", [(ORDERS, "gone"), (PARTS, "gone")]),
        (
            "ALTER TABLE shop.parts ATTACH PARTITION shop.high FOR VALUES FROM (10) TO (20)",
            [(PARTS, "refresh")],
        ),
        ("ALTER TABLE shop.parts DETACH PARTITION shop.low", [(PARTS, "cleanse")]),
        ("DROP TABLE shop.low", [(PARTS, "cleanse")]),
        ("TRUNCATE shop.low", [(PARTS, "cleanse")]),
        (
            "DROP TABLE shop.low; CREATE TABLE shop.low PARTITION OF shop.parts FOR VALUES FROM (0) TO (10)",
            [(PARTS, "cleanse")],
        ),
        (
            "ALTER TABLE shop.parts DETACH PARTITION shop.low;"
            " ALTER TABLE shop.parts ATTACH PARTITION shop.low FOR VALUES FROM (0) TO (10)",
            [(PARTS, "cleanse")],
        ),
        (
            "ALTER TABLE shop.parts DETACH PARTITION shop.low; ALTER TABLE shop.low RENAME TO before;"
            " ALTER TABLE shop.high RENAME TO low;"
            " ALTER TABLE shop.parts ATTACH PARTITION shop.low FOR VALUES FROM (10) TO (20)",
            [(PARTS, "cleanse")],
        ),
        ("ALTER TABLE shop.low RENAME TO lower", []),
        ("CREATE TABLE shop.new PARTITION OF shop.parts FOR VALUES FROM (30) TO (40)", []),
        ("TRUNCATE shop.orders, shop.parts", []),
        ("ALTER TABLE shop.orders DROP n", []),
        ("ALTER TABLE shop.orders ALTER n SET DEFAULT 5, ALTER m SET NOT NULL", []),
        (
            "GRANT SELECT ON shop.orders TO PUBLIC; ANALYZE shop.orders; CREATE INDEX ON shop.orders (n)",
            [],
        ),
        (
            "ALTER TABLE shop.other ADD x int DEFAULT 7; VACUUM FULL shop.other; DROP TABLE shop.other",
            [],
        ),
    ],
)
def test_what_has_changed_is_noted_once(
    conn: Connection, statements: str, expected: list[tuple[str, str]]
) -> None:
    for statement in statements.split("; "):
        conn.execute(statement.encode())
    definitions.compare(conn)
    assert verdicts(conn) == expected
    count = len(history(conn))
    assert definitions.compare(conn) == 0
    assert len(history(conn)) == count


def test_without_a_look_nothing_is_known(conn: Connection) -> None:
    """The twin: no entry, so that no view would be put right."""
    conn.execute("ALTER TABLE shop.orders ADD vip boolean NOT NULL DEFAULT false")
    assert verdicts(conn) == []


def test_a_start_looks(conn: Connection, postgres_dsn: str, unique: str) -> None:
    shop_pipeline = pipeline(unique, postgres_dsn, *CAPTURED)
    follower = SchemaFollower(lambda: shop_pipeline, table_survey.describe(conn, shop_pipeline))
    conn.execute("ALTER TABLE shop.orders ALTER n TYPE int USING -n")
    follower([], Registration())
    assert verdicts(conn) == [(ORDERS, "refresh")]


def test_status_says_how_definitions_are_watched(
    conn: Connection, postgres_dsn: str, unique: str
) -> None:
    shop_pipeline = pipeline(unique, postgres_dsn, *CAPTURED)
    assert collect(shop_pipeline, positions={}).definitions == "comparison"
    conn.execute("SELECT cdc.watch_ddl()")
    assert collect(shop_pipeline, positions={}).definitions == "event triggers"


def test_a_new_partition_is_taken_in(conn: Connection) -> None:
    conn.execute("ALTER TABLE shop.parts REPLICA IDENTITY FULL")
    conn.execute("CREATE TABLE shop.new PARTITION OF shop.parts FOR VALUES FROM (30) TO (40)")
    definitions.compare(conn)
    assert conn.execute(
        "SELECT relreplident::text FROM pg_class WHERE oid = 'shop.new'::regclass"
    ).fetchone() == ("f",)
    conn.execute("TRUNCATE shop.new")
    assert verdicts(conn) == [(PARTS, "cleanse")]


def test_a_partition_of_a_partition_that_was_away_is_noted(conn: Connection) -> None:
    conn.execute(
        "CREATE TABLE shop.wide PARTITION OF shop.parts FOR VALUES FROM (50) TO (60) PARTITION BY RANGE (id)"
    )
    conn.execute("CREATE TABLE shop.narrow PARTITION OF shop.wide FOR VALUES FROM (50) TO (55)")
    definitions.compare(conn)
    assert verdicts(conn) == []
    conn.execute("ALTER TABLE shop.parts DETACH PARTITION shop.wide")
    conn.execute("ALTER TABLE shop.parts ATTACH PARTITION shop.wide FOR VALUES FROM (50) TO (60)")
    definitions.compare(conn)
    assert verdicts(conn) == [(PARTS, "cleanse")]
    assert definitions.compare(conn) == 0


def test_a_rewrite_while_nobody_looked_is_seen_after_a_truncation(conn: Connection) -> None:
    """What TRUNCATE does to a table's file is no rewrite, and hides none that comes later."""
    conn.execute("TRUNCATE shop.orders")
    assert definitions.compare(conn) == 0
    conn.execute("INSERT INTO shop.orders VALUES (1, 'a', 1, 'good')")
    conn.execute("ALTER TABLE shop.orders ALTER n TYPE int USING -n")
    assert definitions.compare(conn) == 1
    assert verdicts(conn) == [(ORDERS, "refresh")]


@pytest.mark.parametrize(
    ("truncated", "expected"),
    [
        (ORDERS, [(ORDERS, "refresh")]),
        (PARTS, [(PARTS, "refresh")]),
        ("shop.low", [(PARTS, "cleanse"), (PARTS, "refresh")]),
    ],
)
def test_a_rewrite_right_after_a_truncation_is_seen(
    conn: Connection, truncated: str, expected: list[tuple[str, str]]
) -> None:
    table = expected[0][0]
    conn.execute(f"TRUNCATE {truncated}".encode())
    conn.execute(f"INSERT INTO {table} (id, n) VALUES (1, 1)".encode())
    conn.execute(f"ALTER TABLE {table} ALTER n TYPE int USING -n".encode())
    definitions.compare(conn)
    assert verdicts(conn) == expected
    assert definitions.compare(conn) == 0


def test_a_partition_that_cant_be_read_spoils_nothing(conn: Connection, unique: str) -> None:
    """It is another owner's; that it may have rows is what has to be taken for true."""
    role = sql.Identifier(f"{unique}_other")
    conn.execute("CREATE TABLE shop.new PARTITION OF shop.parts FOR VALUES FROM (30) TO (40)")
    conn.execute("ALTER TABLE shop.orders ALTER n TYPE int USING -n")
    grants = "CREATE ROLE {r}; GRANT ALL ON SCHEMA cdc TO {r}; GRANT ALL ON ALL TABLES IN SCHEMA cdc TO {r};"
    grants += "GRANT ALL ON ALL SEQUENCES IN SCHEMA cdc TO {r}; GRANT ALL ON ALL FUNCTIONS IN SCHEMA cdc TO {r}"
    conn.execute(sql.SQL(grants).format(r=role))
    try:
        conn.execute(sql.SQL("SET ROLE {}").format(role))
        definitions.compare(conn)
    finally:
        conn.execute(sql.SQL("RESET ROLE; DROP OWNED BY {r}; DROP ROLE {r}").format(r=role))
    assert sorted(verdicts(conn)) == [(ORDERS, "refresh"), (PARTS, "refresh")]


def test_a_locked_partition_keeps_no_other_from_being_taken_in(
    conn: Connection, postgres_dsn: str
) -> None:
    conn.execute("CREATE TABLE shop.aside (id int) PARTITION BY RANGE (id)")
    conn.execute("CREATE TABLE shop.held PARTITION OF shop.aside DEFAULT")
    trigger = (
        "CREATE TRIGGER aside BEFORE TRUNCATE ON shop.aside EXECUTE FUNCTION cdc.begin_truncation()"
    )
    conn.execute(trigger)
    conn.execute("CREATE TABLE shop.new PARTITION OF shop.parts FOR VALUES FROM (30) TO (40)")
    with psycopg.connect(postgres_dsn) as application:
        application.execute("LOCK shop.held")
        with pytest.raises(psycopg.errors.LockNotAvailable):
            definitions.compare(conn)
    conn.execute("TRUNCATE shop.new")
    assert verdicts(conn) == [(PARTS, "cleanse")]


def test_event_triggers_leave_nothing_to_compare(conn: Connection) -> None:
    assert definitions.watch(conn) == "comparison"
    conn.execute("SELECT cdc.watch_ddl()")
    assert definitions.watch(conn) == "event triggers"
    conn.execute("ALTER TABLE shop.orders ADD vip boolean NOT NULL DEFAULT false")
    assert definitions.compare(conn) == 0
    conn.execute("ALTER EVENT TRIGGER cdc_rewrite DISABLE")
    assert definitions.watch(conn) == "comparison"


def test_a_table_that_stays_locked_is_not_waited_for(conn: Connection, postgres_dsn: str) -> None:
    """Who holds it may wait for what the comparison holds."""
    with psycopg.connect(postgres_dsn) as application:
        application.execute("ALTER TABLE shop.orders ADD vip boolean NOT NULL DEFAULT false")
        began = time.monotonic()
        with suppress(psycopg.errors.LockNotAvailable):
            definitions.compare(conn)
        assert time.monotonic() - began < 5
        application.execute("TRUNCATE shop.orders")
    assert verdicts(conn) == []
    definitions.compare(conn)
    assert verdicts(conn) == [(ORDERS, "refresh")]
