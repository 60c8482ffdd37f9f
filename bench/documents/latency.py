"""How late the cache has a document, beside a load of commits of one row, and amid the rename of an
airline with many of them; how late PGSync's index has one.
"""

import time
from collections.abc import Callable, Iterator
from datetime import datetime
from threading import Timer
from typing import Any

import psycopg
from pyspark.sql import functions as F

from bench.batches import Watched
from bench.documents.flights import SHARE, Flights
from bench.documents.topic_times import arrivals, flight_ends, records, view_of
from bench.latency import MARK_S, RATE, watched
from bench.output.figure import Figure
from bench.stage import Stage
from cdc.errors import DivergenceError
from cdc.model.table import row_id
from cdc.sample.probe import Watch, redis_watch

LATENCIES = {RATE: (0.8,), 2000.0: (1.3,)}
"""The most that p50 may be, seconds, by changes a second."""
Identity = Callable[[list[Any]], str]
"""Makes the id of what is watched of a flight's key."""


def late(
    stage: Stage,
    streams: list[Watched],
    flights: Flights,
    rate: float,
    seconds: float,
    what: str = "document",
    identity: Identity = row_id,
) -> Figure:
    """How long it takes from a commit until the cache has the document, beside a load of commits of
    one row. `identity` makes its id of the flight's key; its `updated_at` is the flight's, or later.
    """
    figure = Figure(f"{what} in the cache at {rate:,.0f}/s", "s", asked=LATENCIES[rate])
    figure.changes = int((rate + 1 / MARK_S) * seconds)
    starts = flight_ends(stage, flights)
    with stage.meter() as meter:
        marks, latencies, figure.unseen = _marked(stage, flights, rate, seconds, identity)
    stage.settle(streams)
    times = arrivals(stage, starts)
    for hop, topic in zip(("Kafka", "topic"), starts, strict=True):
        figure.hops[hop] = [
            times[topic, updated] - committed.timestamp()
            for updated, committed in marks.items()
            if (topic, updated) in times
        ]
    figure.hops["visible"] = [latency for _, latency in latencies]
    figure.costs.append(meter.cost)
    return figure


def _marked(
    stage: Stage,
    flights: Flights,
    rate: float,
    seconds: float,
    identity: Identity = row_id,
) -> tuple[dict[datetime, datetime], list[tuple[datetime, float]], int]:
    """Write a load and watch rows: the commits by `updated_at`, the commits with how late the cache
    had them, and how many it hadn't in time.
    """
    watch = redis_watch(stage.endpoints.redis, stage.name, view_of(stage, flights).qualified)
    changes = int(rate * seconds)
    marks = watched(
        {"cache": watch},
        lambda: flights.change(changes, size=1, rate=rate),
        lambda: mark(stage, flights, seconds, watch, identity),
    )
    latencies = list(zip(watch.commits, watch.latencies, strict=True))
    return marks, latencies, watch.unseen + len(watch.pending)


def mark(
    stage: Stage,
    flights: Flights,
    seconds: float,
    watch: Watch,
    identity: Identity,
) -> dict[datetime, datetime]:
    """Change a row every 50 ms and have it watched; the commits by `updated_at`."""
    marks: dict[datetime, datetime] = {}
    began = time.monotonic()
    with psycopg.connect(stage.dsn, autocommit=True) as connection:
        for number in range(int(seconds / MARK_S)):
            time.sleep(max(0.0, began + number * MARK_S - time.monotonic()))
            key, updated, committed = flights.mark(connection, number * 101)
            marks[updated] = committed
            watch.pending[identity(key)] = updated, committed
    return marks


def fan_out(
    stage: Stage, streams: list[Watched], flights: Flights, quiet: Figure, seconds: float
) -> Iterator[Figure]:
    """Rename an airline amid a load: how soon all its documents are in the topic, and how late
    others are in the cache until then.
    """
    size = flights.rows * SHARE // 100
    renamed = Figure(
        f"documents of a renamed airline, {size:,} of {flights.rows:,}",
        "documents/s",
        rate=19_000,
        changes=size,
    )
    median = sorted(quiet.hops["visible"])[len(quiet.hops["visible"]) // 2]
    meanwhile = Figure(f"document in the cache at {RATE:,.0f}/s, amid a rename", "s")
    meanwhile.asked = (2 * median,)
    starts, name = flight_ends(stage, flights), "Renamed"
    rename = Timer(seconds / 4, flights.rename, [name])
    rename.start()
    _, latencies, meanwhile.unseen = _marked(stage, flights, RATE, seconds)
    rename.join()
    stage.settle(streams)
    began = flights.renamed_at()
    _, topic = starts
    by_document = (
        records(stage, {topic: starts[topic]})
        .where(F.col("value").cast("string").contains(name))
        .groupBy("key")
        .agg(F.min("timestamp").cast("double").alias("sent"))
    )
    documents, end = by_document.agg(F.count("*"), F.max("sent")).collect()[0]
    if documents != size:
        raise DivergenceError(
            f"{documents} of {size} documents were renamed.", hint="a bug in the pipeline"
        )
    renamed.ours.append(size / (end - began))
    meanwhile.hops["visible"] = [
        latency for committed, latency in latencies if began <= committed.timestamp() <= end
    ]
    yield renamed
    yield meanwhile
