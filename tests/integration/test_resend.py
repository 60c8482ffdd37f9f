"""All rows of a table again, while the connector goes on with the log."""

import json
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import psycopg
import pytest

from cdc.connectors.client import Connect
from cdc.connectors.debezium import TEMPLATE
from cdc.errors import ConnectorError, SourceError
from cdc.kafka.clients import kafka
from cdc.kafka.topics import Topics
from cdc.model.table import Table
from cdc.postgres import snapshot_request
from cdc.postgres.snapshot_request import COLUMNS, resend
from cdc.verify.backfill import backfill
from tests.support.shop import Shop
from tests.support.wait import wait_until

ROWS = 5000


@pytest.fixture
def shop(shop: Shop) -> Shop:
    shop.conn.execute(
        "CREATE TABLE shop.notes (id int PRIMARY KEY, note text, hidden text);"
        " INSERT INTO shop.notes SELECT n, 'a' FROM generate_series(1, 5000) n"
    )
    shop = shop.capturing(
        {"table": "shop.notes", "exclude": ["hidden"]},
        {"table": "shop.counters", "partitions": 1},
        {"table": "shop.orders", "exclude": ["hidden"]},
    )
    shop.migrate()
    shop.register()
    return shop


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
    first = reads(shop, "shop.notes")
    assert first >= ROWS
    with writing(shop) as counter:
        wait_until(lambda: counter[0] > 20, 20, "the writer")
        rows = table_rows(shop, "shop.notes")
        assert resend(
            shop.conn, shop.table("shop.notes"), reader=shop.pipeline.replication_user, id="again"
        )
        assert resend(
            shop.conn,
            shop.table("shop.counters"),
            reader=shop.pipeline.replication_user,
            id="another",
        )
        wait_until(
            lambda: reads(shop, "shop.counters") == 20,
            60,
            "the second table, which comes after the first",
        )
        count = counter[0]
        wait_until(lambda: counter[0] > count + 20, 20, "the writer goes on")
        # The same request is not made twice, whoever asks.
        assert not resend(
            shop.conn, shop.table("shop.notes"), reader=shop.pipeline.replication_user, id="again"
        )
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
    assert reads(shop, "shop.counters") == 20
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
WITH gone AS (DELETE FROM shop.notes WHERE id = 8) UPDATE shop.notes SET note = 'newer' WHERE id = 7
"""


def resend_beside(shop: Shop) -> None:
    """Have all notes sent again while the log has changes of the seventh and the eighth that a chunk
    can't see.
    """
    count = reads(shop, "shop.notes")
    with unseen(shop, BESIDE) as show:
        wait_until(
            lambda: (
                {(7, "u"), (8, "d")}
                <= {(change.key["id"], change.op) for change in shop.log("shop.notes")}
            ),
            20,
            "the changes in the topic",
        )
        rows = table_rows(shop, "shop.notes")
        assert [rows[key]["note"] for key in (7, 8)] == ["a", "a"]
        assert resend(
            shop.conn, shop.table("shop.notes"), reader=shop.pipeline.replication_user, id="beside"
        )
        assert resend(
            shop.conn,
            shop.table("shop.counters"),
            reader=shop.pipeline.replication_user,
            id="behind",
        )
        wait_until(
            lambda: (
                shop.conn.execute(WAITING_CHUNK).fetchone() is not None
                or reads(shop, "shop.counters") == 20
            ),
            60,
            "a chunk that waits, or rows that were sent as they were",
        )
        show()
    wait_until(lambda: reads(shop, "shop.counters") == 20, 60, "the table behind it")
    assert reads(shop, "shop.notes") >= count + ROWS - 1


def test_rows_whose_change_is_not_seen_yet_do_not_come_again_as_they_were(shop: Shop) -> None:
    """Postgres writes a commit to its log before other sessions see it. A chunk that is read in
    between would send the former row behind the change.
    """
    ((patient,),) = shop.conn.execute(PATIENT).fetchall()
    shop.conn.execute(patient)
    resend_beside(shop)
    assert differences(shop, "shop.notes") == {}


def test_without_a_look_at_who_changes_them_they_do(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The twin of the test above."""
    monkeypatch.setattr("cdc.postgres.snapshot_request.CURRENT", "true")
    resend_beside(shop)
    assert differences(shop, "shop.notes").keys() == {7, 8}


