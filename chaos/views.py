"""Readers of the views that know nothing of `cdc`: all rows of a table, and single rows again and again."""

import json
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Protocol

import deltalake
import httpx
import psycopg
import pyarrow as pa
import redis

from chaos.checks import Seen
from chaos.writer import WATCHED, Row

PAGE = 5_000
TIMEOUT_S = 10.0
UNREADABLE = (httpx.HTTPError, redis.RedisError, OSError, deltalake.exceptions.DeltaError)
"""What a reader gets of a sink that is away."""
Versions = Mapping[int, int | None]


class View(Protocol):
    """A sink as its readers see it. Every method raises while the sink is away."""

    poll_s: float

    def rows(self, table: str) -> dict[str, Row]:
        """Return all rows of a table, or documents of a view, by id."""

    def versions(self, table: str, keys: Sequence[int]) -> Versions:
        """Return `ver` of rows; None for a row that isn't there."""


class Index:
    poll_s = 0.3

    def __init__(self, port: int, pipeline: str) -> None:
        self._client = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=TIMEOUT_S)
        self._pipeline = pipeline

    def rows(self, table: str) -> dict[str, Row]:
        alias = self._alias(table)
        self._ask("POST", f"/{alias}/_refresh")
        rows: dict[str, Row] = {}
        query: dict[str, Any] = {"size": PAGE, "sort": "_doc"}
        page = self._ask("POST", f"/{alias}/_search?scroll=1m", query)
        while page["hits"]["hits"]:
            rows |= {hit["_id"]: _own(hit["_source"]) for hit in page["hits"]["hits"]}
            following = {"scroll": "1m", "scroll_id": page["_scroll_id"]}
            page = self._ask("POST", "/_search/scroll", following)
        self._ask("DELETE", "/_search/scroll", {"scroll_id": page["_scroll_id"]})
        return rows

    def versions(self, table: str, keys: Sequence[int]) -> Versions:
        ids = {"ids": [str(key) for key in keys]}
        answer = self._ask("POST", f"/{self._alias(table)}/_mget?_source=ver", ids)
        # A document with an error couldn't be read, which says nothing of its row.
        found = [document for document in answer["docs"] if "error" not in document]
        return {
            int(document["_id"]): document["_source"]["ver"] if document["found"] else None
            for document in found
        }

    def block(self, table: str, *, blocked: bool) -> None:
        self._ask("PUT", f"/{self._alias(table)}/_settings", {"index.blocks.write": blocked})

    def _alias(self, table: str) -> str:
        return f"{self._pipeline}-{_qualified(table)}"

    def _ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        answer = self._client.request(method, path, json=body).raise_for_status()
        return dict(answer.json())


class Cache:
    poll_s = 0.2

    def __init__(self, port: int, prefix: str) -> None:
        self.server: Any = redis.Redis(
            port=port,
            decode_responses=True,
            socket_timeout=TIMEOUT_S,
            socket_connect_timeout=TIMEOUT_S,
        )
        self._prefix = prefix

    def rows(self, table: str) -> dict[str, Row]:
        start = self._key(table, "")
        keys = list(self.server.scan_iter(f"{start}*", count=PAGE))
        values = self.server.mget(keys) if keys else []
        return {
            key.removeprefix(start): _own(json.loads(value))
            for key, value in zip(keys, values, strict=True)
            if value is not None
        }

    def versions(self, table: str, keys: Sequence[int]) -> Versions:
        values = self.server.mget([self._key(table, key) for key in keys])
        return {
            key: json.loads(value)["ver"] if value is not None else None
            for key, value in zip(keys, values, strict=True)
        }

    def _key(self, table: str, key: object) -> str:
        return f"{self._prefix}:{_qualified(table)}:{key}"


class Warehouse:
    poll_s = 1.0

    def __init__(self, path: str) -> None:
        self._path = path

    def rows(self, table: str) -> dict[str, Row]:
        return {str(row.get("id")): _own(row) for row in self._query(table, "SELECT * FROM t")}

    def versions(self, table: str, keys: Sequence[int]) -> Versions:
        listed = ", ".join(map(str, keys))
        rows = self._query(table, f"SELECT id, ver FROM t WHERE id IN ({listed})")
        found = {row["id"]: row["ver"] for row in rows}
        return {key: found.get(key) for key in keys}

    def _query(self, table: str, query: str) -> list[Row]:
        mirror = deltalake.DeltaTable(f"{self._path}/{_qualified(table)}/mirror")
        rows = deltalake.QueryBuilder().register("t", mirror).execute(query).read_all()
        return list(pa.table(rows).to_pylist())


def _qualified(table: str) -> str:
    """Views of several tables have names that begin with `view.`."""
    return table if table.startswith("view.") else f"public.{table}"


def _own(row: Mapping[str, Any]) -> Row:
    return {name: value for name, value in row.items() if not name.startswith("_cdc")}


def source_rows(dsn: str, query: str) -> dict[str, Row]:
    """Return the rows of a query on Postgres by their column `id`."""
    with psycopg.connect(dsn, row_factory=psycopg.rows.dict_row) as connection:
        return {str(row["id"]): row for row in connection.execute(query.encode())}


class Watch:
    """Polls the versions of a few rows in one view, and notes each change."""

    def __init__(self, sink: str, view: View, note: Callable[[Seen], None]) -> None:
        self.polls = 0
        self._sink = sink
        self._view = view
        self._note = note
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._poll, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closing.set()
        self._thread.join()

    def _poll(self) -> None:
        last: dict[tuple[str, int], int | None] = {}
        while not self._closing.wait(self._view.poll_s):
            # A sink that is away shows nobody anything.
            with suppress(*UNREADABLE):
                for table in ("items", "accounts"):
                    for key, ver in self._view.versions(table, WATCHED).items():
                        if last.get((table, key), -1) != ver:
                            last[table, key] = ver
                            self._note(Seen(self._sink, table, key, ver))
                self.polls += 1


def wait_until(condition: Callable[[], bool], limit_s: float, poll_s: float = 0.2) -> bool:
    """Return whether a condition has come true within the limit. A server that can't be reached counts as not yet."""
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        with suppress(Exception):
            if condition():
                return True
        time.sleep(poll_s)
    return False
