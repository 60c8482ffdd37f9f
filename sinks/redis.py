"""Redis or Valkey: a JSON document per row under <prefix>:<schema>.<table>:<id>.

One Lua call applies a chunk of a partition and moves that partition's position, so the two can't part. Chunks go in
offset order; a chunk's position is its last offset + 1, and a row above it has not been written by then. So a crash
between chunks leaves an exact position, and no row is ever set back.
Positions are a hash <prefix>:_cdc:<schema>.<table>: topic_id, writer, partitions, rows, at, floor, generation, and one
field a partition.
Another generation lies under the same names in another database of the server; SWAPDB exchanges the two. So every call
names the generation that it is for: the other's positions and rows may lie here by now.
"""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import redis

from cdc.change import Advance, Applied, Form, Position, Stored, Table, new_generation
from cdc.errors import SinkRejected, SinkUnavailable
from cdc.report import send
from cdc.sink import Batch, Replaced, check, require, wait_for
from sinks.redis_send import APPLY, EXCHANGE, REMOVE, UNREACHABLE, Due, address, client, forget, sender

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession

SCAN_ROWS = 2000
ROW = ["id", "document"]
HINTS = {
    "unavailable": "it is tried again; is the server up?",
    "rejected": "repair the server's setting or memory, then start `cdc run` again",
    "fenced": "run one `cdc run` per sink; start this one again when the other has ended",
    "rewound": "nothing to do: its changes are applied again from where it stands",
}