def test_a_table_with_a_stored_column_comes_again_whole(shop: Shop) -> None:
    """Read beside the log its stored column would be lost, and the next change would stop the
    connector.
    """
    shop.conn.execute("UPDATE shop.orders SET note = 'b' WHERE id = 1")
    wait_until(lambda: shop.rows("shop.orders")[1]["note"] == "b", 20, "the stream")
    assert resend(
        shop.conn, shop.table("shop.orders"), reader=shop.pipeline.replication_user, id="again"
    )
    wait_until(lambda: reads(shop, "shop.orders") == 200, 30, "the rows again")
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
    later = "+ n * interval '1 s'"
    values = {
        "timestamptz": f"now() {later}",
        "timestamp": f"localtimestamp {later}",
        "time": f"time '00:00' {later}",
        "bit(13)": "n::bit(13)",
        "money": "n::money",
    }
    # More than a chunk: its bounds are what is compared.
    rows = int(TEMPLATE["incremental.snapshot.chunk.size"]) + 1
    names = [f"shop.odd{number}" for number in range(len(values))]
    for name, (kind, value) in zip(names, values.items(), strict=True):
        shop.conn.execute(f"CREATE TABLE {name} (k {kind} PRIMARY KEY)".encode())
        shop.conn.execute(
            f"INSERT INTO {name} SELECT {value} FROM generate_series(1, {rows}) n".encode()
        )
    shop = shop.capturing({"table": "shop.counters", "partitions": 1}, *names)
    shop.migrate()
    shop.register()
    await_reads_of(shop, names, rows)
    for name in (*names, "shop.counters"):
        assert resend(shop.conn, shop.table(name), reader=shop.pipeline.replication_user, id=name)
    await_reads_of(shop, names, 2 * rows)
    wait_until(lambda: reads(shop, "shop.counters") == 20, 30, "the table that was asked for last")


def test_dates_that_jdbc_cannot_carry_come_again_as_they_were(shop: Shop) -> None:
    shop.conn.execute("CREATE TABLE shop.days (id int PRIMARY KEY, d date, hidden text, e date)")
    shop.conn.execute(
        "INSERT INTO shop.days (id, d, e) VALUES (1, 'infinity', 'now'), (2, '0044-03-15 BC', NULL),"
        " (3, '1582-10-10', NULL)"
    )
    shop = shop.capturing({"table": "shop.days", "exclude": ["hidden"]})
    shop.migrate()
    # As a new table of the pipeline: its first rows come by request already.
    assert shop.register().sent == ["shop.days"]
    wait_until(lambda: reads(shop, "shop.days") == 3, 20, "the first time")
    days = {key: row["d"] for key, row in shop.rows("shop.days").items()}
    assert days == {1: 2147483647, 2: -735160, 3: -141432}
    resend(shop.conn, shop.table("shop.days"), reader=shop.pipeline.replication_user, id="again")
    wait_until(lambda: reads(shop, "shop.days") == 6, 20, "the second time")
    assert {key: row["d"] for key, row in shop.rows("shop.days").items()} == days
    shop.conn.execute("UPDATE shop.days SET d = '2026-01-01' WHERE id = 1")
    wait_until(lambda: shop.rows("shop.days")[1]["d"] == 20454, 20, "the stream")


