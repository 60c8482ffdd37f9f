"""Documents outlive kill -9 of what makes and holds them, in the middle of a fan-out: of Spark's
Python workers, and of the broker. And topics that can't continue the state.
"""

import json
import random
import re
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psycopg
import redis

from cdc import client
from cdc.connectors.client import Connect
from cdc.kafka.topics import Topics
from cdc.runtime.context import Context
from cdc.sink.factory import sizes_reader
from tests.scenarios.test_documents import (
    cached,
    change,
    repeated,
    shop,
    wait_for_documents,
    without_other_sinks,
)
from tests.scenarios.test_failures import Pause, kill_workers
from tests.support.cache import cache
from tests.support.load import load
from tests.support.shop import read
from tests.support.wait import wait_until

if TYPE_CHECKING:
    from cdc.model.position import Position
    from tests.scenarios.conftest import World

CUSTOMER, DOCUMENTS = 100, 10_000
"""A customer, and how many orders they have: so many documents have the customer's name."""
LAST = 1_000_000
"""The customer's last name; those before it count from 1."""


def rename(connection: "psycopg.Connection[Any]", number: int) -> None:
    connection.execute("UPDATE customers SET name = %s WHERE id = %s", [str(number), CUSTOMER])


def test_documents_outlive_kills_of_workers_and_of_the_broker(world: "World") -> None:
    """While the customer is renamed again and again: a fan-out is under way."""
    shop(world, only_cache)
    read_sizes, pause = sizes_reader(world.pipeline), Pause()

    def is_amid_a_fan_out() -> bool:
        return bool(read_sizes()["dirty"]["order_docs"])

    def is_reported() -> bool:
        """Kill workers until a stream has lost one in the middle of its work, and tells so."""
        if pause.over and is_amid_a_fan_out() and kill_workers():
            pause.begin()
        return any(state.restarts.get("failure") for state in world.progress().values())

    products = client.view(world.file, "cache", "view.product_docs")
    with world.running():
        wait_for_documents(world, products)
        with load(world.dsn, rename, 0.5):
            wait_until(is_amid_a_fan_out, 60, "a fan-out")
            # Whoever waits for a view of other tables doesn't wait for the fan-out, which never ends.
            world.sql("UPDATE products SET name = 'seen' WHERE id = 50")
            wait_for_documents(world, products)
            assert cached(world, "product_docs", "50")["name"] == "seen"
            products.close()
            wait_until(is_reported, 60, "a stream to lose a worker")
        change(world, random.Random(5), 30)
        with psycopg.connect(world.dsn, autocommit=True) as connection:
            rename(connection, LAST)
        wait_until(is_amid_a_fan_out, 60, "a fan-out after the worker's end")
        world.stack.servers.kill("kafka")
        world.stack.servers.start("kafka")
        change(world, random.Random(6), 30)
        world.verified()
        assert_exactly_once(world)


def only_cache(world: "World") -> None:
    """One sink is enough: what is killed stands before all of them."""
    without_other_sinks(world)
    text = world.file.read_text()
    text = text.replace("  order_docs:\n", "  order_docs:\n    alerts: true\n")
    world.file.write_text(f"{text}  product_docs: {{root: public.products, to: [cache]}}\n")
    world.sql(
        "INSERT INTO products VALUES (50, 'new', 1)",
        f"INSERT INTO customers VALUES ({CUSTOMER}, '0')",
        f"INSERT INTO orders SELECT n, {CUSTOMER}, now()"
        f" FROM generate_series(1000, {999 + DOCUMENTS}) n",
    )


def assert_exactly_once(world: "World") -> None:
    """Who reads the topic, as far as it is committed, has the documents of the cache, which equal
    Postgres' own query; and no version of the name came after a later one, or twice: they are alerts.
    """
    assert repeated(world, "order_docs") == []
    records = read(world.pipeline.kafka, world.pipeline.view_topic("order_docs"))
    newest: dict[int, dict[str, Any] | None] = {}
    names: dict[int, int] = {}
    for record in records:
        number, document = record.key["id"], None
        if record.after:
            texts = {name: record.after[name] or "null" for name in ("customer", "items")}
            document = {**record.after, **{name: json.loads(texts[name]) for name in texts}}
        newest[number] = document
        if number >= 1000 and document and document["customer"]:
            version = int(document["customer"]["name"])
            assert names.get(number, 0) <= version
            names[number] = version
    expected = {number: document for number, document in newest.items() if document}
    assert list(names.values()) == [LAST] * DOCUMENTS
    begin = f"{world.name}:view.order_docs:"
    with redis.Redis.from_url(world.cache, decode_responses=True) as server:
        keys = list(server.scan_iter(f"{begin}*", count=5000))
        values: Any = server.mget(keys)
    documents = map(json.loads, values)
    assert {document["id"]: document for document in documents} == expected


RENEW = ("topics", "renew", "--table", "public.orders")


