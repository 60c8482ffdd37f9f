"""What is measured, one function a line or a few of the table.

Each repeats limit, ours and rival in turn. Ours has no number unless the view equals the source afterwards. What is
applied has been applied once before: a stream runs for weeks, and the JVM compiles during its first minute.
"""

import shutil
import subprocess
import sys
import time
from collections.abc import Iterator

import httpx
import psycopg
import redis

from bench.figure import Figure
from bench.stage import Stage
from bench.workload import Data
from cdc import decode
from cdc.change import Position
from cdc.errors import DivergenceError
from cdc.sink import Sink
from compose import artifacts
from connectors.client import Connect
from sinks.delta.sink import KINDS, Delta
from sinks.elasticsearch.sink import Elasticsearch
from sinks.redis import Redis

BATCH = "10000"


def capture(stage: Stage, rows: int, changes: int, times: int) -> Iterator[Figure]:
    """The connector drains what was written while it was stopped; pg_recvlogical reads the same from a copied slot."""
    figure = Figure("capture: Postgres to Kafka", "rows/s", 0.5, "limit", changes=changes)
    with (
        stage.beside("captured", ["public.captured"], lambda data: data.fill(rows)) as other,
        Connect(other.endpoints.connect) as connect,
        psycopg.connect(other.dsn, autocommit=True) as connection,
    ):
        # The first time is to warm up.
        for number in range(-1, times):
            connect.stop(other.name)
            slot = f"limit_{number + 1}"
            connection.execute("SELECT pg_create_logical_replication_slot(%s, 'pgoutput')", [slot])
            other.data.mixed(changes)
            end = connection.execute("SELECT pg_current_wal_lsn()::text").fetchone()
            assert end
            limit = changes / _received(other, slot, str(end[0]))
            connection.execute("SELECT pg_drop_replication_slot(%s)", [slot])
            before = sum(other.end().offsets)
            with other.meter() as meter:
                connect.resume(other.name)
                seen = [one for one in other.drained() if one[1] > before]
            first, last = seen[0], seen[-1]
            if number >= 0:
                figure.limit.append(limit)
                figure.ours.append(changes * (last[1] - first[1]) / (last[1] - before) / (last[0] - first[0]))
                figure.costs.append(meter.cost)
    yield figure


def _received(stage: Stage, slot: str, end: str) -> float:
    program = artifacts.servers().postgres_bin / "pg_recvlogical"
    words = ["-d", stage.dsn, "-S", slot, "--start", "-f", "/dev/null", "--no-loop", "--endpos", end]
    began = time.monotonic()
    subprocess.run([program, *words, "-o", "proto_version=1", "-o", f"publication_names={stage.name}"], check=True)
    return time.monotonic() - began


def reading(stage: Stage, times: int) -> Iterator[Figure]:
    """Spark's own limits on this topic: read it, and read and decode it, into nothing."""
    records = stage.records()
    for form in ("documents", "events"):
        figure = Figure(f"decode as {form}", "records/s", 0.0, "limit", changes=records)
        for _ in range(times):
            for into, frame in (
                (figure.limit, stage.log()),
                (figure.ours, decode.decoded(stage.log(), [stage.table], form, decode.Reading())),
            ):
                with stage.meter() as meter:
                    frame.write.format("noop").mode("overwrite").save()
                into.append(records / meter.cost.seconds)
            figure.costs.append(meter.cost)
        yield figure


