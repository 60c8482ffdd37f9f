"""Tables that come to a running pipeline and leave it, and a second snapshot of the same topics."""

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import psycopg
import pytest

from cdc.capture.renewal import renew
from cdc.capture.vanished import Removal, remove_vanished
from cdc.connectors.client import Connect, takes_snapshot
from cdc.kafka.clients import kafka
from cdc.kafka.ledger import Ledger
from cdc.kafka.topics import Topics
from cdc.model.position import Position
from tests.support.shop import Shop
from tests.support.wait import wait_until

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

ORDERS = {"table": "shop.orders", "partitions": 2, "exclude": ["hidden"]}
NOTES = {"table": "shop.notes", "partitions": 1}


def floors(shop: Shop) -> dict[str, int]:
    return dict(
        shop.conn.execute("SELECT table_name, (lsn - '0/0')::bigint FROM cdc.truncation").fetchall()
    )


def reads(shop: Shop, table: str) -> list[Any]:
    return [change.key["id"] for change in shop.log(table) if change.op == "r"]


def test_a_table_that_comes_to_a_running_pipeline(shop: Shop) -> None:
    """Rows from before, from during and from after its registration arrive; the others aren't sent again."""
    few = shop.capturing(ORDERS)
    few.migrate()
    few.register()
    shop.conn.execute("CREATE TABLE shop.notes (id int PRIMARY KEY, note text)")
    shop.conn.execute("INSERT INTO shop.notes SELECT n, 'before' FROM generate_series(1, 500) n")
    more = shop.capturing(ORDERS, NOTES)
    more.migrate()
    stop, last = threading.Event(), [1000]

    def write() -> None:
        with psycopg.connect(shop.pipeline.source.dsn, autocommit=True) as conn:
            while not stop.wait(0.01):
                last[0] += 1
                conn.execute("INSERT INTO shop.notes VALUES (%s, 'during')", [last[0]])
                conn.execute(
                    "UPDATE shop.notes SET note = 'changed' WHERE id = %s", [last[0] % 500 + 1]
                )

    thread = threading.Thread(target=write)
    thread.start()
    try:
        result = more.register()
    finally:
        stop.set()
        thread.join()
    assert (result.changed, result.sent) == (True, ["shop.notes"])
    assert last[0] > 1000
    shop.conn.execute(
        "INSERT INTO shop.notes VALUES (999, 'after'); DELETE FROM shop.notes WHERE id = 1"
    )
    notes: dict[int, str] = dict(shop.conn.execute("SELECT id, note FROM shop.notes").fetchall())

    def arrived() -> bool:
        return {key: row["note"] for key, row in more.rows("shop.notes").items() if row} == notes

    wait_until(arrived, 30, "every row of the new table")
    assert sorted(reads(more, "shop.orders")) == list(range(1, 101))
    # Once more: nothing is new.
    result = more.register()
    assert (result.changed, result.sent) == (False, [])
    assert floors(shop) == {}


def test_a_table_that_leaves_and_comes_back(shop: Shop) -> None:
    """Its topic stays; what happened meanwhile has no events, so that everything in it is dead then."""
    shop.migrate()
    shop.register()
    few = shop.capturing(ORDERS)
    few.migrate()
    result = few.register()
    assert (result.changed, result.sent) == (True, [])
    assert f"{shop.pipeline.pipeline}.shop.counters" in shop.topics()
    shop.conn.execute(
        "INSERT INTO shop.counters VALUES (11, 11); DELETE FROM shop.counters WHERE id < 6"
    )
    shop.conn.execute("UPDATE shop.orders SET note = 'b'")
    wait_until(
        lambda: {row["note"] for row in few.rows("shop.orders").values()} == {"b"},
        20,
        "the other table",
    )
    assert 11 not in shop.rows("shop.counters")
    shop.migrate()
    assert shop.register().sent == ["shop.counters"]
    wait_until(lambda: 11 in shop.rows("shop.counters"), 20, "what was written meanwhile")
    assert living_ids(shop) == [6, 7, 8, 9, 10, 11]
    # The same, whatever became of the connector meanwhile.
    few.migrate()
    few.register()
    shop.conn.execute(
        "INSERT INTO shop.counters VALUES (12, 12); DELETE FROM shop.counters WHERE id < 8"
    )
    few.stop()
    shop.migrate()
    assert shop.register().sent == ["shop.counters"]
    wait_until(lambda: 12 in shop.rows("shop.counters"), 20, "what was written meanwhile")
    assert living_ids(shop) == [8, 9, 10, 11, 12]


