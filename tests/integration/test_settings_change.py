"""Another `key` in the pipeline file: what rows are changes without an event, so they are sent again."""

from tests.support.shop import Shop
from tests.support.wait import wait_until

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