def _behind(stage: Stage, records: int) -> int:
    """Let the topic hold at least so many records, by W1; how many they are."""
    while (held := stage.records()) < records:
        stage.data.mixed(max(300, (records - held) * 3 // 4))
        stage.drained()
    return held


def apply_redis(stage: Stage, records: int, times: int) -> Iterator[Figure]:
    figure = Figure("apply to Redis", "records/s", 1.5, "rival", changes=_behind(stage, records))
    url = stage.endpoints.redis
    sink = Redis("cache", url, stage.name)

    def empty() -> None:
        with redis.Redis.from_url(url) as server:
            server.flushall()

    stage.apply(sink)
    for _ in range(times):
        empty()
        figure.limit.append(_limit(stage, "redis", url, "limit"))
        empty()
        figure.rival.append(figure.changes / _rival(stage, "redis", BATCH, url, "rival"))
        empty()
        _ours(stage, sink, figure)
    yield figure


def apply_elasticsearch(stage: Stage, records: int, times: int) -> Iterator[Figure]:
    figure = Figure("apply to Elasticsearch", "records/s", 1.0, "rival", changes=_behind(stage, records))
    url = stage.endpoints.elasticsearch
    sink = Elasticsearch("search", url, stage.name)
    sink.prepare(stage.table)
    mappings = httpx.get(f"{url}/{sink.alias(stage.table)}/_mapping").raise_for_status().json()
    same = {"settings": {"number_of_shards": 1, "number_of_replicas": 0}, **next(iter(mappings.values()))}

    def empty(index: str) -> None:
        httpx.delete(f"{url}/{index}", timeout=60)
        httpx.put(f"{url}/{index}", json=same, timeout=60).raise_for_status()

    stage.apply(sink)
    for _ in range(times):
        empty("limit")
        figure.limit.append(_limit(stage, "elasticsearch", url, "limit"))
        httpx.delete(f"{url}/limit", timeout=60)
        empty("rival")
        figure.rival.append(figure.changes / _rival(stage, "elasticsearch", BATCH, url, "rival"))
        httpx.delete(f"{url}/rival", timeout=60)
        sink.clear(stage.table)
        _ours(stage, sink, figure)
    sink.clear(stage.table)
    yield figure


def apply_changes(stage: Stage, records: int, times: int) -> Iterator[Figure]:
    """The warehouse's log of changes alone: both append."""
    figure = Figure("append to Delta changes", "records/s", 0.4, "rival", changes=_behind(stage, records))
    stage.apply(_log_alone(f"{stage.folder}/changes"))
    for number in range(times):
        folder = f"{stage.folder}/changes{number}"
        figure.rival.append(figure.changes / _rival(stage, "changes", "100000", f"{folder}-rival"))
        _ours(stage, _log_alone(folder), figure, check=False)
        held = stage.spark.read.format("delta").load(f"{folder}/{stage.table.qualified}/changes").count()
        if held < stage.spark.read.format("delta").load(f"{folder}-rival").count():
            raise DivergenceError(f"the log of changes holds {held} rows", hint="a bug in the pipeline")
    yield figure


def _log_alone(folder: str) -> Delta:
    sink = Delta("warehouse", folder, "bench")
    sink._kinds = KINDS[:1]
    return sink


def merge(stage: Stage, changes: int, times: int) -> Iterator[Figure]:
    """Random updates merged into the mirror of the stage's table in one batch; the log of changes follows later."""
    figure = Figure(f"merge {changes:,} into Delta mirror", "changes/s", 0.4, "rival", changes=changes)
    folder = f"{stage.folder}/rival"
    (sink,) = stage.context.sinks(["warehouse"])
    sink._kinds = KINDS[1:]  # type: ignore[attr-defined]
    start = stage.end()
    _rival(stage, "mirror", "1000000", folder)
    for number in range(times):
        Data(stage.dsn, [stage.table.qualified]).scattered(changes, number)
        stage.drained()
        figure.rival.append(changes / _rival(stage, "mirror", "1000000", folder, since=start))
        _ours(stage, sink, figure, check=False)
        start = stage.end()
    shutil.rmtree(folder)
    yield figure


def _ours(stage: Stage, sink: Sink, figure: Figure, *, check: bool = True) -> None:
    with stage.meter() as meter:
        applied = stage.apply(sink)
    if check and not stage.equal(sink):
        raise DivergenceError(f"{figure.name}: the view differs from its source.", hint="a bug in the pipeline")
    # Without the query's start, as the rival is without its own.
    figure.ours.append(figure.changes / (applied.batches()[-1].durable - applied.began))
    figure.costs.append(meter.cost)


def _span(stage: Stage, since: Position | None) -> list[str]:
    ends = stage.end().offsets
    starts = since.offsets if since else (0,) * len(ends)
    return [",".join(map(str, starts)), ",".join(map(str, ends))]


def _rival(stage: Stage, target: str, batch: str, *rest: str, since: Position | None = None) -> float:
    """The seconds that it takes."""
    (seconds,) = _alone("bench.plain", stage, target, since, batch, *rest)
    return seconds


def _limit(stage: Stage, target: str, *rest: str) -> float:
    """Records per second."""
    records, seconds = _alone("bench.limits", stage, target, None, *rest)
    return records / seconds


def _alone(module: str, stage: Stage, target: str, since: Position | None, *rest: str) -> list[float]:
    """Run a module as a process of its own; the numbers that it prints."""
    words = [target, stage.endpoints.kafka, stage.table.topic, *_span(stage, since), *rest]
    done = subprocess.run([sys.executable, "-m", module, *words], check=True, capture_output=True, text=True)
    return [float(number) for number in done.stdout.split()]
