"""How late each hop sees a commit, while all three sinks run: at one rate, and at shares of what
they take for good.

The load is written by Postgres at its own pace. Beside it one row every 50 ms is changed and
watched, begun when it is due whether or not a view shows the one before. Its commit's time is
Postgres' own; that in Kafka is when the connector handed the record over; begin and end of the
batch that holds it are Spark's; visible is when a client of the view first read it
(`cdc.sample.probe`), which may be before all of the batch is durable.
"""

import random
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from functools import reduce
from operator import or_
from typing import TypeVar

import psycopg
from pyspark.sql import functions as F

from bench.batches import Batch, Watched
from bench.output.figure import Figure
from bench.stage import Stage
from cdc.model.position import Position
from cdc.sample.probe import Watch, delta_watch, elasticsearch_watch, redis_watch

MARK_S = 0.05
LATE_S = 30.0
LIMITS = {"cache": (0.2, 0.5), "search": (0.25, 0.6), "warehouse": (1.5, 3.0)}
"""The most that p50 and p99 may be, seconds, at RATE."""
RATE = 200.0
T = TypeVar("T")
Mark = tuple[str, datetime]
"""A row's id and its `updated_at`."""
Marks = dict[Mark, datetime]
"""The commit time of each mark."""


def latency(
    stage: Stage, changes: int, shares: Sequence[float], seconds: float
) -> Iterator[Figure]:
    """Measure the rate that the sinks can take for good, then the hops at shares of it."""
    with stage.running() as streams:
        _sustained(stage, streams, changes)
        yield (sustained := _sustained(stage, streams, changes))
        for figure in _hops(stage, streams, RATE, seconds):
            figure.asked = LIMITS[figure.name.partition(" ")[0]]
            yield figure
        for share in shares:
            yield from _hops(stage, streams, share * sustained.ours[-1], seconds, f" ({share:.0%})")


def _sustained(stage: Stage, streams: list[Watched], changes: int) -> Figure:
    """Measure all three sinks at once, from the first commit until the last view has it: a bit less
    than what they take for good.
    """
    began, figure = (
        time.time(),
        Figure("sustained, one-row transactions", "changes/s", changes=changes),
    )
    with stage.meter() as meter:
        stage.data.single(changes)
        figure.ours.append(changes / (stage.durable(streams) - began))
    figure.costs.append(meter.cost)
    return figure


def _hops(
    stage: Stage, streams: list[Watched], rate: float, seconds: float, share: str = ""
) -> Iterator[Figure]:
    watches, start = _watches(stage), stage.end()
    with stage.meter() as meter:
        marks = _marked(stage, watches, rate, seconds)
    stage.settle(streams)
    arrived = _arrived(stage, start, marks)
    changes = int(rate * seconds) + len(marks)
    for stream in streams:
        watch = watches[stream.sink.name]
        figure = Figure(f"{stream.sink.name} at {rate:,.0f}/s{share}", "s", changes=changes)
        figure.hops = times(marks, arrived, stream.batches(stage.ends()), stage.table.topic)
        figure.hops["visible"] = watch.latencies
        figure.unseen = watch.unseen + len(watch.pending)
        figure.costs.append(meter.cost)
        yield figure


def visible(stage: Stage, rate: float, seconds: float) -> dict[str, Watch]:
    """Return, by sink, the watch of rows changed at a rate: how long it took until clients saw
    them, whoever applies them.
    """
    watches = _watches(stage)
    _marked(stage, watches, rate, seconds)
    return watches


def _watches(stage: Stage) -> dict[str, Watch]:
    endpoints, table = stage.endpoints, stage.table.qualified
    return {
        "cache": redis_watch(endpoints.redis, stage.name, table),
        "search": elasticsearch_watch(endpoints.elasticsearch, stage.name, table),
        "warehouse": delta_watch(endpoints.warehouse, table),
    }


def _marked(stage: Stage, watches: Mapping[str, Watch], rate: float, seconds: float) -> Marks:
    return watched(
        watches,
        lambda: stage.data.single(int(rate * seconds), rate=rate),
        lambda: _mark(stage, watches, seconds),
    )


def watched(watches: Mapping[str, Watch], write: Callable[[], object], mark: Callable[[], T]) -> T:
    """Write the load and watch the marks until the views show all of them, or have had the time
    to; return what `mark` returns.
    """
    stop = threading.Event()
    with ThreadPoolExecutor(len(watches) + 1) as pool:
        jobs = [pool.submit(_watch, watch, stop) for watch in watches.values()]
        load = pool.submit(write)
        try:
            marks = mark()
            load.result()
            end = time.monotonic() + LATE_S
            while any(watch.pending for watch in watches.values()) and time.monotonic() < end:
                time.sleep(0.1)
        finally:
            stop.set()
        for job in jobs:
            job.result()
    return marks


def _watch(watch: Watch, stop: threading.Event) -> None:
    while not stop.wait(watch.poll_s):
        watch.poll()


def _mark(stage: Stage, watches: Mapping[str, Watch], seconds: float) -> Marks:
    marks: Marks = {}
    chance, began = random.Random(1), time.monotonic()
    table = stage.table.qualified
    with psycopg.connect(stage.dsn, autocommit=True) as connection:
        oldest, newest = connection.execute(f"SELECT min(id), max(id) FROM {table}").fetchone() or (
            1,
            1,
        )
        for number in range(int(seconds / MARK_S)):
            time.sleep(max(0.0, began + number * MARK_S - time.monotonic()))
            key = chance.randint(oldest, newest)
            connection.execute(
                f"UPDATE {table} SET amount = amount + 1, updated_at = clock_timestamp() WHERE id = %s",
                [key],
            )
            row = connection.execute(
                f"SELECT updated_at, pg_xact_commit_timestamp(xmin) FROM {table} WHERE id = %s",
                [key],
            ).fetchone()
            if row:
                marks[str(key), row[0]] = row[1]
                for watch in watches.values():
                    watch.pending[str(key)] = row
    return marks


def _arrived(stage: Stage, start: Position, marks: Marks) -> dict[Mark, tuple[int, int, float]]:
    """Partition, offset and time of each mark's record."""
    later = [
        (F.col("partition") == partition) & (F.col("offset") >= offset)
        for partition, offset in enumerate(start.offsets)
    ]
    name, updated = (
        F.get_json_object(F.col(column).cast("string"), path)
        for column, path in (("key", "$.id"), ("value", "$.after.updated_at"))
    )
    records = (
        stage.log()
        .where(reduce(or_, later))
        .select(
            name.alias("id"),
            updated.alias("updated"),
            "partition",
            "offset",
            F.col("timestamp").cast("double"),
        )
        .where(F.col("id").isin(sorted({key for key, _ in marks})))
    )
    rows = ((row[0], datetime.fromisoformat(row[1]), tuple(row[2:])) for row in records.collect())
    return {(key, updated): place for key, updated, place in rows if (key, updated) in marks}


def times(
    marks: Marks,
    arrived: Mapping[Mark, tuple[int, int, float]],
    batches: Sequence[Batch],
    topic: str,
) -> dict[str, list[float]]:
    """Seconds from commit to Kafka, to the begin and to the end of the batch that holds the record.

    A mark whose record has been compacted away has none.
    """
    hops: dict[str, list[float]] = {"Kafka": [], "begun": [], "durable": []}
    for mark, (partition, offset, arrival) in arrived.items():
        batch = next(batch for batch in batches if batch.ends[topic][partition] > offset)
        for hop, moment in zip(hops, (arrival, batch.began, batch.durable), strict=True):
            hops[hop].append(moment - marks[mark].timestamp())
    return hops
