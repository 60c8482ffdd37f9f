"""What the executors do for the cache: one Lua call per chunk of a partition, rows and position at once."""

import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import redis

from cdc.change import Advance, Position
from cdc.errors import CdcError, SinkUnavailable
from cdc.report import Report, Row, partitions, report, rows
from cdc.sink import UNKNOWN, mismatch

if TYPE_CHECKING:
    import pyarrow as pa

CHUNK_ROWS = 1000
"""Rows per Lua call: a few milliseconds, in which nobody else is served."""
CHUNK_BYTES = 1_000_000

# KEYS: position hash, then the rows. ARGV: topic id, partition, from, until, writer, time, partition count, floor,
# generation, then a document per row, '' for a delete. Integers stay text: Lua's numbers are doubles. Lua unpacks 8,000
# values at most. The generation is compared as well: once two have changed places, the other's positions lie here.
APPLY = """
local at = redis.call('HMGET', KEYS[1], 'topic_id', 'writer', ARGV[2], 'generation')
if (at[1] and at[1] ~= ARGV[1]) or (at[3] or '0') ~= ARGV[3] or (at[4] or '') ~= ARGV[9] then
  return {'moved', at[1] or '', at[2] or '', at[3] or '0', at[4] or ''}
end
local set, gone, n = {}, {}, 0
local function flush()
  if #set > 0 then redis.call('MSET', unpack(set)) end
  if #gone > 0 then redis.call('DEL', unpack(gone)) end
  set, gone = {}, {}
end
for i = 2, #KEYS do
  local value = ARGV[i + 8]
  if value == '' then gone[#gone + 1] = KEYS[i] else set[#set + 1] = KEYS[i]; set[#set + 1] = value end
  n = n + 1
  if n % 2000 == 0 then flush() end
end
flush()
redis.call('HSET', KEYS[1], 'topic_id', ARGV[1], 'writer', ARGV[5], ARGV[2], ARGV[4], 'at', ARGV[6],
  'partitions', ARGV[7], 'floor', ARGV[8])
redis.call('HINCRBY', KEYS[1], 'rows', n)
return {'ok'}
"""

# KEYS: position hash, then rows to remove. ARGV: generation, and if the position goes as well, 'position' and which
# generation is there from then on, if any. 0 when the rows are another generation's: the two have changed places.
REMOVE = """
local generation = redis.call('HGET', KEYS[1], 'generation') or ''
if generation ~= ARGV[1] then return 0 end
if #KEYS > 1 then redis.call('UNLINK', unpack(KEYS, 2)) end
if ARGV[2] == 'position' then redis.call('DEL', KEYS[1]) end
if ARGV[3] ~= '' then redis.call('HSET', KEYS[1], 'generation', ARGV[3]) end
return 1
"""

# ARGV: two databases, then the position hashes. 0 when the first is ahead of the second anywhere. Numbers are compared
# as text: a floor may be greater than what a double holds.
EXCHANGE = """
local function less(one, other)
  return #one < #other or (#one == #other and one < other)
end
for i = 3, #ARGV do
  redis.call('SELECT', ARGV[1])
  local live = redis.call('HGETALL', ARGV[i])
  redis.call('SELECT', ARGV[2])
  for j = 1, #live, 2 do
    if live[j] == 'floor' or string.match(live[j], '^%d+$') then
      local at = redis.call('HGET', ARGV[i], live[j])
      if less(at or '0', live[j + 1]) then return 0 end
    end
  end
end
redis.call('SWAPDB', ARGV[1], ARGV[2])
return 1
"""

UNREACHABLE = (redis.exceptions.ConnectionError, redis.exceptions.TimeoutError, redis.exceptions.BusyLoadingError)

_clients: dict[str, redis.Redis] = {}


def client(url: str) -> redis.Redis:
    """The connection of this process; executors keep it across batches."""
    if url not in _clients:
        _clients[url] = redis.Redis.from_url(url, decode_responses=True, socket_timeout=30, socket_connect_timeout=5)
    return _clients[url]


def forget(url: str) -> None:
    """Close this process' connection."""
    if server := _clients.pop(url, None):
        server.close()


def address(url: str) -> str:
    return url.rsplit("@", 1)[-1].removeprefix("redis://")


class Due(NamedTuple):
    """What is left of an advance: offsets to go on from, in this generation of the view."""

    advance: Advance
    offsets: tuple[int, ...]
    generation: str

    def arguments(self, partition: int, start: int, until: int, writer: str) -> list[str | int]:
        """Of `APPLY`, without the documents."""
        topic_id, count = self.advance.until.topic_id, self.advance.until.partition_count
        now = f"{time.time():.3f}"
        return [topic_id, partition, start, until, writer, now, count, self.advance.floor, self.generation]

    def moved(self, at: int, answer: Sequence[str], writer: str) -> CdcError:
        """Why `APPLY` has answered so to what goes on from `at`."""
        _, topic_id, other, offset, generation = answer
        expected = Position(self.advance.until.topic_id, (at,))
        if not topic_id:
            return mismatch(self.advance.table, expected, None, ours=True)
        ours = generation == self.generation and other == writer
        return mismatch(self.advance.table, expected, Position(topic_id, (int(offset),)), ours=ours)


