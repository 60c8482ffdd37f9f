"""Migrations and prepare_source against a real Postgres: what they make and what they refuse."""

import shutil
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg import sql
from psycopg.conninfo import make_conninfo

from cdc.errors import SourceError
from cdc.migrations import (
    CONTROL,
    SAMPLE,
    heartbeat_query,
    migrate,
    plan,
    prepare_source,
    removal,
    script,
    source,
)
from cdc.migrations.runner import LOCK, migrations
from cdc.readiness.facts import SourceRequirements
from tests.support.postgres import run_psql
from tests.support.wait import wait_until

SHOP = """
CREATE SCHEMA shop;
CREATE TABLE shop.orders (id int PRIMARY KEY, note text);
CREATE TABLE shop.counters (id int PRIMARY KEY, n bigint);
CREATE TABLE shop.lines (id int PRIMARY KEY, order_id int REFERENCES shop.orders);
"""
TABLES = [("shop", "orders"), ("shop", "counters"), ("shop", "lines")]
Connection = psycopg.Connection[Any]
Prepare = Callable[..., list[str]]
MakeRole = Callable[[str], str]


@pytest.fixture
def conn(postgres_dsn: str) -> Iterator[Connection]:
    """An administrator's connection to an empty database."""
    with psycopg.connect(postgres_dsn, autocommit=True) as connection:
        yield connection


@pytest.fixture
def make_role(conn: Connection) -> Iterator[MakeRole]:
    """Names of roles, which live longer than a database; `make_role("LOGIN")` also creates it."""
    names: list[str] = []

    def make(options: str) -> str:
        names.append(f"r_{uuid.uuid4().hex[:12]}")
        if options:
            execute(conn, f"CREATE ROLE {names[-1]} {options}")
        return names[-1]

    yield make
    for name in names:
        if rows(conn, "SELECT 1 FROM pg_roles WHERE rolname = %s", name):
            execute(
                conn,
                f"REASSIGN OWNED BY {name} TO CURRENT_USER; DROP OWNED BY {name} CASCADE; DROP ROLE {name}",
            )


@pytest.fixture
def role(make_role: MakeRole) -> str:
    return make_role("")


@pytest.fixture
def shop(conn: Connection) -> Connection:
    """The control schema, and an application's three tables."""
    migrate(conn)
    execute(conn, SHOP)
    return conn


@pytest.fixture
def prepare(shop: Connection, role: str) -> Prepare:
    def call(tables: Sequence[tuple[str, str]] = TABLES, **changed: Any) -> list[str]:
        values = {"pipeline": "shop", "role": role} | changed
        return prepare_source(
            values.pop("conn", shop),
            SourceRequirements(tables=tables, **values),
        )

    return call


def execute(conn: Connection, statements: str) -> None:
    conn.execute(sql.SQL(statements))


def rows(conn: Connection, query: str, *parameters: object) -> list[tuple[Any, ...]]:
    return conn.execute(query.encode(), parameters or None).fetchall()


def as_role(dsn: str, role: str) -> Connection:
    return psycopg.connect(make_conninfo(dsn, options=f"-c role={role}"), autocommit=True)


def fingerprint(conn: Connection) -> list[tuple[Any, ...]]:
    """Everything that prepare_source may make or change."""
    return rows(
        conn,
        "SELECT 'role', rolname, rolsuper::text FROM pg_roles UNION ALL"
        " SELECT 'publication', pubname, NULL FROM pg_publication UNION ALL"
        " SELECT 'published', prrelid::text, prpubid::text FROM pg_publication_rel UNION ALL"
        " SELECT 'trigger', tgname, tgrelid::text FROM pg_trigger UNION ALL"
        " SELECT 'table', relname, relreplident::text || coalesce(relacl::text, '') FROM pg_class UNION ALL"
        " SELECT 'policy', polname, polroles::text FROM pg_policy UNION ALL"
        " SELECT 'heartbeat', pipeline, NULL FROM cdc.heartbeat ORDER BY 1, 2, 3",
    )


def folder(tmp_path: Path, **files: str) -> Path:
    directory = tmp_path / "mine"
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir()
    for number, (name, text) in enumerate(files.items(), start=1):
        (directory / f"{number:04}_{name}.sql").write_text(text)
    return directory


# The runner


def test_files_are_applied_once_and_recorded(conn: Connection) -> None:
    first = migrate(conn) | migrate(conn, SAMPLE)
    assert all(first.values())
    assert migrate(conn) | migrate(conn, SAMPLE) == dict.fromkeys(first, False)
    assert rows(conn, "SELECT name, checksum FROM cdc.migration ORDER BY name") == [
        (file.name, file.checksum) for file in (*migrations(CONTROL), *migrations(SAMPLE))
    ]


def test_a_plain_connection_does_as_well_as_autocommit(postgres_dsn: str, conn: Connection) -> None:
    with psycopg.connect(postgres_dsn) as plain:
        migrate(plain)
        plain.rollback()
    assert rows(conn, "SELECT FROM cdc.migration")


def test_an_open_transaction_is_refused(postgres_dsn: str) -> None:
    """It would make every commit a savepoint, which the caller might roll back."""
    with psycopg.connect(postgres_dsn) as plain:
        plain.execute("SELECT 1")
        with pytest.raises(ValueError, match="inside a transaction"):
            migrate(plain)


def test_an_edited_file_is_refused(conn: Connection, tmp_path: Path) -> None:
    migrate(conn, folder(tmp_path, a="CREATE TABLE one ()"))
    with pytest.raises(SourceError, match=r"mine/0001_a\.sql was changed") as caught:
        migrate(conn, folder(tmp_path, a="CREATE TABLE one (id int)", b="CREATE TABLE two ()"))
    assert "new one" in caught.value.hint
    assert rows(conn, "SELECT to_regclass('two')") == [(None,)]


def test_a_recorded_file_that_is_missing_is_refused(conn: Connection, tmp_path: Path) -> None:
    migrate(conn, folder(tmp_path, a="SELECT 1", b="SELECT 2"))
    with pytest.raises(SourceError, match=r"mine/0002_b\.sql was applied"):
        migrate(conn, folder(tmp_path, a="SELECT 1"))


