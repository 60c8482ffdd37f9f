"""Redis or Valkey: a JSON document per row under <prefix>:<schema>.<table>:<id>.

One Lua call applies a chunk of a partition and moves that partition's position, so the two can't part. Chunks go in
offset order; a chunk's position is its last offset + 1, and a row above it has not been written by then. So a crash
between chunks leaves an exact position, and no row is ever set back.
Positions are a hash <prefix>:_cdc:<schema>.<table>: topic_id, writer, partitions, rows, at, and one field a partition.
"""

import itertools
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import redis

from cdc.change import Advance, Applied, Form, Position, Stored, Table
from cdc.errors import SinkRejected, SinkUnavailable
from cdc.sink import Batch, Report, check, mismatch, partitions, report, send

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession

CHUNK_ROWS = 1000
"""Rows per Lua call: a few milliseconds, in which nobody else is served."""
CHUNK_BYTES = 1_000_000
SCAN_ROWS = 2000
HINTS = {
    "unavailable": "it is tried again; is the server up?",
    "rejected": "repair the server's setting or memory, then start `cdc run` again",
    "fenced": "run one `cdc run` per sink; start this one again when the other has ended",
    "rewound": "nothing to do: its changes are applied again from where it stands",
}

# KEYS: position hash, then the rows. ARGV: topic id, partition, from, until, writer, time, partition count, then a
# document per row, '' for a delete. Integers stay text: Lua's numbers are doubles.
APPLY = """
local at = redis.call('HMGET', KEYS[1], 'topic_id', 'writer', ARGV[2])
if (at[1] and at[1] ~= ARGV[1]) or (at[3] or '0') ~= ARGV[3] then
  return {'moved', at[1] or '', at[2] or '', at[3] or '0'}
end
local set, gone, n = {}, {}, 0
for i = 2, #KEYS do
  local value = ARGV[i + 6]
  if value == '' then gone[#gone + 1] = KEYS[i] else set[#set + 1] = KEYS[i]; set[#set + 1] = value end
  n = n + 1
end
if #set > 0 then redis.call('MSET', unpack(set)) end
if #gone > 0 then redis.call('DEL', unpack(gone)) end
redis.call('HSET', KEYS[1], 'topic_id', ARGV[1], 'writer', ARGV[5], ARGV[2], ARGV[4], 'at', ARGV[6],
  'partitions', ARGV[7])
redis.call('HINCRBY', KEYS[1], 'rows', n)
return {'ok'}
"""

UNREACHABLE = (redis.exceptions.ConnectionError, redis.exceptions.TimeoutError, redis.exceptions.BusyLoadingError)

_clients: dict[str, redis.Redis] = {}


def client(url: str) -> redis.Redis:
    """The connection of this process; executors keep it across batches."""
    if url not in _clients:
        _clients[url] = redis.Redis.from_url(url, decode_responses=True, socket_timeout=30, socket_connect_timeout=5)
    return _clients[url]


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
        return Stored(Position(found["topic_id"], offsets), found["writer"], int(found["rows"]), at)

    def apply(self, batch: Batch) -> Mapping[str, Applied]:
        before = {a.table.topic: self.position(a.table) for a in batch.advances}
        partly = {a.table.topic: self._resumable(a, before[a.table.topic], batch.writer) for a in batch.advances}
        pending = [a for a in batch.advances if partly[a.table.topic] is not None]
        if not pending:
            return {}
        sender = _sender(self.url, self.prefix, batch.writer, [(a, partly[a.table.topic] or ()) for a in pending])
        applied = send(batch.changes, sender, HINTS)
        for advance in pending:
            self._finish(advance, batch.writer)
        return {a.table.qualified: applied.get(a.table.topic, Applied()) for a in pending}

    def scan(self, table: Table, spark: "SparkSession") -> "DataFrame":
        url, start = self.url, f"{self.prefix}:{table.qualified}:"

        def read(_: Iterator["pa.RecordBatch"]) -> Iterator["pa.RecordBatch"]:
            import pyarrow as pa

            keys = client(url).scan_iter(match=_glob(start) + "*", count=SCAN_ROWS)
            seen: set[str] = set()
            while page := list(itertools.islice(keys, SCAN_ROWS)):
                # SCAN may give a key twice while the table of keys grows or shrinks.
                fresh = [key for key in dict.fromkeys(page) if key not in seen]
                seen.update(fresh)
                values = client(url).mget(fresh) if fresh else []
                yield pa.RecordBatch.from_pydict({"id": [key[len(start) :] for key in fresh], "document": values})

        return spark.range(1, numPartitions=1).mapInArrow(read, "id string, document string")

    def close(self) -> None:
        if server := _clients.pop(self.url, None):
            server.close()

    def position_key(self, table: Table) -> str:
        return f"{self.prefix}:_cdc:{table.qualified}"

    def _resumable(self, advance: Advance, stored: Stored | None, writer: str) -> tuple[int, ...] | None:
        """The offsets to go on from, None when the batch is done: an earlier try may have got part of the way."""
        ours = stored is not None and stored.writer == writer
        if stored and ours and stored.position.topic_id == advance.until.topic_id:
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
            arguments = _arguments(advance, partition, at, until, writer)
            answer = self._ask(partial(_run, script, self.position_key(advance.table), arguments))
            if answer[0] != "ok":
                found = stored.position if stored else None
                raise mismatch(advance.table, advance.start, found, ours=answer[2] == writer)

    def _ask(self, question: Callable[[redis.Redis], Any]) -> Any:
        try:
            return question(client(self.url))
        except redis.exceptions.AuthenticationError:
            raise SinkRejected("The cache refuses the user or password.", hint="see the sink's url") from None
        except (
            redis.exceptions.ConnectionError,
            redis.exceptions.TimeoutError,
            redis.exceptions.BusyLoadingError,
        ):
            raise SinkUnavailable(
                f"The cache at {_address(self.url)} can't be reached.",
                hint=HINTS["unavailable"],
                sink=self.name,
            ) from None