def sender(
    url: str, prefix: str, writer: str, dues: Sequence[Due]
) -> Callable[[Iterator["pa.RecordBatch"]], Iterator["pa.RecordBatch"]]:
    known = {due.advance.table.topic: due for due in dues}

    def apply(batches: Iterator["pa.RecordBatch"]) -> Iterator["pa.RecordBatch"]:
        reports = []
        for topic, partition, part in partitions(batches):
            if topic in known:
                reports.append(_apply_partition(url, prefix, writer, known[topic], partition, part))
            else:
                for _ in part:
                    pass
        yield report(reports)

    return apply


def _apply_partition(
    url: str,
    prefix: str,
    writer: str,
    due: Due,
    partition: int,
    batches: Iterator["pa.RecordBatch"],
) -> Report:
    """Send one partition's rows chunk by chunk; those below where it goes on are there from an earlier try."""
    advance, start = due.advance, due.offsets[partition]
    done = Report(topic=advance.table.topic, partition=partition)
    name, at = f"{prefix}:{advance.table.qualified}", start
    end = advance.until.offsets[partition]
    try:
        script = client(url).register_script(APPLY)
        for chunk, reach in _chunks(_due(batches, start, advance.repairs, done)):
            values = _documents(client(url), name, chunk, done)
            if done.refused:
                break
            to = end if reach is None else min(reach, end)
            keys = [f"{prefix}:_cdc:{advance.table.qualified}", *(f"{name}:{row.id}" for row in chunk)]
            answer = script(keys=keys, args=[*due.arguments(partition, at, to, writer), *values])
            if answer[0] == "moved":
                error = due.moved(at, answer, writer)
                done.failure = "rewound" if isinstance(error, SinkUnavailable) else "fenced"
                done.message = error.message
                break
            at = to
            done.deleted += values.count("")
            done.written += len(values) - values.count("")
    except redis.exceptions.RedisError as error:
        done.failure, done.message = _failed(error, url, advance.table.qualified)
    for _ in batches:
        pass
    return done


def _due(batches: Iterator["pa.RecordBatch"], start: int, repairs: bool, done: Report) -> Iterator[Row]:
    """The rows that have to be written; what there is to say of the others is booked."""
    for row in itertools.chain.from_iterable(map(rows, batches)):
        if not row.book(done):
            continue
        if repairs or (row.offset or 0) >= start:
            yield row
        else:
            done.stale += 1


def _documents(server: redis.Redis, name: str, chunk: list[Row], done: Report) -> list[str]:
    """What to write for each row, '' to delete it. A row that can't be completed is refused."""
    asking = [row.id for row in chunk if row.asks_view]
    found: Any = server.mget([f"{name}:{key}" for key in asking]) if asking else []
    viewed: dict[str, str | None] = dict(zip(asking, found, strict=True))
    values = []
    for row in chunk:
        document = row.document if row.kept is None else row.complete(viewed.get(row.id))
        if row.kept is not None and document is None:
            done.refused.append((row.id, UNKNOWN))
        values.append(document or "")
    return values


def _failed(error: redis.exceptions.RedisError, url: str, table: str) -> tuple[str, str]:
    if isinstance(error, UNREACHABLE):
        return "unavailable", f"The cache at {address(url)} can't be reached."
    if isinstance(error, redis.exceptions.OutOfMemoryError):
        return "unavailable", f"The cache at {address(url)} is out of memory."
    # The first word of an answer is its kind; what follows may quote what was sent.
    return "rejected", f"The cache refuses rows of {table}: {str(error).split(' ', 1)[0]}."


def _chunks(rows: Iterable[Row]) -> Iterator[tuple[list[Row], int | None]]:
    """Chunks of rows in the order of `first`, each with the position that it leads to; None for the last.

    Below that position all is written, and nothing above it: a row made from several records isn't cut through.
    """
    chunk: list[Row] = []
    size = reach = 0
    for row in rows:
        full = len(chunk) >= CHUNK_ROWS or size >= CHUNK_BYTES
        if full and (row.first or 0) >= reach:
            yield chunk, reach
            chunk, size = [], 0
        chunk.append(row)
        size += len(row.document or "")
        reach = max(reach, (row.offset or 0) + 1)
    if chunk:
        yield chunk, None
