"""Columns that the pipeline file stops excluding, or begins to: the views follow, and so does what a rebuild reads."""

import json
from typing import TYPE_CHECKING, Any

import deltalake
import pyarrow as pa
import redis

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
    world.write_file("{table: public.items, partitions: 1}")
    assert "cdc register" in " ".join(
        world.cdc("run", code=2).stderr.replace("-p FILE ", "").split()
    )
    (finding,) = (
        finding for finding in world.json("status")["findings"] if finding["code"] == "file-changed"
    )
    assert "`exclude` of public.items" in finding["message"]
    world.write_file("{table: public.items, partitions: 1, exclude: [secret]}")
    world.rebuild("search")
    world.assert_equal()
    assert rows_with(world, "secret") == {0}
