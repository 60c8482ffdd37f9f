"""Cases of documents that take the connector and sinks."""

import threading
from pathlib import Path
from typing import TYPE_CHECKING

import psycopg
import redis

from cdc import client
from cdc.kafka.topics import Topics
from tests.scenarios.test_documents import cached, shop, without_other_sinks
from tests.support.cache import CacheServer
from tests.support.shop import read
from tests.support.wait import wait_until

if TYPE_CHECKING:
    from tests.scenarios.conftest import World

NESTED = 10_000
"""Most nested objects that an index takes in a document: index.mapping.nested_objects.limit."""


def applied(world: "World", sink: str, view: str) -> None:
    """Wait until a view in a sink holds all that is committed now."""
    with psycopg.connect(world.dsn) as connection:
        token = client.token(connection)
    waiting = client.view(world.file, sink, f"view.{view}")
    client.wait_for(waiting, token, timeout_s=180)
    waiting.close()


def codes(world: "World") -> set[tuple[str, str | None]]:
    return {(finding["code"], finding["sink"]) for finding in world.json("status")["findings"]}


def test_a_document_that_an_index_refuses_is_refused_there_alone(world: "World") -> None:
    shop(world)
    text = world.file.read_text()
    twice = """
      same_items:
        {table: public.items, on: {id: order_id}, many: true, limit: 10000, columns: [line]}
"""
    text = text.replace(
        "      customer: {table", f"{twice.strip(chr(10))}\n      customer: {{table", 1
    )
    world.file.write_text(text.replace("        order_by: [line]\n", "        limit: 10000\n", 1))
    with world.running():
        world.verified()
        lines = NESTED // 2 + 1
        world.sql(
            "INSERT INTO orders VALUES (500, NULL, now(), true), (501, NULL, now(), true)",
            f"INSERT INTO items SELECT 500, n, 1, 1 FROM generate_series(1, {lines}) n",
        )
        for sink in ("cache", "warehouse", "search"):
            applied(world, sink, "order_docs")
        assert len(cached(world, "order_docs", "500")["items"]) == lines
        wait_until(lambda: ("records-quarantined", "search") in codes(world), 60, "the refusal")
        assert not {sink for code, sink in codes(world) if code == "records-quarantined"} - {
            "search"
        }
        # The other documents of the batch are there, and the next one of this row is taken.
        world.sql("DELETE FROM items WHERE order_id = 500 AND line > 3")
        applied(world, "search", "order_docs")
        world.verified()


def _has_documents(world: "World") -> bool:
    topic = world.pipeline.view_topic("order_docs")
    with Topics(world.pipeline.kafka) as kafka:
        return sum(kafka.ends([topic])[topic].offsets) > 0


def test_no_document_lacks_a_row_that_was_there_at_the_beginning(world: "World") -> None:
    """Writers write while the connector takes its snapshot and while the state is loaded."""
    stopping = threading.Event()

    def write() -> None:
        with psycopg.connect(world.dsn, autocommit=True) as connection:
            number = 1000
            while not stopping.wait(0.005):
                number += 1
                connection.execute(
                    "INSERT INTO orders VALUES (%s, %s, now())", [number, 200 + number % 800]
                )
                connection.execute("INSERT INTO items VALUES (%s, 0, 300, 1)", [number])
                connection.execute(
                    "UPDATE customers SET city = %s WHERE id = %s",
                    [str(number), 200 + number % 800],
                )

    writer = threading.Thread(target=write, daemon=True)

    def begin(world: "World") -> None:
        without_other_sinks(world)
        world.sql(
            "INSERT INTO customers SELECT n, 'C' FROM generate_series(200, 999) n",
            "INSERT INTO products VALUES (300, 'P', 1)",
        )
        writer.start()

    try:
        shop(world, begin)
        with world.running():
            # The state has been loaded once a document is there; what is written from then on is
            # only a backlog, which a machine may take longer for than the writer.
            wait_until(lambda: _has_documents(world), 180, "the first document")
            stopping.set()
            writer.join()
            world.verified()
    finally:
        stopping.set()
    records = read(world.pipeline.kafka, world.pipeline.view_topic("order_docs"))
    documents = [record.after for record in records if record.after]
    assert len([row for row in documents if row["id"] > 1000]) > 100
    assert [row for row in documents if row["id"] > 1000 and row["customer"] is None] == []
    assert [row for row in documents if '"product":null' in row["items"] and row["id"] > 1000] == []


def test_a_sink_that_is_down_delays_no_other_and_a_new_one(world: "World", tmp_path: Path) -> None:
    shop(world)
    world.sql("INSERT INTO orders VALUES (700, NULL, now(), true)")
    with world.running():
        applied(world, "cache", "order_docs")
    # A sink that is added later gets the documents from the beginning of their topic.
    late = CacheServer(tmp_path / "late")
    entry = f'  late: {{type: redis, url: "{late.url}", prefix: late}}\n'
    text = world.file.read_text().replace("  warehouse: {type", f"{entry}  warehouse: {{type", 1)
    world.file.write_text(text.replace("to: [search, cache, ", "to: [late, search, cache, ", 1))
    with world.running():
        applied(world, "late", "order_docs")
        with redis.Redis.from_url(late.url) as server:
            assert server.exists("late:view.order_docs:700")
        # And goes away: the documents, and those in the other sinks, go on.
        late.kill()
        wait_until(lambda: ("sink-waiting", "late") in codes(world), 120, "the sink to be missed")
        for number in range(701, 711):
            world.sql(f"INSERT INTO orders VALUES ({number}, NULL, now(), true)")
        for sink in ("cache", "search"):
            applied(world, sink, "order_docs")
        assert cached(world, "order_docs", "710")["id"] == 710
        assert {sink for code, sink in codes(world) if code.startswith("sink-")} == {"late"}
        # Back, and empty: it is filled again.
        late.start()
        applied(world, "late", "order_docs")
        world.verified()
        with redis.Redis.from_url(late.url) as server:
            assert server.exists("late:view.order_docs:710")
    late.kill()