def test_a_failing_file_leaves_nothing_of_itself(conn: Connection, tmp_path: Path) -> None:
    broken = "CREATE TABLE two ();\nINSERT INTO nowhere\nVALUES (1)"
    with pytest.raises(SourceError) as caught:
        migrate(
            conn, folder(tmp_path, a="CREATE TABLE one ()", b=broken, c="CREATE TABLE three ()")
        )
    assert caught.value.message == 'mine/0002_b.sql line 2: relation "nowhere" does not exist'
    assert rows(conn, "SELECT to_regclass('one')::text, to_regclass('two')") == [("one", None)]
    repaired = migrate(conn, folder(tmp_path, a="CREATE TABLE one ()", b="CREATE TABLE two ()"))
    assert list(repaired.values()) == [False, True]


def test_two_migrators_take_turns(conn: Connection, postgres_dsn: str, tmp_path: Path) -> None:
    """Both wait for the lock that this test holds; without one, both would create the table."""
    files = folder(tmp_path, a="CREATE TABLE one ()", b="CREATE TABLE two ()")

    def run() -> list[bool]:
        with psycopg.connect(postgres_dsn) as connection:
            return list(migrate(connection, files).values())

    def waiting() -> bool:
        query = (
            "SELECT count(*) FROM pg_locks l JOIN pg_database d ON d.oid = l.database"
            " WHERE d.datname = current_database() AND l.locktype = 'advisory' AND NOT l.granted"
        )
        return rows(conn, query) == [(2,)]

    rows(conn, "SELECT pg_advisory_lock(hashtextextended(%s, 0))", LOCK)
    with ThreadPoolExecutor(2) as pool:
        runs = [pool.submit(run) for _ in range(2)]
        try:
            wait_until(waiting, 20, "both migrators to wait for the lock")
        finally:
            rows(conn, "SELECT pg_advisory_unlock(hashtextextended(%s, 0))", LOCK)
        assert sorted(future.result(timeout=120) for future in runs) == [
            [False, False],
            [True, True],
        ]


def test_a_read_only_server_is_named(conn: Connection, postgres_dsn: str) -> None:
    """As a standby would answer."""
    dsn = make_conninfo(postgres_dsn, options="-c default_transaction_read_only=on")
    with psycopg.connect(dsn) as standby, pytest.raises(SourceError, match="read-only transaction"):
        migrate(standby)


def test_without_a_superuser_only_the_event_triggers_are_missing(
    conn: Connection, postgres_dsn: str, make_role: MakeRole
) -> None:
    owner, requirements = (
        make_role("LOGIN"),
        SourceRequirements("shop", TABLES, make_role("LOGIN REPLICATION")),
    )
    execute(conn, f"ALTER DATABASE {conn.info.dbname} OWNER TO {owner}")
    with psycopg.connect(make_conninfo(postgres_dsn, user=owner)) as theirs:
        migrate(theirs)
        execute(theirs, SHOP)
        theirs.commit()
        lines = prepare_source(theirs, requirements)
        second_run = prepare_source(theirs, requirements)
    assert "event triggers, which take a superuser" in lines[-1]
    assert second_run == lines[-1:]
    assert second_run[0].startswith("note: ")
    assert rows(conn, "SELECT count(*) FROM pg_publication_tables WHERE pubname = 'shop'") == [(7,)]
    assert prepare_source(conn, requirements) == [
        f"created event trigger {name}"
        for name in ("cdc_ddl", "cdc_ddl_around", "cdc_drop", "cdc_rewrite")
    ]


# The connector's role


def test_the_role_can_do_its_work_and_no_more(
    prepare: Prepare, conn: Connection, postgres_dsn: str, role: str
) -> None:
    execute(conn, "CREATE TABLE shop.secrets (id int PRIMARY KEY)")
    prepare()
    granted = rows(
        conn,
        "SELECT n.nspname || '.' || c.relname, string_agg(a.privilege_type, ' ' ORDER BY a.privilege_type)"
        " FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace CROSS JOIN aclexplode(c.relacl) a"
        " WHERE a.grantee = to_regrole(%s) GROUP BY 1",
        role,
    )
    assert dict(granted) == {
        "shop.orders": "SELECT",
        "shop.counters": "SELECT",
        "shop.lines": "SELECT",
        "cdc.ddl": "SELECT",
        "cdc.heartbeat": "INSERT SELECT UPDATE",
        "cdc.signal": "INSERT SELECT",
        "cdc.truncation": "SELECT",
    }
    attributes = "rolcanlogin, rolreplication, rolsuper, rolbypassrls, rolcreatedb, rolcreaterole"
    assert rows(conn, f"SELECT {attributes} FROM pg_roles WHERE rolname = %s", role) == [
        (True, True, False, False, False, False)
    ]
    with psycopg.connect(make_conninfo(postgres_dsn, user=role), autocommit=True) as connector:
        assert rows(connector, "SELECT * FROM shop.orders") == []
        assert connector.execute(heartbeat_query("shop").encode()).rowcount == 1
        slot = f"work_{uuid.uuid4().hex[:12]}"
        assert rows(connector, "SELECT pg_create_logical_replication_slot(%s, 'pgoutput')", slot)
        assert rows(connector, "SELECT pg_drop_replication_slot(%s)", slot)
        execute(connector, "INSERT INTO cdc.signal VALUES ('1', 'log', NULL)")
        for forbidden in (
            "INSERT INTO shop.orders VALUES (1)",
            "DELETE FROM cdc.signal",
            "DELETE FROM cdc.heartbeat",
            "UPDATE cdc.truncation SET n = 0",
            "SELECT * FROM cdc.migration",
            "SELECT cdc.watch_ddl()",
            "CREATE TABLE shop.mine ()",
        ):
            with pytest.raises(psycopg.errors.InsufficientPrivilege):
                execute(connector, forbidden)


