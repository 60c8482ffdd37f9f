"""Partitions added to a topic: keys move, so their records have no order; every verb says so and what repairs it."""

import json
import random
from collections.abc import Callable
from typing import TYPE_CHECKING

import psycopg
import pytest

from cdc import client
from cdc.connectors.client import Connect
from cdc.errors import CdcError, ConnectorError
from cdc.kafka.clients import kafka
from cdc.kafka.topic_setup import check_topics, ensure_topics
from cdc.kafka.topics import Topics
from cdc.verify import barrier
from tests.scenarios.test_documents import change, shop, without_other_sinks
from tests.scenarios.test_retention import catch_up
from tests.support import bad_records, http
from tests.support.wait import wait_until

if TYPE_CHECKING:
    from tests.scenarios.conftest import World

ITEMS = "public.items"
RENEW = f"cdc -p FILE topics renew --table {ITEMS}"


def refused(verb: Callable[[], object]) -> CdcError:
    with pytest.raises(ConnectorError) as caught:
        verb()
    assert caught.value.exit_code == 5
    return caught.value


def test_partitions_that_were_added_are_told_and_repaired(world: "World") -> None:
    """What is in quarantine of the former topic is settled: its places name other records of the new
    one, or none, so a redrive would write the former row over the present one, or end the stream.
    """
    world.sql(
        "CREATE TABLE items (id int PRIMARY KEY, n int)",
        "INSERT INTO items SELECT n, 0 FROM generate_series(1, 40) n",
    )
    world.begin(f"{{table: {ITEMS}, partitions: 2}}")
    topic, bootstrap = f"{world.name}.{ITEMS}", world.stack.endpoints.kafka
    with world.running():
        world.settle()
        refuse_a_row_of_each_partition(world)
    cache = client.view(world.file, "cache", ITEMS)
    with psycopg.connect(world.dsn) as connection:
        token = client.token(connection)
    with kafka.KafkaAdminClient(bootstrap_servers=bootstrap) as admin:
        admin.create_partitions({topic: 3})
    with Topics(bootstrap) as topics:
        wait_until(
            lambda: topics.ends([topic])[topic].partition_count == 3, 10, "the third partition"
        )
        verbs: list[Callable[[], object]] = [
            lambda: check_topics(topics, world.pipeline),
            lambda: ensure_topics(topics, world.pipeline),
            lambda: catch_up(world, "cache"),
            lambda: world.rebuild("search"),
            lambda: world.rebuild("warehouse"),
            lambda: barrier.wait_until_current(
                world.pipeline, world.described, world.sinks, barrier.WaitOptions(60)
            ),
            lambda: client.wait_for(cache, token, timeout_s=30),
        ]
        for verb in verbs:
            assert refused(verb).hint.startswith(RENEW)
        # A pipeline file that says the same doesn't give keys back their order.
        world.file.write_text(world.file.read_text().replace("partitions: 2", "partitions: 3"))
        assert "keys have moved" in refused(lambda: ensure_topics(topics, world.pipeline)).message
        log = world.cdc("run", "--until-caught-up", code=5).stderr
        assert RENEW in " ".join(log.split())
    cache.close()
    (view,) = world.json("status")["sinks"][0]["views"]
    assert view["hint"] == f"{RENEW}, then cdc -p FILE rebuild search --table {ITEMS}"
    world.file.write_text(world.file.read_text().replace("partitions: 3", "partitions: 1"))
    assert world.json("topics", "renew", "--table", ITEMS)["sent"] == [ITEMS]
    world.sql("UPDATE items SET n = 1 WHERE id <= 5", "DELETE FROM items WHERE id > 15")
    world.sql("INSERT INTO items VALUES (0, 1)")
    assert refused(lambda: catch_up(world, "cache")).hint.startswith(
        f"cdc -p FILE rebuild cache --table {ITEMS}"
    )
    for name in ("search", "cache", "warehouse"):
        world.rebuild(name)
    with world.running():
        world.sql("INSERT INTO items SELECT n, 1 FROM generate_series(100, 200) n")
        world.settle()
        world.cdc("quarantine", "redrive")
        world.settle()
        world.assert_equal()
        assert world.quarantine() == []


def refuse_a_row_of_each_partition(world: "World") -> None:
    """What one index refuses the next one takes."""
    alias = f"{world.stack.endpoints.elasticsearch}/{world.name}-{ITEMS}"
    http.put(f"{alias}/_mapping", json={"dynamic": "strict"}).raise_for_status()
    source = {"schema": "public", "table": "items", "lsn": 2**40, "ts_us": 1}
    for partition in (0, 1):
        row = {"id": partition, "n": -1, "more": 1}
        change = json.dumps({"op": "c", "after": row, "source": source}).encode()
        key = json.dumps({"id": partition}).encode()
        bad_records.produce(
            world.pipeline.kafka, f"{world.name}.{ITEMS}", [(key, change)], partition
        )
    world.settle()
    listed = world.quarantine()
    assert sorted((entry["sink"], entry["id"]) for entry in listed) == [
        ("search", "0"),
        ("search", "1"),
    ]


def test_partitions_of_a_root_are_changed_together_with_its_views(world: "World") -> None:
    """What can't be made again isn't deleted: the connector goes on until all is named."""
    shop(world, without_other_sinks)
    with world.running():
        world.verified()
    text = world.file.read_text()
    orders, items = (
        f"{{table: {name}, partitions: 2}}" for name in ("public.orders", "public.items")
    )
    world.file.write_text(text.replace("public.orders, public.items", f"{orders}, {items}", 1))
    output = world.cdc("topics", "renew", "--table", "public.orders", code=5).stderr
    together = "topics renew --table public.orders --table view.order_docs --table public.items"
    assert together in " ".join(output.split())
    with Connect(world.pipeline.connect) as connect:
        assert connect.state(world.name).running
    world.file.write_text(text.replace("public.orders, public.items", f"{orders}, public.items", 1))
    output = world.cdc("topics", "renew", "--table", "public.orders").stdout
    for view in ("public.orders", "view.order_docs"):
        assert f"rebuild cache --table {view}" in " ".join(output.split())
    with Topics(world.pipeline.kafka) as topics:
        check_topics(topics, world.pipeline)
        renewed = [world.pipeline.topic(name) for name in ("public.orders", "view.order_docs")]
        assert {end.partition_count for end in topics.ends(renewed).values()} == {2}
    with world.running():
        change(world, random.Random(2), 30)
        world.rebuild("cache")
        world.verified()
