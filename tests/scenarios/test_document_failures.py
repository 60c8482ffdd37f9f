"""Documents outlive kill -9 of what makes and holds them, in the middle of a fan-out: of Spark's
Python workers, and of the broker.
"""

import json
import random
import re
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
import redis

from cdc.client import read_your_writes as client
from cdc.sink.factory import sizes_reader
from tests.scenarios.test_documents import cached, change, compare, shop, wait_for_documents
from tests.scenarios.test_failures import Pause, kill_workers
from tests.support.load import load
from tests.support.shop import read
from tests.support.wait import wait_until

if TYPE_CHECKING:
    from tests.scenarios.conftest import World

pytestmark = pytest.mark.timeout(600)
CUSTOMER, DOCUMENTS = 100, 10_000
"""A customer, and how many orders they have: so many documents have the customer's name."""
LAST = 1_000_000
"""The customer's last name; those before it count from 1."""


def rename(connection: "psycopg.Connection[Any]", number: int) -> None:
    connection.execute("UPDATE customers SET name = %s WHERE id = %s", [str(number), CUSTOMER])


def test_case_47_documents_outlive_kills_of_workers_and_of_the_broker(world: "World") -> None:
    """While the customer is renamed again and again: a fan-out is under way."""
    shop(world, only_cache)
    read_sizes, pause = sizes_reader(world.pipeline), Pause()

    def is_amid_a_fan_out() -> bool:
        return bool(read_sizes()["dirty"]["order_docs"])

    def is_told() -> bool:
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
            wait_until(is_told, 60, "a stream to lose a worker")
        change(world, random.Random(5), 30)
        with psycopg.connect(world.dsn, autocommit=True) as connection:
            rename(connection, LAST)
        wait_until(is_amid_a_fan_out, 60, "a fan-out after the worker's end")
        world.stack.servers.kill("kafka")
        world.stack.servers.start("kafka")
        change(world, random.Random(6), 30)
        compare(world)
        assert_exactly_once(world)


def only_cache(world: "World") -> None:
    """One sink is enough: what is killed stands before all of them."""
    text = re.sub(r"  (search|warehouse): \{.*\n", "", world.file.read_text())
    text = text.replace("[search, cache, warehouse]", "[cache]")
    world.file.write_text(f"{text}  product_docs: {{root: public.products, to: [cache]}}\n")
    world.sql(
        "INSERT INTO products VALUES (50, 'new', 1)",
        f"INSERT INTO customers VALUES ({CUSTOMER}, '0')",
        f"INSERT INTO orders SELECT n, {CUSTOMER}, now()"
        f" FROM generate_series(1000, {999 + DOCUMENTS}) n",
    )


def assert_exactly_once(world: "World") -> None:
    """Who reads the topic, as far as it is committed, has the documents of the cache, which equal
    Postgres' own query; and no version of the name came after a later one.
    """
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