def living_ids(shop: Shop) -> list[int]:
    return sorted(change.key["id"] for change in shop.living("shop.counters"))


def test_a_connector_that_was_deleted_comes_back_with_more_tables(shop: Shop) -> None:
    few = shop.capturing(ORDERS)
    few.migrate()
    few.register()
    few.stop()
    shop.conn.execute("UPDATE shop.orders SET note = 'b' WHERE id = 1")
    shop.migrate()
    assert shop.register().sent == ["shop.counters"]
    wait_until(lambda: len(reads(shop, "shop.counters")) == 10, 20, "the new table")
    wait_until(lambda: shop.rows("shop.orders")[1]["note"] == "b", 20, "what was written meanwhile")
    assert len(reads(shop, "shop.orders")) == 100


def crash(*_: object) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    "step", ["cdc.capture.connector.request_backfills", "cdc.connectors.client.Connect.put"]
)
def test_a_registration_that_ends_half_way(
    shop: Shop, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    few = shop.capturing(ORDERS)
    few.migrate()
    few.register()
    shop.migrate()
    with monkeypatch.context() as patch:
        patch.setattr(step, crash)
        with pytest.raises(KeyboardInterrupt):
            shop.register()
    shop.conn.execute("INSERT INTO shop.counters VALUES (11, 11)")
    assert shop.register().sent == ["shop.counters"]
    wait_until(lambda: shop.rows("shop.counters").keys() == set(range(1, 12)), 20, "the new table")


def test_a_renewal_that_ends_half_way(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    """The topic is there again, empty: the next registration has the rows sent."""
    shop.migrate()
    shop.register()
    for step in ("cdc.kafka.ledger.Ledger.add_shapes", "cdc.capture.connector.request_backfills"):
        with monkeypatch.context() as patch:
            patch.setattr(step, crash)
            with pytest.raises(KeyboardInterrupt):
                renew(shop.pipeline, shop.tables, [shop.table("shop.counters")])
        assert shop.register().sent == ["shop.counters"]
        wait_until(lambda: shop.rows("shop.counters").keys() == set(range(1, 11)), 20, "the rows")
        # Once more: the topic is the one that was registered.
        assert shop.register().sent == []


def forget(shop: Shop, *, slot: str) -> None:
    """Delete rows while the connector's offsets are lost, and its slot is kept or dropped."""
    shop.migrate()
    shop.register()
    shop.stop(forget=True)
    if slot == "dropped":
        shop.drop_slot()
    shop.conn.execute(
        "DELETE FROM shop.counters WHERE id < 6; DELETE FROM shop.orders WHERE id < 50"
    )
    assert floors(shop) == {}


def test_a_second_snapshot_from_the_same_slot_leaves_no_ghosts(shop: Shop) -> None:
    """The slot sends changes from before the snapshot after it; the floor between them says that they are dead."""
    forget(shop, slot="kept")
    shop.register()
    floor_by_table = floors(shop)
    assert floor_by_table.keys() == {"shop.orders", "shop.counters"}
    for table, ids in (("shop.counters", range(6, 11)), ("shop.orders", range(50, 101))):
        alive = [change for change in shop.log(table) if change.lsn >= floor_by_table[table]]
        assert sorted(change.key["id"] for change in alive if change.op == "r") == list(ids)
        assert {change.op for change in alive} == {"r"}
    table_names = {change.key["table_name"] for change in shop.log("cdc.truncation")}
    assert table_names == floor_by_table.keys()


def snapshots(shop: Shop) -> list[dict[str, Position]]:
    with Topics(shop.kafka) as topics:
        return list(Ledger(shop.pipeline, topics).read().snapshots.values())


def present(shop: Shop) -> dict[str, set[int]]:
    """The rows that a view which is built from the topics has."""
    return {
        table: {row_id for row_id, row in shop.rows(table).items() if row}
        for table in ("shop.orders", "shop.counters")
    }


ALL = {"shop.orders": {*range(1, 101)}, "shop.counters": {*range(1, 11)}}
KEPT = {"shop.orders": {*range(50, 101)}, "shop.counters": {*range(6, 11)}}


def test_a_snapshot_with_a_new_slot_updates_rows_in_place(
    shop: Shop, spark: "SparkSession"
) -> None:
    """No floor empties the views. The rows that are gone go once the snapshot has ended; repeating that
    changes nothing.
    """
    forget(shop, slot="dropped")
    shop.register()
    assert floors(shop) == {}
    assert present(shop) == ALL
    assert [entry.keys() for entry in snapshots(shop)] == [
        {shop.pipeline.topic(table) for table in ALL}
    ]
    # As if the run that has written the tombstones had been killed before it said so.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("cdc.kafka.ledger.Ledger.end_snapshot", crash)
        with pytest.raises(KeyboardInterrupt):
            remove_vanished(spark, shop.pipeline)
    assert present(shop) == KEPT
    shop.conn.execute("INSERT INTO shop.counters VALUES (1, 1)")
    wait_until(lambda: 1 in present(shop)["shop.counters"], 20, "the row that is back")
    # Two runs at once.
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda _: remove_vanished(spark, shop.pipeline), range(2)))
    assert present(shop) == {**KEPT, "shop.counters": {1, *range(6, 11)}}
    assert snapshots(shop) == []
    assert floors(shop) == {}


