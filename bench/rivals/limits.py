"""What the servers take when everything is prepared: the client only sends.

Run by itself (`python -m bench.rivals.limits`), so that one process is timed; prints rows and
seconds.
"""

import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import orjson
import redis

from bench.rivals import plain

Change = tuple[Any, int, dict[str, Any] | None]


def changes(kafka: str, starts: plain.Offsets, ends: plain.Offsets) -> list[Change]:
    """The newest change of each id in batches of the rival's size."""
    return [
        (key, offset, row)
        for _, _, records in plain.batches(kafka, starts, plain.BATCH, lambda: ends)
        for key, (offset, row) in plain.newest(records).items()
    ]


def to_redis(records: list[Change], url: str, prefix: str) -> float:
    script = redis.Redis.from_url(url).register_script(plain.LUA)
    calls = []
    for start in range(0, len(records), plain.CHUNK):
        chunk = records[start : start + plain.CHUNK]
        keys = [f"{prefix}:position", *(f"{prefix}:{key}" for key, _, _ in chunk)]
        args = [str(start).encode(), *(orjson.dumps(row) if row else b"" for _, _, row in chunk)]
        calls.append((keys, args))
    began = time.monotonic()
    for keys, args in calls:
        script(keys=keys, args=args)
    return time.monotonic() - began


def to_elasticsearch(records: list[Change], url: str, index: str) -> float:
    bodies = plain.bulks(records)
    client = httpx.Client(
        base_url=url, timeout=120, headers={"Content-Type": "application/x-ndjson"}
    )
    began = time.monotonic()
    with ThreadPoolExecutor(2) as pool:
        for answer in pool.map(
            lambda body: client.post(f"/{index}/_bulk?filter_path=errors", content=body), bodies
        ):
            answer.raise_for_status()
    return time.monotonic() - began


TARGETS = {"redis": to_redis, "elasticsearch": to_elasticsearch}


def main() -> None:
    """Words: target, broker, where the target is, name of what it writes, first and end offsets."""
    target, kafka, place, name, starts, ends = sys.argv[1:]
    records = changes(kafka, orjson.loads(starts), orjson.loads(ends))
    sys.stdout.write(f"{len(records)} {TARGETS[target](records, place, name)}")


if __name__ == "__main__":
    main()
