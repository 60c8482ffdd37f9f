"""Measurements while the pipeline runs as it would: the cost of an idle one, rebuild and
verification.
"""

import os
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import product

import psutil
import psycopg
import typer
from pyspark.sql import functions as F

from bench.latency import LIMITS, RATE, visible
from bench.output.cost import Cost, Meter
from bench.output.figure import Figure
from bench.stage import Stage
from cdc.cli.rebuild import build
from cdc.errors import CdcError, DivergenceError
from cdc.generations.registry import GenerationBuild
from cdc.sample.probe import Watch
from cdc.verify.barrier import WaitOptions, wait_until_current
from cdc.verify.verification import verify

START_S = 600.0
"""The longest time that applying may take."""
STARTED_S = 60.0
STARTED_TIMES = 1.3
"""A view may be so many times later soon after the start than minutes afterwards, at p50 and p99.
"""
WARM_S = 45.0
"""Time for the work after the last batch, and for the JVM to compile the code of the batches."""
GB = 2**30
PRINTED_LINES = 60
"""Lines of `cdc run` that are shown when its views don't get current."""


def process(stage: Stage, changes: int, seconds: float) -> Iterator[Figure]:
    """`cdc run` as a process of its own, as people restart it.

    How late the views are a minute after its start and minutes later; its memory while it applies
    so many changes; its CPU while there are none.
    """
    sinks = stage.context.sinks(None)
    used = Figure("memory of `cdc run`, three sinks", "GB", rate=3.0, at_most=True, changes=changes)
    resting = Figure("idle: share of one core in Spark", "%", rate=2.0, at_most=True, changes=1)
    busy = Figure(
        f"CPU of all processes at {RATE:,.0f}/s, without readers",
        "% of all cores",
        rate=40.0,
        at_most=True,
        changes=int(RATE * seconds),
    )

    def load() -> None:
        stage.data.mixed(changes)
        wait_until_current(stage.pipeline, stage.tables, sinks, WaitOptions(START_S))

    printed = stage.folder / "run.log"
    with (
        printed.open("wb") as log,
        subprocess.Popen(stage.command("run"), stdout=log, stderr=subprocess.STDOUT) as run,
        ThreadPoolExecutor(1) as pool,
    ):
        try:
            began = time.monotonic()
            wait_until_current(stage.pipeline, stage.tables, sinks, WaitOptions(START_S))
            if (rest_s := began + STARTED_S - time.monotonic()) > 0:
                stage.data.single(int(RATE * rest_s), rate=RATE)
            started = visible(stage, RATE, seconds)
            loaded = pool.submit(load)
            used.ours.append(_peak(run, loaded.done))
            loaded.result()
            time.sleep(WARM_S)
            with Meter({"run": run.pid}) as meter:
                time.sleep(seconds)
            resting.ours.append(100 * meter.cost.cpu_s["run"] / seconds)
            warm = visible(stage, RATE, seconds)
            # Nobody looks at the views meanwhile: that costs an index as much as the changes do.
            with stage.meter() as meter_of_all:
                stage.data.single(int(RATE * seconds), rate=RATE)
            busy.ours.append(_share_of_cores(meter_of_all.cost))
            busy.costs.append(meter_of_all.cost)
        except CdcError:
            # What a view waits for is said by the run alone.
            lines = printed.read_text(errors="replace").splitlines()
            typer.echo("\n".join(lines[-PRINTED_LINES:]), err=True)
            raise
        finally:
            run.terminate()
    yield from _restarted(started, warm)
    yield used
    yield resting
    yield busy


def _share_of_cores(cost: Cost) -> float:
    """The CPU of all processes but the bench itself, of all cores, %."""
    used_s = sum(used for name, used in cost.cpu_s.items() if name != "bench")
    return 100 * used_s / cost.seconds / (os.cpu_count() or 1)


