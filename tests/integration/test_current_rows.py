"""Which rows of a statement the log has a later change of: `cdc.is_current`, on a real Postgres."""

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, LiteralString

import psycopg
import pytest
from psycopg import sql

from cdc import migrations
from cdc.postgres.snapshot_request import CURRENT
from tests.support.wait import wait_until

Connection = psycopg.Connection[Any]
ALL = [1, 2, 3]
# A statement that is only active may not have its snapshot yet.
WAITING = "SELECT FROM pg_stat_activity WHERE pid = %s AND wait_event = 'PgSleep' AND query LIKE '%%is_current%%'"


@pytest.fixture
def connect(postgres_dsn: str) -> Iterator[Callable[[], Connection]]:
    connections: list[Connection] = []

    def connect() -> Connection:
        connections.append(psycopg.connect(postgres_dsn, autocommit=True))
        return connections[-1]

    conn = connect()
    migrations.migrate(conn)
    conn.execute("CREATE TABLE notes (id int, note text, PRIMARY KEY (id)) PARTITION BY RANGE (id)")
    conn.execute("CREATE TABLE low PARTITION OF notes FOR VALUES FROM (0) TO (2)")
    conn.execute("CREATE TABLE high PARTITION OF notes FOR VALUES FROM (2) TO (9)")
    conn.execute("INSERT INTO notes SELECT n, 'a' FROM generate_series(1, 3) n")
    yield connect
    for connection in connections:
        connection.close()


def read(conn: Connection) -> list[int]:
    current = sql.SQL(CURRENT).format(sql.Literal("notes"))
    query = sql.SQL("SELECT id FROM notes WHERE {} ORDER BY id").format(current)
    return [number for (number,) in conn.execute(query).fetchall()]


class Reader(threading.Thread):
    """A statement over all rows, begun while somebody is at work on one of them."""

    def __init__(self, conn: Connection) -> None:
        super().__init__()
        self._conn = conn
        self.rows: list[int] = []
        self.seconds = 0.0

    def run(self) -> None:
        begun = time.monotonic()
        self.rows = read(self._conn)
        self.seconds = time.monotonic() - begun


def make_patient(conn: Connection) -> None:
    """Wait for writers as long as a busy machine takes to end them."""
    ((function,),) = conn.execute(
        "SELECT replace(pg_get_functiondef('cdc.is_current'::regproc), '1 s', '60 s')"
    ).fetchall()
    conn.execute(function)


def begin_reading(conn: Connection, observer: Connection) -> Reader:
    """Return once the statement waits for a writer."""
    reader = Reader(conn)
    reader.start()
    wait_until(
        lambda: observer.execute(WAITING, [conn.info.backend_pid]).fetchone() is not None,
        20,
        "the statement to wait for a writer",
    )
    return reader


REPLACED = [1, 3]
CASES: dict[str, tuple[LiteralString, LiteralString, list[int]]] = {
    "updated": ("UPDATE notes SET note = 'b' WHERE id = 2", "COMMIT", REPLACED),
    "updated in place of its key": ("UPDATE notes SET id = 7 WHERE id = 2", "COMMIT", REPLACED),
    "moved to another partition": ("UPDATE notes SET id = 0 WHERE id = 2", "COMMIT", REPLACED),
    "deleted": ("DELETE FROM notes WHERE id = 2", "COMMIT", REPLACED),
    "deleted within a savepoint": ("SAVEPOINT s; DELETE FROM notes WHERE id = 2; RELEASE s", "COMMIT", REPLACED),
    "updated and taken back": ("UPDATE notes SET note = 'b' WHERE id = 2", "ROLLBACK", ALL),
    "locked": ("SELECT FROM notes WHERE id = 2 FOR UPDATE", "COMMIT", ALL),
    "inserted": ("INSERT INTO notes VALUES (5, 'new')", "COMMIT", ALL),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_a_row_that_is_being_changed(connect: Callable[[], Connection], case: str) -> None:
    change, end, expected = CASES[case]
    observer, writer = connect(), connect()
    make_patient(observer)
    writer.execute("BEGIN")
    writer.execute(change)
    if case == "inserted":
        # Nobody has read that row, so nobody waits for it.
        assert read(connect()) == expected
        return
    reader = begin_reading(connect(), observer)
    writer.execute(end)
    reader.join()
    assert reader.rows == expected


def test_a_row_that_several_hold_while_one_changes_it(connect: Callable[[], Connection]) -> None:
    """Its xmax is the number of a group."""
    observer, first, second, writer = (connect() for _ in range(4))
    make_patient(observer)
    for holder in (first, second):
        holder.execute("BEGIN")
        holder.execute("SELECT FROM notes WHERE id = 2 FOR KEY SHARE")
    writer.execute("BEGIN")
    writer.execute("UPDATE notes SET note = 'b' WHERE id = 2")
    reader = begin_reading(connect(), observer)
    writer.execute("COMMIT")
    first.execute("COMMIT")
    second.execute("COMMIT")
    reader.join()
    assert reader.rows == REPLACED
    # The group of those who only hold it means nothing once they are over.
    for holder in (first, second):
        holder.execute("BEGIN")
        holder.execute("SELECT FROM notes WHERE id = 3 FOR KEY SHARE")
    for holder in (first, second):
        holder.execute("COMMIT")
    assert read(connect()) == ALL


def test_nobody_waits_longer_than_a_second(connect: Callable[[], Connection]) -> None:
    """Of all rows together: the connector's log waits meanwhile."""
    writer = connect()
    writer.execute("CREATE TABLE others PARTITION OF notes DEFAULT")
    writer.execute("INSERT INTO notes SELECT n, 'a' FROM generate_series(10, 39) n")
    writer.execute("BEGIN")
    writer.execute("UPDATE notes SET note = 'b'")
    reader = Reader(connect())
    reader.start()
    reader.join()
    assert reader.rows == [*ALL, *range(10, 40)]
    # A second for each row would be 33.
    assert 1.0 <= reader.seconds < 20


def test_who_may_read_the_table_needs_no_more(
    connect: Callable[[], Connection], unique: str
) -> None:
    conn = connect()
    role = sql.Identifier(unique)
    conn.execute(sql.SQL("CREATE ROLE {}").format(role))
    conn.execute(sql.SQL("GRANT USAGE ON SCHEMA cdc TO {}").format(role))
    conn.execute(sql.SQL("GRANT SELECT ON notes TO {}").format(role))
    # Each row has been locked once, so that each is looked at.
    conn.execute("SELECT FROM notes FOR UPDATE")
    conn.execute(sql.SQL("SET ROLE {}").format(role))
    try:
        assert read(conn) == ALL
    finally:
        conn.execute("RESET ROLE")
        conn.execute(sql.SQL("DROP OWNED BY {r}; DROP ROLE {r}").format(r=role))
