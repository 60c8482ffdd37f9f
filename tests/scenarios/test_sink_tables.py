"""What goes where: each sink has the tables that it lists, and a list that changes is followed."""

import json
from typing import TYPE_CHECKING, Any

import pytest
import redis

from cdc import client
from cdc.errors import SettingsError

if TYPE_CHECKING:
    from tests.scenarios.conftest import World

ITEMS = "public.items"
ORDERS = "public.orders"
ROWS = 50


def list_tables(world: "World", cache: str) -> None:
    """Write the file: search has all tables, the cache what is listed."""
    world.write_file("'public.*'", sinks=("search", "cache"))
    text = world.file.read_text()
    world.file.write_text(text.replace("{type: redis,", f"{{type: redis, tables: {cache},"))


def cached(world: "World", table: str) -> dict[int, int]:
    """Return what readers of the cache see of a table: `n` by `id`."""
    with redis.Redis.from_url(world.cache) as cache:
        keys = list(cache.scan_iter(f"{world.name}:{table}:*"))
        rows: list[dict[str, Any]] = [json.loads(text) for text in cache.mget(keys)] if keys else []
    return {row["id"]: row["n"] for row in rows}


def measured(world: "World") -> dict[str, list[str]]:
    """Return the views that `status` measures, by sink. All of them are current."""
    sinks = world.json("status")["sinks"]
    assert {view["lag_records"] for sink in sinks for view in sink["views"]} == {0}
    return {sink["name"]: [view["table"] for view in sink["views"]] for sink in sinks}


def compared(world: "World") -> set[tuple[str, str]]:
    """Return the views that `cdc verify` proves equal."""
    return {(result.sink, result.table) for result in world.verified()}


EVERYWHERE = {(sink, table) for sink in ("search", "cache") for table in (ITEMS, ORDERS)}
KEPT = f"note      {ORDERS} in cache is no longer in the file: nobody updates it"


def test_each_sink_has_the_tables_that_it_lists(world: "World") -> None:
    for table in ("items", "orders"):
        world.sql(
            f"CREATE TABLE {table} (id int PRIMARY KEY, n int)",
            f"INSERT INTO {table} SELECT i, 0 FROM generate_series(1, {ROWS}) i",
        )
    list_tables(world, "[public.items]")
    world.cdc("migrate")
    world.cdc("register")
    with world.running():
        world.settle()
        for table in ("items", "orders"):
            world.sql(
                f"UPDATE {table} SET n = 1 WHERE id > 20", f"DELETE FROM {table} WHERE id = 1"
            )
        world.settle()
        assert measured(world) == {"search": [ITEMS, ORDERS], "cache": [ITEMS]}
        assert compared(world) == EVERYWHERE - {("cache", ORDERS)}
        world.rebuild("cache")
        assert world.json("status")["findings"] == []
    assert (len(cached(world, ITEMS)), cached(world, ORDERS)) == (ROWS - 1, {})
    assert world.cdc("plan").stdout == "nothing to do\n"
    refused = world.cdc("verify", "--sink", "cache", "--table", ORDERS, code=2).stderr
    assert f"{ORDERS} isn't in cache." in refused
    with pytest.raises(SettingsError, match=f"{ORDERS} isn't in cache"):
        client.view(world.file, "cache", ORDERS)

    list_tables(world, "['public.*']")
    assert f"run       make {ORDERS} in cache, from its first record on" in world.cdc("plan").stdout
    with world.running():
        world.settle()
        assert measured(world)["cache"] == [ITEMS, ORDERS]
        assert compared(world) == EVERYWHERE
    stood = cached(world, ORDERS)
    assert len(stood) == ROWS - 1

    list_tables(world, "[public.items]")
    with world.running():
        world.sql("UPDATE orders SET n = 2", "DELETE FROM orders WHERE id = 2")
        world.settle()
        assert measured(world)["cache"] == [ITEMS]
        # Readers of the table keep what they had, also when the cache is made again.
        world.rebuild("cache")
        assert compared(world) == EVERYWHERE - {("cache", ORDERS)}
    assert cached(world, ORDERS) == stood
    assert world.cdc("plan").stdout.splitlines() == [KEPT, "nothing to do"]

    list_tables(world, "[public.items, public.orders]")
    assert world.cdc("plan").stdout == "nothing to do\n"
    with world.running():
        world.settle()
        assert compared(world) == EVERYWHERE
    assert cached(world, ORDERS) == dict.fromkeys(range(3, ROWS + 1), 2)