def _restarted(started: Mapping[str, Watch], warm: Mapping[str, Watch]) -> Iterator[Figure]:
    for name, watch in warm.items():
        later = Figure(f"{name} at {RATE:,.0f}/s, a process for minutes", "s", asked=LIMITS[name])
        sooner = Figure(f"{name} at {RATE:,.0f}/s, for one minute", "s")
        sooner.asked = tuple(STARTED_TIMES * watch.percentile(share) for share in (0.5, 0.99))
        for figure, watched in ((later, watch), (sooner, started[name])):
            figure.hops, figure.unseen = (
                {"visible": watched.latencies},
                watched.unseen + len(watched.pending),
            )
            yield figure


def growing(stage: Stage, sizes: Sequence[int]) -> Iterator[Figure]:
    """The memory of `cdc rebuild`, its verification included: the largest table against the
    smallest.

    With a small heap, which both fill: a larger one would only be filled by the larger table.
    """
    figure = Figure(
        f"memory of `cdc rebuild`, {sizes[-1]:,} rows / {sizes[0]:,}",
        "GB",
        1.1,
        "limit",
        at_most=True,
    )
    for into, table in ((figure.limit, stage.tables[0]), (figure.ours, stage.tables[-1])):
        words = stage.command("rebuild", "warehouse", "--table", table.qualified, "--keep", "0")
        little = {**os.environ, "SPARK_DRIVER_MEMORY": "640m"}
        with subprocess.Popen(
            words, env=little, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        ) as building:
            into.append(_peak(building, lambda: building.poll() is not None))
        if building.returncode:
            raise DivergenceError(
                f"rebuild ended with {building.returncode}.", hint="a bug in the pipeline"
            )
    yield figure


def _peak(process: "subprocess.Popen[bytes]", is_over: Callable[[], bool]) -> float:
    """The most that a process and its children have at once, GB, until something has ended."""
    most = 0
    while not is_over():
        most = max(most, _bytes(process.pid))
        time.sleep(0.5)
    return most / GB


def _bytes(pid: int) -> int:
    """Return the memory of a process and its children, bytes; pages that they share count once."""
    root, total = psutil.Process(pid), 0
    for process in (root, *root.children(recursive=True)):
        with suppress(psutil.NoSuchProcess):
            total += process.memory_full_info().pss
    return total


def rebuilding(stage: Stage, changes: int) -> Iterator[Figure]:
    """W8: a rebuild's replay of a snapshot and W1, against the same sink applying the same backlog
    as a stream.
    """
    stage.data.mixed(changes)
    stage.drained()
    for name in ("cache", "search", "warehouse"):
        figure = Figure(
            f"rebuild of {name}: replay", "records/s", 1.0, "limit", changes=stage.records()
        )
        (sink,) = stage.context.sinks([name])
        stage.apply(sink)
        sink.clear(stage.table)
        began = time.monotonic()
        stage.apply(sink)
        figure.limit.append(figure.changes / (time.monotonic() - began))
        phases: dict[str, float] = {}

        def show(build: GenerationBuild, phases: dict[str, float] = phases) -> None:
            phases.setdefault(build.phase, time.monotonic())

        with stage.meter() as meter:
            build(stage.context, stage.spark, sink, [stage.table], 0.0, show)
        figure.ours.append(figure.changes / (phases["catch up"] - phases["replay"]))
        figure.costs.append(meter.cost)
        yield figure


def verifying(stage: Stage, rows: int) -> Iterator[Figure]:
    """Verification of equal views of tables that have so many rows, against a COPY and a scan of
    each view.
    """
    sinks = stage.context.sinks(None)
    figure = Figure(f"verify {rows:,} rows in three views", "rows/s", 1 / 3, "limit", changes=rows)
    with stage.running():
        began = time.monotonic()
        copy(stage)
        for table, sink in product(stage.tables, sinks):
            # Into `noop`, Delta refuses to read what has deletion vectors.
            sink.scan(table, stage.spark).agg(F.sum(F.hash("id", "document"))).collect()
        figure.limit.append(rows / (time.monotonic() - began))
        with stage.meter() as meter:
            comparisons = verify(stage.spark, stage.pipeline, stage.tables, sinks)
    if not all(comparison.equal for comparison in comparisons):
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
