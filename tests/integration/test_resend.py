"""All rows of a table again, while the connector goes on with the log."""

import json
import re
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from uuid import uuid4

import psycopg
import pytest

from cdc.connectors.debezium import TEMPLATE
from cdc.errors import ConnectorError, SourceError
from cdc.kafka.clients import kafka
from cdc.kafka.topics import Topics
from cdc.model.table import Table
from cdc.postgres import snapshot_request
from cdc.postgres.snapshot_request import resend
from cdc.verify.backfill import backfill
from tests.support.postgres import sibling
from tests.support.shop import Shop, shop_on
from tests.support.wait import wait_until

ROWS = 5000
TABLES = """
CREATE TABLE shop.notes (id int PRIMARY KEY, note text, hidden text);
INSERT INTO shop.notes SELECT n, 'a' FROM generate_series(1, 5000) n;
CREATE TABLE shop.days (id int PRIMARY KEY, d date, hidden text, e date);
INSERT INTO shop.days (id, d, e)
VALUES (1, 'infinity', 'now'), (2, '0044-03-15 BC', NULL), (3, '1582-10-10', NULL);
CREATE TABLE shop.odd (at time, name text, d date, PRIMARY KEY (at, name));
INSERT INTO shop.odd VALUES ('10:00', 'it''s', NULL), ('10:00', 'b\\s', 'infinity'), ('11:00', '?', NULL);
CREATE TABLE shop.plain (yes boolean, name text, PRIMARY KEY (yes, name));
INSERT INTO shop.plain SELECT true, name FROM shop.odd;
CREATE TABLE shop.keyless (id int UNIQUE);
"""
LATER = "+ n * interval '1 s'"
NOT_COMPARED = {
    "timestamptz": f"now() {LATER}",
    "timestamp": f"localtimestamp {LATER}",
    "time": f"time '00:00' {LATER}",
    "bit(13)": "n::bit(13)",
    "money": "n::money",
}
"""Types of keys that are not compared with text, and their values."""
ODD_NAMES = [f"shop.odd{number}" for number in range(len(NOT_COMPARED))]
ODD_ROWS = int(TEMPLATE["incremental.snapshot.chunk.size"]) + 1
"""More than a chunk: its bounds are what is compared."""


@pytest.fixture(scope="module")
def shop(stack: Any) -> Iterator[Shop]:
    """One pipeline for all tests: each counts what comes by its own requests."""
    with sibling(stack.endpoints.postgres) as dsn:
        for small in shop_on(dsn, f"t_{uuid4().hex[:8]}", stack):
            small.conn.execute(TABLES)
            for table, (kind, value) in zip(ODD_NAMES, NOT_COMPARED.items(), strict=True):
                small.conn.execute(f"CREATE TABLE {table} (k {kind} PRIMARY KEY)".encode())
                rows = f"SELECT {value} FROM generate_series(1, {ODD_ROWS}) n"
                small.conn.execute(f"INSERT INTO {table} {rows}".encode())
            names = ("notes", "orders", "days")
            hiding = [{"table": f"shop.{table}", "exclude": ["hidden"]} for table in names]
            counters = {"table": "shop.counters", "partitions": 1}
            shop = small.capturing(*hiding, counters, "shop.odd", "shop.plain", *ODD_NAMES)
            shop.migrate()
            shop.register()
            yield shop


def again(shop: Shop, table: str, request: str, **options: Any) -> bool:
    """Ask for all rows of a table."""
    reader = shop.pipeline.replication_user
    return resend(shop.conn, shop.table(table), reader=reader, id=request, **options)


@contextmanager
def writing(shop: Shop) -> Iterator[list[int]]:
    """Someone who updates, deletes and inserts all the time; how often, so far."""
    stop, counter = threading.Event(), [0]

    def write() -> None:
        with psycopg.connect(shop.pipeline.source.dsn, autocommit=True) as conn:
            while not stop.wait(0.005):
                number = counter[0] + 1
                conn.execute(
                    "UPDATE shop.notes SET note = %s WHERE id = %s",
                    [f"u{number}", number * 7 % ROWS + 1],
                )
                conn.execute("DELETE FROM shop.notes WHERE id = %s", [number * 11 % ROWS + 1])
                conn.execute("INSERT INTO shop.notes VALUES (%s, 'new')", [ROWS + number])
                counter[0] = number

    thread = threading.Thread(target=write)
    thread.start()
    try:
        yield counter
    finally:
        stop.set()
        thread.join()


