"""A pipeline with a role for those who only read: what they do needs no more than `migrate` has granted."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import psycopg
import pytest
import redis
from psycopg.conninfo import make_conninfo

from cdc.capture.connector import register
from cdc.errors import SourceError
from cdc.postgres import table_survey
from cdc.postgres.source import READER
from cdc.sink.remedy import classify
from cdc.verify.source_rows import open_snapshot
from tests.support.verbs import document_of
from tests.support.wait import wait_until

if TYPE_CHECKING:
    from tests.scenarios.conftest import World

SCHEMA = """
CREATE SCHEMA shop;
CREATE TABLE shop.orders (id int PRIMARY KEY, note text);
CREATE TABLE shop.parts (id int PRIMARY KEY, n int) PARTITION BY RANGE (id);
CREATE TABLE shop.low PARTITION OF shop.parts FOR VALUES FROM (0) TO (100);
INSERT INTO shop.orders SELECT n, 'a' FROM generate_series(1, 50) n;
INSERT INTO shop.parts SELECT n, n FROM generate_series(1, 50) n;
"""
TABLES = ("shop.orders", "shop.parts")
FORBIDDEN = (
    "INSERT INTO shop.orders VALUES (1000, 'x')",
    "UPDATE shop.orders SET note = 'x'",
    "DELETE FROM shop.orders",
    "TRUNCATE shop.orders",
    "ALTER TABLE shop.orders ADD n int",
    "DROP TABLE shop.orders",
    "LOCK TABLE shop.orders IN SHARE MODE",
    "CREATE TABLE shop.mine (id int)",
    "CREATE TABLE cdc.mine (id int)",
    "CREATE TABLE public.mine (id int)",
    "CREATE SCHEMA mine",
    "CREATE PUBLICATION mine",
    "CREATE ROLE mine",
    "SELECT pg_create_logical_replication_slot('mine', 'pgoutput')",
    "INSERT INTO cdc.ddl (command, table_name, relation) VALUES ('COMPARE', 'shop.orders', 1)",
    "UPDATE cdc.truncation SET n = 0",
    "UPDATE cdc.heartbeat SET beat = 0",
    "UPDATE cdc.signal SET data = ''",
    "SELECT cdc.note('COMPARE', '{}')",
    "SELECT cdc.compare_definitions()",
    "SELECT cdc.adopt_partitions('shop.parts'::regclass)",
    "SELECT cdc.raise_floor_as_owner('{shop.kept}')",
)
"""What nobody needs who only reads."""


@pytest.fixture
def readers(world: "World") -> Iterator["World"]:
    """A world whose tables are owned by a role that is no superuser, and whose file names a reader;
    `world.dsn` is the owner's.
    """
    admin = world.dsn
    owner = f"{world.name}_owner"
    reader = f"{world.name}_reader"
    connector = f"{world.name}_replication"
    with psycopg.connect(admin, autocommit=True) as conn:
        for role, words in {owner: "", reader: "", connector: "REPLICATION"}.items():
            conn.execute(f"CREATE ROLE {role} LOGIN {words}")
        conn.execute(f"ALTER DATABASE {conn.info.dbname} OWNER TO {owner}")
        world.dsn = make_conninfo(admin, user=owner)
        world.sql(SCHEMA, "CREATE TABLE shop.kept (id int PRIMARY KEY)")
        world.write_file(*TABLES)
        dsn = make_conninfo(admin, user=reader)
        text = world.file.read_text()
        world.file.write_text(text.replace("  heartbeat_s", f"  reader: {dsn}\n  heartbeat_s", 1))
        yield world
        world.dsn = admin


def lock_owner_out(world: "World") -> None:
    """From now on only the reader can log in; `world.dsn` is the reader's."""
    with psycopg.connect(world.stack.endpoints.postgres, autocommit=True) as admin:
        admin.execute(f"ALTER ROLE {world.name}_owner NOLOGIN")
    world.dsn = world.pipeline.source.reader_dsn


def reader_findings(world: "World") -> list[str]:
    return [message for code, message in findings(world) if code == "reader-unfit"]


def findings(world: "World") -> list[tuple[str, str]]:
    """Codes and messages of what `doctor` finds."""
    found = document_of(world.file, "doctor", None)["findings"]
    return [(finding["code"], finding["message"]) for finding in found]


