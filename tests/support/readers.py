"""Readers of three views that know nothing of generations: what they see, and how old it is, again
and again.

The table is `tests.support.writer`'s: rows 1 to ROWS are there for good, row 0 says when it was
written. They read in a process of their own, so that nothing else of a test keeps them waiting.
"""

import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field

import deltalake
import httpx
import redis

from tests.support.writer import ROWS

PULSE_S = 0.2


@dataclass
class Readings:
    polls: int = 0
    errors: list[str] = field(default_factory=list)
    partial: list[int] = field(default_factory=list)
    """The numbers of lasting rows that polls found when they didn't find all."""
    oldest_s: float = 0.0


Poll = Callable[[], tuple[int, float]]
"""The number of lasting rows, and the time at which the pulse was written, Unix seconds."""


def search(url: str, alias: str) -> Poll:
    client = httpx.Client(base_url=url, timeout=60)

    def poll() -> tuple[int, float]:
        query = {
            "query": {"range": {"id": {"gte": 1, "lte": ROWS}}},
            "size": 0,
            "track_total_hits": True,
        }
        response = client.post(f"/{alias}/_search", json=query).raise_for_status().json()
        pulse = client.get(f"/{alias}/_doc/0").raise_for_status().json()["_source"]
        return response["hits"]["total"]["value"], float(pulse["name"])

    return poll


def cache(url: str, prefix: str) -> Poll:
    server = redis.Redis.from_url(url, decode_responses=True)
    keys = [f"{prefix}{number}" for number in range(1, ROWS + 1)]

    def poll() -> tuple[int, float]:
        # MGET is one command, so one moment.
        pulse, *rows = server.mget([f"{prefix}0", *keys])
        return sum(row is not None for row in rows), float(json.loads(str(pulse))["name"])

    return poll


def warehouse(path: str) -> Poll:
    def poll() -> tuple[int, float]:
        table = deltalake.DeltaTable(path)
        query = f"SELECT count(CASE WHEN id BETWEEN 1 AND {ROWS} THEN 1 END) AS n, max(CASE WHEN id = 0 THEN name END)"
        counts = (
            deltalake.QueryBuilder()
            .register("t", table)
            .execute(f"{query} AS pulse FROM t")
            .read_all()
        )
        return counts.column("n").to_pylist()[0], float(counts.column("pulse").to_pylist()[0])

    return poll


VIEWS: Mapping[str, Callable[..., Poll]] = {
    "search": search,
    "cache": cache,
    "warehouse": warehouse,
}


@contextmanager
def reading(places: Mapping[str, Sequence[str]]) -> Iterator[dict[str, Readings]]:
    """Poll each view, by its name in VIEWS, for as long as the context lasts; what was seen is there afterwards."""
    readings: dict[str, Readings] = {}
    command = [sys.executable, "-m", __name__, json.dumps(places)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        yield readings
    finally:
        output, _ = process.communicate()
    readings.update({name: Readings(**fields) for name, fields in json.loads(output).items()})


def main() -> None:
    """The word: places as JSON. Reads until standard input ends, then prints what it has seen."""
    polls = {name: VIEWS[name](*place) for name, place in json.loads(sys.argv[1]).items()}
    stop, readings = threading.Event(), {name: Readings() for name in polls}
    threads = [
        threading.Thread(target=_read, args=(poll, readings[name], stop))
        for name, poll in polls.items()
    ]
    for thread in threads:
        thread.start()
    sys.stdin.read()
    stop.set()
    for thread in threads:
        thread.join()
    json.dump({name: asdict(reading) for name, reading in readings.items()}, sys.stdout)


def _read(poll: Poll, readings: Readings, stop: threading.Event) -> None:
    while not stop.wait(PULSE_S):
        try:
            began = time.time()
            rows, pulse = poll()
        except Exception as error:
            readings.errors.append(repr(error)[:300])
            continue
        readings.polls += 1
        if rows != ROWS:
            readings.partial.append(rows)
        readings.oldest_s = max(readings.oldest_s, began - pulse)


if __name__ == "__main__":
    main()