def table_rows(shop: Shop, table: str) -> dict[Any, Any]:
    rows: list[tuple[Any, ...]] = shop.conn.execute(
        f"SELECT row_to_json(t) FROM {table} t".encode()
    ).fetchall()
    return {
        row["id"]: {name: row[name] for name in row if name not in ("hidden", "twice")}
        for (row,) in rows
    }


def living(shop: Shop, table: str) -> dict[Any, Any]:
    return {key: row for key, row in shop.rows(table).items() if row is not None}


def differences(shop: Shop, table: str) -> dict[Any, list[str]]:
    """The changes in the log of each key whose row isn't the table's, oldest first."""
    logged, stored = living(shop, table), table_rows(shop, table)
    keys = {key for key in logged.keys() | stored.keys() if logged.get(key) != stored.get(key)}
    changes: dict[Any, list[str]] = {key: [] for key in keys}
    for change in shop.log(table) if keys else ():
        if (key := next(iter(change.key.values()))) in keys:
            changes[key].append(f"{change.op} {change.after}")
    return changes


def reads(shop: Shop, table: str) -> int:
    return sum(change.op == "r" for change in shop.log(table))


def read_keys(shop: Shop, table: str) -> Counter[Any]:
    """The last column of each key that was read from the table itself."""
    return Counter([*change.key.values()][-1] for change in shop.log(table) if change.op == "r")


def test_all_rows_come_again_while_others_write(shop: Shop) -> None:
    first, counters = reads(shop, "shop.notes"), reads(shop, "shop.counters")
    assert first >= ROWS
    with writing(shop) as counter:
        wait_until(lambda: counter[0] > 20, 20, "the writer")
        rows = table_rows(shop, "shop.notes")
        assert again(shop, "shop.notes", "again")
        assert again(shop, "shop.counters", "another")
        wait_until(
            lambda: reads(shop, "shop.counters") == counters + 10,
            60,
            "the second table, which comes after the first",
        )
        count = counter[0]
        wait_until(lambda: counter[0] > count + 20, 20, "the writer goes on")
        # The same request is not made twice, whoever asks.
        assert not again(shop, "shop.notes", "again")
    wait_until(
        lambda: not differences(shop, "shop.notes"),
        20,
        lambda: f"the table as it is, and not {differences(shop, 'shop.notes')}",
    )
    log = shop.log("shop.notes")
    later_keys = {change.key["id"] for change in log[first:]}
    # Every row that was there came again: read by the request, or written meanwhile.
    assert later_keys >= rows.keys()
    assert any(change.op == "u" for change in log[first:])
    assert reads(shop, "shop.notes") > first + len(rows) - count * 3
    assert reads(shop, "shop.counters") == counters + 10
    assert shop.state() == "RUNNING"


PATIENT = "SELECT replace(pg_get_functiondef('cdc.is_current'::regproc), '1 s', '60 s')"
STILL_UNSEEN = "SELECT pid FROM pg_stat_activity WHERE wait_event = 'SyncRep' AND query = %s"
WAITING_CHUNK = """
SELECT FROM pg_stat_activity
WHERE query LIKE '%cdc.is_current%' AND state = 'active' AND pid <> pg_backend_pid()
"""