def test_a_topic_that_cannot_continue_the_state_is_read_again(world: "World") -> None:
    """It may have lost deletes, or was recreated: documents are made again, and documents of
    rows that were deleted meanwhile are removed.
    """
    shop(world, without_other_sinks)
    world.sql("INSERT INTO orders SELECT n, NULL, now(), true FROM generate_series(50, 53) n")
    topic = f"{world.name}.public.orders"
    with world.running(), Topics(world.pipeline.kafka) as kafka:
        assert_documents_equal(world)
        (before,) = kafka.ends([topic]).values()
    delete_unread(world, 51, before)
    wait_until(lambda: late_s(world) > 10, 30, "the tombstone to be of age")
    with Topics(world.pipeline.kafka) as kafka:
        kafka.override({topic: {"delete.retention.ms": "8000"}})
    assert not any(view["problem"] for view in state_views(world))
    with world.running(), Topics(world.pipeline.kafka) as kafka:
        assert_documents_equal(world)
        (before,) = kafka.ends([topic]).values()
    # Neither the old topic, which goes unread, nor the new one tells of this row.
    delete_unread(world, 52, before)
    assert world.json(*RENEW)["sent"] == ["public.orders"]
    with world.running():
        assert_documents_equal(world)
        assert order_documents(world) & {50, 51, 52, 53} == {50, 53}
        state_views(world)


def test_topics_are_renewed_while_a_run_is_at_work(world: "World") -> None:
    """Of a view, then of a table: the stream of documents waits for the topic, however long that
    takes, and doesn't end.
    """
    shop(world, without_other_sinks)
    with world.running():
        assert_documents_equal(world)
        for number, name in enumerate(("view.order_docs", "public.orders")):
            topic = f"{world.name}.{name}"
            # The first half of a renewal; `register` is the second.
            with (
                Topics(world.pipeline.kafka) as kafka,
                Connect(world.stack.endpoints.connect) as admin,
            ):
                if name == "public.orders":
                    admin.stop(world.name)
                kafka.remove([topic])
            change(world, random.Random(7 + number), 30)
            wait_until(partial(misses, world, topic), 60, "the documents to miss the topic")
            assert world.json("register")["created"] == [topic]
            if name == "view.order_docs":
                world.rebuild("cache", name)
            assert_documents_equal(world)
            assert "error" not in world.progress()["documents"].restarts


def misses(world: "World", topic: str) -> bool:
    """Whether the stream of documents has started without this topic, and says so."""
    return f"There is no topic {topic}" in (world.progress()["documents"].error or "")


def test_a_build_that_does_not_fit_ends_alone_before_anything_is_loaded(
    world: "World", tmp_path: Path
) -> None:
    """`run` says so and what helps; tables get into the sink as ever."""
    with cache(tmp_path / "server") as url, redis.Redis.from_url(url) as server:
        shop(world, many_customers, state=url)
        server.config_set("maxmemory", 800_000)
        ended = world.cdc("run", "--until-caught-up", code=7)
        assert "doesn't fit into the server at" in ended.stderr
        assert "state-too-large" in ended.stderr
        (helpful,) = set(re.findall(r"redis-cli .* CONFIG SET maxmemory (\d+)", ended.stderr))
        assert server.keys() == []
        with redis.Redis.from_url(world.cache) as readers:
            assert readers.exists(f"{world.name}:public.customers:{CUSTOMER}")
        server.config_set("maxmemory", helpful)
        world.cdc("run", "--until-caught-up")
        world.verified()


def many_customers(world: "World") -> None:
    without_other_sinks(world)
    world.sql(
        f"INSERT INTO customers SELECT n, 'name', 'x' FROM generate_series({CUSTOMER}, 10_000) n",
        "ANALYZE",
    )


def delete_unread(world: "World", number: int, before: "Position") -> None:
    """Delete an order while no run is at work, and wait until the topic has it."""
    world.sql(f"DELETE FROM orders WHERE id = {number}")
    topic = f"{world.name}.public.orders"
    with Topics(world.pipeline.kafka) as kafka:
        wait_until(lambda: kafka.ends([topic])[topic] != before, 30, "the delete in the topic")


def state_views(world: "World") -> list[dict[str, Any]]:
    """The tables of the state, as `status` has them; no finding names a command that there isn't."""
    status = world.json("status")
    assert "rebuild documents" not in str(status)
    (views,) = [sink["views"] for sink in status["sinks"] if sink["name"] == "documents"]
    return list(views)


def late_s(world: "World") -> float:
    (view,) = [view for view in state_views(world) if view["table"] == "public.orders"]
    return float(view["lag_seconds"] or 0)


def order_documents(world: "World") -> set[int]:
    """The ids of the documents that readers see."""
    begin = f"{world.name}:view.order_docs:"
    with redis.Redis.from_url(world.cache, decode_responses=True) as server:
        return {int(key.removeprefix(begin)) for key in server.scan_iter(f"{begin}*", count=5000)}


def assert_documents_equal(world: "World") -> None:
    """Compare documents alone: the cache's view of orders waits for a rebuild."""
    results = world.verified(Context(world.file, world.folder).views)
    assert {result.table for result in results} == {"view.order_docs", "view.customer_docs"}
