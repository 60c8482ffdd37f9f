"""What is measured while the pipeline runs as it would: what an idle one costs, rebuild and verification."""

import time
from collections.abc import Iterator

import psycopg

from bench.figure import Figure
from bench.stage import Stage
from cdc.cli_rebuild import build
from cdc.errors import DivergenceError
from cdc.generations import Build
from cdc.verify import verify

RUN = ("spark", "python", "bench")
"""The processes that `cdc run` would be: the driver is this one."""


def idle(stage: Stage, seconds: float) -> Iterator[Figure]:
    """What Spark's processes cost while nothing is written."""
    with stage.running():
        time.sleep(seconds)
        with stage.meter() as meter:
            time.sleep(seconds)
    used = sum(meter.cost.cpu_s.get(name, 0.0) for name in RUN)
    figure = Figure("idle: share of one core in Spark", "%", 3.0, "", at_most=True, changes=1)
    figure.ours.append(100 * used / seconds)
    yield figure


def rebuilding(stage: Stage, changes: int, times: int) -> Iterator[Figure]:
    """W8: a rebuild's replay of a snapshot and W1, against the same sink applying the same backlog as a stream."""
    stage.data.mixed(changes)
    stage.drained()
    for name in ("cache", "search", "warehouse"):
        figure = Figure(f"rebuild of {name}: replay", "records/s", 1.0, "limit", changes=stage.records())
        (sink,) = stage.context.sinks([name])
        stage.apply(sink)
        for _ in range(times):
            sink.clear(stage.table)
            began = time.monotonic()
            stage.apply(sink)
            figure.limit.append(figure.changes / (time.monotonic() - began))
            phases: dict[str, float] = {}

            def show(one: Build, phases: dict[str, float] = phases) -> None:
                phases.setdefault(one.phase, time.monotonic())

            with stage.meter() as meter:
                build(stage.context, stage.spark, sink, [stage.table], 0.0, show)
            figure.ours.append(figure.changes / (phases["catch up"] - phases["replay"]))
            figure.costs.append(meter.cost)
        yield figure


def verifying(stage: Stage, times: int) -> Iterator[Figure]:
    """Verification of equal views, against a COPY of the table and a scan of each view."""
    sinks = stage.context.sinks(None)
    rows = stage.rows()
    figure = Figure("verify three views", "rows/s", 1 / 3, "limit", changes=rows)
    with stage.running():
        for _ in range(times):
            began = time.monotonic()
            copy(stage)
            for sink in sinks:
                sink.scan(stage.table, stage.spark).write.format("noop").mode("overwrite").save()
            figure.limit.append(rows / (time.monotonic() - began))
            with stage.meter() as meter:
                found = verify(stage.spark, stage.pipeline, [stage.table], sinks)
            if not all(one.equal for one in found):
                raise DivergenceError("verify finds differences.", hint="a bug in the pipeline")
            figure.ours.append(rows / meter.cost.seconds)
            figure.costs.append(meter.cost)
    yield figure


def copy(stage: Stage) -> None:
    """Read the tables as fast as Postgres gives them."""
    with psycopg.connect(stage.dsn) as connection:
        for table in stage.tables:
            with connection.cursor().copy(f"COPY {table.qualified} TO STDOUT") as copied:
                for _ in copied:
                    pass