@contextmanager
def unseen(shop: Shop, statement: str) -> Iterator[Callable[[], None]]:
    """Someone's change that the log has and no other session sees, until what is yielded is called:
    a synchronous standby doesn't confirm it.
    """

    def set_standby(commit: str, names: str) -> None:
        shop.conn.execute(f"ALTER SYSTEM SET synchronous_commit = {commit}".encode())
        shop.conn.execute("SELECT pg_reload_conf()")
        shop.conn.execute(f"ALTER SYSTEM SET synchronous_standby_names = '{names}'".encode())
        shop.conn.execute("SELECT pg_reload_conf()")

    def write() -> None:
        with psycopg.connect(shop.pipeline.source.dsn, autocommit=True) as conn:
            conn.execute("SET synchronous_commit = on")
            # No commit waits before the checkpointer has read the settings, as it does by then.
            conn.execute("CHECKPOINT")
            conn.execute(statement.encode())

    def pids() -> list[int]:
        return [pid for (pid,) in shop.conn.execute(STILL_UNSEEN, [statement]).fetchall()]

    def show() -> None:
        for pid in pids():
            # It is committed already; only its wait for the standby is given up.
            shop.conn.execute("SELECT pg_cancel_backend(%s)", [pid])

    set_standby("local", "nobody")
    thread = threading.Thread(target=write)
    thread.start()
    try:
        wait_until(lambda: len(pids()) == 1, 20, "the commit that waits for a standby")
        yield show
    finally:
        set_standby("DEFAULT", "")
        thread.join()


BESIDE = """
WITH gone AS (DELETE FROM shop.notes WHERE id = 90008) UPDATE shop.notes SET note = 'newer' WHERE id = 90007
"""


def test_rows_whose_change_is_not_seen_yet_do_not_come_again_as_they_were(shop: Shop) -> None:
    """Postgres writes a commit to its log before other sessions see it. A chunk that is read in
    between would send the former row behind the change, as it does without `cdc.is_current`.
    """
    ((patient,),) = shop.conn.execute(PATIENT).fetchall()
    shop.conn.execute(patient)
    shop.conn.execute("INSERT INTO shop.notes VALUES (90007, 'a'), (90008, 'a')")
    count, counters = reads(shop, "shop.notes"), reads(shop, "shop.counters")
    with unseen(shop, BESIDE) as show:
        wait_until(
            lambda: (
                {(90007, "u"), (90008, "d")}
                <= {(change.key["id"], change.op) for change in shop.log("shop.notes")}
            ),
            20,
            "the changes in the topic",
        )
        rows = table_rows(shop, "shop.notes")
        assert [rows[key]["note"] for key in (90007, 90008)] == ["a", "a"]
        assert again(shop, "shop.notes", "beside")
        assert again(shop, "shop.counters", "behind")
        wait_until(
            lambda: (
                shop.conn.execute(WAITING_CHUNK).fetchone() is not None
                or reads(shop, "shop.counters") == counters + 10
            ),
            60,
            "a chunk that waits, or rows that were sent as they were",
        )
        show()
    wait_until(lambda: reads(shop, "shop.counters") == counters + 10, 60, "the table behind it")
    assert reads(shop, "shop.notes") >= count + len(rows) - 2
    assert differences(shop, "shop.notes") == {}


def test_a_table_with_a_stored_column_comes_again_whole(shop: Shop) -> None:
    """Read beside the log its stored column would be lost, and the next change would stop the connector."""
    count = reads(shop, "shop.orders")
    shop.conn.execute("UPDATE shop.orders SET note = 'b' WHERE id = 1")
    wait_until(lambda: shop.rows("shop.orders")[1]["note"] == "b", 20, "the stream")
    assert again(shop, "shop.orders", "stored")
    wait_until(lambda: reads(shop, "shop.orders") == count + 100, 30, "the rows again")
    shop.conn.execute(
        "UPDATE shop.orders SET note = 'c' WHERE id = 1; DELETE FROM shop.orders WHERE id = 2"
    )
    wait_until(
        lambda: living(shop, "shop.orders") == table_rows(shop, "shop.orders"),
        20,
        "the table as it is",
    )
    assert shop.state() == "RUNNING"


def await_reads_of(shop: Shop, names: Sequence[str], expected: int) -> None:
    """One table after the other: a look reads a whole topic."""
    for name in names:
        wait_until(lambda name=name: reads(shop, name) == expected, 60, f"rows of {name}")  # type: ignore[misc]


