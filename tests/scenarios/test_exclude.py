"""Columns that the pipeline file stops excluding or masking, or begins to: the views follow, and so does what a
rebuild reads.
"""

import json
from typing import TYPE_CHECKING, Any

import deltalake
import pyarrow as pa
import redis

from cdc.connectors.client import Connect
from tests.scenarios.test_definitions import equal_soon
from tests.support import http
from tests.support.wait import wait_until

if TYPE_CHECKING:
    from tests.scenarios.conftest import World


def values_by_sink(world: "World", column: str) -> dict[str, list[Any]]:
    """Return the values of a column that readers find in the views, by sink."""
    with redis.Redis.from_url(world.cache) as cache:
        cached = [
            json.loads(cache.get(key)) for key in cache.scan_iter(f"{world.name}:public.items:*")
        ]
    url = f"{world.stack.endpoints.elasticsearch}/{world.name}-public.items/_search"
    http.post(f"{url.rsplit('/', 1)[0]}/_refresh").raise_for_status()
    hits = http.get(url, params={"size": 100}).raise_for_status().json()["hits"]["hits"]
    mirror = deltalake.DeltaTable(str(world.warehouse / "public.items" / "mirror"))
    rows = deltalake.QueryBuilder().register("t", mirror).execute("SELECT * FROM t").read_all()
    views = {
        "cache": cached,
        "search": [hit["_source"] for hit in hits],
        "warehouse": pa.table(rows).to_pylist(),
    }
    assert [len(view) for view in views.values()] == [20] * 3
    return {
        sink: [row[column] for row in view if row.get(column) is not None]
        for sink, view in views.items()
    }


HASHED = "{table: public.items, partitions: 1, exclude: [secret], mask: {note: {hash: shop-2026}}}"


def rows_with(world: "World", column: str) -> set[int]:
    return set(map(len, values_by_sink(world, column).values()))


def test_values_come_and_go_with_the_file(world: "World") -> None:
    world.sql(
        "CREATE TABLE items (id int PRIMARY KEY, note text, secret text)",
        "INSERT INTO items SELECT n, 'n', 's' FROM generate_series(1, 20) n",
    )
    world.begin("{table: public.items, partitions: 1, exclude: [note]}")
    with world.running():
        world.settle()
        assert rows_with(world, "note") == {0}
        # The run at work takes it up by itself.
        world.begin("{table: public.items, partitions: 1, exclude: [secret]}")
        world.sql("UPDATE items SET note = 'm' WHERE id = 1")
        # All rows, those too that nobody has changed.
        equal_soon(world)
        assert rows_with(world, "note") == {20}
        wait_until(
            lambda: rows_with(world, "secret") == {0},
            60,
            lambda: str(values_by_sink(world, "secret")),
        )
        world.write_file(HASHED)
        (line,) = world.json("plan")["register"]
        assert line.startswith(
            "mask note of public.items (hash): all its rows are sent again; the topic keeps"
        )
        world.begin(HASHED)
        equal_soon(world)
        notes = {note for view in values_by_sink(world, "note").values() for note in view}
        assert {len(note) for note in notes} == {64}
        assert len(notes) == 2
        # Planted: a connector that masks nothing. The comparison shows each row that it sends.
        with Connect(world.pipeline.connect) as connect:
            config = connect.config(world.name) or {}
            masks = [name for name in config if name.startswith("column.mask")]
            assert len(masks) == 1
            # Stopped, so that the task that still masks doesn't send them.
            connect.stop(world.name)
            connect.put(world.name, {name: config[name] for name in config.keys() - masks})
            world.sql("UPDATE items SET note = 'clear' WHERE id < 3")
            connect.resume(world.name)
        world.settle()
        compared = [part.to_dict() for part in world.compare()]
        assert [part["different"] for part in compared] == [2] * 3
        world.cdc("register")
        world.sql("UPDATE items SET note = 'hashed' WHERE id < 3")
        equal_soon(world)
    world.write_file(HASHED.replace("shop-2026", "shop-2027"))
    assert "`mask` of public.items" in world.cdc("run", code=2).stderr
    world.write_file("{table: public.items, partitions: 1}")
    assert "cdc register" in " ".join(
        world.cdc("run", code=2).stderr.replace("-p FILE ", "").split()
    )
    (finding,) = (
        finding for finding in world.json("status")["findings"] if finding["code"] == "file-changed"
    )
    assert "`exclude` of public.items" in finding["message"]
    world.write_file(HASHED)
    world.rebuild("search")
    world.assert_equal()
    assert rows_with(world, "secret") == {0}
