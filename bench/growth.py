"""W4, W7: the snapshot of a large table, and what a change costs on it over what it costs on a small one."""

import time
from collections.abc import Iterator

from pyspark.sql import functions as F

from bench.figure import Figure
from bench.live import copy
from bench.paths import book, equal
from bench.stage import Stage
from connectors.client import Connect

GOALS = {"cache": 1.1, "search": 1.1, "warehouse": 1.3}


def growth(stage: Stage, rows: int, factor: int, changes: int, times: int) -> Iterator[Figure]:
    """The snapshot of a table `factor` times as large as the first; then the same number of updates on either."""
    table = f"public.bench_{factor}"
    with stage.beside(f"bench_{factor}", [table], lambda data: data.fill(rows * factor)) as other:
        found = [*_snapshot(other), *_compared(stage, other, changes, times)]
        for one in (stage, other):
            equal(one, "W4, W7")
        yield from found


def _snapshot(stage: Stage) -> Iterator[Figure]:
    """Into Kafka, against COPY; then from there into three views at once."""
    rows = stage.rows()
    figure = Figure(f"W4 snapshot of {rows:,} rows to Kafka", "rows/s", changes=rows)
    began = time.monotonic()
    copy(stage)
    figure.limit.append(rows / (time.monotonic() - began))
    sent = [F.max("timestamp").cast("double"), F.min("timestamp").cast("double")]
    last, first = stage.log().agg(*sent).collect()[0]
    figure.ours.append(rows / (last - first))
    figure.costs.append(stage.snapshot)
    yield figure
    views = Figure("W4 snapshot to three views", "rows/s", changes=rows)
    with stage.meter() as meter, stage.running() as streams:
        batches = [batch for stream in streams for batch in stream.batches(stage.ends())]
    book(views, max(one.durable for one in batches) - min(one.began for one in batches), meter.cost)
    yield views


def _compared(small: Stage, large: Stage, changes: int, times: int) -> Iterator[Figure]:
    """Each sink alone, from Kafka; `limit` is the small table's cost. All rows are equally likely to be changed."""
    sizes = f"{large.rows():,} rows / {small.rows():,}"
    figures = {
        name: Figure(f"W7 {name}, {sizes}", "µs/change", goal, at_most=True, changes=changes)
        for name, goal in GOALS.items()
    }
    with Connect(small.endpoints.connect) as connect:
        connect.resume(small.name)
    for number in range(-1, times):
        # The first time is to warm up.
        number_of = changes if number >= 0 else changes // 10
        for stage in (small, large):
            stage.data.scattered(number_of, number)
        for stage, into in ((small, "limit"), (large, "ours")):
            stage.drained()
            for name, figure in figures.items():
                (sink,) = stage.context.sinks([name])
                with stage.meter() as meter:
                    took = sum(batch.durable - batch.began for batch in stage.apply(sink).batches(stage.ends()))
                if number >= 0:
                    getattr(figure, into).append(took / changes * 1e6)
                if number >= 0 and stage is large:
                    figure.costs.append(meter.cost)
    yield from figures.values()
