"""Definitions that no event trigger journals: compared with the journal, what differs is noted."""

import json
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import psycopg
import pytest
from psycopg import sql

from cdc.apply.schema_follower import SchemaFollower
from cdc.control import definitions
from cdc.control.registrations import Registration
from cdc.migrations import migrate, prepare_source
from cdc.observe.collection import collect
from cdc.postgres import table_survey
from cdc.postgres.schema_changes import consequences
from cdc.postgres.table_definition import Definition, parse
from cdc.postgres.table_survey import unidentified
from cdc.readiness.facts import SourceRequirements
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
KEYS = {"shop.marks": ["a"]}
"""Keys that the pipeline file names."""
Connection = psycopg.Connection[tuple[Any, ...]]


@pytest.fixture
def conn(postgres_dsn: str, unique: str) -> Iterator[Connection]:
    """A prepared source without event triggers, that has been looked at."""
    with prepared(postgres_dsn, unique, SHOP, *CAPTURED) as connection:
        drop_event_triggers(connection)
        assert definitions.compare(connection) == 0
        yield connection


def drop_event_triggers(connection: Connection) -> None:
    for name in EVENT_TRIGGERS:
        connection.execute(sql.SQL("DROP EVENT TRIGGER {}").format(sql.Identifier(name)))


@contextmanager
def prepared(dsn: str, unique: str, schema: str, *tables: str) -> Iterator[Connection]:
    """A source as `cdc migrate` prepares it, with event triggers."""
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute(schema.encode())
        migrate(connection)
        needs = requirements(unique, *tables)
        prepare_source(connection, needs)
        yield connection
        role = sql.Identifier(needs.role)
        connection.execute(
            sql.SQL("DROP OWNED BY {role} CASCADE; DROP ROLE {role}").format(role=role)
        )


def requirements(name: str, *tables: str) -> SourceRequirements:
    pairs = [(table.split(".")[0], table.split(".")[1]) for table in tables]
    return SourceRequirements(name, pairs, f"{name}_replication", keys=KEYS)


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


def verdicts(conn: Connection, *captured: str) -> list[tuple[str, str]]:
    """Return what became of captured tables, without entries that mean nothing for their rows."""
    return [
        (consequence.table, consequence.kind)
        for consequence in consequences(history(conn), captured or CAPTURED)
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
        ("ALTER TABLE shop.orders DROP n; ALTER TABLE shop.orders ADD n int", [(ORDERS, "refresh")]),
        ("ALTER TYPE shop.mood RENAME VALUE 'bad' TO 'worse'", [(ORDERS, "refresh")]),
        ("ALTER TABLE shop.orders DROP CONSTRAINT orders_pkey, ADD PRIMARY KEY (id, n)", [(ORDERS, "cleanse")]),
        ("ALTER TABLE shop.orders RENAME TO requests", [(ORDERS, "gone")]),
        ("DROP TABLE shop.orders", [(ORDERS, "gone")]),
        ("DROP TABLE shop.orders; CREATE TABLE shop.orders (id int PRIMARY KEY)", [(ORDERS, "gone"), (ORDERS, "gone")]),
        ("ALTER SCHEMA shop RENAME TO store", [(ORDERS, "gone"), (PARTS, "gone")]),
        ("ALTER TABLE shop.parts ATTACH PARTITION shop.high FOR VALUES FROM (10) TO (20)", [(PARTS, "refresh")]),
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
        ("GRANT SELECT ON shop.orders TO PUBLIC; ANALYZE shop.orders; CREATE INDEX ON shop.orders (n)", []),
        ("ALTER TABLE shop.other ADD x int DEFAULT 7; VACUUM FULL shop.other; DROP TABLE shop.other", []),
    ],
)  # fmt: skip
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


