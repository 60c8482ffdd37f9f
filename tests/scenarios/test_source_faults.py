"""What connectors have lost in the past when they restarted at the wrong moment: none of it may be
missing here.

Looked at in the topics alone; what the views make of them has tests of its own.
"""

from collections.abc import Callable, Iterator
from typing import Any

import psycopg
import pytest

from cdc.connectors.client import Connect
from cdc.errors import ConnectorError
from cdc.postgres.snapshot_request import resend
from tests.support import http
from tests.support.server_control import connect_with
from tests.support.shop import Shop, shop_on
from tests.support.wait import wait_until

COPIED = 10_000
NOTES = "CREATE TABLE shop.notes (id int PRIMARY KEY, note text)"


@pytest.fixture
def shop(stack: Any, postgres_dsn: str, unique: str) -> Iterator[Shop]:
    for shop in shop_on(postgres_dsn, unique, stack):
        shop.conn.execute(NOTES)
        few = shop.capturing({"table": "shop.notes", "partitions": 2})
        few.migrate()
        few.register()
        yield few


def restarted(shop: Shop) -> None:
    """Connect starts the task again."""
    with Connect(shop.connect) as connect:
        wait_until(
            lambda: connect.state(shop.pipeline.pipeline).running, 30, "the connector to run"
        )
    http.ask_connect(
        "POST", f"{shop.connect}/connectors/{shop.pipeline.pipeline}/restart?includeTasks=true"
    )


def put_again(shop: Shop) -> None:
    """The connector is deleted and registered again: it goes on where it was."""
    shop.stop()
    shop.register()


def arrived(shop: Shop, keys: set[int]) -> None:
    def missing() -> set[int]:
        return keys - shop.rows("shop.notes").keys()

    def never() -> str:
        with Connect(shop.connect) as connect:
            return f"{len(missing())} of {len(keys)} rows never came: {connect.state(shop.pipeline.pipeline)}"

    # A transaction that a killed worker has left open hides what follows until the broker aborts
    # it, after 60 s.
    wait_until(lambda: not missing(), 120, never)


@pytest.mark.parametrize("restart", [restarted, put_again])
def test_a_transaction_that_was_open_across_a_restart(
    shop: Shop, restart: Callable[[Shop], None]
) -> None:
    """dbz#76: A writes, B commits, A writes more, the connector restarts, A commits; all of A was lost."""
    dsn = shop.pipeline.source.dsn
    for round_ in range(3):
        base = round_ * 100
        with psycopg.connect(dsn) as a:
            a.execute(
                "INSERT INTO shop.notes SELECT n, 'a' FROM generate_series(%s::int, %s) n",
                [base + 1, base + 10],
            )
            with psycopg.connect(dsn) as b:
                b.execute("INSERT INTO shop.notes VALUES (%s, 'b')", [base + 50])
            arrived(shop, {base + 50})
            a.execute(
                "INSERT INTO shop.notes SELECT n, 'a' FROM generate_series(%s::int, %s) n",
                [base + 11, base + 20],
            )
            restart(shop)
            a.commit()
        arrived(shop, {*range(base + 1, base + 21), base + 50})


def test_a_copy_and_a_worker_that_is_killed(shop: Shop, stack: Any) -> None:
    """dbz#1554: rows of a COPY share a position; what comes after the first of them may be lost.

    Debezium 3.7.0 has it still when exactly one row at a position was stored. What is promised: one
    request brings every row that is missing.
    """
    with psycopg.connect(shop.pipeline.source.dsn) as conn:
        with conn.cursor().copy("COPY shop.notes FROM STDIN") as copy:
            for number in range(COPIED):
                copy.write_row((number, "x" * 500))
        conn.commit()
    count = wait_until(lambda: len(shop.rows("shop.notes")), 30, "the first rows of the copy")
    stack.servers.kill("connect")
    try:
        # Killed in the middle, or the test shows nothing: the worker reads some 20,000 such rows a
        # second.
        assert count <= COPIED
        with psycopg.connect(shop.pipeline.source.dsn) as conn:
            conn.execute("INSERT INTO shop.notes VALUES (%s, 'after')", [COPIED])
    finally:
        stack.servers.start("connect")
    arrived(shop, {COPIED})
    assert resend(
        shop.conn, shop.table("shop.notes"), reader=shop.pipeline.replication_user, id="lost"
    )
    arrived(shop, set(range(COPIED + 1)))


def test_a_worker_of_another_time_zone_sends_nothing(shop: Shop, stack: Any) -> None:
    """Ranges of time stamps would be written in its zone."""
    shop.conn.execute("INSERT INTO shop.notes VALUES (1, 'before')")
    arrived(shop, {1})
    with connect_with(stack.servers, "-Duser.timezone=Asia/Kolkata"):
        shop.conn.execute("INSERT INTO shop.notes VALUES (2, 'meanwhile')")
        with Connect(shop.connect) as connect:
            wait_until(
                lambda: "FAILED" in connect.state(shop.pipeline.pipeline).tasks,
                60,
                "the task to fail",
            )
            trace = connect.state(shop.pipeline.pipeline).trace or ""
        assert "time zone is Asia/Kolkata: start it with -Duser.timezone=UTC" in trace
        with pytest.raises(ConnectorError, match="time zone is Asia/Kolkata"):
            shop.register()
    arrived(shop, {1, 2})


def test_small_transactions_with_restarts_between(shop: Shop) -> None:
    """DBZ-5915: BEGIN, COMMIT and the one INSERT between share a position; one was skipped after a restart."""
    number = 0
    with psycopg.connect(shop.pipeline.source.dsn, autocommit=True) as conn:
        for _ in range(5):
            for _ in range(20):
                number += 1
                conn.execute("INSERT INTO shop.notes VALUES (%s, 'x')", [number])
            arrived(shop, {1})
            restarted(shop)
            for _ in range(20):
                number += 1
                conn.execute("INSERT INTO shop.notes VALUES (%s, 'x')", [number])

            def running() -> bool:
                with Connect(shop.connect) as connect:
                    return connect.state(shop.pipeline.pipeline).running

            wait_until(running, 30, "the task to run again")
    arrived(shop, set(range(1, number + 1)))


def test_a_row_that_never_comes_is_missed(shop: Shop) -> None:
    """The twin: a change that the log doesn't have, as of a table that for a while isn't
    published.
    """
    name = shop.pipeline.pipeline
    shop.conn.execute(f"ALTER PUBLICATION {name} DROP TABLE shop.notes".encode())
    shop.conn.execute("INSERT INTO shop.notes VALUES (1, 'unseen')")
    shop.conn.execute(f"ALTER PUBLICATION {name} ADD TABLE shop.notes".encode())
    shop.conn.execute("INSERT INTO shop.notes VALUES (2, 'seen')")
    arrived(shop, {2})
    assert 1 not in shop.rows("shop.notes")
