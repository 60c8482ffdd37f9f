"""What a pipeline leaves in its source database once it is removed: nothing, and another one
everything.
"""

from collections.abc import Iterator

import psycopg
import pytest

from cdc import migrations
from cdc.errors import SourceError
from cdc.migrations import removal
from cdc.readiness.facts import SourceRequirements
from tests.scenarios.test_destroy import IN_CONTROL, IN_POSTGRES

Connection = psycopg.Connection[tuple[str, ...]]


@pytest.fixture
def conn(postgres_dsn: str) -> Iterator[Connection]:
    with psycopg.connect(postgres_dsn, autocommit=True) as connection:
        connection.execute("CREATE TABLE items (id int PRIMARY KEY, note text)")
        connection.execute("CREATE TABLE shared (id int PRIMARY KEY)")
        connection.execute("CREATE TABLE parts (id int PRIMARY KEY) PARTITION BY RANGE (id)")
        connection.execute("CREATE TABLE part PARTITION OF parts FOR VALUES FROM (0) TO (9)")
        migrations.migrate(connection)
        yield connection


def prepare(conn: Connection, pipeline: str, *tables: str) -> None:
    names = [("public", table) for table in tables]
    role = f"{pipeline}_replication"
    migrations.prepare_source(conn, SourceRequirements(pipeline, names, role))


def things(conn: Connection, *words: str) -> set[str]:
    """All that there is whose name holds one of these words."""
    rows = conn.execute(IN_POSTGRES).fetchall()
    if ("schema cdc",) in rows:
        rows += conn.execute(IN_CONTROL).fetchall()
    return {text for (text,) in rows if any(word in text for word in words)}


def test_one_pipeline_goes_and_the_other_stays(conn: Connection, unique: str) -> None:
    name, neighbour = unique, f"n{unique[1:]}"
    role = f"{name}_replication"
    texts = (name, "public.items", "public.part", "of items", "of part")
    prepare(conn, neighbour, "shared")
    theirs = things(conn, neighbour, "shared")
    prepare(conn, name, "items", "shared", "parts")
    conn.execute("TRUNCATE items")
    conn.execute("SELECT pg_create_logical_replication_slot(%s, 'pgoutput')", [name])
    assert len(things(conn, *texts)) > 8

    assert removal.drop_slot(conn, name)
    assert not removal.drop_slot(conn, name)
    removal.remove_from_source(conn, name, role)
    assert removal.removals(conn, name) == []
    assert things(conn, *texts) == set()
    assert things(conn, neighbour, "shared") == theirs
    # Twice does no harm.
    removal.remove_from_source(conn, name, role)
    assert things(conn, neighbour, "shared") == theirs

    # The control schema goes with the last one.
    removal.remove_from_source(conn, neighbour, f"{neighbour}_replication")
    assert things(conn, neighbour, "schema cdc", "cdc_") == set()


def test_a_slot_that_is_read_is_dropped_and_one_of_another_database_isnt(
    conn: Connection, unique: str
) -> None:
    conn.execute("SELECT pg_create_logical_replication_slot(%s, 'pgoutput')", [unique])
    with psycopg.connect(conn.info.dsn, dbname="postgres", autocommit=True) as elsewhere:
        assert not removal.drop_slot(elsewhere, unique)
    assert removal.find_slots(conn, unique) == [None]
    conn.execute("CREATE ROLE reader")
    try:
        conn.execute("SET ROLE reader")
        with pytest.raises(SourceError, match="this role may not drop it") as caught:
            removal.drop_slot(conn, unique)
    finally:
        conn.execute("RESET ROLE")
        conn.execute("DROP ROLE reader")
    assert f"pg_drop_replication_slot('{unique}')" in caught.value.hint
    assert removal.drop_slot(conn, unique)