def test_a_start_looks(conn: Connection, postgres_dsn: str, unique: str) -> None:
    shop_pipeline = pipeline(unique, postgres_dsn, *CAPTURED)
    follower = SchemaFollower(lambda: shop_pipeline, table_survey.describe(conn, shop_pipeline))
    conn.execute("ALTER TABLE shop.orders ALTER n TYPE int USING -n")
    follower([], Registration())
    assert verdicts(conn) == [(ORDERS, "refresh")]


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


def test_event_triggers_leave_nothing_to_compare(
    conn: Connection, postgres_dsn: str, unique: str
) -> None:
    file = pipeline(unique, postgres_dsn, *CAPTURED)
    assert collect(file, positions={}).definitions == "comparison"
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
        assert time.monotonic() - began < 60
        application.execute("TRUNCATE shop.orders")
    assert verdicts(conn) == []
    definitions.compare(conn)
    assert verdicts(conn) == [(ORDERS, "refresh")]


# A table's rows also change by a command that names another table or type, by one that no event
# trigger sees, or by none.

MOODS = """
CREATE SCHEMA shop;
CREATE TYPE shop.mood AS ENUM ('good', 'bad');
CREATE DOMAIN shop.state AS shop.mood;
CREATE DOMAIN shop.checked AS shop.state NOT NULL;
CREATE TYPE shop.span AS RANGE (subtype = shop.mood);
CREATE TYPE shop.pair AS (m shop.mood, n int);
CREATE TYPE shop.nested AS (p shop.pair[], t text);
CREATE DOMAIN shop.pairs AS shop.pair;
"""
KINDS = (
    "mood", "mood[]", "state", "state[]", "pair", "pair[]", "pairs", "nested", "span", "span[]", "span_multirange",
)  # fmt: skip
MADE_OF_PAIRS = ("pair", "pair[]", "pairs", "nested")
DEEP = {kind: f"shop.{kind.replace('[]', '_list')}_rows" for kind in KINDS}
"""For each type that is a mood or made of moods, a table with a column of it."""
RENAMED = "ALTER TYPE shop.mood RENAME VALUE 'bad' TO 'worse'"
"""Seen by an event trigger."""
OVERWRITTEN = "UPDATE pg_enum SET enumlabel = 'worse' WHERE enumlabel = 'bad'"
EXCHANGED = """
UPDATE pg_enum SET enumlabel = 'other' WHERE enumlabel = 'bad';
UPDATE pg_enum SET enumlabel = 'bad' WHERE enumlabel = 'good';
UPDATE pg_enum SET enumlabel = 'good' WHERE enumlabel = 'other'
"""


def deep_schema() -> str:
    tables = (
        f"CREATE TABLE {table} (id int PRIMARY KEY, m shop.{kind});" for kind, table in DEEP.items()
    )
    return MOODS + "".join(tables)


@pytest.mark.parametrize(
    ("change", "watched"),
    [(RENAMED, True), (RENAMED, False), (OVERWRITTEN, True), (EXCHANGED, True)],
)
def test_a_label_changes_at_any_depth(
    postgres_dsn: str, unique: str, change: str, watched: bool
) -> None:
    tables = list(DEEP.values())
    with prepared(postgres_dsn, unique, deep_schema(), *tables) as conn:
        if not watched:
            drop_event_triggers(conn)
        assert definitions.compare(conn) == 0
        # A new label changes no row.
        conn.execute("ALTER TYPE shop.mood ADD VALUE 'fair' BEFORE 'bad'")
        definitions.compare(conn)
        assert verdicts(conn, *tables) == []
        conn.execute(change.encode())
        if change != RENAMED or not watched:
            assert verdicts(conn, *tables) == []
            definitions.compare(conn)
        assert sorted(verdicts(conn, *tables)) == sorted((name, "refresh") for name in tables)
        assert definitions.compare(conn) == 0


LINES = """
CREATE SCHEMA shop;
CREATE TABLE shop.lines (id int PRIMARY KEY, "order" int NOT NULL UNIQUE);
CREATE TABLE shop.parts (id int, day int NOT NULL, PRIMARY KEY (id, day), UNIQUE (day)) PARTITION BY RANGE (day);
CREATE TABLE shop.january PARTITION OF shop.parts FOR VALUES FROM (1) TO (32);
CREATE TABLE shop.february PARTITION OF shop.parts FOR VALUES FROM (32) TO (60);
CREATE TABLE shop.marks (a int NOT NULL UNIQUE, b int NOT NULL UNIQUE);
"""