def test_a_role_beats_its_own_heart_only(
    prepare: Prepare, postgres_dsn: str, make_role: MakeRole
) -> None:
    prepare()
    other_role = make_role("")
    prepare(pipeline="other", role=other_role)
    with as_role(postgres_dsn, other_role) as connector:
        assert connector.execute(heartbeat_query("other").encode()).rowcount == 1
        assert connector.execute(heartbeat_query("shop").encode()).rowcount == 0
        with pytest.raises(psycopg.errors.InsufficientPrivilege):
            execute(connector, "INSERT INTO cdc.heartbeat (pipeline) VALUES ('third')")
        assert rows(connector, "SELECT pipeline, beat FROM cdc.heartbeat ORDER BY 1") == [
            ("other", 1),
            ("shop", 0),
        ]


def test_the_password_is_set_and_told_to_nobody(
    prepare: Prepare, conn: Connection, role: str
) -> None:
    lines = prepare(password="it's a secret")
    assert f"set the password of role {role}" in lines
    assert "secret" not in " ".join(lines)
    ((stored,),) = rows(conn, "SELECT rolpassword FROM pg_authid WHERE rolname = %s", role)
    assert stored.startswith("SCRAM-SHA-256$")


def test_a_role_with_too_much_is_cut_down(
    prepare: Prepare, conn: Connection, make_role: MakeRole
) -> None:
    grand = make_role("SUPERUSER BYPASSRLS NOLOGIN")
    execute(conn, f"GRANT ALL ON shop.orders TO {grand}")
    lines = prepare(role=grand)
    assert lines[0] == f"changed role {grand} to LOGIN REPLICATION NOSUPERUSER NOBYPASSRLS"
    assert f"REVOKE TRUNCATE ON shop.orders FROM {grand}" in lines
    with (
        as_role(conn.info.dsn, grand) as connector,
        pytest.raises(psycopg.errors.InsufficientPrivilege),
    ):
        execute(connector, "TRUNCATE shop.orders")


def test_the_preparing_role_is_not_demoted(prepare: Prepare, conn: Connection) -> None:
    with pytest.raises(SourceError, match="is the user of source"):
        prepare(role=conn.info.user)


# The publication


def published(conn: Connection, pipeline: str = "shop") -> set[str]:
    query = "SELECT schemaname || '.' || tablename FROM pg_publication_tables WHERE pubname = %s"
    return {name for (name,) in rows(conn, query, pipeline)}


CONTROLS = {"cdc.heartbeat", "cdc.truncation", "cdc.ddl", "cdc.signal"}


def test_the_publication_holds_captured_and_control_tables(
    prepare: Prepare, conn: Connection
) -> None:
    prepare()
    assert published(conn) == {"shop.orders", "shop.counters", "shop.lines"} | CONTROLS
    assert rows(
        conn,
        "SELECT puballtables, pubinsert, pubupdate, pubdelete, pubtruncate, pubviaroot FROM pg_publication",
    ) == [(False, True, True, True, True, True)]
    # A second run changes nothing.
    state = fingerprint(conn)
    assert prepare() == []
    assert fingerprint(conn) == state


def test_a_changed_list_moves_the_source_to_it(
    prepare: Prepare, conn: Connection, role: str
) -> None:
    prepare(TABLES[:2])
    assert prepare(TABLES[1:]) == [
        f"GRANT SELECT ON shop.lines TO {role}",
        f"REVOKE SELECT ON shop.orders FROM {role}",
        "publishing shop.lines",
        "no longer publishing shop.orders",
        "recording TRUNCATE of shop.lines",
        "no longer recording TRUNCATE of shop.orders",
    ]
    assert published(conn) == {"shop.counters", "shop.lines"} | CONTROLS
    noted = [table for command, table in journal(conn) if command == "PUBLISH"]
    assert noted == ["shop.orders", "shop.counters", "shop.lines"]
    # Also of a schema none of whose tables is captured any more.
    execute(conn, "CREATE SCHEMA old; CREATE TABLE old.notes (id int PRIMARY KEY)")
    prepare([*TABLES, ("old", "notes")])
    assert f"REVOKE SELECT ON old.notes FROM {role}" in prepare(TABLES)


def test_pipelines_that_share_a_role_leave_each_other_alone(
    prepare: Prepare, conn: Connection, role: str
) -> None:
    prepare(TABLES[:2])
    prepare(TABLES[2:], pipeline="other")
    assert prepare(TABLES[:2]) == []
    assert published(conn, "other") == {"shop.lines"} | CONTROLS
    with as_role(conn.info.dsn, role) as connector:
        assert rows(connector, "SELECT FROM shop.orders, shop.lines") == []


def test_a_tampered_publication_is_repaired(prepare: Prepare, conn: Connection) -> None:
    prepare()
    execute(conn, "ALTER PUBLICATION shop SET (publish = 'insert')")
    execute(conn, "ALTER PUBLICATION shop DROP TABLE shop.orders")
    execute(conn, "ALTER PUBLICATION shop ADD TABLE shop.orders (id)")
    lines = prepare()
    assert lines[0] == "made publication shop hold its tables whole"
    assert lines[1].startswith("set publication shop to publish")
    assert rows(conn, "SELECT FROM pg_publication_rel WHERE prattrs IS NOT NULL") == []
    assert prepare() == []


# Replica identity


def identities(conn: Connection, schema: str = "shop") -> dict[str, str]:
    query = (
        "SELECT relname, relreplident::text FROM pg_class WHERE relnamespace = to_regnamespace(%s)"
        " AND relkind IN ('r', 'p')"
    )
    return dict(rows(conn, query, schema))


def test_only_tables_that_can_be_toasted_get_a_full_identity_and_each_has_the_key(
    prepare: Prepare, conn: Connection
) -> None:
    """With NOTHING, publishing a table would make the application's updates fail."""
    execute(conn, "ALTER TABLE shop.counters REPLICA IDENTITY NOTHING, ALTER n SET NOT NULL")
    execute(conn, "ALTER TABLE shop.lines ALTER order_id SET NOT NULL")
    execute(conn, "CREATE UNIQUE INDEX other ON shop.lines (order_id)")
    execute(conn, "ALTER TABLE shop.lines REPLICA IDENTITY USING INDEX other")
    prepare()
    assert identities(conn) == {"orders": "f", "counters": "d", "lines": "d"}
    execute(conn, "INSERT INTO shop.counters VALUES (1, 1); UPDATE shop.counters SET n = 2")