def test_what_reads_needs_what_migrate_grants_and_no_owner(readers: "World") -> None:
    world = readers
    reader = f"{world.name}_reader"
    granted = world.json("migrate")["done"]
    assert f"GRANT SELECT ON shop.orders TO {reader}" in granted
    assert f"GRANT SELECT, INSERT, DELETE ON cdc.signal TO {reader}" in granted
    assert not [line for line in world.json("migrate")["done"] if not line.startswith("note")]
    world.cdc("register")
    lock_owner_out(world)
    refused = world.cdc("register", code=4).stderr
    assert "source.dsn" in refused
    # As a run does that captures a table again.
    again = register(world.pipeline, world.described, by_run=True)
    assert (again.changed, again.sent) == (False, [])
    with world.running():
        world.settle()
        world.verified()
        assert reader_findings(world) == []
        change_plan = world.json("plan")
        assert (change_plan["refused"], change_plan["register"]) == ([], [])
        # What takes a superuser is all that is left.
        assert {line.rpartition(" ")[0] for line in change_plan["migrate"]} == {
            "created event trigger"
        }
        assert world.cdc("status").returncode in (0, 4)
        key = f"{world.name}:shop.orders:7"
        with redis.Redis.from_url(world.cache) as cache:
            cache.delete(key)
            world.cdc("verify", "--sink", "cache", "--repair")
            assert cache.exists(key)
    world.rebuild("cache")
    world.verified()


def test_a_run_follows_tables_that_it_doesnt_own(readers: "World") -> None:
    world = readers
    world.cdc("migrate")
    world.cdc("register")
    with world.running():
        world.settle()
        # Without event triggers only the run notices these, one by one.
        world.sql("ALTER TABLE shop.orders ALTER note TYPE text USING note || '!'")
        world.sql("CREATE TABLE shop.high PARTITION OF shop.parts FOR VALUES FROM (100) TO (200)")
        world.sql("ALTER TABLE shop.parts DETACH PARTITION shop.low")
        lock_owner_out(world)
        with psycopg.connect(world.stack.dsn(f"db_{world.name}"), autocommit=True) as admin:

            def followed() -> bool:
                adopted = admin.execute(
                    "SELECT FROM pg_trigger WHERE tgrelid = 'shop.high'::regclass AND tgname = 'cdc_truncation_alone'"
                ).fetchone()
                floor = admin.execute(
                    "SELECT FROM cdc.truncation WHERE table_name = 'shop.parts'"
                ).fetchone()
                return adopted is not None and floor is not None

            wait_until(followed, 90, "the partitions of now to be adopted, and a floor")
        world.settle()
        rows = {comparison.table: comparison.view_rows for comparison in world.verified()}
        assert rows == {"shop.orders": 50, "shop.parts": 0}


def test_a_reader_can_change_nothing(readers: "World") -> None:
    world = readers
    world.cdc("migrate")
    dsn = world.pipeline.source.reader_dsn
    for statement in FORBIDDEN:
        with (
            psycopg.connect(dsn) as conn,
            pytest.raises(psycopg.errors.InsufficientPrivilege),
        ):
            conn.execute(statement.encode())


def test_each_right_that_is_taken_away_is_named(readers: "World") -> None:
    world = readers
    reader = f"{world.name}_reader"
    world.cdc("migrate")
    rights = (
        "SELECT ON shop.orders",
        "USAGE ON SCHEMA shop",
        "DELETE ON cdc.signal",
        "EXECUTE ON FUNCTION cdc.compare_as_owner()",
        "EXECUTE ON FUNCTION cdc.raise_floor_as_owner(text[])",
    )
    orders = table_survey.table_named(world.described, "shop.orders")
    dsn = world.pipeline.source.reader_dsn
    for right in rights:
        world.sql(f"REVOKE {right} FROM {reader}")
        (message,) = reader_findings(world)
        assert f"GRANT {right} TO {reader}" in message
        assert f"GRANT {right} TO {reader}" in world.json("migrate")["done"]
        assert reader_findings(world) == []
    world.sql("ALTER TABLE shop.orders ENABLE ROW LEVEL SECURITY")
    world.sql(f"CREATE POLICY c ON shop.orders FOR SELECT TO {world.name}_replication USING (true)")
    hidden = [message for code, message in findings(world) if code == "row-security"]
    assert [reader in message for message in hidden] == [True]
    # A repair would take them out of the views.
    with pytest.raises(SourceError, match="hide rows"), open_snapshot(dsn, orders, setting=READER):
        pass
    world.sql("ALTER TABLE shop.orders DISABLE ROW LEVEL SECURITY")
    with open_snapshot(dsn, orders, setting=READER):
        pass
    world.sql(f"REVOKE SELECT ON shop.orders FROM {reader}")
    with (
        pytest.raises(psycopg.errors.InsufficientPrivilege) as caught,
        open_snapshot(dsn, orders, setting=READER),
    ):
        pass
    refused = classify(caught.value, "postgres")
    assert "permission denied for table orders" in refused.message
    assert "doctor" in refused.hint