@pytest.mark.parametrize("watched", [True, False], ids=["event triggers", "comparison"])
@pytest.mark.parametrize(
    ("table", "part", "identity"),
    [
        ("shop.lines", "shop.lines", "USING INDEX lines_order_key"),
        ("shop.parts", "shop.january", "USING INDEX january_day_key"),
        ("shop.marks", "shop.marks", "USING INDEX marks_b_key"),
        ("shop.lines", "shop.lines", "NOTHING"),
    ],
)
def test_an_identity_without_the_key(
    postgres_dsn: str, unique: str, table: str, part: str, identity: str, *, watched: bool
) -> None:
    """Its views wait, and deletes that named no row are made up for. NOTHING lets no delete pass."""
    tables = ("shop.lines", "shop.parts", "shop.marks")
    entries = [{"table": name, "key": KEYS.get(name, [])} for name in tables]
    file = pipeline(unique, postgres_dsn, *entries)
    with prepared(postgres_dsn, unique, LINES, *tables) as conn:
        if not watched:
            drop_event_triggers(conn)
        follower = SchemaFollower(lambda: file, table_survey.survey(conn, file).tables)
        assert follower(history(conn), Registration())[1] == {}
        conn.execute(f"ALTER TABLE {part} REPLICA IDENTITY {identity}".encode())
        definitions.compare(conn)
        _, problems = follower(history(conn), Registration())
        assert list(problems) == [table]
        assert f"identity of {part} lacks the key" in str(problems)
        prepare_source(conn, requirements(unique, *tables))
        definitions.compare(conn)
        assert unidentified(conn, table_survey.survey(conn, file).tables) == {}
        lost = set() if identity == "NOTHING" else {(table, "cleanse")}
        assert set(verdicts(conn, *tables)) == lost


def test_a_composite_type_gets_an_attribute_at_any_depth(postgres_dsn: str, unique: str) -> None:
    tables = [DEEP[kind] for kind in MADE_OF_PAIRS]
    with prepared(postgres_dsn, unique, deep_schema(), *tables) as conn:
        conn.execute("ALTER TYPE shop.pair ADD ATTRIBUTE more int")
        assert sorted(verdicts(conn, *tables)) == sorted((name, "refresh") for name in tables)
        assert definitions.compare(conn) == 0


def test_a_label_of_the_key_below_a_domain_moves_rows(postgres_dsn: str, unique: str) -> None:
    schema = f"{MOODS}; CREATE TABLE shop.moods (m shop.checked PRIMARY KEY)"
    with prepared(postgres_dsn, unique, schema, "shop.moods") as conn:
        conn.execute(RENAMED.encode())
        assert verdicts(conn, "shop.moods") == [("shop.moods", "cleanse")]


FAMILY = """
CREATE SCHEMA shop;
CREATE TABLE shop.parent (id int PRIMARY KEY, n int, v text);
CREATE TABLE shop.child (PRIMARY KEY (id)) INHERITS (shop.parent);
CREATE TABLE shop.grandchild (PRIMARY KEY (id)) INHERITS (shop.child);
CREATE TABLE shop.parts (id int PRIMARY KEY, n int, v text) PARTITION BY RANGE (id);
CREATE TABLE shop.part PARTITION OF shop.parts FOR VALUES FROM (0) TO (10);
INSERT INTO shop.child VALUES (1, 1, 'a'); INSERT INTO shop.grandchild VALUES (2, 1, 'a');
INSERT INTO shop.parts VALUES (3, 1, 'a');
"""
HEIRS = ("shop.child", "shop.grandchild", "shop.part")


