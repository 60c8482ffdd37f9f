"""Another Postgres behind the same name: never in silence, and nothing of the one before rises from the dead."""

from collections.abc import Iterator
from dataclasses import replace

import pytest

from cdc import client
from cdc.apply.schema_follower import SchemaFollower
from cdc.capture.connector import register
from cdc.client import Token, View
from cdc.connectors.client import Connect
from cdc.control import registrations
from cdc.errors import AnotherServer
from cdc.kafka.topics import Topics
from cdc.observe.collection import collect
from cdc.postgres import source
from cdc.quarantine.log import QuarantineKey, QuarantineLog
from cdc.sinks.memory import Memory
from tests.support.postgres import strict_postgres
from tests.support.shop import TABLES, Shop
from tests.support.wait import wait_until

pytestmark = pytest.mark.own_source


@pytest.fixture
def moved(shop: Shop) -> Iterator[Shop]:
    """The shop, restored on a server that was made just now, without some rows."""
    with strict_postgres(wal_level="logical") as dsn, source.connect(dsn) as conn:
        conn.execute(TABLES)
        conn.execute("DELETE FROM shop.counters WHERE id < 6")
        changed = shop.pipeline.source.model_copy(update={"dsn": dsn})
        yield replace(
            shop, conn=conn, pipeline=shop.pipeline.model_copy(update={"source": changed})
        )
        shop.stop(forget=True)


def refused(shop: Shop) -> str:
    with pytest.raises(AnotherServer) as caught:
        shop.register()
    with Topics(shop.kafka) as topics:
        registration = registrations.read(topics, shop.pipeline)
    assert registration is not None
    # `cdc run`, at every start of a query.
    with pytest.raises(AnotherServer):
        SchemaFollower(lambda: shop.pipeline, shop.tables)([], registration)
    (finding,) = collect(shop.pipeline, positions={}).findings
    assert finding.code == "another-server"
    assert finding.message.startswith(caught.value.message)
    return f"{caught.value.message} {caught.value.hint}"


def test_a_server_that_takes_the_place_of_another(shop: Shop, moved: Shop) -> None:
    for n in range(20):
        shop.conn.execute("INSERT INTO shop.orders (id) VALUES (%s)", [1000 + n])
        shop.conn.execute("SELECT pg_switch_wal()")
    shop.migrate()
    shop.register()
    view = View(shop.pipeline, Memory("memory"), shop.table("shop.counters"))
    old_token = client.token(shop.conn)
    assert wait_until(
        lambda: view.barrier(Token.parse(old_token)), 20, "the token to be in the log"
    )
    moved.migrate()
    message = refused(moved)
    assert "another server" in message
    assert "register --another-server" in message

    of_former_server = QuarantineKey("cache", moved.table("shop.counters").topic, 0, 0, "1")
    with Topics(moved.kafka) as topics:
        quarantine = moved.pipeline.quarantine_topic
        topics.write(quarantine, [(of_former_server.to_key(), b'{"reason":"too large"}')])
        register(moved.pipeline, moved.tables, another_server=True)
        assert not QuarantineLog(topics, moved.pipeline).read(), "a redrive brings its row back"
    assert sorted(change.key["id"] for change in moved.living("shop.counters")) == [6, 7, 8, 9, 10]
    # What went before has higher positions: the twin of a comparison by LSN alone.
    log = moved.log("shop.counters")
    assert min(change.lsn for change in log[:10]) > max(change.lsn for change in log[10:])
    first = moved.floors()
    assert first.number("shop.counters") > max(change.lsn for change in log)
    assert moved.register().changed is False

    # A token is of a lower place than what was heard of the other server: that proves nothing.
    with Connect(moved.connect) as connect:
        connect.stop(moved.pipeline.pipeline)
        new_token = client.token(moved.conn)
        assert Token.parse(new_token).lsn < Token.parse(old_token).lsn
        assert view.barrier(Token.parse(new_token)) is None
        connect.resume(moved.pipeline.pipeline)
    barrier = wait_until(
        lambda: view.barrier(Token.parse(new_token)), 30, "the token to be in the log"
    )
    assert barrier is not None
    assert barrier[0].offsets[0] >= len(log)

    # The new server's TRUNCATE, at a low place: rows of the old one stay dead, and so do its own
    # from before.
    moved.conn.execute("TRUNCATE shop.counters")
    moved.conn.execute("INSERT INTO shop.counters VALUES (99, 99)")
    wait_until(
        lambda: [change.key["id"] for change in moved.living("shop.counters")] == [99],
        20,
        "the floor",
    )
    assert moved.floors().number("shop.counters") > first.number("shop.counters")
    view.close()