def test_a_key_that_is_no_primary_key_becomes_the_identity(
    prepare: Prepare, conn: Connection
) -> None:
    """Otherwise a deletion would not say which row it was, or Postgres would refuse it."""
    execute(
        conn,
        "CREATE TABLE shop.seats (a int NOT NULL, b int NOT NULL, n int); CREATE UNIQUE INDEX ON shop.seats (n);"
        " CREATE UNIQUE INDEX seats_a_b ON shop.seats (a, b);"
        " CREATE TABLE shop.names (a int NOT NULL UNIQUE, t text);"
        " CREATE TABLE shop.parts (a int NOT NULL UNIQUE, n int) PARTITION BY RANGE (a);"
        " CREATE TABLE shop.part PARTITION OF shop.parts FOR VALUES FROM (0) TO (10)",
    )
    tables = [("shop", "seats"), ("shop", "names"), ("shop", "parts")]
    keys = {"shop.seats": ["b", "a"], "shop.names": ["a"], "shop.parts": ["a"]}
    with pytest.raises(SourceError, match=r"shop.seats has no primary key") as caught:
        prepare(tables)
    assert "key: [a, b]" in caught.value.hint
    lines = prepare(tables, keys=keys)
    assert 'set REPLICA IDENTITY USING INDEX "seats_a_b" on shop.seats' in lines
    identity_by_table = identities(conn)
    assert {name: identity_by_table[name] for name in ("seats", "names", "parts", "part")} == {
        "seats": "i",
        "names": "f",
        "parts": "f",
        "part": "f",
    }
    assert prepare(tables, keys=keys) == []
    execute(
        conn,
        "INSERT INTO shop.seats VALUES (1, 1, 1); UPDATE shop.seats SET n = 2; DELETE FROM shop.seats",
    )
    execute(conn, "ALTER TABLE shop.seats REPLICA IDENTITY DEFAULT")
    assert prepare(tables, keys=keys) == [
        'set REPLICA IDENTITY USING INDEX "seats_a_b" on shop.seats'
    ]


def test_the_application_can_still_write_every_table(prepare: Prepare, conn: Connection) -> None:
    """A full identity with an unpublished generated column would refuse updates and deletes."""
    execute(
        conn,
        "CREATE TABLE shop.shouts (id int PRIMARY KEY, t text, u text GENERATED ALWAYS AS (upper(t)) STORED)",
    )
    prepare([*TABLES, ("shop", "shouts")])
    execute(conn, "INSERT INTO shop.shouts VALUES (1, 'a'); UPDATE shop.shouts SET t = 'b'")
    execute(conn, "DELETE FROM shop.shouts")


def test_partitions_are_published_as_their_table(prepare: Prepare, conn: Connection) -> None:
    execute(
        conn,
        "CREATE SCHEMA log; CREATE TABLE log.events (id int PRIMARY KEY, t text) PARTITION BY RANGE (id);"
        "CREATE TABLE log.low PARTITION OF log.events FOR VALUES FROM (0) TO (10)",
    )
    prepare([("log", "events")])
    assert identities(conn, "log") == {"events": "f", "low": "f"}
    assert published(conn) == {"log.events"} | CONTROLS
    execute(conn, "TRUNCATE log.events")
    assert rows(conn, "SELECT table_name FROM cdc.truncation") == [("log.events",)]
    assert ("TRUNCATE PARTITION", "log.events") not in journal(conn)


def test_a_table_is_published_without_those_that_inherit_from_it(
    prepare: Prepare, conn: Connection
) -> None:
    """A child is captured under its own name, or not at all; also one that comes later."""
    execute(
        conn,
        "CREATE SCHEMA log; CREATE TABLE log.parent (id int PRIMARY KEY);"
        "CREATE TABLE log.child () INHERITS (log.parent)",
    )
    note = "note: rows of {}, which inherit from log.parent, aren't in its views: list these tables to capture them"
    assert prepare([("log", "parent")])[-1] == note.format("log.child")
    assert published(conn) == {"log.parent"} | CONTROLS
    execute(conn, "CREATE TABLE log.later (PRIMARY KEY (id)) INHERITS (log.parent)")
    assert prepare([("log", "parent")]) == [note.format("log.child, log.later")]
    assert prepare([("log", "parent"), ("log", "later")])[-1] == note.format("log.child")
    assert published(conn) == {"log.parent", "log.later"} | CONTROLS
    execute(conn, "ALTER PUBLICATION shop ADD TABLE log.child")
    prepare([("log", "parent")])
    assert published(conn) == {"log.parent"} | CONTROLS


# What is refused


@pytest.mark.parametrize(
    ("statement", "table", "message", "hint"),
    [
        ("SELECT 1", "shop.ordres", "There is no table shop.ordres", "did you mean shop.orders?"),
        (
            "CREATE MATERIALIZED VIEW shop.v AS SELECT 1 AS id",
            "shop.v",
            "a materialized view",
            "list the tables that it is made from",
        ),
        (
            "CREATE FOREIGN DATA WRAPPER w; CREATE SERVER s FOREIGN DATA WRAPPER w;"
            "CREATE FOREIGN TABLE shop.f (id int) SERVER s",
            "shop.f",
            "shop.f is a foreign table",
            "on the server that has its rows",
        ),
        ("CREATE VIEW shop.v AS SELECT 1 AS id", "shop.v", "shop.v is a view", "list the tables"),
        ("CREATE UNLOGGED TABLE shop.u (id int PRIMARY KEY)", "shop.u", "shop.u isn't logged", "SET LOGGED"),
        (
            "CREATE TABLE shop.g (id int PRIMARY KEY, t text, n int GENERATED ALWAYS AS (id + 1) VIRTUAL)",
            "shop.g",
            "virtual generated columns (n)",
            "",
        ),
        (
            "CREATE TABLE shop.r (id int PRIMARY KEY); ALTER TABLE shop.r ENABLE ROW LEVEL SECURITY",
            "shop.r",
            "Policies of shop.r hide rows from",
            "CREATE POLICY",
        ),
        ("SELECT 1", "cdc.migration", "cdc.migration isn't an application's table", "take it out"),
        ("CREATE PUBLICATION shop FOR ALL TABLES", "shop.lines", "is for all tables", "another name"),
    ],
)  # fmt: skip
def test_what_cannot_be_captured_is_refused_before_anything_is_made(
    prepare: Prepare,
    conn: Connection,
    *,
    statement: str,
    table: str,
    message: str,
    hint: str,
) -> None:
    execute(conn, statement)
    state = fingerprint(conn)
    schema, _, name = table.partition(".")
    with pytest.raises(SourceError) as caught:
        prepare([*TABLES, (schema, name)])
    assert message in caught.value.message
    assert hint in caught.value.hint
    assert fingerprint(conn) == state


