"""Faults of a source that `doctor` names, on a real Postgres alone."""

import psycopg
import pytest

from cdc.doctor.source_checks import check_source
from cdc.doctor.source_facts import read_source
from cdc.errors import SourceError
from cdc.postgres import source
from tests.integration.test_comparison import alter_publication, prepared
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
        facts = read_source(connection, pipeline(unique, dsn, *TABLES), connected=False)
    return {
        (finding.code, finding.subject)
        for finding in check_source(facts)
        if finding.code.startswith(("publication", "table"))
    }


def test_a_publication_without_generated_columns_is_named(postgres_dsn: str, unique: str) -> None:
    """New rows would lack them, and Postgres refuses updates under REPLICA IDENTITY FULL."""
    with prepared(postgres_dsn, unique, SCHEMA, *TABLES) as conn:
        assert faults(postgres_dsn, unique) == set()
        alter_publication(conn, unique, "SET (publish_generated_columns = none)")
        assert faults(postgres_dsn, unique) == {("publication-differs", unique)}


def test_a_virtual_column_that_stops_updates_is_named(postgres_dsn: str, unique: str) -> None:
    """It was added after `migrate`, which refuses it."""
    with prepared(postgres_dsn, unique, SCHEMA, *TABLES) as conn:
        for table in TABLES:
            conn.execute(f"ALTER TABLE {table} ADD v int GENERATED ALWAYS AS (id + 1) VIRTUAL")
        conn.execute("UPDATE shop.fixed SET n = 1")
        assert faults(postgres_dsn, unique) == {("table-refused", WIDE), ("table-refused", PARTS)}


@pytest.mark.timeout(300)
def test_a_locked_table_is_not_waited_for_without_end(postgres_dsn: str, unique: str) -> None:
    with (
        prepared(postgres_dsn, unique, SCHEMA, *TABLES),
        psycopg.connect(postgres_dsn) as application,
    ):
        application.execute("ALTER TABLE shop.wide ADD more int")
        with pytest.raises(SourceError, match="stayed locked"):
            faults(postgres_dsn, unique)
        application.rollback()
