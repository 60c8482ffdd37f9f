"""What is measured while the pipeline runs as it would: latency, what an idle one costs, rebuild and verification."""

import random
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import psycopg

from bench.figure import Figure
from bench.stage import Stage
from cdc.cli_rebuild import build
from cdc.errors import DivergenceError
from cdc.fence import settle
from cdc.generations import Build
from cdc.supervise import supervise
from cdc.verify import verify
from sample.probe import Watch, delta_watch, elasticsearch_watch, redis_watch

MARK_S = 0.05
WARM_S = 20.0
SINKS = {"cache": (0.2, 0.5), "search": (0.25, 0.6), "warehouse": (10.0, 10.0)}
"""The most that p50 and p99 may be, seconds."""
RUN = ("spark", "python", "bench")
"""The processes that `cdc run` would be: the driver is this one."""


@contextmanager
def running(stage: Stage) -> Iterator[None]:
    """All three sinks, caught up."""
    stopping = threading.Event()
    sinks = stage.context.sinks(None)
    streams = stage.context.streams(stage.spark, sinks)
    thread = threading.Thread(target=supervise, args=(streams, stopping))
    thread.start()
    try:
        settle(stage.pipeline, [stage.table], sinks, timeout_s=600)
        yield
    finally:
        stopping.set()
        thread.join()


def latency(stage: Stage, rate: float, seconds: float) -> Iterator[Figure]:
    """Commit to visible, one-row transactions begun when they are due, whether or not the one before has ended."""
    endpoints, table = stage.endpoints, stage.table.qualified
    watches = {
        "cache": redis_watch(endpoints.redis, "bench", table),
        "search": elasticsearch_watch(endpoints.elasticsearch, "bench", table),
        "warehouse": delta_watch(endpoints.warehouse, table),
    }
    stop = threading.Event()
    threads = [threading.Thread(target=_watch, args=(watch, stop), daemon=True) for watch in watches.values()]
    with running(stage):
        _write(stage, rate, max(WARM_S, seconds), {})
        for thread in threads:
            thread.start()
        with stage.meter() as meter:
            changes = _write(stage, rate, seconds, watches)
        end = time.monotonic() + 30
        while any(watch.pending for watch in watches.values()) and time.monotonic() < end:
            time.sleep(0.1)
        stop.set()
        for thread in threads:
            thread.join()
    used = Figure("memory of `cdc run`, three sinks", "GB", 3.0, "most", changes=changes)
    used.ours.append(sum(meter.cost.peak_mb.get(name, 0.0) for name in RUN) / 1024)
    yield used
    for name, watch in watches.items():
        for share, most in zip((0.5, 0.99), SINKS[name], strict=True):
            missed = watch.unseen + len(watch.pending)
            figure = Figure(
                f"{name}, p{share * 100:g} at {rate:g}/s ({missed} unseen)", "s", most, "most", changes=changes
            )
            figure.ours.append(watch.percentile(share))
            figure.costs.append(meter.cost)
            figure.samples += watch.latencies if share == 0.5 else []
            yield figure


def _watch(watch: Watch, stop: threading.Event) -> None:
    while not stop.wait(watch.poll_s):
        watch.look()


def _write(stage: Stage, rate: float, seconds: float, watches: dict[str, Watch]) -> int:
    """Change rows at random; one every MARK_S is watched. How many changes were made."""
    chance, began, done, marked = random.Random(1), time.monotonic(), 0, 0.0
    with psycopg.connect(stage.dsn, autocommit=True) as connection:
        while (now := time.monotonic() - began) < seconds:
            if now < done / rate:
                time.sleep(done / rate - now)
            key = chance.randint(stage.bench.oldest, stage.bench.newest)
            connection.execute(
                "UPDATE public.bench SET amount = amount + 1, updated_at = clock_timestamp() WHERE id = %s", [key]
            )
            done += 1
            if watches and now - marked > MARK_S:
                marked = now
                found = connection.execute(
                    "SELECT updated_at, pg_xact_commit_timestamp(xmin) FROM public.bench WHERE id = %s", [key]
                ).fetchone()
                assert found
                for watch in watches.values():
                    watch.pending[str(key)] = found
    return done


def idle(stage: Stage, seconds: float) -> Iterator[Figure]:
    """What Spark's processes cost while nothing is written."""
    with running(stage):
        time.sleep(WARM_S)
        with stage.meter() as meter:
            time.sleep(seconds)
    used = sum(meter.cost.cpu_s.get(name, 0.0) for name in RUN)
    figure = Figure("idle: share of one core in Spark", "%", 3.0, "most", changes=1)
    figure.ours.append(100 * used / seconds)
    yield figure


def rebuilding(stage: Stage, times: int) -> Iterator[Figure]:
    """A rebuild's replay, against the same sink applying the same backlog as a stream."""
    for name in ("cache", "search", "warehouse"):
        figure = Figure(f"rebuild of {name}: replay", "records/s", 1.0, "limit", changes=stage.records())
        (sink,) = stage.context.sinks([name])
        for _ in range(times):
            sink.clear(stage.table)
            began = time.monotonic()
            stage.apply(sink)
            figure.limit.append(figure.changes / (time.monotonic() - began))
            phases: dict[str, float] = {}

            def show(one: Build, phases: dict[str, float] = phases) -> None:
                phases.setdefault(one.phase, time.monotonic())

            build(stage.context, stage.spark, sink, [stage.table], 0.0, show)
            figure.ours.append(figure.changes / (phases["catch up"] - phases["replay"]))
        yield figure


def verifying(stage: Stage, times: int) -> Iterator[Figure]:
    """Verification of equal views, against a COPY of the table and a scan of each view."""
    sinks = stage.context.sinks(None)
    rows = stage.rows()
    figure = Figure("verify three views", "rows/s", 1 / 3, "limit", changes=rows)
    with running(stage):
        for _ in range(times):
            began = time.monotonic()
            _copy(stage)
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


def _copy(stage: Stage) -> None:
    with psycopg.connect(stage.dsn) as connection, connection.cursor().copy("COPY public.bench TO STDOUT") as copied:
        for _ in copied:
            pass