def test_a_row_that_comes_back_meanwhile_stays(shop: Shop, spark: "SparkSession") -> None:
    """It is found to be gone, and is in the topic again before or after its tombstone is written."""
    forget(shop, slot="dropped")
    shop.register()
    (starts,) = snapshots(shop)
    table = shop.table("shop.counters")
    with Topics(shop.kafka) as topics:
        end = topics.ends([table.topic])[table.topic]
    removal = Removal(shop.kafka, shop.pipeline.pipeline, table, starts[table.topic], end)
    shop.conn.execute("INSERT INTO shop.counters VALUES (3, 33)")
    wait_until(lambda: shop.rows("shop.counters")[3]["n"] == 33, 20, "the row that is back")
    assert not removal.delete({"3": [b'{"id":3}']}, end.offsets)
    assert present(shop)["shop.counters"] == ALL["shop.counters"]
    assert not removal.run(spark)
    assert present(shop)["shop.counters"] == {3, *KEPT["shop.counters"]}
    remove_vanished(spark, shop.pipeline)
    assert present(shop)["shop.counters"] == {3, *KEPT["shop.counters"]}


def test_a_killed_removal_deletes_nothing_and_holds_up_nothing(
    shop: Shop, spark: "SparkSession"
) -> None:
    """It leaves a transaction open, with tombstones that weren't checked. The next one ends it."""
    forget(shop, slot="dropped")
    shop.register()
    topic = shop.pipeline.topic("shop.counters")
    killed = kafka.KafkaProducer(
        bootstrap_servers=shop.kafka, transactional_id=f"{shop.pipeline.pipeline}.vanished"
    )
    killed.init_transactions()
    killed.begin_transaction()
    for number in range(1, 11):
        killed.send(topic, key=b'{"id":%d}' % number).get(10)
    remove_vanished(spark, shop.pipeline)
    assert present(shop) == KEPT
    killed.close(timeout=0)


def test_nothing_is_removed_during_a_snapshot(
    shop: Shop, spark: "SparkSession", monkeypatch: pytest.MonkeyPatch
) -> None:
    """A registration that is killed before it starts the connector has recorded where the snapshot begins."""
    forget(shop, slot="dropped")
    for step in (
        "cdc.kafka.ledger.Ledger.begin_snapshot",
        "cdc.control.registrations.write",
        "cdc.connectors.client.Connect.resume",
    ):
        with monkeypatch.context() as patch:
            patch.setattr(step, crash)
            # What is written last is written only if it has changed.
            patch.setattr("cdc.control.registrations.Registration.__eq__", lambda *_: False)
            with pytest.raises(KeyboardInterrupt):
                shop.register()
        remove_vanished(spark, shop.pipeline)
        assert present(shop) == ALL
    shop.register()
    assert floors(shop) == {}
    remove_vanished(spark, shop.pipeline)
    assert present(shop) == KEPT
    assert snapshots(shop) == []


def test_a_first_snapshot_and_an_ordinary_restart_raise_no_floor(shop: Shop) -> None:
    shop.migrate()
    shop.register()
    with Connect(shop.connect) as connect:
        assert not takes_snapshot(connect.offsets(shop.pipeline.pipeline))
    shop.stop()
    shop.register()
    assert floors(shop) == {}
    assert takes_snapshot([])
    assert takes_snapshot([{"snapshot": "INITIAL", "snapshot_completed": False}])
    assert not takes_snapshot([{"snapshot": "INITIAL", "snapshot_completed": True}])
    assert not takes_snapshot([{"snapshot": "BLOCKING", "snapshot_completed": False}])