def test_row_security_that_shows_the_connector_everything_is_fine(
    prepare: Prepare, conn: Connection, make_role: MakeRole
) -> None:
    reader = make_role("LOGIN REPLICATION BYPASSRLS")
    execute(conn, "ALTER TABLE shop.orders ENABLE ROW LEVEL SECURITY")
    with pytest.raises(SourceError, match="hide rows from"):
        prepare(role=reader)
    execute(conn, f"CREATE POLICY all_rows ON shop.orders FOR SELECT TO {reader} USING (true)")
    assert prepare(role=reader)
    execute(
        conn,
        f"CREATE POLICY few ON shop.orders AS RESTRICTIVE FOR SELECT TO {reader} USING (id > 5)",
    )
    with pytest.raises(SourceError, match="hide rows from"):
        prepare(role=reader)


def test_no_tables_and_no_control_schema_are_refused(
    conn: Connection, prepare: Prepare, role: str
) -> None:
    with pytest.raises(SourceError, match="no tables to capture"):
        prepare([])
    execute(conn, "DELETE FROM cdc.migration WHERE name = 'control/0003_truncation.sql'")
    with pytest.raises(SourceError, match=r"control/0003_truncation\.sql hasn't been applied"):
        prepare()


def test_only_an_owner_may_publish(
    prepare: Prepare, conn: Connection, postgres_dsn: str, make_role: MakeRole
) -> None:
    """Each obstacle is named in turn: control tables, captured tables, the publication."""
    someone, connector = make_role("LOGIN"), make_role("LOGIN REPLICATION")
    me = conn.info.user
    execute(conn, f"GRANT ALL ON DATABASE {conn.info.dbname} TO {someone}")
    execute(
        conn,
        f"GRANT USAGE ON SCHEMA cdc, shop TO {someone}; GRANT SELECT ON cdc.migration TO {someone}",
    )
    execute(conn, "CREATE PUBLICATION shop")
    with psycopg.connect(make_conninfo(postgres_dsn, user=someone)) as theirs:

        def refused() -> str:
            state = fingerprint(conn)
            with pytest.raises(SourceError) as caught:
                prepare(conn=theirs, role=connector)
            assert fingerprint(conn) == state
            return caught.value.message

        assert refused() == f"cdc.heartbeat belongs to {me}, and only its owner may publish it"
        for table in ("heartbeat", "truncation", "ddl", "signal"):
            execute(conn, f"ALTER TABLE cdc.{table} OWNER TO {someone}")
        assert refused() == f"shop.orders belongs to {me}, and only its owner may publish it"
        for table in ("orders", "counters", "lines"):
            execute(conn, f"ALTER TABLE shop.{table} OWNER TO {someone}")
        assert (
            refused() == f"Publication shop belongs to {me}, and source.dsn logs in as {someone}."
        )


def test_a_failure_half_way_leaves_nothing(prepare: Prepare, conn: Connection) -> None:
    execute(
        conn,
        "CREATE FUNCTION public.no() RETURNS event_trigger LANGUAGE plpgsql AS"
        " $$ BEGIN RAISE 'publications are frozen'; END $$;"
        "CREATE EVENT TRIGGER no ON ddl_command_end WHEN TAG IN ('CREATE PUBLICATION')"
        " EXECUTE FUNCTION public.no()",
    )
    state = fingerprint(conn)
    with pytest.raises(SourceError, match="publications are frozen"):
        prepare()
    assert fingerprint(conn) == state
    execute(conn, "DROP EVENT TRIGGER no")
    assert prepare()


def test_a_locked_table_does_not_hold_everybody_up(
    prepare: Prepare, conn: Connection, postgres_dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source, "LOCK_TIMEOUT", "100ms")
    state = fingerprint(conn)
    with psycopg.connect(postgres_dsn) as application:
        application.execute("INSERT INTO shop.orders VALUES (1, 'open')")
        with pytest.raises(SourceError, match="locked for 100ms"):
            prepare()
        application.rollback()
    assert fingerprint(conn) == state
    assert prepare()


@pytest.mark.parametrize("scripted", [False, True])
def test_hostile_names_are_names(
    shop: Connection, postgres_dsn: str, make_role: MakeRole, scripted: bool
) -> None:
    strange = ('O"dd; Schema', "T%a'ble :x \\q $cdc$\n✈ {}")
    role = f'{make_role("")}"; DROP SCHEMA cdc; --\n\\quit :x'
    requirements = SourceRequirements("shop", [strange], role)
    conn = shop
    quoted = sql.Identifier(*strange)
    conn.execute(sql.SQL("CREATE SCHEMA {}").format(sql.Identifier(strange[0])))
    conn.execute(sql.SQL("CREATE TABLE {} (id int PRIMARY KEY, t text)").format(quoted))
    try:
        if scripted:
            text = script(conn, requirements, plan(conn, requirements))
            for _ in range(2):
                run_psql(postgres_dsn, text, "-v", "x=1")
        else:
            prepare_source(conn, requirements)
        assert plan(conn, requirements) == []
        assert prepare_source(conn, requirements) == []
        conn.execute(sql.SQL("TRUNCATE {}").format(quoted))
        assert rows(conn, "SELECT table_name FROM cdc.truncation") == [(".".join(strange),)]
    finally:
        conn.execute(
            sql.SQL("DROP OWNED BY {role} CASCADE; DROP ROLE {role}").format(
                role=sql.Identifier(role)
            )
        )


