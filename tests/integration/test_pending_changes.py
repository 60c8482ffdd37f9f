"""The table of a change that the connector couldn't send, found in what its slot still holds."""

from cdc.capture.aside import Unsendable, find_table
from cdc.model.obstacle import Obstacle
from tests.support.shop import Shop

CAPTURED = ("shop.orders", "shop.counters")
LARGEST = Unsendable(Obstacle.TOO_LARGE)
PENDING = """
SELECT lsn - '0/0'::pg_lsn FROM pg_logical_slot_peek_binary_changes(
    %(slot)s::text::name, NULL, NULL, 'proto_version', '1', 'publication_names', %(slot)s::text)
WHERE chr(get_byte(data, 0)) IN ('I', 'U', 'D')
"""


def test_the_largest_and_the_one_at_an_lsn(shop: Shop) -> None:
    shop.migrate()
    slot = shop.pipeline.pipeline
    shop.conn.execute("SELECT pg_create_logical_replication_slot(%s, 'pgoutput')", [slot])
    shop.conn.execute(b"UPDATE shop.counters SET n = 7 WHERE id = 1")
    shop.conn.execute(b"UPDATE shop.orders SET note = repeat('x', 10000) WHERE id = 1")
    shop.conn.execute(b"DELETE FROM shop.counters WHERE id = 2")
    lsns = [int(lsn) for (lsn,) in shop.conn.execute(PENDING, {"slot": slot}).fetchall()]
    tables = [
        find_table(shop.conn, slot, Unsendable(Obstacle.UNREADABLE, lsn=lsn), CAPTURED)
        for lsn in lsns
    ]
    assert tables == ["shop.counters", "shop.orders", "shop.counters"]
    assert find_table(shop.conn, slot, LARGEST, CAPTURED) == "shop.orders"
    # Of a table that isn't captured nothing may be concluded.
    assert find_table(shop.conn, slot, LARGEST, ("shop.counters",)) is None
    beyond = Unsendable(Obstacle.UNREADABLE, lsn=lsns[-1] + 1)
    assert find_table(shop.conn, slot, beyond, CAPTURED) is None
    # Looking moves nothing: the connector still gets all of it.
    assert len(shop.conn.execute(PENDING, {"slot": slot}).fetchall()) == len(lsns)


def test_without_a_slot_nothing_is_found(shop: Shop) -> None:
    assert find_table(shop.conn, shop.pipeline.pipeline, LARGEST, CAPTURED) is None
    named = Unsendable(Obstacle.KEYLESS, "shop.orders")
    assert find_table(shop.conn, shop.pipeline.pipeline, named, CAPTURED) == "shop.orders"
