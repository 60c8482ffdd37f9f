"""A pipeline whose cache is on a cluster, from its beginning to its end."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import redis

from cdc import client
from cdc.cli.destroy import prepare
from cdc.runtime.context import Context
from cdc.sinks.redis.slots import slot_of
from tests.support.cache import ClusterServers, nodes

if TYPE_CHECKING:
    from tests.scenarios.conftest import World

IDS = range(1, 301)


def begin(world: "World", servers: ClusterServers) -> None:
    world.write_file("public.items", sinks=["cache"])
    address = servers.url.partition("?")[0]
    text = world.file.read_text().replace(f'"{world.cache}"', f'"{address}", cluster: true')
    world.file.write_text(text)
    world.sql(
        "CREATE TABLE items (id int PRIMARY KEY, n int)",
        "INSERT INTO items SELECT n, 0 FROM generate_series(1, 400) n",
    )
    world.cdc("migrate")
    world.cdc("register")


def change(world: "World", n: int) -> None:
    """Change all rows of `IDS`; others come and go."""
    world.sql(
        f"UPDATE items SET n = {n} WHERE id <= 300",
        f"INSERT INTO items SELECT {n} * 1000 + n, {n} FROM generate_series(1, 50) n",
        f"DELETE FROM items WHERE id = 300 + {n}",
    )


@contextmanager
def reading(reader: "redis.RedisCluster", view: client.View, least: int) -> Iterator[list[int]]:
    """Read known rows meanwhile, as the documentation says: none is missing or older than `least`."""
    over = threading.Event()
    found: list[int] = []

    def read() -> None:
        while not over.is_set():
            for row_id in IDS:
                prefix = ""
                value: object = None
                while value is None and prefix != (prefix := client.key_prefix(view)):
                    value = reader.get(f"{prefix}{row_id}")
                found.append(-1 if value is None else int(json.loads(str(value))["n"]))

    thread = threading.Thread(target=read)
    thread.start()
    try:
        yield found
    finally:
        over.set()
        thread.join()
    assert len(found) > len(IDS)
    assert min(found) >= least


def test_a_cache_on_a_cluster(world: "World", tmp_path: Path) -> None:
    """A node loses its last writes, the view is rebuilt and rolled back under its readers, and nothing is left."""
    with nodes(tmp_path / "cluster") as servers:
        for server in servers.primaries:
            server.save()
        begin(world, servers)
        reader = redis.RedisCluster("127.0.0.1", servers.primaries[0].port, decode_responses=True)
        # The node that has the catalog, and another one.
        first = min(slot_of(f"{world.name}:_cdc:catalog") // 5461, 2)
        second = (first + 1) % 3
        with world.running():
            change(world, 1)
            world.settle()
            servers.primaries[second].save()
            change(world, 2)
            world.settle()
            servers.go_back(second)
            world.settle()
            world.verified()
            change(world, 3)
            # It has nothing any more, not even the catalog.
            servers.go_back(first)
            change(world, 4)
            world.settle()
            view = client.view(world.file, "cache", "public.items")
            before = client.key_prefix(view)
            with reading(reader, view, 4):
                world.rebuild("cache")
                rebuilt = client.key_prefix(view)
                change(world, 5)
                world.settle()
                world.rollback("cache")
                world.settle()
            assert rebuilt != before
            assert client.key_prefix(view) == before
            world.verified()
            status = world.json("status")
            assert status["findings"] == []
            assert world.cdc("plan").stdout == "nothing to do\n"
        view.close()
        assert list(reader.scan_iter(f"{world.name}:*")) != []
        prepare(Context(world.file, world.folder)).run(lambda _: None, watch_s=0.0)
        assert list(reader.scan_iter(f"{world.name}:*")) == []