def test_keys_that_are_not_compared_with_text(shop: Shop) -> None:
    """Read beside the log such a table would be skipped, and all that is asked for after it."""
    counters = reads(shop, "shop.counters")
    await_reads_of(shop, ODD_NAMES, ODD_ROWS)
    for name in (*ODD_NAMES, "shop.counters"):
        assert again(shop, name, name)
    await_reads_of(shop, ODD_NAMES, 2 * ODD_ROWS)
    wait_until(
        lambda: reads(shop, "shop.counters") == counters + 10,
        30,
        "the table that was asked for last",
    )


def test_dates_that_jdbc_cannot_carry_come_again_as_they_were(shop: Shop) -> None:
    wait_until(lambda: reads(shop, "shop.days") == 3, 20, "the first time")
    days = {key: row["d"] for key, row in shop.rows("shop.days").items()}
    assert days == {1: 2147483647, 2: -735160, 3: -141432}
    again(shop, "shop.days", "dates")
    wait_until(lambda: reads(shop, "shop.days") == 6, 20, "the second time")
    assert {key: row["d"] for key, row in shop.rows("shop.days").items()} == days
    shop.conn.execute("UPDATE shop.days SET d = '2026-01-01' WHERE id = 1")
    wait_until(lambda: shop.rows("shop.days")[1]["d"] == 20454, 20, "the stream")


def test_cleansed_rows_are_above_the_floor_and_the_others_below(shop: Shop) -> None:
    count = reads(shop, "shop.counters")
    assert again(shop, "shop.counters", "clean", reset_floor=True)
    wait_until(lambda: reads(shop, "shop.counters") == count + 10, 30, "the rows again")
    ((lsn,),) = shop.conn.execute(
        "SELECT (lsn - '0/0')::bigint FROM cdc.truncation WHERE table_name = 'shop.counters'"
    ).fetchall()
    copies = [change for change in shop.log("shop.counters") if change.op == "r"]
    assert [change.lsn >= lsn for change in copies] == [False] * count + [True] * 10
    wait_until(
        lambda: [change.key["table_name"] for change in shop.log("cdc.truncation")],
        10,
        "the floor in its topic",
    )
    # A request that was made before raises no floor.
    floors = shop.conn.execute("SELECT lsn, n FROM cdc.truncation").fetchall()
    assert not again(shop, "shop.counters", "clean", reset_floor=True)
    assert shop.conn.execute("SELECT lsn, n FROM cdc.truncation").fetchall() == floors


def written(shop: Shop) -> list[Any]:
    """All floors and signals."""
    query = "SELECT lsn::text, n::text FROM cdc.truncation UNION ALL SELECT id, type FROM cdc.signal ORDER BY 1"
    return shop.conn.execute(query).fetchall()


