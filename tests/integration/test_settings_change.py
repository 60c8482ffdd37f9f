"""Another `key` or `events` in the pipeline file: what rows are changes without an event, so they are
sent again.
"""

import psycopg
import pytest

from cdc.control import registrations
from cdc.kafka.topics import Topics
from tests.support.shop import Shop
from tests.support.wait import wait_until

ALL_OF_ORDERS = {"table": "shop.orders", "partitions": 2}
ORDERS = {**ALL_OF_ORDERS, "exclude": ["hidden"]}
COUNTERS = {"table": "shop.counters", "partitions": 1}
SEATS = """
CREATE TABLE shop.seats (a int NOT NULL, b int NOT NULL, n int);
CREATE UNIQUE INDEX ON shop.seats (a);
CREATE UNIQUE INDEX ON shop.seats (b);
INSERT INTO shop.seats SELECT g, -g, 0 FROM generate_series(1, 5) g;
"""


def reads(shop: Shop, table: str) -> int:
    return sum(change.op == "r" for change in shop.log(table))


def test_another_key_voids_what_the_topic_holds(shop: Shop) -> None:
    shop.conn.execute(SEATS)
    first = shop.capturing({"table": "shop.seats", "key": ["a"], "partitions": 1})
    first.migrate()
    first.register()
    shop.conn.execute("DELETE FROM shop.seats WHERE a = 1")
    wait_until(lambda: shop.rows("shop.seats").get(1, ...) is None, 20, "the stream")
    second = shop.capturing({"table": "shop.seats", "key": ["b"], "partitions": 1})
    second.migrate()
    assert second.register().sent == ["shop.seats"]
    wait_until(lambda: reads(second, "shop.seats") == 9, 20, "the rows again")
    assert [change.key for change in second.living("shop.seats")] == [
        {"b": -n} for n in range(5, 1, -1)
    ]
    assert second.register().sent == []


def test_a_table_becomes_one_of_events_and_one_of_rows_again(shop: Shop) -> None:
    """What was sent before is dead: the deletes of rows, and then the events that were purged."""
    shop.migrate()
    shop.register()
    shop.conn.execute("DELETE FROM shop.counters WHERE id = 1")
    wait_until(lambda: shop.rows("shop.counters").get(1, ...) is None, 20, "the delete")
    events = shop.capturing(ORDERS, {**COUNTERS, "events": True})
    events.migrate()
    assert events.register().sent == ["shop.counters"]
    wait_until(lambda: reads(events, "shop.counters") == 19, 20, "the events")
    with pytest.raises(psycopg.Error, match=r"an event of shop\.counters can't be changed"):
        shop.conn.execute("UPDATE shop.counters SET n = 0 WHERE id = 2")
    shop.conn.execute("DELETE FROM shop.counters WHERE id = 2")
    wait_until(lambda: events.rows("shop.counters").get(2, ...) is None, 20, "the purge")
    assert ids(events) == list(range(2, 11))
    rows = shop.capturing(ORDERS, COUNTERS)
    rows.migrate()
    assert rows.register().sent == ["shop.counters"]
    wait_until(lambda: reads(rows, "shop.counters") == 27, 20, "the rows")
    assert ids(rows) == list(range(3, 11))
    shop.conn.execute("UPDATE shop.counters SET n = 0 WHERE id = 3")


def ids(shop: Shop) -> list[int]:
    """The rows of a table that its topic has, dead ones left out."""
    return sorted({change.key["id"] for change in shop.living("shop.counters") if change.op != "d"})


def test_a_column_that_is_captured_or_no_longer_is_changes_all_rows(shop: Shop) -> None:
    shop.migrate()
    shop.register()
    full_shop = shop.capturing(ALL_OF_ORDERS, COUNTERS)
    full_shop.migrate()
    assert full_shop.register().sent == ["shop.orders"]
    wait_until(
        lambda: {row["hidden"] for row in shop.rows("shop.orders").values()} == {"secret"},
        20,
        "the column",
    )
    less = shop.capturing({**ALL_OF_ORDERS, "exclude": ["hidden", "note"]}, COUNTERS)
    less.migrate()
    assert less.register().sent == ["shop.orders"]
    wait_until(
        lambda: {tuple(row) for row in shop.rows("shop.orders").values()} == {("id", "total")},
        20,
        "without it",
    )
    # Once more: nothing is new, and the other table never was.
    result = less.register()
    assert (result.changed, result.sent) == (False, [])
    assert reads(shop, "shop.counters") == 10
    with Topics(shop.kafka) as topics:
        registration = registrations.read(topics, shop.pipeline)
    # The log holds its values still, so that whoever reads it leaves them out.
    assert registration is not None
    assert set(registration.tables["shop.orders"].withdrawn) == {"hidden", "note"}
