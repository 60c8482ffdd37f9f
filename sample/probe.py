"""Commit-to-visible latency as a client sees it: watch rows of the replay until each view shows
them.

The commit's time is Postgres' own (`pg_xact_commit_timestamp`); visible means that a plain client
of the view reads a row that is at least as new: GET in Redis, a document by its id in
Elasticsearch, a committed version in Delta.
"""

import json
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import deltalake
import httpx
import psycopg
import redis

from cdc.model.table import row_id
from cdc.sample.plan import Change

EVERY_S = 0.25
GIVE_UP_S = 60.0
COMMITTED = (
    "SELECT updated_at, pg_xact_commit_timestamp(xmin) FROM public.flights"
    " WHERE (carrier, flight, origin, sched_dep) = (%s, %s, %s, %s)"
)
Find = Callable[[list[str]], Mapping[str, datetime]]
"""Row ids to the `updated_at` that the view holds for those it has."""


@dataclass
class Watch:
    """A watched view: the rows that it doesn't show yet, and the latencies of the rows that it
    shows, in seconds.
    """

    find: Find
    poll_s: float
    pending: dict[str, tuple[datetime, datetime]] = field(default_factory=dict)
    latencies: list[float] = field(default_factory=list)
    commits: list[datetime] = field(default_factory=list)
    """When the changes of `latencies` were committed."""
    unseen: int = 0

    def poll(self) -> None:
        waiting = dict(self.pending)
        shown = self.find(list(waiting)) if waiting else {}
        now = datetime.now(UTC)
        for key, (updated, committed) in waiting.items():
            if key in shown and shown[key] >= updated:
                self.latencies.append((now - committed).total_seconds())
                self.commits.append(committed)
            elif (now - committed).total_seconds() > GIVE_UP_S:
                self.unseen += 1
            else:
                continue
            if self.pending.get(key) == (updated, committed):
                self.pending.pop(key, None)

    def percentile(self, share: float) -> float:
        ordered = sorted(self.latencies)
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


class Probe:
    """Use as a context manager; pass `on_commit` to the replay."""

    def __init__(self, dsn: str, watches: Mapping[str, Watch]) -> None:
        self.watches = dict(watches)
        self._dsn = dsn
        self._lock = threading.Lock()
        self._next = 0.0
        self._stopping = threading.Event()
        self._pool = ThreadPoolExecutor(len(self.watches))

    def __enter__(self) -> "Probe":
        self._connection = psycopg.connect(self._dsn, autocommit=True)
        self._watching = [self._pool.submit(self._watch, watch) for watch in self.watches.values()]
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        self._pool.shutdown()
        self._connection.close()
        for watching in self._watching:
            watching.result()

    def on_commit(self, change: Change, _: datetime) -> None:
        """Take a row now and then. The replay's next change of its key comes after this call, on
        its thread.
        """
        if change.table != "flights":
            return
        if change.op == "delete" or change.key_after != change.key:
            # A view that applies a batch at once never shows a row that was there for less long.
            for watch in self.watches.values():
                watch.pending.pop(_identity(change.key), None)
        with self._lock:
            if time.monotonic() < self._next:
                return
            self._next = time.monotonic() + EVERY_S
            row = self._connection.execute(COMMITTED, change.key_after).fetchone()
        if row:
            for watch in self.watches.values():
                watch.pending[_identity(change.key_after)] = row

    def _watch(self, watch: Watch) -> None:
        while not self._stopping.wait(watch.poll_s):
            watch.poll()


def _identity(key: tuple[Any, ...]) -> str:
    """Return the id that views have of a flight."""
    carrier, flight, origin, departure = key
    stamp = departure.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
    return row_id([carrier, flight, origin, stamp])


def redis_watch(url: str, prefix: str, table: str) -> Watch:
    client = redis.Redis.from_url(url, decode_responses=True)

    def find(ids: list[str]) -> Mapping[str, datetime]:
        rows = client.mget([f"{prefix}:{table}:{key}" for key in ids])
        return {key: _updated(json.loads(row)) for key, row in zip(ids, rows, strict=True) if row}

    return Watch(find, 0.01)


def elasticsearch_watch(url: str, pipeline: str, table: str) -> Watch:
    client = httpx.Client(base_url=url, timeout=GIVE_UP_S)

    def find(ids: list[str]) -> Mapping[str, datetime]:
        answer = (
            client.post(f"/{pipeline}-{table}/_mget", json={"ids": ids}).raise_for_status().json()
        )
        return {doc["_id"]: _updated(doc["_source"]) for doc in answer["docs"] if doc.get("found")}

    return Watch(find, 0.02)


def delta_watch(path: str, table: str) -> Watch:
    folder = f"{path}/{table}/mirror"
    version = -1

    def find(ids: list[str]) -> Mapping[str, datetime]:
        nonlocal version
        delta = deltalake.DeltaTable(folder)
        if delta.version() == version:
            return {}
        version = delta.version()
        listed = ", ".join("'" + key.replace("'", "''") + "'" for key in ids)
        query = f"SELECT _cdc_id, updated_at FROM rows WHERE _cdc_id IN ({listed})"
        rows = deltalake.QueryBuilder().register("rows", delta).execute(query).read_all()
        return dict(
            zip(*(rows.column(name).to_pylist() for name in ("_cdc_id", "updated_at")), strict=True)
        )

    return Watch(find, 0.2)


def _updated(row: Mapping[str, Any]) -> datetime:
    return datetime.fromisoformat(row["updated_at"])