def _run(script: Any, key: str, arguments: list[str | int], _: redis.Redis) -> Any:
    return script(keys=[key], args=arguments)


def _address(url: str) -> str:
    return url.rsplit("@", 1)[-1].removeprefix("redis://")


def _glob(text: str) -> str:
    return "".join(f"\\{char}" if char in "*?[]\\" else char for char in text)


def _arguments(advance: Advance, partition: int, start: int, until: int, writer: str) -> list[str | int]:
    topic_id, count = advance.until.topic_id, advance.until.partition_count
    return [topic_id, partition, start, until, writer, f"{time.time():.3f}", count]


def _sender(
    url: str, prefix: str, writer: str, advances: list[tuple[Advance, tuple[int, ...]]]
) -> Callable[[Iterator["pa.RecordBatch"]], Iterator["pa.RecordBatch"]]:
    known = {advance.table.topic: (advance, offsets) for advance, offsets in advances}

    def apply(batches: Iterator["pa.RecordBatch"]) -> Iterator["pa.RecordBatch"]:
        reports = []
        for topic, partition, rows in partitions(batches):
            if topic in known:
                advance, offsets = known[topic]
                reports.append(_apply_partition(url, prefix, writer, advance, partition, offsets[partition], rows))
            else:
                for _ in rows:
                    pass
        yield report(reports)

    return apply


def _apply_partition(
    url: str, prefix: str, writer: str, advance: Advance, partition: int, start: int, rows: Iterator["pa.RecordBatch"]
) -> Report:
    """Send one partition's rows chunk by chunk; those below `start` are there from an earlier try."""
    done = Report(advance.table.topic, partition)
    script = client(url).register_script(APPLY)
    name, at = advance.table.qualified, start
    try:
        for chunk, last in _chunks(rows, start):
            to = advance.until.offsets[partition] if last else chunk[-1][0] + 1
            keys = [f"{prefix}:_cdc:{name}", *(f"{prefix}:{name}:{key}" for _, key, _ in chunk)]
            values = [document or "" for _, _, document in chunk]
            answer = script(keys=keys, args=[*_arguments(advance, partition, at, to, writer), *values])
            if answer[0] == "moved":
                _moved(done, advance, at, answer, writer)
                break
            at = to
            done.deleted += values.count("")
            done.written += len(values) - values.count("")
    except redis.exceptions.RedisError as error:
        done.failure, done.message = _failed(error, url, name)
    for _ in rows:
        pass
    return done


def _moved(done: Report, advance: Advance, at: int, answer: list[str], writer: str) -> None:
    _, topic_id, other, offset = answer
    found = Position(topic_id, (int(offset),))
    expected = Position(advance.until.topic_id, (at,))
    error = mismatch(advance.table, expected, found, ours=other in (writer, ""))
    done.failure = "rewound" if isinstance(error, SinkUnavailable) else "fenced"
    done.message = error.message


def _failed(error: redis.exceptions.RedisError, url: str, table: str) -> tuple[str, str]:
    if isinstance(error, UNREACHABLE):
        return "unavailable", f"The cache at {_address(url)} can't be reached."
    if isinstance(error, redis.exceptions.OutOfMemoryError):
        return "unavailable", f"The cache at {_address(url)} is out of memory."
    # The first word of an answer is its kind; what follows may quote what was sent.
    return "rejected", f"The cache refuses rows of {table}: {str(error).split(' ', 1)[0]}."


def _chunks(rows: Iterator["pa.RecordBatch"], start: int) -> Iterator[tuple[list[tuple[int, str, str | None]], bool]]:
    """Chunks of (offset, id, document) from `start` on, each with whether it is the last."""
    ready: list[tuple[int, str, str | None]] | None = None
    chunk: list[tuple[int, str, str | None]] = []
    size = 0
    for batch in rows:
        names = ("offset", "id", "document")
        for row in zip(*(batch.column(name).to_pylist() for name in names), strict=True):
            if row[0] < start:
                continue
            chunk.append(row)
            size += len(row[2] or "")
            if len(chunk) >= CHUNK_ROWS or size >= CHUNK_BYTES:
                if ready:
                    yield ready, False
                ready, chunk, size = chunk, [], 0
    if ready:
        yield ready, not chunk
    if chunk:
        yield chunk, True
