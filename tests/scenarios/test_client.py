"""Read your own writes: nobody who waits reads what is stale, under load and while `cdc run` is started again."""

import json
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
import redis

from cdc import client
from cdc.errors import KafkaUnavailable, ReadTimeout, SettingsError, SourceError
from cdc.kafka.topics import Topics
from cdc.model.position import Position
from tests.support import http
from tests.support.load import load
from tests.support.wait import wait_until

if TYPE_CHECKING:
    from tests.scenarios.conftest import World

READERS, PAIRS = 6, 5


def busy(conn: "psycopg.Connection[Any]", _: int) -> None:
    conn.execute("UPDATE items SET n = n + 1 WHERE id > 1000 AND id % 50 = 0")


class Reader:
    """Writes a row of its own and reads it back from a view."""

    def __init__(self, world: "World", number: int, views: dict[str, client.View]) -> None:
        self.world, self.number, self.views = world, number, views
        self.sink = ("cache", "search")[number % 2]

    def stale(self, pairs: int, *, wait: bool) -> int:
        """Count the reads, of so many, that didn't see the write before them."""
        with psycopg.connect(self.world.dsn) as conn:
            return sum(self._pair(conn, n, wait=wait) for n in range(pairs))

    def _pair(self, conn: "psycopg.Connection[tuple[int, ...]]", n: int, *, wait: bool) -> bool:
        (value,) = conn.execute(
            "UPDATE items SET n = n + 1 WHERE id = %s RETURNING n", [self.number]
        ).fetchone() or (0,)
        conn.commit()
        token, search = client.token(conn), n % 2 == 0
        if wait:
            client.wait_for(self.views[self.sink], token, 240, search=search)
        stored_value = self._read(search=search)
        # Not another's later write of the same row.
        return stored_value is None or stored_value < value

    def _read(self, *, search: bool) -> int | None:
        if self.sink == "cache":
            url = self.world.cache
            with redis.Redis.from_url(url) as server:
                text = server.get(f"{self.world.name}:public.items:{self.number}")
                return int(json.loads(text)["n"]) if isinstance(text, bytes) else None
        alias = f"{self.world.stack.endpoints.elasticsearch}/{self.world.name}-public.items"
        if not search:
            return int(http.get(f"{alias}/_doc/{self.number}").json()["_source"]["n"])
        hits = http.get(f"{alias}/_search", params={"q": f"id:{self.number}"}).json()["hits"][
            "hits"
        ]
        return int(hits[0]["_source"]["n"]) if hits else None


def test_nobody_who_waits_reads_what_is_stale(
    world: "World", monkeypatch: pytest.MonkeyPatch
) -> None:
    world.sql("CREATE TABLE items (id int PRIMARY KEY, n int)")
    world.begin("{table: public.items, partitions: 2}", sinks=["search", "cache"])
    world.sql("INSERT INTO items SELECT n, 0 FROM generate_series(0, 2000) n")
    with pytest.raises(SettingsError, match=r"public\.other"):
        client.view(world.file, "cache", "public.other")
    views = {name: client.view(world.file, name, "public.items") for name in ("search", "cache")}
    assert client.key_prefix(views["cache"]) == f"{world.name}:public.items:"
    with pytest.raises(SettingsError, match="search is no cache"):
        client.key_prefix(views["search"])
    readers = [Reader(world, number, views) for number in range(READERS)]
    with load(world.dsn, busy, 0.05), ThreadPoolExecutor(READERS) as pool:
        with world.running():
            world.settle()
            assert sum(pool.map(lambda reader: reader.stale(PAIRS, wait=True), readers)) == 0
            assert sum(pool.map(lambda reader: reader.stale(PAIRS, wait=False), readers)) > 0, (
                "the twin must be stale"
            )
            going = [pool.submit(reader.stale, PAIRS, wait=True) for reader in readers]
        with psycopg.connect(world.dsn) as conn:
            conn.execute("UPDATE items SET n = n + 1 WHERE id = 2000")
            with pytest.raises(SourceError):
                client.token(conn)
            conn.commit()
            token = client.token(conn)
        with pytest.raises(ReadTimeout):
            client.wait_for(views["cache"], token, 0.5)
        more = [pool.submit(reader.stale, 3, wait=True) for reader in readers]
        with world.running():
            assert sum(job.result() for job in [*going, *more]) == 0
            by_hand(world, views["cache"])
    assert_read_again_after_a_failed_request(world, views["cache"], monkeypatch)
    for view in views.values():
        view.close()


def assert_read_again_after_a_failed_request(
    world: "World", view: client.View, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ends that belong to a message aren't known yet, and no other message need come."""
    with psycopg.connect(world.dsn) as conn:
        token = client.Token.parse(client.token(conn))
    log_ends, faults = Topics.log_ends, list[str]()

    def fail_once(kafka: Topics, topics: Sequence[str]) -> Mapping[str, Position]:
        if not faults:
            faults.append("the broker is away")
            raise KafkaUnavailable("It is away.", hint="wait")
        return log_ends(kafka, topics)

    def barrier() -> object:
        with suppress(KafkaUnavailable):
            return view.barrier(token)
        return None

    monkeypatch.setattr(Topics, "log_ends", fail_once)
    wait_until(barrier, 30, "the token to be in the log")
    assert faults


def by_hand(world: "World", view: client.View) -> None:
    """Do as docs/use/read-your-writes.md tells other languages, as a role that can only connect."""
    with psycopg.connect(world.dsn) as conn:
        conn.execute(f"CREATE ROLE {world.name}_guest")
        conn.commit()
        conn.execute(f"SET ROLE {world.name}_guest")
        conn.commit()
        token = client.token(conn)
        conn.execute("RESET ROLE")
        conn.execute(f"DROP ROLE {world.name}_guest")
    answer = wait_until(
        lambda: view.barrier(client.Token.parse(token)), 30, "the token to be in the log"
    )
    assert answer is not None
    fence, _ = answer
    elastic = world.stack.endpoints.elasticsearch
    (name,) = http.get(f"{elastic}/_alias/{world.name}-public.items").json()
    url = f"{elastic}/cdc-position/_doc/{name}"

    def has_reached() -> bool:
        with redis.Redis.from_url(world.cache, decode_responses=True) as server:
            fields: dict[str, str] = server.hgetall(f"{world.name}:_cdc:public.items")
        index = http.get(url).json()["_source"]["offsets"]
        cached = [int(fields[str(partition)]) for partition in range(fence.partition_count)]
        return all(
            have >= end
            for side in (cached, index)
            for have, end in zip(side, fence.offsets, strict=True)
        )

    wait_until(has_reached, 60, "the positions to reach the fence")