# TRUNCATE


def truncations(conn: Connection) -> dict[str, int]:
    return dict(rows(conn, "SELECT table_name, n FROM cdc.truncation"))


def test_every_truncation_is_recorded_and_raises_the_floor(
    prepare: Prepare, conn: Connection, make_role: MakeRole
) -> None:
    prepare()
    with conn.transaction(force_rollback=True):
        execute(conn, "TRUNCATE shop.counters")
    assert truncations(conn) == {}
    execute(conn, "TRUNCATE shop.counters")
    first = rows(conn, "SELECT lsn::text, at FROM cdc.truncation")[0]
    execute(conn, "TRUNCATE shop.orders CASCADE")
    execute(conn, "TRUNCATE shop.counters, shop.lines")
    assert truncations(conn) == {"shop.counters": 2, "shop.orders": 1, "shop.lines": 2}
    query = (
        "SELECT lsn > %s::pg_lsn, at > %s FROM cdc.truncation WHERE table_name = 'shop.counters'"
    )
    assert rows(conn, query, *first) == [(True, True)]
    # Whoever may truncate needs no other right.
    cleaner = make_role("LOGIN")
    execute(
        conn,
        f"GRANT USAGE ON SCHEMA shop TO {cleaner}; GRANT TRUNCATE ON shop.counters TO {cleaner}",
    )
    with as_role(conn.info.dsn, cleaner) as theirs:
        execute(theirs, "SET search_path = shop; TRUNCATE counters")
    assert truncations(conn)["shop.counters"] == 3
    execute(conn, "SET session_replication_role = replica")
    execute(conn, "TRUNCATE shop.counters")
    assert truncations(conn)["shop.counters"] == 4


@pytest.mark.parametrize("mode", ["origin", "replica"])
def test_an_update_of_an_event_is_refused(
    prepare: Prepare, conn: Connection, role: str, mode: str
) -> None:
    execute(
        conn,
        "CREATE TABLE shop.log (id int, at date, PRIMARY KEY (id, at)) PARTITION BY RANGE (at);"
        "CREATE TABLE shop.log_1 PARTITION OF shop.log FOR VALUES FROM ('2026-01-01') TO ('2027-01-01');"
        "INSERT INTO shop.log VALUES (1, '2026-02-03'); INSERT INTO shop.counters VALUES (1, 1)",
    )
    tables = [("shop", "counters"), ("shop", "log")]
    events = ["shop.counters", "shop.log"]
    lines = prepare(tables, events=events)
    assert {f"refusing UPDATE of {table}" for table in events} <= set(lines)
    prepared = fingerprint(conn)
    prepare(tables, events=events)
    assert fingerprint(conn) == prepared
    execute(conn, f"SET session_replication_role = {mode}")
    for statement in (
        "UPDATE shop.counters SET n = 2",
        "UPDATE shop.counters SET id = 2",
        "INSERT INTO shop.counters VALUES (1, 5) ON CONFLICT (id) DO UPDATE SET n = 5",
        "UPDATE shop.log SET id = 2",
        "UPDATE shop.log_1 SET id = 2",
    ):
        with pytest.raises(psycopg.errors.RestrictViolation, match="can't be changed") as caught:
            execute(conn, statement)
        assert caught.value.diag.message_hint == "Insert another event that corrects it."
    execute(conn, "SET session_replication_role = origin")
    assert "no longer refusing UPDATE of shop.counters" in prepare(tables, events=["shop.log"])
    execute(conn, "UPDATE shop.counters SET n = 2; DELETE FROM shop.log")
    removal.remove_from_source(conn, "shop", role)
    assert rows(conn, "SELECT tgname FROM pg_trigger WHERE tgname LIKE 'cdc%'") == []


def test_the_floor_divides_earlier_changes_from_later_ones(
    prepare: Prepare, conn: Connection
) -> None:
    """Seen as the connector sees it: the rows of one transaction, around a TRUNCATE, in the log."""
    prepare()
    slot = f"floor_{uuid.uuid4().hex[:12]}"
    rows(conn, "SELECT pg_create_logical_replication_slot(%s, 'pgoutput')", slot)
    try:
        with conn.transaction():
            execute(conn, "INSERT INTO shop.counters VALUES (1, 1)")
            execute(conn, "TRUNCATE shop.counters")
            execute(conn, "INSERT INTO shop.counters VALUES (2, 2)")
        oid = rows(conn, "SELECT 'shop.counters'::regclass::oid")[0][0]
        inserts = rows(
            conn,
            "SELECT lsn < floor FROM (SELECT lsn FROM pg_logical_slot_peek_binary_changes(%s, NULL, NULL,"
            " 'proto_version', '1', 'publication_names', 'shop') WHERE substr(data, 1, 5) = %s) AS seen,"
            " (SELECT lsn AS floor FROM cdc.truncation) AS recorded ORDER BY lsn",
            slot,
            b"I" + int(oid).to_bytes(4, "big"),
        )
        assert inserts == [(True,), (False,)]
    finally:
        rows(conn, "SELECT pg_drop_replication_slot(%s)", slot)


# The DDL journal


def journal(conn: Connection) -> list[tuple[str, str]]:
    return rows(conn, "SELECT command, table_name FROM cdc.ddl ORDER BY id")


def publish(conn: Connection, *tables: str) -> None:
    """A pipeline's publication, as far as the journal minds it."""
    execute(
        conn,
        f"DROP PUBLICATION IF EXISTS ours; CREATE PUBLICATION ours FOR TABLE {', '.join(('cdc.ddl', *tables))}",
    )
    execute(conn, "SELECT cdc.note('PUBLISH', array_agg(prrelid)) FROM pg_publication_rel")