@pytest.mark.parametrize(
    "change",
    [
        "ALTER TABLE {} ADD COLUMN w int NOT NULL DEFAULT 7",
        "ALTER TABLE {} RENAME COLUMN n TO number",
        "ALTER TABLE {} ALTER n TYPE text USING 'n' || n",
    ],
)
@pytest.mark.parametrize("watched", [True, False])
def test_a_change_of_the_parent_is_one_of_its_children(
    postgres_dsn: str, unique: str, change: str, watched: bool
) -> None:
    """Also of a partition that is captured by itself."""
    with prepared(postgres_dsn, unique, FAMILY, *HEIRS) as conn:
        if not watched:
            drop_event_triggers(conn)
        assert definitions.compare(conn) == 0
        conn.execute(change.format("shop.parent").encode())
        conn.execute(change.format("shop.parts").encode())
        if not watched:
            definitions.compare(conn)
        changed = set(verdicts(conn, *HEIRS))
        assert changed == {(table, "refresh") for table in HEIRS}
        newest = {entry.table: entry for entry in history(conn)}
        names = {column.name for column in newest["shop.child"].columns or ()}
        assert names == {name for (name,) in conn.execute(COLUMN_NAMES)}
        assert definitions.compare(conn) == 0


COLUMN_NAMES = """
SELECT attname FROM pg_attribute WHERE attrelid = 'shop.child'::regclass AND attnum > 0 AND NOT attisdropped
"""


@pytest.fixture
def watched(postgres_dsn: str, unique: str) -> Iterator[Connection]:
    """A prepared source with its event triggers."""
    with prepared(postgres_dsn, unique, SHOP, *CAPTURED) as connection:
        assert definitions.compare(connection) == 0
        yield connection


@pytest.mark.parametrize(
    ("statement", "expected"),
    [
        ("ALTER TABLE shop.orders ADD extra text NOT NULL DEFAULT 'd'", [(ORDERS, "refresh")]),
        ("ALTER TABLE shop.orders ADD plain text", [(ORDERS, "refresh")]),
        ("ALTER TABLE shop.orders RENAME note TO remark", [(ORDERS, "refresh")]),
        ("ALTER TABLE shop.parts ALTER n TYPE text", [(PARTS, "refresh")]),
        ("ALTER TABLE shop.parts ADD extra int DEFAULT 1", [(PARTS, "refresh")]),
        ("ALTER TABLE shop.parts DETACH PARTITION shop.low", [(PARTS, "cleanse")]),
        ("ALTER TABLE shop.parts ATTACH PARTITION shop.high FOR VALUES FROM (10) TO (20)", [(PARTS, "refresh")]),
        ("ALTER TYPE shop.mood RENAME VALUE 'bad' TO 'worse'", [(ORDERS, "refresh")]),
        ("ALTER TABLE shop.orders RENAME TO requests", [(ORDERS, "gone")]),
        ("DROP TABLE shop.orders", [(ORDERS, "gone")]),
    ],
)  # fmt: skip
def test_what_event_triggers_do_not_see_is_noted_once(
    watched: Connection, statement: str, expected: list[tuple[str, str]]
) -> None:
    watched.execute("SET event_triggers = off")
    watched.execute(statement.encode())
    watched.execute("RESET event_triggers")
    assert verdicts(watched) == []
    definitions.compare(watched)
    assert verdicts(watched) == expected
    count = len(history(watched))
    assert definitions.compare(watched) == 0
    assert len(history(watched)) == count


