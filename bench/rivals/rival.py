"""The rival's processes: one alone on what a topic holds, or three at once that follow all of them
(`bench.rivals.plain`).
"""

import shutil
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from types import TracebackType

import deltalake
import httpx
import orjson
import psycopg
import redis

from bench.rivals.plain import Offsets, rival_name
from bench.stage import Stage
from cdc.errors import DivergenceError
from cdc.model.table import Table
from cdc.sinks.elasticsearch.sink import Elasticsearch

RECORDS = {"warehouse": 100_000, "changes": 100_000}
"""The records of a batch by target; ten thousand for other targets."""
END_S = 600.0


class Consumer:
    """A process that reads topics from these offsets to the ends that it receives later."""

    def __init__(self, stage: Stage, target: str, place: str, starts: Offsets) -> None:
        words = [
            target,
            stage.endpoints.kafka,
            place,
            str(RECORDS.get(target, 10_000)),
            orjson.dumps(starts).decode(),
        ]
        command = [sys.executable, "-m", "bench.rivals.plain", *words]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def __enter__(self) -> "Consumer":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._process.kill()
        self._process.communicate()

    def ready(self) -> float:
        """Since when it reads, Unix seconds; waits until it does."""
        assert self._process.stdout
        return float(self._process.stdout.readline() or "nan")

    def send_ends(self, ends: Offsets) -> None:
        assert self._process.stdin
        self._process.stdin.write(f"{orjson.dumps(ends).decode()}\n")
        self._process.stdin.flush()

    def durable_time(self) -> float:
        """Wait until all records up to the ends are durable; return when that was, Unix seconds."""
        answer, _ = self._process.communicate(timeout=END_S)
        if self._process.returncode:
            raise DivergenceError(
                f"the rival ended with {self._process.returncode}.", hint="it has printed why"
            )
        return float(answer)


def alone(stage: Stage, target: str, place: str, starts: Offsets | None = None) -> float:
    """The seconds that a consumer needs for the records of the stage's table, without its start."""
    ends = {stage.table.topic: list(stage.end().offsets)}
    with Consumer(stage, target, place, starts or zero(ends)) as consumer:
        began = consumer.ready()
        consumer.send_ends(ends)
        return consumer.durable_time() - began


def empty_index(stage: Stage, table: Table, name: str) -> None:
    """Recreate an index with our mapping for the table, and nothing else of our index."""
    url = stage.endpoints.elasticsearch
    alias = Elasticsearch("search", url, stage.name).alias(table)
    mappings = httpx.get(f"{url}/{alias}/_mapping").raise_for_status().json()
    same = {
        "settings": {"number_of_shards": 1, "number_of_replicas": 0},
        **next(iter(mappings.values())),
    }
    httpx.delete(f"{url}/{name}", timeout=60)
    httpx.put(f"{url}/{name}", json=same, timeout=60).raise_for_status()


class Rivals:
    """Three consumers at once, of all topics of a stage: index, cache, and a warehouse of changes
    and mirror.

    They go on from where they were, as ours do. The stage's own indices have to exist.
    """

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self._index = stage.endpoints.elasticsearch
        # A database of their own, so that its number of keys gives the number of rows.
        self._cache = stage.endpoints.redis.rpartition("/")[0] + "/1"
        self._folder = f"{stage.folder}/rivals"
        self._read = zero(_ends(stage))

    def __enter__(self) -> "Rivals":
        for table in self._stage.tables:
            empty_index(self._stage, table, rival_name(table.topic))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for table in self._stage.tables:
            for index in (rival_name(table.topic), f"{rival_name(table.topic)}-position"):
                httpx.delete(f"{self._index}/{index}", timeout=60)
        with redis.Redis.from_url(self._cache) as server:
            server.flushdb()
        shutil.rmtree(self._folder, ignore_errors=True)

    def catch_up(self) -> float:
        """Apply what the topics hold: the seconds from the first read until the last view had all
        of it.
        """
        return self.drain(lambda began: began)

    def drain(self, release: Callable[[float], float]) -> float:
        """The same for what `release` brings into the topics once they are read.

        It takes and returns when what is measured began, Unix seconds.
        """
        places = {"redis": self._cache, "elasticsearch": self._index, "warehouse": self._folder}
        with ExitStack() as stack:
            consumers = [
                stack.enter_context(Consumer(self._stage, target, place, self._read))
                for target, place in places.items()
            ]
            began = release(min([consumer.ready() for consumer in consumers]))
            self._read = _ends(self._stage)
            for consumer in consumers:
                consumer.send_ends(self._read)
            return max([consumer.durable_time() for consumer in consumers]) - began

    def check(self) -> None:
        """Raise DivergenceError unless their views have as many rows as the tables: who loses some
        has no number.
        """
        tables = self._stage.tables
        with psycopg.connect(self._stage.dsn) as connection:
            counts = {table.topic: _count(connection, table) for table in tables}
        httpx.post(f"{self._index}/rival-*/_refresh", timeout=60).raise_for_status()
        with redis.Redis.from_url(self._cache) as server:
            # The other keys are positions.
            counts_by_view = {"cache": (server.dbsize() - len(tables), sum(counts.values()))}
        for topic, rows in counts.items():
            index = (
                httpx.get(f"{self._index}/{rival_name(topic)}/_count")
                .raise_for_status()
                .json()["count"]
            )
            mirror = deltalake.DeltaTable(f"{self._folder}/{rival_name(topic)}/mirror").count()
            counts_by_view |= {
                f"index of {topic}": (index, rows),
                f"mirror of {topic}": (mirror, rows),
            }
        for view, (count, rows) in counts_by_view.items():
            if count != rows:
                raise DivergenceError(
                    f"the rival's {view} has {count} of {rows} rows.",
                    hint="a bug in bench/rivals/plain.py",
                )


def _count(connection: "psycopg.Connection[tuple[int]]", table: Table) -> int:
    (count,) = connection.execute(f"SELECT count(*) FROM {table.qualified}").fetchone() or (0,)
    return count


def _ends(stage: Stage) -> Offsets:
    return {topic: list(end.offsets) for topic, end in stage.ends().items()}


def zero(ends: Offsets) -> Offsets:
    """The first offsets of topics that nothing has left."""
    return {topic: [0] * len(offsets) for topic, offsets in ends.items()}