def test_definitions_of_tables_are_journalled(conn: Connection) -> None:
    migrate(conn)
    execute(
        conn,
        "CREATE TABLE public.t (b text NOT NULL DEFAULT 'x', a numeric(5, 2), PRIMARY KEY (a, b))",
    )
    execute(conn, "CREATE SCHEMA gone CREATE TABLE x (); CREATE TABLE public.s (id int)")
    publish(conn, "public.t", "gone.x")
    for statement in (
        "ALTER TABLE public.t ADD c timestamptz",
        "ALTER TABLE public.t RENAME COLUMN c TO d",
        "ALTER TABLE public.t RENAME TO u",
        # Others that take the name of one that was captured.
        "CREATE TABLE public.t AS SELECT 1 AS id",
        "DROP TABLE public.t",
        "ALTER TABLE public.s RENAME TO t",
        "DROP TABLE public.u",
        "DROP SCHEMA gone CASCADE",
    ):
        execute(conn, statement)
    entries = journal(conn)
    assert (sorted(entries[:2]), entries[2:]) == (
        [("PUBLISH", "gone.x"), ("PUBLISH", "public.t")],
        [
            ("ALTER TABLE", "public.t"),
            ("ALTER TABLE", "public.t"),
            ("ALTER TABLE", "public.u"),
            ("CREATE TABLE AS", "public.t"),
            ("DROP TABLE", "public.t"),
            ("ALTER TABLE", "public.t"),
            ("DROP TABLE", "public.u"),
            ("DROP SCHEMA", "gone.x"),
        ],
    )
    assert rows(
        conn, "SELECT columns FROM cdc.ddl WHERE table_name = 'gone.x' ORDER BY id DESC LIMIT 1"
    ) == [(None,)]
    (first,) = rows(
        conn, "SELECT columns FROM cdc.ddl WHERE table_name = 'public.t' ORDER BY id LIMIT 1"
    )
    plain: dict[str, Any] = {
        "missing": False,
        "types": [],
        "identified": True,
    }
    assert first[0] == [
        {
            "name": "b",
            "number": 1,
            "type": "text",
            "not_null": True,
            "default": "'x'::text",
            "key": 2,
        }
        | plain,
        {
            "name": "a",
            "number": 2,
            "type": "numeric(5,2)",
            "not_null": True,
            "default": None,
            "key": 1,
        }
        | plain,
    ]
    ((relations, shapes),) = rows(
        conn,
        "SELECT count(DISTINCT relation), count(partitions) FROM cdc.ddl"
        " WHERE relation = (SELECT relation FROM cdc.ddl WHERE table_name = 'public.t' ORDER BY id LIMIT 1)",
    )
    assert (relations, shapes) == (1, 0)


EVENTS = """
CREATE SCHEMA log;
CREATE TABLE log.events (id int PRIMARY KEY, t text) PARTITION BY RANGE (id);
CREATE TABLE log.low PARTITION OF log.events FOR VALUES FROM (0) TO (10);
CREATE TABLE log.high (id int PRIMARY KEY, t text);
CREATE TABLE log.deep PARTITION OF log.events FOR VALUES FROM (20) TO (30) PARTITION BY RANGE (id);
"""


@pytest.fixture
def events(prepare: Prepare, conn: Connection) -> Connection:
    """A captured table with one partition, one table beside it, and a partition that has its own."""
    execute(conn, EVENTS)
    prepare([("log", "events")])
    return conn


@pytest.mark.parametrize(
    ("statement", "command", "partitions"),
    [
        ("CREATE TABLE log.new PARTITION OF log.events FOR VALUES FROM (40) TO (50)", "CREATE TABLE", "low new"),
        ("CREATE TABLE log.new PARTITION OF log.deep FOR VALUES FROM (20) TO (25)", "CREATE TABLE", "low new"),
        ("ALTER TABLE log.events ATTACH PARTITION log.high FOR VALUES FROM (10) TO (20)", "ALTER TABLE", "high low"),
        ("ALTER TABLE log.deep ATTACH PARTITION log.high FOR VALUES FROM (20) TO (21)", "ALTER TABLE", "high low"),
        ("ALTER TABLE log.events DETACH PARTITION log.low", "ALTER TABLE", ""),
        ("ALTER TABLE log.events DETACH PARTITION log.low CONCURRENTLY", "ALTER TABLE", ""),
        ("DROP TABLE log.low", "DROP TABLE", ""),
        ("ALTER TABLE log.low RENAME TO lower", "ALTER TABLE", "lower"),
        ("TRUNCATE log.low", "TRUNCATE PARTITION", "low"),
    ],
)  # fmt: skip
def test_what_a_partition_does_is_reported_of_its_table(
    events: Connection, statement: str, command: str, partitions: str
) -> None:
    earlier = journal(events)
    execute(events, statement)
    assert journal(events)[len(earlier) :][-1] == (command, "log.events")
    ((last, names),) = rows(
        events, "SELECT command, partitions FROM cdc.ddl ORDER BY id DESC LIMIT 1"
    )
    assert (last, names) == (command, [f"log.{name}" for name in partitions.split()])
    assert rows(events, "SELECT FROM cdc.truncation") == []


def test_a_table_and_its_partition_are_truncated_in_one_transaction(
    events: Connection,
) -> None:
    """The mark that tells the table's truncation from the partition's ends with the statement."""
    with events.transaction():
        execute(events, "TRUNCATE log.events")
        execute(events, "INSERT INTO log.events VALUES (1)")
        execute(events, "TRUNCATE log.low")
    commands = [command for command, table in journal(events) if table == "log.events"]
    assert commands.count("TRUNCATE PARTITION") == 1
    assert truncations(events) == {"log.events": 1}


def test_a_partition_that_comes_later_is_like_the_others(
    events: Connection, prepare: Prepare, make_role: MakeRole
) -> None:
    """Made by someone who may do nothing else here."""
    author = make_role("LOGIN")
    execute(
        events,
        f"GRANT USAGE, CREATE ON SCHEMA log TO {author}; ALTER TABLE log.events OWNER TO {author}",
    )
    with as_role(events.info.dsn, author) as theirs:
        execute(
            theirs, "CREATE TABLE log.later PARTITION OF log.events FOR VALUES FROM (60) TO (70)"
        )
        assert identities(events, "log")["later"] == "f"
        execute(theirs, "TRUNCATE log.later")
    assert journal(events)[-1] == ("TRUNCATE PARTITION", "log.events")
    assert prepare([("log", "events")]) == []
    execute(events, "ALTER TABLE log.events DETACH PARTITION log.later; TRUNCATE log.later")
    assert [entry for entry in journal(events) if entry[0] == "TRUNCATE PARTITION"] == [
        ("TRUNCATE PARTITION", "log.events")
    ]
    assert prepare([("log", "events")]) == ["no longer recording TRUNCATE of log.later"]


