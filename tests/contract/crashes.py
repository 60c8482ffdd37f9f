"""Ways in which a writer ends in the middle of a batch. Parts of them run in the workers of Spark, by reference."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NoReturn
from unittest import mock

import deltalake
import httpx
import redis
from pyspark.errors import PySparkException

import sinks.elasticsearch.sink
import sinks.redis
from cdc.change import Applied
from cdc.errors import Fenced, SinkUnavailable
from cdc.report import Report
from cdc.sink import Batch
from sinks import redis_chunks, redis_send, redis_server
from sinks.delta.sink import Delta
from sinks.elasticsearch import executor
from sinks.elasticsearch.positions import POSITIONS
from sinks.elasticsearch.sink import Elasticsearch
from sinks.memory import Memory

if TYPE_CHECKING:
    from tests.contract.test_histories import Consumer

Crash = Callable[["Consumer", Batch, int], None]
Send = Callable[[Iterator[Any]], Iterator[Any]]
DEATH = "the writer dies here"


def die(*_: Any, **__: Any) -> NoReturn:
    raise RuntimeError(DEATH)


@contextmanager
def survived() -> Iterator[None]:
    """What is expected of a broken writer, and nothing else."""
    try:
        yield
    except (SinkUnavailable, Fenced):
        pass
    except (RuntimeError, PySparkException) as error:
        if DEATH not in str(error):
            raise


class Torn(Memory):
    """Dies between the data and the position: of the rows, every third is still as it was, or none."""

    keeps = 0

    def apply(self, batch: Batch) -> Mapping[str, Applied]:
        before, stored = {name: dict(view) for name, view in self.views.items()}, dict(self.stored)
        super().apply(batch)
        for name, view in self.views.items():
            old = [key for key in {**before[name], **view} if self.keeps and len(key) % self.keeps == 0]
            for key in old:
                view.pop(key, None)
            view.update({key: before[name][key] for key in old if key in before[name]})
        self.stored.clear()
        self.stored.update(stored)
        die()


def torn_memory(consumer: "Consumer", batch: Batch, seed: int) -> None:
    """Its rows have no versions, so the same batch has to come again: Spark has planned it."""
    held, torn = consumer.sink, Torn("memory")
    assert isinstance(held, Memory)
    torn.views, torn.stored, torn.keeps = held.views, held.stored, seed % 4
    with survived():
        torn.apply(batch)
    consumer.look()
    consumer.start()
    consumer.deliver(consumer.between(consumer.at, batch.advances[0].until.offsets))


class Flaky:
    """A connection to the cache that breaks at one call of a script: before the server has it, or after."""

    def __init__(self, server: redis.Redis, calls: int, after: bool) -> None:
        self.server, self.calls, self.after = server, calls, after

    def __getattr__(self, name: str) -> Any:
        return getattr(self.server, name)

    def register_script(self, text: str) -> Callable[..., Any]:
        script = self.server.register_script(text)

        def call(**arguments: Any) -> Any:
            self.calls -= 1
            if self.calls < 0:
                if self.after:
                    script(**arguments)
                raise redis.exceptions.ConnectionError
            return script(**arguments)

        return call


def flaky_redis(calls: int, after: bool) -> Callable[..., Send]:
    def sender(*arguments: Any) -> Send:
        whole, real = redis_send.sender(*arguments), redis_server.client

        def apply(batches: Iterator[Any]) -> Iterator[Any]:
            (url, *_) = arguments
            broken = Flaky(real(url), calls, after)
            few = mock.patch.object(redis_chunks, "CHUNK_ROWS", 5)
            with few, mock.patch.object(redis_send, "client", return_value=broken):
                yield from whole(batches)

        return apply

    return sender


def broken_redis(consumer: "Consumer", batch: Batch, seed: int) -> None:
    with survived(), mock.patch.object(sinks.redis, "sender", flaky_redis(seed % 11, seed % 2 == 0)):
        consumer.sink.apply(batch)


def flaky_elasticsearch(calls: int, kind: int) -> Callable[..., Send]:
    def sender(*arguments: Any) -> Send:
        whole, real, left = executor.sender(*arguments), executor._post, [calls]

        def post(url: str, items: Sequence[Any], said: Report) -> Any:
            left[0] -= 1
            if left[0] >= 0 or kind == 1:
                answers = real(url, list(items), said)
            if left[0] >= 0:
                return answers
            if kind == 2:
                die()
            said.failure, said.message = "unavailable", "cut"
            return []

        def apply(batches: Iterator[Any]) -> Iterator[Any]:
            with mock.patch.multiple(executor, BULK_BYTES=1500, _post=post):
                yield from whole(batches)

        return apply

    return sender


def broken_elasticsearch(consumer: "Consumer", batch: Batch, seed: int) -> None:
    with survived(), mock.patch.object(sinks.elasticsearch.sink, "sender", flaky_elasticsearch(seed % 13, seed % 3)):
        consumer.sink.apply(batch)


def before(method: str) -> Crash:
    """Dies where it would call a method of the sink."""

    def crash(consumer: "Consumer", batch: Batch, seed: int) -> None:
        with survived(), mock.patch.object(consumer.sink, method, die):
            consumer.sink.apply(batch)

    return crash


def after(method: str) -> Crash:
    """Dies when a method of the sink has done its work."""

    def crash(consumer: "Consumer", batch: Batch, seed: int) -> None:
        whole = getattr(consumer.sink, method)

        def last(*arguments: Any) -> NoReturn:
            whole(*arguments)
            die()

        with survived(), mock.patch.object(consumer.sink, method, last):
            consumer.sink.apply(batch)

    return crash


def lost_position(consumer: "Consumer", batch: Batch, seed: int) -> None:
    """All of the batch is there, but not one word of how far it goes: the log comes again from offset zero."""
    sink = consumer.sink
    assert isinstance(sink, Elasticsearch)
    consumer.send(batch)
    (index,) = httpx.get(f"{sink.url}/_alias/{sink.alias(consumer.world.table)}").raise_for_status().json()
    url = f"{sink.url}/{POSITIONS}/_doc/{index}"
    httpx.delete(url, params={"refresh": "true"}).raise_for_status()


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
    "elasticsearch": (broken_elasticsearch, before("_commit"), after("_commit"), lost_position),
    "delta": (
        before("_append"),
        after("_append"),
        before("_merge"),
        after("_merge"),
        restored("mirror"),
        restored("changes"),
    ),
}