def test_read_beside_the_log_a_stored_column_ends_the_task(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The twin of the test above: why such tables are read with the log held up."""
    monkeypatch.setattr(
        "cdc.postgres.snapshot_request.COLUMNS", COLUMNS.replace("a.attgenerated::text", "''")
    )
    shop.conn.execute("UPDATE shop.orders SET note = 'b' WHERE id = 1")
    wait_until(lambda: shop.rows("shop.orders")[1]["note"] == "b", 20, "the stream")
    resend(shop.conn, shop.table("shop.orders"), reader=shop.pipeline.replication_user, id="again")
    wait_until(lambda: reads(shop, "shop.orders") == 200, 30, "the rows again")
    assert "total" not in shop.rows("shop.orders")[5]
    shop.conn.execute("UPDATE shop.orders SET note = 'c' WHERE id = 1")

    def failed() -> bool:
        with Connect(shop.connect) as connect:
            return connect.state(shop.pipeline.pipeline).failed

    wait_until(failed, 60, "the task to end")


def test_cleansed_rows_are_above_the_floor_and_the_others_below(shop: Shop) -> None:
    assert resend(
        shop.conn,
        shop.table("shop.counters"),
        reader=shop.pipeline.replication_user,
        id="clean",
        reset_floor=True,
    )
    wait_until(lambda: reads(shop, "shop.counters") == 20, 30, "the rows again")
    ((lsn,),) = shop.conn.execute(
        "SELECT (lsn - '0/0')::bigint FROM cdc.truncation WHERE table_name = 'shop.counters'"
    ).fetchall()
    copies = [change for change in shop.log("shop.counters") if change.op == "r"]
    assert [change.lsn >= lsn for change in copies] == [False] * 10 + [True] * 10
    wait_until(
        lambda: [change.key["table_name"] for change in shop.log("cdc.truncation")],
        10,
        "the floor in its topic",
    )
    # A request that was made before raises no floor.
    floors = shop.conn.execute("SELECT lsn, n FROM cdc.truncation").fetchall()
    assert not resend(
        shop.conn,
        shop.table("shop.counters"),
        reader=shop.pipeline.replication_user,
        id="clean",
        reset_floor=True,
    )
    assert shop.conn.execute("SELECT lsn, n FROM cdc.truncation").fetchall() == floors


def test_a_floor_waits_for_who_has_written_below_it(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise that change would come after the floor, with a position below it, and be taken for
    dead.
    """
    monkeypatch.setattr(snapshot_request, "LOCK_TIMEOUT", "200ms")
    with psycopg.connect(shop.pipeline.source.dsn) as application:
        application.execute("UPDATE shop.counters SET n = 0")
        with pytest.raises(SourceError, match=r"One of shop\.counters stayed locked"):
            resend(
                shop.conn,
                shop.table("shop.counters"),
                reader=shop.pipeline.replication_user,
                id="clean",
                reset_floor=True,
            )
        assert shop.conn.execute("SELECT FROM cdc.truncation").fetchall() == []
        assert shop.conn.execute("SELECT FROM cdc.signal").fetchall() == []
        application.rollback()
    assert resend(
        shop.conn,
        shop.table("shop.counters"),
        reader=shop.pipeline.replication_user,
        id="clean",
        reset_floor=True,
    )


def test_chosen_rows_come_again_and_no_others(shop: Shop) -> None:
    """Beside the log, with it held up, by a key that isn't compared by its index, and ids that no
    row has.
    """
    shop.conn.execute(
        "CREATE TABLE shop.odd (at time, name text, d date, PRIMARY KEY (at, name));"
        " INSERT INTO shop.odd VALUES ('10:00', 'it''s', NULL), ('10:00', 'b\\s', 'infinity'), ('11:00', '?', NULL)"
    )
    shop.conn.execute("CREATE TABLE shop.plain (yes boolean, name text, PRIMARY KEY (yes, name))")
    shop.conn.execute("INSERT INTO shop.plain SELECT true, name FROM shop.odd")
    shop = shop.capturing(
        *(entry.model_dump() for entry in shop.pipeline.source.tables), "shop.odd", "shop.plain"
    )
    shop.migrate()
    shop.register()
    pair = '["10:00:00.000000","b\\\\s"]', '["10:00:00.000000","it\'s"]', '["11:00:00.000000","?"]'
    requests: dict[str, tuple[list[str], set[Any]]] = {
        "shop.notes": ([*map(str, range(100, 400)), "none", "999999"], set(range(100, 400))),
        "shop.counters": (["none"], set()),
        "shop.orders": (["7", "8", "-1"], {7, 8}),
        "shop.odd": ([*pair[:2], "no list"], {"it's", "b\\s"}),
        "shop.plain": (
            [
                value.replace('"10:00:00.000000"', "true").replace('"11:00:00.000000"', "true")
                for value in pair
            ],
            {"it's", "b\\s", "?"},
        ),
    }
    wait_until(
        lambda: reads(shop, "shop.plain") == 3 == reads(shop, "shop.odd"), 30, "the new tables"
    )
    with Topics(shop.kafka) as topics:
        for name, (ids, expected) in requests.items():
            keys = read_keys(shop, name)
            assert backfill(shop.pipeline, topics, shop.table(name), ids, timeout_s=30) == len(
                expected
            ), name
            # No waiting: when it returns they can be read.
            assert read_keys(shop, name) - keys == Counter(expected)
    assert shop.state() == "RUNNING"


def key(number: int) -> bytes:
    return json.dumps({"id": number}).encode()


def test_a_repair_deletes_what_the_source_has_not(shop: Shop) -> None:
    """And nothing else: a row that came back since it was missed is there in the end."""
    rows = living(shop, "shop.counters")
    with Topics(shop.kafka) as topics:
        assert backfill(
            shop.pipeline,
            topics,
            shop.table("shop.counters"),
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


def test_rows_that_do_not_come_are_missed(shop: Shop) -> None:
    shop.stop()
    with Topics(shop.kafka) as topics, pytest.raises(ConnectorError, match="have not come in time"):
        backfill(shop.pipeline, topics, shop.table("shop.counters"), ["1"], timeout_s=1)


def test_what_earlier_requests_left_is_swept(shop: Shop) -> None:
    def windows() -> set[str]:
        rows = shop.conn.execute(
            "SELECT id FROM cdc.signal WHERE type LIKE 'snapshot-window-%'"
        ).fetchall()
        return {row[0] for row in rows}

    resend(shop.conn, shop.table("shop.counters"), reader=shop.pipeline.replication_user, id="one")
    wait_until(lambda: reads(shop, "shop.counters") == 20, 60, "the rows a second time")
    leftovers = windows()
    assert leftovers
    resend(shop.conn, shop.table("shop.counters"), reader=shop.pipeline.replication_user, id="two")
    assert not windows() & leftovers
    wait_until(lambda: reads(shop, "shop.counters") == 30, 60, "the rows a third time")
    requests = shop.conn.execute(
        "SELECT id FROM cdc.signal WHERE type = 'execute-snapshot' ORDER BY id"
    ).fetchall()
    assert requests == [("one",), ("two",)]


def test_a_table_without_a_key(shop: Shop) -> None:
    shop.conn.execute("CREATE TABLE shop.keyless (id int UNIQUE)")
    for table in ("keyless", "nothing"):
        with pytest.raises(SourceError, match=f"shop.{table} can't be sent again"):
            resend(
                shop.conn,
                Table("shop", table, (), (), ""),
                reader=shop.pipeline.replication_user,
                id="no",
            )
    assert shop.conn.execute("SELECT FROM cdc.signal").fetchall() == []
