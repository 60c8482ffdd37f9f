"""Readers of three views that know nothing of generations: what they see, and how old it is, again and again.

The table is `tests.support.writer`'s: rows 1 to ROWS are there for good, row 0 says when it was written.
"""

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import deltalake
import httpx
import redis

from tests.support.writer import ROWS

PULSE_S = 0.2


@dataclass
class Seen:
    polls: int = 0
    errors: list[str] = field(default_factory=list)
    partial: list[int] = field(default_factory=list)
    """How many of the rows that are always there a poll found, when it wasn't all."""
    oldest_s: float = 0.0


Poll = Callable[[], tuple[int, float]]
"""How many of the lasting rows there are, and when the pulse was written, Unix seconds."""


def search(url: str, alias: str) -> Poll:
    client = httpx.Client(base_url=url, timeout=10)

    def poll() -> tuple[int, float]:
        query = {"query": {"range": {"id": {"gte": 1, "lte": ROWS}}}, "size": 0, "track_total_hits": True}
        found = client.post(f"/{alias}/_search", json=query).raise_for_status().json()
        pulse = client.get(f"/{alias}/_doc/0").raise_for_status().json()["_source"]
        return found["hits"]["total"]["value"], float(pulse["name"])

    return poll


def cache(url: str, prefix: str) -> Poll:
    server = redis.Redis.from_url(url, decode_responses=True)
    keys = [f"{prefix}{number}" for number in range(1, ROWS + 1)]

    def poll() -> tuple[int, float]:
        # MGET is one command, so one moment.
        pulse, *rows = server.mget([f"{prefix}0", *keys])
        return sum(row is not None for row in rows), float(json.loads(str(pulse))["name"])

    return poll


def warehouse(path: Path) -> Poll:
    def poll() -> tuple[int, float]:
        table = deltalake.DeltaTable(str(path))
        query = f"SELECT count(CASE WHEN id BETWEEN 1 AND {ROWS} THEN 1 END) AS n, max(CASE WHEN id = 0 THEN name END)"
        found = deltalake.QueryBuilder().register("t", table).execute(f"{query} AS pulse FROM t").read_all()
        return found.column("n").to_pylist()[0], float(found.column("pulse").to_pylist()[0])

    return poll


@contextmanager
def reading(polls: dict[str, Poll]) -> Iterator[dict[str, Seen]]:
    """Poll each view for as long as the context lasts."""
    stop, seen = threading.Event(), {name: Seen() for name in polls}

    def read(name: str, poll: Poll) -> None:
        one = seen[name]
        while not stop.wait(PULSE_S):
            try:
                began = time.time()
                rows, pulse = poll()
            except Exception as error:
                one.errors.append(repr(error)[:300])
                continue
            one.polls += 1
            if rows != ROWS:
                one.partial.append(rows)
            one.oldest_s = max(one.oldest_s, began - pulse)

    threads = [threading.Thread(target=read, args=item) for item in polls.items()]
    for thread in threads:
        thread.start()
    try:
        yield seen
    finally:
        stop.set()
        for thread in threads:
            thread.join()