class Redis:
    form: Form = "documents"
    whole = True

    def __init__(
        self, name: str, url: str, prefix: str, spare: int | None = None, beside: Mapping[str, str] | None = None
    ) -> None:
        """`spare` is the number of the database for other generations: the next one when None."""
        self.name, self.url, self.prefix, self._beside = name, url, prefix, beside
        self.database = int(urlsplit(url).path.strip("/") or 0)
        self.spare = self.database + 1 if spare is None else spare

    def prepare(self, table: Table) -> None:
        """Check that the server keeps what it is given: a view that evicts rows is no view."""
        policy = self._ask(lambda server: server.config_get("maxmemory-policy"))["maxmemory-policy"]
        if policy != "noeviction":
            raise SinkRejected(
                f"The cache's maxmemory-policy is {policy}: it may drop rows of {table.qualified} by itself.",
                hint="CONFIG SET maxmemory-policy noeviction",
                sink=self.name,
            )
        generation = self._own(table) or new_generation()
        self._ask(lambda server: server.hsetnx(self.position_key(table), "generation", generation))

    def position(self, table: Table) -> Stored | None:
        found = self._ask(lambda server: server.hgetall(self.position_key(table)))
        if self._beside and found.get("generation") not in (None, self._own(table)):
            raise Replaced(table.qualified, self._own(table), self.name)
        if "topic_id" not in found:
            return None
        offsets = tuple(int(found.get(str(partition), 0)) for partition in range(int(found["partitions"])))
        at = float(found["at"])
        position, floor = Position(found["topic_id"], offsets), int(found.get("floor", 0))
        return Stored(position, found["writer"], int(found["rows"]), at, floor, found.get("generation", ""))

    def apply(self, batch: Batch) -> Mapping[str, Applied]:
        dues = [due for a in batch.advances if (due := self._due(a, batch.writer))]
        if not dues:
            return {}
        applied = send(batch.changes, sender(self.url, self.prefix, batch.writer, dues), self.name, HINTS)
        for due in dues:
            self._finish(due, batch.writer)
        tables = (due.advance.table for due in dues)
        return {table.qualified: applied.get(table.topic, Applied()) for table in tables}

    def clear(self, table: Table) -> None:
        """Rows first: if this ends half-way, the position is still there to tell that it has to be done.

        What another generation has left beside the live one makes room for this one.
        """
        generation, script = self._generation(table), client(self.url).register_script(REMOVE)
        rows = client(self.url).scan_iter(match=_glob(f"{self.prefix}:{table.qualified}:") + "*", count=SCAN_ROWS)
        left = True
        while left:
            page = self._ask(lambda _: list(itertools.islice(rows, SCAN_ROWS)))
            left = bool(page)
            told: list[str | int] = [generation, *(("", "") if page else ("position", self._own(table)))]
            if not self._ask(partial(_run, script, [self.position_key(table), *page], told)):
                raise SinkUnavailable(
                    f"Generations of {table.qualified} have changed places while one was made empty.",
                    hint="nothing to do: it is tried again",
                    sink=self.name,
                )

    def scan(self, table: Table, spark: "SparkSession", ids: Sequence[str] | None = None) -> "DataFrame":
        url, start = self.url, f"{self.prefix}:{table.qualified}:"

        def rows(keys: list[str]) -> "pa.RecordBatch":
            import pyarrow as pa

            # A key that SCAN has named may be gone by now; MGET takes one key at least.
            values = client(url).mget(keys) if keys else []
            held = [(key, value) for key, value in zip(keys, values, strict=True) if value is not None]
            ids, documents = [key[len(start) :] for key, _ in held], [value for _, value in held]
            return pa.RecordBatch.from_arrays([pa.array(ids, "string"), pa.array(documents, "string")], names=ROW)

        def read(parts: Iterator["pa.RecordBatch"]) -> Iterator["pa.RecordBatch"]:
            # Spark throws a worker away that hasn't read its input to the end: 0.7 s of imports.
            for _ in parts:
                pass
            keys = client(url).scan_iter(match=_glob(start) + "*", count=SCAN_ROWS)
            while page := list(itertools.islice(keys, SCAN_ROWS)):
                yield rows(page)

        def read_ids(parts: Iterator["pa.RecordBatch"]) -> Iterator["pa.RecordBatch"]:
            for part in parts:
                yield rows([start + key for key in part.column("key").to_pylist()])

        if ids is None:
            return spark.range(1, numPartitions=1).mapInArrow(read, "id string, document string")
        keys = spark.createDataFrame([(key,) for key in ids], "key string")
        return keys.mapInArrow(read_ids, "id string, document string")

    def close(self) -> None:
        forget(self.url)

    def beside(self, names: Mapping[str, str]) -> "Redis":
        url = urlsplit(self.url)._replace(path=f"/{self.spare}").geturl()
        return Redis(self.name, url, self.prefix, self.database, dict(names))

    def require_room(self, tables: Sequence[Table]) -> None:  # noqa: ARG002  # it is always for all
        """The two databases change places as a whole, so both have to be the pipeline's own."""
        for sink in (self, self.beside({})):
            if key := sink._ask(sink._foreign):
                raise SinkRejected(
                    f"Database {sink.database} of the cache holds keys of others ({key.split(':', 1)[0]}:…), which"
                    " would change places with those of the new generation.",
                    hint="give the pipeline two databases of its own: url: redis://host:port/2 and spare: 3",
                    sink=self.name,
                )
        memory = self._ask(lambda server: server.info("memory"))
        limit = int(memory["maxmemory"]) or int(memory["total_system_memory"])
        used = int(memory["used_memory"])
        require(used, limit - used, f"the memory of the cache at {address(self.url)}", self.name)

    def promote(self, tables: Sequence[Table], names: Mapping[str, str]) -> Mapping[str, str]:
        """One script compares all positions and exchanges the databases, so that no view goes back."""
        if all((at := self.position(table)) and at.generation == names[table.qualified] for table in tables):
            return {}
        keys = [self.position_key(table) for table in tables]
        wait_for(lambda: bool(self._ask(partial(_exchange, self, keys))), self.name)
        other = self.beside({})
        return {table.qualified: at.generation for table in tables if (at := other.position(table))}

    def generations(self, table: Table) -> list[str]:
        found = (sink.position(table) for sink in (self, self.beside({})))
        return [stored.generation for stored in found if stored]

    def sweep(self, tables: Sequence[Table], keep: Mapping[str, str]) -> None:
        other = self.beside({})
        for table in tables:
            if table.qualified not in keep:
                other.clear(table)

    def _foreign(self, server: redis.Redis) -> str | None:
        """A key that isn't the pipeline's."""
        keys = server.scan_iter(count=SCAN_ROWS)
        return next((key for key in keys if not key.startswith(f"{self.prefix}:")), None)

    def position_key(self, table: Table) -> str:
        return f"{self.prefix}:_cdc:{table.qualified}"

    def _due(self, advance: Advance, writer: str) -> Due | None:
        """What is left to do, None when it is done: an earlier try may have got part of the way."""
        stored = self.position(advance.table)
        ours = stored is not None and stored.writer == writer
        if stored and ours and not advance.repairs and stored.position.topic_id == advance.until.topic_id:
            offsets = stored.position.offsets
            if offsets == advance.until.offsets:
                return None
            between = zip(advance.start_offsets, offsets, advance.until.offsets, strict=True)
            if all(start <= at <= until for start, at, until in between):
                return Due(advance, offsets, stored.generation)
        check(advance, stored, writer)
        return Due(advance, advance.start_offsets, stored.generation if stored else self._generation(advance.table))

    def _finish(self, due: Due, writer: str) -> None:
        """Move the partitions whose records were transaction markers only: no row carried their position."""
        until = due.advance.until
        stored = self.position(due.advance.table)
        offsets = stored.position.offsets if stored else (0,) * until.partition_count
        script = client(self.url).register_script(APPLY)
        for partition, (at, end) in enumerate(zip(offsets, until.offsets, strict=True)):
            if at == end:
                continue
            moved = due.arguments(partition, at, end, writer)
            answer = self._ask(partial(_run, script, [self.position_key(due.advance.table)], moved))
            if answer[0] != "ok":
                raise due.moved(at, answer, writer)

    def _own(self, table: Table) -> str:
        """The name of the generation that this is the sink of; '' for the live one, whatever it is called."""
        return self._beside[table.qualified] if self._beside else ""

    def _generation(self, table: Table) -> str:
        """Which one lies here, whether it has a position yet or not."""
        return self._ask(lambda server: server.hget(self.position_key(table), "generation")) or ""

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


def _run(script: Any, keys: list[str], arguments: list[str | int], _: redis.Redis) -> Any:
    return script(keys=keys, args=arguments)


def _exchange(sink: Redis, keys: list[str], server: redis.Redis) -> Any:
    return server.eval(EXCHANGE, 0, sink.database, sink.spare, *keys)


def _glob(text: str) -> str:
    return "".join(f"\\{char}" if char in "*?[]\\" else char for char in text)
