"""A slot that a removed pipeline leaves."""

from collections.abc import Iterator

import psycopg
import pytest

from cdc.errors import SourceError
from cdc.migrations import removal

Connection = psycopg.Connection[tuple[str, ...]]


@pytest.fixture
def conn(postgres_dsn: str) -> Iterator[Connection]:
    with psycopg.connect(postgres_dsn, autocommit=True) as connection:
        yield connection


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
