"""The whole way, Postgres to three views at once: how fast a backlog drains, beside what the CPU
allows, and the rival.

The connector stands still while the backlog is written; what is measured goes from the first record
in Kafka to the last batch that is durable. Before that a part of the same has been applied, see
`bench.cases`. What the CPU allows is the machine's cores over the CPU seconds of all processes per
change, so the ratio shows how much of it lies idle. The rival is three plain consumers at once,
behind the same connector, for which as much is written in the same way.
"""

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from pyspark.sql import functions as F

from bench.batches import Span, Watched, spans
from bench.output.cost import Cost
from bench.output.figure import Figure
from bench.rivals.rival import Rivals
from bench.stage import Stage
from bench.workload import Data
from cdc.connectors.client import Connect
from cdc.errors import DivergenceError

STEP_S = 0.5
EARLY_S = 1.0
"""A batch may have begun so long before the first record was seen."""
Write = Callable[[Data, int], None]
"""Makes so many changes."""


@dataclass(frozen=True)
class Workload:
    name: str
    write: Write
    rate: float = 0.0
    """Changes per second to reach."""


MIXED = Workload("W1 mixed", Data.mixed, 14_000)
BULK = Workload("W3 one update", lambda data, changes: data.scattered(changes, changes))
HOT = Workload("W6 hot keys", lambda data, changes: data.single(changes, keys="hot"))
OLTP, WIDE = [f"public.oltp_{number}" for number in range(10)], ["public.wide"]
UNIFORM = Workload(
    "W2 OLTP, uniform",
    lambda data, changes: Data(data.dsn, OLTP).single(changes, moved=0.2),
    rate=6_000,
)
ZIPF = Workload(
    "W2 OLTP, Zipf",
    lambda data, changes: Data(data.dsn, OLTP).single(changes, moved=0.2, keys="zipf"),
)
UNCHANGED = Workload("W5 wide rows", lambda data, changes: Data(data.dsn, WIDE).single(changes))


def drain(stage: Stage, changes: int, times: int, *workloads: Workload) -> Iterator[Figure]:
    """A figure for each workload, all of one run, once the views are proved equal."""
    figures = []
    with stage.running() as streams:
        _drained(stage, streams, workloads[0].write, max(100, changes // 4))
        for workload in workloads:
            figure = _figure(workload, changes)
            for _ in range(times):
                began, end, cost = _drained(stage, streams, workload.write, changes)
                book(figure, end - began, cost)
            figure.over_time = _over_time(stage, streams, began)
            figures.append(figure)
        equal(stage, "the whole path")
    yield from figures


def apart(stage: Stage, changes: int, times: int) -> Iterator[Figure]:
    """The whole path of W1 to one view at a time: what each costs, and what all cost together
    (`drain`).
    """
    for sink in stage.pipeline.sinks:
        with stage.running([sink]) as streams:
            figure = Figure(
                f"{MIXED.name}, whole path to {sink} alone", "changes/s", changes=changes
            )
            _drained(stage, streams, MIXED.write, max(100, changes // 4))
            for _ in range(times):
                began, end, cost = _drained(stage, streams, MIXED.write, changes)
                book(figure, end - began, cost)
            yield figure
    with stage.running():
        equal(stage, MIXED.name)


def contest(stage: Stage, changes: int, times: int, workload: Workload) -> Iterator[Figure]:
    """Ours and the rival's consumers in turn, none of them running while the other is measured."""
    figure = _figure(workload, changes)
    figure.goal, figure.against = 1.0, "rival"
    with stage.running() as streams:
        _drained(stage, streams, workload.write, max(100, changes // 4))

    def release(_: float) -> float:
        began = _released(stage, workload.write, changes)
        stage.drained()
        return began

    with Rivals(stage) as rivals:
        for _ in range(times):
            with stage.running() as streams:
                began, end, cost = _drained(stage, streams, workload.write, changes)
                book(figure, end - began, cost)
                figure.over_time = _over_time(stage, streams, began)
            rivals.catch_up()
            figure.rival.append(changes / rivals.drain(release))
        rivals.check()
    with stage.running():
        equal(stage, workload.name)
    yield figure


def _figure(workload: Workload, changes: int) -> Figure:
    return Figure(f"{workload.name}, whole path", "changes/s", rate=workload.rate, changes=changes)


def _drained(
    stage: Stage, streams: list[Watched], write: Write, changes: int
) -> tuple[float, float, Cost]:
    """Return when the first record was in Kafka and when the last batch was durable, Unix seconds,
    and the cost.
    """
    began = _released(stage, write, changes)
    with stage.meter() as meter:
        end = stage.durable(streams)
    return began, end, meter.cost


def _released(stage: Stage, write: Write, changes: int) -> float:
    """Write while the connector stands still, then let it go; when the first record was in Kafka,
    Unix seconds.
    """
    with Connect(stage.endpoints.connect) as connect:
        connect.stop(stage.name)
        write(stage.data, changes)
        ends = stage.log_ends()
        connect.resume(stage.name)
        while stage.log_ends() == ends:
            time.sleep(0.1)
    return time.time()


def equal(stage: Stage, subject: str) -> None:
    """Raise DivergenceError unless all views equal their source."""
    if not stage.equal(*stage.context.sinks(None)):
        raise DivergenceError(
            f"{subject}: a view differs from its source.", hint="a bug in the pipeline"
        )


def book(figure: Figure, seconds: float, cost: Cost) -> None:
    """Add one repetition to a figure; its limit is the rate that the CPU would have allowed."""
    figure.ours.append(figure.changes / seconds)
    figure.limit.append((os.cpu_count() or 1) * figure.changes / sum(cost.cpu_s.values()))
    figure.costs.append(cost)


def _over_time(stage: Stage, streams: list[Watched], start: float) -> dict[str, list[Span]]:
    """See `Figure.over_time`; Kafka in steps of half a second."""
    step = F.floor((F.col("timestamp").cast("double") - start) / STEP_S)
    counted = (
        stage.log()
        .where(step >= -EARLY_S / STEP_S)
        .groupBy(step.alias("step"))
        .count()
        .orderBy("step")
        .collect()
    )
    arrivals = [
        (step_number * STEP_S, (step_number + 1) * STEP_S, count / STEP_S)
        for step_number, count in counted
    ]
    return {
        "Kafka": arrivals,
        **{stream.sink.name: spans(stream.batches(), start, EARLY_S) for stream in streams},
    }


def make_oltp(data: Data, rows: int) -> None:
    """So many rows in ten tables, a tenth as many wide ones."""
    Data(data.dsn, OLTP).fill(rows // len(OLTP))
    Data(data.dsn, WIDE).fill(rows // 10, wide=True)


def oltp(stage: Stage, changes: int) -> Iterator[Figure]:
    yield from contest(stage, changes, 1, UNIFORM)
    yield from drain(stage, changes, 1, ZIPF, UNCHANGED)