@pytest.mark.parametrize(
    "statements",
    [
        "VACUUM FULL shop.orders",
        "CLUSTER shop.orders USING orders_pkey",
        "ALTER TABLE shop.orders ADD vip boolean NOT NULL DEFAULT false",
        "ALTER TABLE shop.orders ALTER n TYPE int USING -n",
        "ALTER TABLE shop.parts ADD extra int DEFAULT 1",
        "ALTER TABLE shop.parts DETACH PARTITION shop.low;"
        " ALTER TABLE shop.parts ATTACH PARTITION shop.low FOR VALUES FROM (0) TO (10)",
        "CREATE TABLE shop.new PARTITION OF shop.parts FOR VALUES FROM (30) TO (40)",
        "ALTER TABLE shop.low RENAME TO lower",
        "TRUNCATE shop.orders; TRUNCATE shop.low",
        "DROP TABLE shop.orders",
        "ALTER SCHEMA shop RENAME TO store",
    ],
)
def test_what_event_triggers_have_noted_is_not_noted_again(
    watched: Connection, statements: str
) -> None:
    """Each entry starts queries again, and some have all rows sent again."""
    for statement in statements.split("; "):
        watched.execute(statement.encode())
    noted = history(watched)
    assert definitions.compare(watched) == 0
    assert history(watched) == noted


def test_definitions_are_compared_while_they_change(watched: Connection, postgres_dsn: str) -> None:
    """A command that is committed during a look is noted by its event trigger alone."""
    stopping = threading.Event()
    failures: list[BaseException] = []

    def look() -> None:
        try:
            with psycopg.connect(postgres_dsn, autocommit=True) as other:
                while not stopping.is_set():
                    with suppress(psycopg.errors.LockNotAvailable):
                        definitions.compare(other)
        except BaseException as error:
            failures.append(error)

    looking = threading.Thread(target=look)
    looking.start()
    try:
        for n in range(1, 41):
            watched.execute(f"ALTER TABLE shop.orders ADD c{n} int DEFAULT {n}".encode())
            watched.execute(f"ALTER TYPE shop.mood RENAME TO mood{n}".encode())
            watched.execute(f"ALTER TYPE shop.mood{n} RENAME TO mood".encode())
            watched.execute(
                f"CREATE TABLE shop.p{n} PARTITION OF shop.parts FOR VALUES FROM ({n}00) TO ({n}01)".encode()
            )
            watched.execute(f"ALTER TABLE shop.parts DETACH PARTITION shop.p{n}".encode())
    finally:
        stopping.set()
        looking.join()
    assert failures == []
    assert "COMPARE" not in {entry.command for entry in history(watched)}


NESTED = """
CREATE SCHEMA shop;
CREATE TABLE shop.all_parts (id int PRIMARY KEY, n int) PARTITION BY RANGE (id);
CREATE TABLE shop.year PARTITION OF shop.all_parts FOR VALUES FROM (0) TO (100) PARTITION BY RANGE (id);
CREATE TABLE shop.low PARTITION OF shop.year FOR VALUES FROM (0) TO (10);
CREATE TABLE shop.mid PARTITION OF shop.year FOR VALUES FROM (10) TO (20);
INSERT INTO shop.all_parts VALUES (1, 1), (11, 1);
"""


@pytest.mark.parametrize("has_event_triggers", [True, False])
@pytest.mark.parametrize(
    ("statement", "kind"),
    [
        ("TRUNCATE shop.low", "cleanse"),
        ("ALTER TABLE shop.all_parts ALTER n TYPE int USING -n", "refresh"),
        ("DROP TABLE shop.low", "cleanse"),
        ("ALTER TABLE shop.year DETACH PARTITION shop.low", "cleanse"),
        ("ALTER TABLE shop.all_parts ADD c int DEFAULT 7", "refresh"),
    ],
)
def test_a_captured_table_may_be_a_partition_of_one_that_is_not(
    postgres_dsn: str, unique: str, statement: str, kind: str, has_event_triggers: bool
) -> None:
    with prepared(postgres_dsn, unique, NESTED, "shop.year") as conn:
        if not has_event_triggers:
            drop_event_triggers(conn)
        assert definitions.compare(conn) == 0
        conn.execute(statement.encode())
        definitions.compare(conn)
        assert set(verdicts(conn, "shop.year")) == {("shop.year", kind)}
        assert definitions.compare(conn) == 0


BOTH = [(ORDERS, "cleanse"), (PARTS, "cleanse")]