def test_a_partition_that_nobody_adopted_is_found(events: Connection, prepare: Prepare) -> None:
    """As it is where no superuser has made the event triggers."""
    execute(events, "ALTER EVENT TRIGGER cdc_ddl DISABLE")
    execute(events, "CREATE TABLE log.later PARTITION OF log.events FOR VALUES FROM (60) TO (70)")
    assert prepare([("log", "events")]) == [
        "set REPLICA IDENTITY FULL on log.later",
        "recording TRUNCATE of partition log.later",
        "noted the definition of log.events",
    ]
    assert journal(events)[-1] == ("DESCRIBE", "log.events")
    assert prepare([("log", "events")]) == []


@pytest.mark.parametrize(
    ("statement", "rewritten"),
    [
        ("ALTER TABLE shop.counters ALTER n TYPE bigint USING -n", True),
        ("ALTER TABLE shop.counters ALTER n TYPE int", True),
        ("ALTER TABLE shop.counters ADD at timestamptz DEFAULT clock_timestamp()", True),
        ("ALTER TABLE shop.counters ADD at timestamptz DEFAULT now()", False),
        ("ALTER TABLE shop.counters SET UNLOGGED", False),
    ],
)
def test_a_rewrite_is_reported_before_the_definition(
    shop: Connection, statement: str, rewritten: bool
) -> None:
    publish(shop, "shop.counters")
    if "UNLOGGED" in statement:
        # Postgres refuses it for a table that is published.
        execute(shop, "DROP PUBLICATION ours")
    execute(shop, statement)
    events = rows(
        shop,
        "SELECT command, columns FROM cdc.ddl WHERE table_name = 'shop.counters' ORDER BY id OFFSET 1",
    )
    assert [command for command, _ in events] == ["REWRITE TABLE"] * rewritten + ["ALTER TABLE"]
    assert events[0][1] == events[-1][1]


def test_floors_of_another_server_are_reset(prepare: Prepare, conn: Connection) -> None:
    """After a dump and a restore positions start again; with such a floor every change would be taken for dead."""
    prepare()
    execute(conn, "TRUNCATE shop.counters")
    execute(conn, "INSERT INTO cdc.truncation VALUES ('shop.orders', now(), 'FFFF/0')")
    floors = dict(rows(conn, "SELECT table_name, lsn::text FROM cdc.truncation"))
    assert prepare() == [
        "reset the floor of shop.orders: it lay beyond the end of the server's log"
    ]
    assert dict(rows(conn, "SELECT table_name, lsn::text FROM cdc.truncation")) == floors | {
        "shop.orders": "0/0"
    }


def test_what_no_view_is_made_from_is_not_journalled(conn: Connection) -> None:
    """Nor is what no pipeline publishes: 50,000 staging tables of a nightly job are not read by every sink."""
    migrate(conn)
    execute(conn, "CREATE TABLE public.orders (id int); CREATE TABLE public.other (id int)")
    publish(conn, "public.orders")
    execute(conn, "CREATE PUBLICATION theirs FOR TABLE public.other")
    entries = journal(conn)
    for n in range(20):
        execute(
            conn,
            f"CREATE TABLE public.s{n} (a int, b text); ALTER TABLE public.s{n} ALTER a TYPE bigint",
        )
        execute(conn, f"ALTER TABLE public.s{n} RENAME TO r{n}; DROP TABLE public.r{n}")
    execute(
        conn,
        "ALTER TABLE public.other ADD x int; CREATE SCHEMA gone CREATE TABLE x (); DROP SCHEMA gone CASCADE",
    )
    execute(conn, "CREATE TEMPORARY TABLE t (id int); ALTER TABLE t ADD x int; DROP TABLE t")
    execute(
        conn, "CREATE TABLE cdc.mine (id int); ALTER TABLE cdc.mine ADD x int; DROP TABLE cdc.mine"
    )
    execute(conn, "CREATE VIEW public.v AS SELECT 1 AS a; ALTER TABLE public.v RENAME a TO b")
    execute(conn, "CREATE SEQUENCE public.s; DROP VIEW public.v")
    assert journal(conn) == entries


def test_whoever_may_create_a_table_needs_no_other_right(
    conn: Connection, make_role: MakeRole
) -> None:
    migrate(conn)
    author = make_role("LOGIN")
    execute(conn, f"CREATE SCHEMA theirs AUTHORIZATION {author}")
    with as_role(conn.info.dsn, author) as theirs:
        execute(theirs, "CREATE TABLE theirs.t (id int)")
        publish(conn, "theirs.t")
        execute(theirs, "ALTER TABLE theirs.t ADD x int; DROP TABLE theirs.t")
    assert journal(conn) == [
        ("PUBLISH", "theirs.t"),
        ("ALTER TABLE", "theirs.t"),
        ("DROP TABLE", "theirs.t"),
    ]


def test_a_broken_journal_warns_and_lets_the_ddl_through(conn: Connection) -> None:
    migrate(conn)
    execute(conn, "CREATE TABLE public.t (id int)")
    publish(conn, "public.t")
    entries = journal(conn)
    execute(conn, "ALTER TABLE cdc.ddl ADD CHECK (false) NOT VALID")
    warnings: list[tuple[str | None, str | None]] = []
    conn.add_notice_handler(
        lambda notice: warnings.append((notice.severity, notice.message_primary))
    )
    execute(conn, "ALTER TABLE public.t ADD x int")
    execute(conn, "DROP TABLE public.t")
    assert [severity for severity, _ in warnings] == ["WARNING", "WARNING"]
    assert all("is not in the DDL journal" in (message or "") for _, message in warnings)
    assert journal(conn) == entries
