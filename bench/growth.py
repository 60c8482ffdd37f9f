"""W4, W7: a large table: its snapshot, verified; what a change costs on it beside a small one."""

import time
from collections import defaultdict
from collections.abc import Iterator, Sequence

from pyspark.sql import functions as F

from bench.live import copy, verifying
from bench.output.cost import Cost
from bench.output.figure import Figure
from bench.paths import book
from bench.rivals.rival import Rivals
from bench.stage import Stage
from bench.workload import Data

GOALS = {"cache": 1.1, "search": 1.1, "warehouse": 1.3}


def make(data: Data, sizes: Sequence[int]) -> None:
    """A table for each number of rows."""
    for table, rows in zip(data.tables, sizes, strict=True):
        Data(data.dsn, [table]).fill(rows)


def snapshot(stage: Stage, rows: int) -> Iterator[Figure]:
    """Into Kafka, against COPY; then from there into three views at once, against the rival's."""
    figure = Figure(f"W4 snapshot of {rows:,} rows to Kafka", "rows/s", changes=rows)
    began = time.monotonic()
    copy(stage)
    figure.limit.append(rows / (time.monotonic() - began))
    timestamps = [F.max("timestamp").cast("double"), F.min("timestamp").cast("double")]
    last, first = stage.log().agg(*timestamps).collect()[0]
    figure.ours.append(rows / (last - first))
    figure.costs.append(stage.snapshot)
    yield figure
    views = Figure("W4 snapshot to three views", "rows/s", 1.0, "rival", rate=20_000, changes=rows)
    with stage.meter() as meter, stage.running() as streams:
        batches = [batch for stream in streams for batch in stream.batches(stage.ends())]
    book(
        views,
        max(batch.durable for batch in batches) - min(batch.began for batch in batches),
        meter.cost,
    )
    with Rivals(stage) as rivals:
        views.rival.append(rows / rivals.catch_up())
        rivals.check()
    verified = list(verifying(stage, rows))
    yield views
    yield from verified


def growth(stage: Stage, sizes: Sequence[int], changes: int, times: int) -> Iterator[Figure]:
    """Measure each sink alone, from Kafka; `limit` is the smallest table's cost. All rows are
    equally likely to be changed.
    """
    cost: dict[tuple[str, int], list[float]] = defaultdict(list)
    meters: dict[tuple[str, int], list[Cost]] = defaultdict(list)
    for number in range(-1, times):
        for table, rows in zip(stage.data.tables, sizes, strict=True):
            # The first time is to warm up.
            Data(stage.dsn, [table]).scattered(changes if number >= 0 else changes // 10, number)
            stage.drained()
            for sink in stage.context.sinks(None):
                with stage.meter() as meter:
                    took = sum(
                        batch.durable - batch.began
                        for batch in stage.apply(sink).batches(stage.ends())
                    )
                if number >= 0:
                    cost[sink.name, rows].append(took / changes * 1e6)
                    meters[sink.name, rows].append(meter.cost)
    for name, goal in GOALS.items():
        for rows in sizes[1:]:
            figure = Figure(
                f"W7 {name}, {rows:,} rows / {sizes[0]:,}", "µs/change", goal, at_most=True
            )
            figure.changes, figure.costs = changes, meters[name, rows]
            figure.limit, figure.ours = cost[name, sizes[0]], cost[name, rows]
            yield figure