LEFT_OUT = [
    ("DROP TABLE shop.orders", "ADD TABLE ONLY shop.orders", [(ORDERS, "cleanse")]),
    (
        "SET TABLE ONLY shop.parts, ONLY cdc.ddl, ONLY cdc.heartbeat, ONLY cdc.signal, ONLY cdc.truncation",
        "ADD TABLE ONLY shop.orders",
        [(ORDERS, "cleanse")],
    ),
    ("SET (publish = 'insert')", "SET (publish = 'insert, update, delete, truncate')", BOTH),
    ("SET (publish_via_partition_root = false)", "SET (publish_via_partition_root = true)", BOTH),
    ("DROP TABLE cdc.truncation", "ADD TABLE cdc.truncation", BOTH),
    ("DROP TABLE cdc.ddl", "ADD TABLE cdc.ddl", BOTH),
]  # fmt: skip
"""How a publication is narrowed and widened again, and what becomes of the tables."""


@pytest.mark.parametrize("has_event_triggers", [True, False])
@pytest.mark.parametrize("looked", [True, False])
def test_what_a_publication_left_out_for_a_while_is_noted_once(
    postgres_dsn: str, unique: str, has_event_triggers: bool, looked: bool
) -> None:
    """Its changes were never in the log, whether anybody looked meanwhile or not."""
    with prepared(postgres_dsn, unique, SHOP, *CAPTURED) as conn:
        if not has_event_triggers:
            drop_event_triggers(conn)
        assert definitions.compare(conn) == 0
        for narrowed, widened, expected in LEFT_OUT:
            former = Counter(verdicts(conn))
            alter_publication(conn, unique, narrowed)
            conn.execute("DELETE FROM shop.orders")
            if looked:
                # Nothing is noted before it is whole: an entry might not reach the log, and rows
                # that are deleted after it wouldn't.
                assert definitions.compare(conn) == 0
            alter_publication(conn, unique, widened)
            definitions.compare(conn)
            noted = Counter(verdicts(conn)) - former
            assert (narrowed, sorted(noted.elements())) == (narrowed, expected)
            assert definitions.compare(conn) == 0


def alter_publication(conn: Connection, name: str, change: str) -> None:
    conn.execute(sql.SQL("ALTER PUBLICATION {} ").format(sql.Identifier(name)) + sql.SQL(change))


def test_a_filter_or_list_of_columns_that_is_taken_back_is_noted(
    watched: Connection, unique: str
) -> None:
    whole = (
        "ONLY shop.parts, ONLY cdc.ddl, ONLY cdc.heartbeat, ONLY cdc.signal, ONLY cdc.truncation"
    )
    for clause in ("WHERE (id > 5)", "(id, n)"):
        before = len(verdicts(watched))
        alter_publication(watched, unique, f"SET TABLE ONLY shop.orders {clause}, {whole}")
        definitions.compare(watched)
        assert len(verdicts(watched)) == before
        alter_publication(watched, unique, f"SET TABLE ONLY shop.orders, {whole}")
        definitions.compare(watched)
        assert verdicts(watched)[before:] == [(ORDERS, "cleanse")]


def test_a_publication_that_migrate_repairs_has_its_rows_sent_again(
    watched: Connection, unique: str
) -> None:
    alter_publication(watched, unique, "DROP TABLE shop.orders")
    prepare_source(watched, requirements(unique, *CAPTURED))
    definitions.compare(watched)
    assert verdicts(watched) == [(ORDERS, "cleanse")]
    prepare_source(watched, requirements(unique, *CAPTURED))
    assert definitions.compare(watched) == 0


def test_a_table_that_migrate_takes_out_and_in_again_is_no_loss(
    watched: Connection, unique: str
) -> None:
    """`cdc register` asks for the rows of a table that is new to the pipeline."""
    prepare_source(watched, requirements(unique, PARTS))
    assert definitions.compare(watched) == 0
    prepare_source(watched, requirements(unique, *CAPTURED))
    noted = history(watched)
    definitions.compare(watched)
    assert history(watched) == noted
    assert verdicts(watched) == []