def test_a_floor_waits_for_who_has_written_below_it(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise that change would come after the floor, with a position below it, and be taken for dead."""
    before = written(shop)
    monkeypatch.setattr(snapshot_request, "LOCK_TIMEOUT", "200ms")
    with psycopg.connect(shop.pipeline.source.dsn) as application:
        application.execute("UPDATE shop.counters SET n = 0")
        with pytest.raises(SourceError, match=r"One of shop\.counters stayed locked"):
            again(shop, "shop.counters", "locked", reset_floor=True)
        assert written(shop) == before
        application.rollback()
    count = reads(shop, "shop.counters")
    assert again(shop, "shop.counters", "locked", reset_floor=True)
    wait_until(lambda: reads(shop, "shop.counters") == count + 10, 30, "the rows again")


def test_chosen_rows_come_again_and_no_others(shop: Shop) -> None:
    """Beside the log, with it held up, by a key that isn't compared by its index, and ids that no row has."""
    pair = '["10:00:00.000000","b\\\\s"]', '["10:00:00.000000","it\'s"]', '["11:00:00.000000","?"]'
    plain = [re.sub(r'"1[01]:00:00.000000"', "true", value) for value in pair]
    notes = [str(key) for key in table_rows(shop, "shop.notes") if 100 <= key < 400]
    requests: dict[str, tuple[list[str], set[Any]]] = {
        "shop.notes": ([*notes, "none", "999999"], set(map(int, notes))),
        "shop.counters": (["none"], set()),
        "shop.orders": (["7", "8", "-1"], {7, 8}),
        "shop.odd": ([*pair[:2], "no list"], {"it's", "b\\s"}),
        "shop.plain": (plain, {"it's", "b\\s", "?"}),
    }
    with Topics(shop.kafka) as topics:
        for name, (ids, expected) in requests.items():
            keys = read_keys(shop, name)
            count = backfill(shop.pipeline, topics, shop.table(name), ids, timeout_s=30)
            assert count == len(expected), name
            # No waiting: when it returns they can be read.
            assert read_keys(shop, name) - keys == Counter(expected)
    assert shop.state() == "RUNNING"


def key(number: int) -> bytes:
    return json.dumps({"id": number}).encode()


def test_a_repair_deletes_what_the_source_has_not(shop: Shop) -> None:
    """And nothing else: a row that came back since it was missed is there in the end."""
    rows = living(shop, "shop.counters")
    counters = shop.table("shop.counters")
    with Topics(shop.kafka) as topics:
        assert backfill(
            shop.pipeline,
            topics,
            counters,
            ["1", "99"],
            timeout_s=30,
            delete_keys=[key(1), key(99)],
        )
    assert shop.rows("shop.counters")[99] is None
    assert living(shop, "shop.counters") == rows


def test_a_repair_that_ends_half_way_deletes_nothing(shop: Shop) -> None:
    rows = living(shop, "shop.counters")
    away = shop.pipeline.source.model_copy(update={"dsn": "postgresql://127.0.0.1:1/none"})
    nowhere = shop.pipeline.model_copy(update={"source": away})
    with Topics(shop.kafka) as topics, pytest.raises(SourceError):
        backfill(
            nowhere, topics, shop.table("shop.counters"), ["1"], timeout_s=5, delete_keys=[key(1)]
        )
    assert living(shop, "shop.counters") == rows


def test_a_repair_that_was_killed_is_taken_back_by_the_next(shop: Shop) -> None:
    rows, counters = living(shop, "shop.counters"), shop.table("shop.counters")
    killed = kafka.KafkaProducer(
        bootstrap_servers=shop.kafka,
        transactional_id=f"{shop.pipeline.pipeline}.repair",
        transaction_timeout_ms=600_000,
    )
    killed.init_transactions()
    killed.begin_transaction()
    killed.send(counters.topic, key=key(1), value=None).get(60)
    with Topics(shop.kafka) as topics:
        backfill(shop.pipeline, topics, counters, ["2", "99"], timeout_s=30, delete_keys=[key(99)])
    assert living(shop, "shop.counters") == rows
    killed.close(0)


def test_what_earlier_requests_left_is_swept(shop: Shop) -> None:
    def windows() -> set[str]:
        rows = shop.conn.execute(
            "SELECT id FROM cdc.signal WHERE type LIKE 'snapshot-window-%'"
        ).fetchall()
        return {row[0] for row in rows}

    count = reads(shop, "shop.counters")
    again(shop, "shop.counters", "one")
    wait_until(lambda: reads(shop, "shop.counters") == count + 10, 60, "the rows a second time")
    leftovers = windows()
    assert leftovers
    again(shop, "shop.counters", "two")
    assert not windows() & leftovers
    wait_until(lambda: reads(shop, "shop.counters") == count + 20, 60, "the rows a third time")
    query = "SELECT id FROM cdc.signal WHERE type = 'execute-snapshot'"
    assert set(shop.conn.execute(query).fetchall()) >= {("one",), ("two",)}


def test_a_table_without_a_key(shop: Shop) -> None:
    before = written(shop)
    reader = shop.pipeline.replication_user
    for table in ("keyless", "nothing"):
        with pytest.raises(SourceError, match=f"shop.{table} can't be sent again"):
            resend(shop.conn, Table("shop", table, (), (), ""), reader=reader, id="no")
    assert written(shop) == before


def test_rows_that_do_not_come_are_missed(shop: Shop) -> None:
    """The last one: it deletes the connector."""
    shop.stop()
    with Topics(shop.kafka) as topics, pytest.raises(ConnectorError, match="have not come in time"):
        backfill(shop.pipeline, topics, shop.table("shop.counters"), ["1"], timeout_s=1)
