"""Ways in which a writer ends in the middle of a batch. Parts of them run in the workers of Spark, by reference."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn
from unittest import mock

import deltalake
from pyspark.errors import PySparkException

import cdc.sinks.elasticsearch.sink
import cdc.sinks.redis.sink
from cdc.errors import Fenced, SinkUnavailable
from cdc.sink.contract import Batch, Outcome
from cdc.sink.lane import ChunkLimits, Failure, Part, Verdicts
from cdc.sinks.delta.batch import TableCommit
from cdc.sinks.delta.sink import Delta
from cdc.sinks.elasticsearch.executor import ElasticsearchWriter
from cdc.sinks.elasticsearch.positions import POSITIONS, Positions
from cdc.sinks.elasticsearch.sink import Elasticsearch
from cdc.sinks.memory import Memory
from cdc.sinks.redis.executor import RedisWriter
from tests.support import http
from tests.support.histories import LARGE

if TYPE_CHECKING:
    from tests.contract.test_histories import Consumer

Crash = Callable[["Consumer", Batch, int], None]
DEATH = "the writer dies here"


def die(*_: Any, **__: Any) -> NoReturn:
    raise RuntimeError(DEATH)


@contextmanager
def survived() -> Iterator[None]:
    """Suppress the errors that a broken writer is expected to raise, and no others."""
    try:
        yield
    except (SinkUnavailable, Fenced):
        pass
    except (RuntimeError, PySparkException) as error:
        if DEATH not in str(error):
            raise


class Torn(Memory):
    """Dies between the data and the position: of the rows, every third is still as it was, or
    none.

    Rows that the batch deletes, and those that have a null in a large column after it, are all as
    they were. Without versions nobody could tell that such a row is newer than a change before,
    which misses values. No destination loses it that way: the cache and the mirror take a chunk as
    a whole, the index has versions and answers `SUPERSEDED`.
    """

    keeps = 0

    def apply(self, batch: Batch) -> Outcome:
        views, stored = {name: dict(view) for name, view in self.views.items()}, dict(self.stored)
        super().apply(batch)
        for name, view in self.views.items():
            torn_keys = [
                key
                for key in {**views[name], **view}
                if key not in view
                or (self.keeps and len(key) % self.keeps == 0)
                or has_null(view[key])
            ]
            for key in torn_keys:
                view.pop(key, None)
            view.update({key: views[name][key] for key in torn_keys if key in views[name]})
        self.stored.clear()
        self.stored.update(stored)
        die()


def has_null(document: str) -> bool:
    """Whether a row has a null in a column whose values an update may leave out."""
    row = json.loads(document)
    return any(row[name] is None for name in LARGE)


def torn_memory(consumer: "Consumer", batch: Batch, seed: int) -> None:
    """Tear a batch of the memory sink. Its rows have no versions, so the same batch has to come
    again: Spark has planned it.
    """
    memory, torn = consumer.sink, Torn("memory")
    assert isinstance(memory, Memory)
    torn.views, torn.stored, torn.keeps = memory.views, memory.stored, seed % 4
    with survived():
        torn.apply(batch)
    consumer.check_view()
    consumer.start()
    consumer.deliver(consumer.between(consumer.place, batch.advances[0].end.offsets))


class Cut:
    """Breaks at one of the calls of a writer: before the destination has it, or after. Stands before its class."""

    calls: int
    late: bool
    dies: bool = False

    def write(self, parts: Sequence[Part]) -> Sequence[Verdicts]:
        verdicts: list[Verdicts] = []
        for part in parts:
            self.calls -= 1
            if self.calls >= 0 or self.late:
                verdicts += super().write([part])  # type: ignore[misc]
            if self.calls < 0:
                if self.dies:
                    die()
                raise Failure("unavailable", "cut")
        return verdicts


@dataclass
class CutRedis(Cut, RedisWriter):
    calls: int = 0
    late: bool = False
    limits = ChunkLimits(5, 10**6)


@dataclass
class CutElasticsearch(Cut, ElasticsearchWriter):
    calls: int = 0
    late: bool = False
    dies: bool = False
    limits = ChunkLimits(5, 10**6)


def broken_redis(consumer: "Consumer", batch: Batch, seed: int) -> None:
    cut = partial(CutRedis, calls=seed % 11, late=seed % 2 == 0)
    with survived(), mock.patch.object(cdc.sinks.redis.sink, "RedisWriter", cut):
        consumer.sink.apply(batch)


def broken_elasticsearch(consumer: "Consumer", batch: Batch, seed: int) -> None:
    cut = partial(CutElasticsearch, calls=seed % 13, late=seed % 3 == 1, dies=seed % 3 == 2)
    with survived(), mock.patch.object(cdc.sinks.elasticsearch.sink, "ElasticsearchWriter", cut):
        consumer.sink.apply(batch)


def break_before(step: type, method: str) -> Crash:
    """Dies where the sink would do a step of its batch."""

    def crash(consumer: "Consumer", batch: Batch, seed: int) -> None:
        with survived(), mock.patch.object(step, method, die):
            consumer.sink.apply(batch)

    return crash


def break_after(step: type, method: str) -> Crash:
    """Dies when the sink has done a step of its batch."""
    original = getattr(step, method)

    def last(*arguments: Any, **options: Any) -> NoReturn:
        original(*arguments, **options)
        die()

    def crash(consumer: "Consumer", batch: Batch, seed: int) -> None:
        with survived(), mock.patch.object(step, method, last):
            consumer.sink.apply(batch)

    return crash


def lost_position(consumer: "Consumer", batch: Batch, seed: int) -> None:
    """Apply the whole batch, but lose its position: the log comes again from offset zero."""
    sink = consumer.sink
    assert isinstance(sink, Elasticsearch)
    consumer.send(batch)
    (index,) = (
        http.get(f"{sink.url}/_alias/{sink.alias(consumer.world.table)}").raise_for_status().json()
    )
    url = f"{sink.url}/{POSITIONS}/_doc/{index}"
    http.delete(url, params={"refresh": "true"}).raise_for_status()


def restored(kind: str) -> Crash:
    """Somebody brings an older version of a Delta table back, after a batch."""

    def crash(consumer: "Consumer", batch: Batch, seed: int) -> None:
        sink = consumer.sink
        assert isinstance(sink, Delta)
        consumer.send(batch)
        table = deltalake.DeltaTable(sink.folder(consumer.world.table, kind))
        table.restore(seed % table.version())
        consumer.reader.restart()

    return crash


MEMORY: Sequence[Crash] = (torn_memory,)
SERVERS: Mapping[str, Sequence[Crash]] = {
    "redis": (broken_redis,),
    "elasticsearch": (
        broken_elasticsearch,
        break_before(Positions, "finish"),
        break_after(Positions, "finish"),
        lost_position,
    ),
    "delta": (
        break_before(TableCommit, "append"),
        break_after(TableCommit, "append"),
        break_before(TableCommit, "merge"),
        break_after(TableCommit, "merge"),
        restored("mirror"),
        restored("changes"),
    ),
}
