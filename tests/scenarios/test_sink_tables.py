"""What goes where: each sink has the tables and columns that it lists, and a list that changes is followed."""

import json
from typing import TYPE_CHECKING, Any

import deltalake
import pyarrow as pa
import pytest
import redis

from cdc import client
from cdc.errors import SettingsError
from cdc.sink.contract import SchemaMismatch
from tests.support import http
from tests.support.wait import wait_until

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


def cached(world: "World", table: str, column: str = "n") -> dict[int, Any]:
    """Return what readers of the cache see of a table: a column by `id`."""
    with redis.Redis.from_url(world.cache) as cache:
        keys = list(cache.scan_iter(f"{world.name}:{table}:*"))
        rows: list[dict[str, Any]] = [json.loads(text) for text in cache.mget(keys)] if keys else []
    return {row["id"]: row[column] for row in rows}


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


COLUMNS = {"search": "", "cache": "exclude: [note]", "warehouse": "columns: [n]"}


def list_columns(world: "World", columns: dict[str, str]) -> None:
    """Write the file: each sink has all tables, and of items these columns."""
    world.write_file("'public.*'")
    text = world.file.read_text()
    for sink, kind in (("search", "elasticsearch"), ("cache", "redis"), ("warehouse", "delta")):
        entry = f"{{table: public.items, {columns[sink]}}}"
        text = text.replace(f"{{type: {kind},", f"{{type: {kind}, tables: ['public.*', {entry}],")
    world.file.write_text(text)


def shown(world: "World") -> dict[str, set[tuple[str, ...]]]:
    """Return which columns the rows of items have for readers, by sink."""
    with redis.Redis.from_url(world.cache) as cache:
        keys = list(cache.scan_iter(f"{world.name}:{ITEMS}:*"))
        cached_rows = [json.loads(text) for text in cache.mget(keys)]
    index = f"{world.stack.endpoints.elasticsearch}/{world.name}-{ITEMS}"
    http.post(f"{index}/_refresh").raise_for_status()
    hits = http.get(f"{index}/_search", params={"size": 100}).raise_for_status().json()["hits"]
    mirror = deltalake.DeltaTable(str(world.warehouse / ITEMS / "mirror"))
    rows = deltalake.QueryBuilder().register("t", mirror).execute("SELECT * FROM t").read_all()
    views = {
        "search": [hit["_source"] for hit in hits["hits"]],
        "cache": cached_rows,
        "warehouse": pa.table(rows).to_pylist(),
    }
    assert [len(view) for view in views.values()] == [ROWS] * 3
    return {
        sink: {tuple(sorted(name for name in row if not name.startswith("_cdc"))) for row in view}
        for sink, view in views.items()
    }


def test_each_sink_has_the_columns_that_it_lists(world: "World") -> None:
    world.sql(
        "CREATE TABLE items (id int PRIMARY KEY, n int, note text)",
        f"INSERT INTO items SELECT i, i, 'first' FROM generate_series(1, {ROWS}) i",
        "CREATE TABLE orders (id int PRIMARY KEY, n int)",
    )
    list_columns(world, COLUMNS)
    world.cdc("migrate")
    world.cdc("register")
    everything = {(sink, table) for sink in COLUMNS for table in (ITEMS, ORDERS)}
    with world.running():
        world.settle()
        world.sql(
            "UPDATE items SET note = 'second' WHERE id > 10", "INSERT INTO orders VALUES (1, 1)"
        )
        world.settle()
        assert compared(world) == everything
        assert shown(world) == {
            "search": {("id", "n", "note")},
            "cache": {("id", "n")},
            "warehouse": {("id", "n")},
        }
    list_columns(world, {**COLUMNS, "cache": "exclude: [id]"})
    assert "In sinks.cache, public.items excludes id, which is part of its key" in " ".join(
        world.cdc("plan").stdout.split()
    )

    list_columns(world, {"search": "exclude: [note]", "cache": "", "warehouse": "columns: [note]"})
    before = shown(world)
    planned = " ".join(world.cdc("plan").stdout.split())
    for sink in COLUMNS:
        assert f"The view of {ITEMS} in {sink} was made with other columns" in planned
        assert f"cdc -p FILE rebuild {sink} --table {ITEMS}" in planned
    with world.running():
        world.sql("UPDATE items SET n = 0", "INSERT INTO orders VALUES (2, 2)")
        wait_until(
            lambda: (
                {(finding["code"], finding["sink"]) for finding in world.json("status")["findings"]}
                == {("view-stopped", sink) for sink in COLUMNS}
            ),
            60,
            "each view of other columns to be reported",
        )
        assert shown(world) == before
        with pytest.raises(SchemaMismatch, match="was made with other columns"):
            world.verified()
        for sink in COLUMNS:
            world.rebuild(sink, ITEMS)
        world.settle()
        world.sql("UPDATE items SET n = 1, note = 'third' WHERE id < 5")
        world.settle()
        assert compared(world) == everything
        assert shown(world) == {
            "search": {("id", "n")},
            "cache": {("id", "n", "note")},
            "warehouse": {("id", "note")},
        }
    assert world.cdc("plan").stdout == "nothing to do\n"
    with world.running():
        world.sql("ALTER TABLE items RENAME note TO remark")
        wait_until(
            lambda: (
                {sink for sink, made in world.progress().items() if ITEMS in made.aside}
                == {"search", "warehouse"}
            ),
            60,
            lambda: (
                f"only the sinks whose lists name the former column to stop: {world.progress()}"
            ),
        )
        assert "names note, but has no such column" in " ".join(world.cdc("status").stdout.split())
        world.settle(sinks=["cache"])
        rows = cached(world, ITEMS, "remark")
        assert set(rows.values()) == {"first", "second", "third"}
    assert "names note, but has no such column" in " ".join(world.cdc("plan").stdout.split())
    assert "names note" in world.cdc("register", code=7).stderr
