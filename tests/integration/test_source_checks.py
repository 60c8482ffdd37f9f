"""Faults of a source that `doctor` names, on a real Postgres alone."""

import re
from functools import partial

import psycopg
import pytest

from cdc.documents import source_checks
from cdc.errors import SourceError
from cdc.migrations import migrate, prepare_source
from cdc.postgres import source
from cdc.postgres.table_survey import read_source, survey
from cdc.readiness import facts
from cdc.readiness.checks import check_source
from tests.integration.test_comparison import alter_publication, prepared, requirements
from tests.support.pipelines import pipeline

SCHEMA = """
CREATE SCHEMA shop;
CREATE TABLE shop.fixed (id int PRIMARY KEY, n int, twice int GENERATED ALWAYS AS (n * 2) STORED);
CREATE TABLE shop.wide (id int PRIMARY KEY, note text);
CREATE TABLE shop.parts (id int PRIMARY KEY, note text) PARTITION BY RANGE (id);
CREATE TABLE shop.part PARTITION OF shop.parts FOR VALUES FROM (0) TO (10);
"""
FIXED, WIDE, PARTS = TABLES = ("shop.fixed", "shop.wide", "shop.parts")


def faults(dsn: str, unique: str) -> set[tuple[str, str]]:
    """The codes and subjects of what is wrong with the source, apart from its server."""
    with source.connect(dsn) as connection:
        read = read_source(connection, pipeline(unique, dsn, *TABLES), connected=False)
    return {
        (fault.key, fault.subject)
        for fault in check_source(read)
        if fault.key.startswith(("publication", "table", "row", "role"))
    }


CHANGES = {
    # New rows would lack them, and Postgres refuses updates under REPLICA IDENTITY FULL.
    "SET (publish_generated_columns = none)": "partial",
    "ADD TABLES IN SCHEMA shop": "extra",
    "SET (publish = 'insert, update, delete')": "truncates",
}


def test_whatever_migrate_changes_of_a_publication_is_named(postgres_dsn: str, unique: str) -> None:
    with prepared(postgres_dsn, unique, SCHEMA, *TABLES) as conn:
        assert faults(postgres_dsn, unique) == set()
        for change, key in CHANGES.items():
            alter_publication(conn, unique, change)
            assert faults(postgres_dsn, unique) == {(f"publication-differs/{key}", unique)}
            assert prepare_source(conn, requirements(unique, *TABLES))
            assert faults(postgres_dsn, unique) == set()


def test_a_virtual_column_that_stops_updates_is_named(postgres_dsn: str, unique: str) -> None:
    """It was added after `migrate`, which refuses it."""
    with prepared(postgres_dsn, unique, SCHEMA, *TABLES) as conn:
        for table in TABLES:
            conn.execute(f"ALTER TABLE {table} ADD v int GENERATED ALWAYS AS (id + 1) VIRTUAL")
        conn.execute("UPDATE shop.fixed SET n = 1")
        assert faults(postgres_dsn, unique) == {("table-refused", WIDE), ("table-refused", PARTS)}


def test_what_migrate_refuses_is_named_before_it_runs(postgres_dsn: str, unique: str) -> None:
    """Otherwise doctor advises `migrate`, which refuses."""
    with psycopg.connect(postgres_dsn, autocommit=True) as conn:
        conn.execute(SCHEMA.encode())
        conn.execute("ALTER TABLE shop.wide ADD v int GENERATED ALWAYS AS (id + 1) VIRTUAL")
        conn.execute("ALTER TABLE shop.fixed ENABLE ROW LEVEL SECURITY")
        conn.execute("CREATE UNLOGGED TABLE shop.rest PARTITION OF shop.parts DEFAULT")
        conn.execute(f"CREATE PUBLICATION {unique} FOR ALL TABLES")
        expected = {
            ("table-refused", WIDE),
            ("row-security", FIXED),
            ("table-unlogged", PARTS),
            ("publication-foreign", unique),
        }
        assert faults(postgres_dsn, unique) == expected
        with source.connect(postgres_dsn) as owner:
            migrate(owner)
            for _, subject in sorted(expected - {("publication-foreign", unique)}):
                with pytest.raises(SourceError, match=re.escape(subject)):
                    prepare_source(owner, requirements(unique, subject))
        assert faults(postgres_dsn, unique) >= expected


def test_whoever_may_not_read_the_control_schema_gets_an_answer(
    postgres_dsn: str, unique: str
) -> None:
    with prepared(postgres_dsn, unique, SCHEMA, *TABLES) as conn:
        conn.execute(f"CREATE ROLE {unique}_stranger LOGIN")
        dsn = psycopg.conninfo.make_conninfo(postgres_dsn, user=f"{unique}_stranger")
        try:
            assert faults(dsn, unique) == {("publication-foreign", unique)}
        finally:
            conn.execute(f"DROP ROLE {unique}_stranger")


def test_a_role_that_owns_a_table_is_named(postgres_dsn: str, unique: str) -> None:
    """`migrate` refuses it, so it is no fix of what such a role has too much."""
    with prepared(postgres_dsn, unique, SCHEMA, *TABLES) as conn:
        role = f"{unique}_replication"
        conn.execute(f"ALTER ROLE {role} SUPERUSER")
        assert faults(postgres_dsn, unique) == {("role-unfit/superuser", role)}
        conn.execute(f"ALTER TABLE shop.fixed OWNER TO {role}")
        assert faults(postgres_dsn, unique) == {("role-unfit/shared", role)}
        with source.connect(postgres_dsn) as owner, pytest.raises(SourceError, match="owns"):
            prepare_source(owner, requirements(unique, FIXED))
        conn.execute("ALTER TABLE shop.fixed OWNER TO CURRENT_USER")
        with source.connect(postgres_dsn) as owner:
            prepare_source(owner, requirements(unique, *TABLES))
        assert faults(postgres_dsn, unique) == set()


VIEWS = {"notes": {"root": WIDE, "to": ["topic"]}}
STATE = {"type": "redis", "url": "redis://127.0.0.1:1/2", "prefix": "notes"}


@pytest.mark.timeout(300)
def test_a_locked_table_is_not_waited_for_without_end(
    postgres_dsn: str, unique: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor is one of a view."""
    assert facts.LOCK_TIMEOUT == "5s"
    impatient = partial(facts.bounded_locks, timeout="200ms")
    monkeypatch.setattr(facts, "bounded_locks", impatient)
    monkeypatch.setattr(source_checks, "bounded_locks", impatient)
    described = pipeline(unique, postgres_dsn, *TABLES, views=VIEWS, state=STATE)
    with (
        prepared(postgres_dsn, unique, SCHEMA, *TABLES),
        source.connect(postgres_dsn) as connection,
        psycopg.connect(postgres_dsn) as application,
    ):
        surveyed = survey(connection, described)
        assert source_checks.examine_views(connection, described, surveyed).refused == {}
        application.execute("ALTER TABLE shop.wide ADD more int")
        with pytest.raises(SourceError, match="stayed locked"):
            faults(postgres_dsn, unique)
        with pytest.raises(SourceError, match="stayed locked"):
            source_checks.examine_views(connection, described, surveyed)
        application.rollback()
