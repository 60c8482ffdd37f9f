"""Redis or Valkey: a JSON document per row under <prefix>:<schema>.<table>:<id>.

One Lua call applies a chunk of a partition and moves that partition's position, so the two can't part. Chunks go in
offset order; a chunk's position is its last offset + 1, and a row above it has not been written by then. So a crash
between chunks leaves an exact position, and no row is ever set back.
Positions are a hash <prefix>:_cdc:<schema>.<table>: topic_id, writer, partitions, rows, at, and one field a partition.
"""

import itertools
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import redis

from cdc.change import Advance, Applied, Form, Position, Stored, Table
from cdc.errors import SinkRejected, SinkUnavailable
from cdc.produce import produced
from cdc.report import send
from cdc.sink import Batch, check, mismatch
from sinks.redis_send import APPLY, UNREACHABLE, address, arguments, client, forget, sender

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession

SCAN_ROWS = 2000
HINTS = {
    "unavailable": "it is tried again; is the server up?",
    "rejected": "repair the server's setting or memory, then start `cdc run` again",
    "fenced": "run one `cdc run` per sink; start this one again when the other has ended",
    "rewound": "nothing to do: its changes are applied again from where it stands",
}


class Redis:
    form: Form = "documents"

    def __init__(self, name: str, url: str, prefix: str) -> None:
        self.name, self.url, self.prefix = name, url, prefix

    def prepare(self, table: Table) -> None:
        """Check that the server keeps what it is given: a view that evicts rows is no view."""
        policy = self._ask(lambda server: server.config_get("maxmemory-policy"))["maxmemory-policy"]
        if policy != "noeviction":
            raise SinkRejected(
                f"The cache's maxmemory-policy is {policy}: it may drop rows of {table.qualified} by itself.",
                hint="CONFIG SET maxmemory-policy noeviction",
                sink=self.name,
            )

    def position(self, table: Table) -> Stored | None:
        found = self._ask(lambda server: server.hgetall(self.position_key(table)))
        if not found:
            return None
        offsets = tuple(int(found.get(str(partition), 0)) for partition in range(int(found["partitions"])))
        at = float(found["at"])
        position, floor = Position(found["topic_id"], offsets), int(found.get("floor", 0))
        return Stored(position, found["writer"], int(found["rows"]), at, floor)

    def apply(self, batch: Batch) -> Mapping[str, Applied]:
        before = {a.table.topic: self.position(a.table) for a in batch.advances}
        partly = {a.table.topic: self._resumable(a, before[a.table.topic], batch.writer) for a in batch.advances}
        pending = [a for a in batch.advances if partly[a.table.topic] is not None]
        if not pending:
            return {}
        partial = [(a, partly[a.table.topic] or ()) for a in pending]
        applied = send(batch.changes, sender(self.url, self.prefix, batch.writer, partial), self.name, HINTS)
        for advance in pending:
            self._finish(advance, batch.writer)
        return {a.table.qualified: applied.get(a.table.topic, Applied()) for a in pending}

    def clear(self, table: Table) -> None:
        """Rows first: if this ends half-way, the position is still there to tell that it has to be done."""
        self._ask(lambda server: _clear(server, f"{self.prefix}:{table.qualified}:"))
        self._ask(lambda server: server.delete(self.position_key(table)))

    def scan(self, table: Table, spark: "SparkSession") -> "DataFrame":
        url, start = self.url, f"{self.prefix}:{table.qualified}:"

        def read() -> Iterator["pa.RecordBatch"]:
            import pyarrow as pa

            keys = client(url).scan_iter(match=_glob(start) + "*", count=SCAN_ROWS)
            seen: set[str] = set()
            while page := list(itertools.islice(keys, SCAN_ROWS)):
                # SCAN may give a key twice while the table of keys grows or shrinks.
                fresh = [key for key in dict.fromkeys(page) if key not in seen]
                seen.update(fresh)
                values = client(url).mget(fresh) if fresh else []
                yield pa.RecordBatch.from_pydict({"id": [key[len(start) :] for key in fresh], "document": values})

        return produced(spark, read, "id string, document string")

    def close(self) -> None:
        forget(self.url)

    def position_key(self, table: Table) -> str:
        return f"{self.prefix}:_cdc:{table.qualified}"

    def _resumable(self, advance: Advance, stored: Stored | None, writer: str) -> tuple[int, ...] | None:
        """The offsets to go on from, None when the batch is done: an earlier try may have got part of the way."""
        ours = stored is not None and stored.writer == writer
        if stored and ours and not advance.repairs and stored.position.topic_id == advance.until.topic_id:
            offsets = stored.position.offsets
            if offsets == advance.until.offsets:
                return None
            between = zip(advance.start_offsets, offsets, advance.until.offsets, strict=True)
            if all(start <= at <= until for start, at, until in between):
                return offsets
        check(advance, stored, writer)
        return advance.start_offsets

    def _finish(self, advance: Advance, writer: str) -> None:
        """Move the partitions whose records were transaction markers only: no row carried their position."""
        stored = self.position(advance.table)
        offsets = stored.position.offsets if stored else (0,) * advance.until.partition_count
        script = client(self.url).register_script(APPLY)
        for partition, (at, until) in enumerate(zip(offsets, advance.until.offsets, strict=True)):
            if at == until:
                continue
            moved = arguments(advance, partition, at, until, writer)
            answer = self._ask(partial(_run, script, self.position_key(advance.table), moved))
            if answer[0] != "ok":
                found = stored.position if stored else None
                raise mismatch(advance.table, advance.start, found, ours=answer[2] == writer)

    def _ask(self, question: Callable[[redis.Redis], Any]) -> Any:
        try:
            return question(client(self.url))
        except redis.exceptions.AuthenticationError:
            raise SinkRejected("The cache refuses the user or password.", hint="see the sink's url") from None
        except UNREACHABLE:
            raise SinkUnavailable(
                f"The cache at {address(self.url)} can't be reached.",
                hint=HINTS["unavailable"],
                sink=self.name,
            ) from None


def _run(script: Any, key: str, arguments: list[str | int], _: redis.Redis) -> Any:
    return script(keys=[key], args=arguments)


def _glob(text: str) -> str:
    return "".join(f"\\{char}" if char in "*?[]\\" else char for char in text)


def _clear(server: redis.Redis, start: str) -> None:
    keys = server.scan_iter(match=_glob(start) + "*", count=SCAN_ROWS)
    while page := list(itertools.islice(keys, SCAN_ROWS)):
        server.unlink(*page)
