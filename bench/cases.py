"""What is measured, one function a line or a few of the table.

Each repeats limit, ours and rival in turn. Ours has no number unless the view equals the source
afterwards. What is applied has been applied once before: a stream runs for weeks, and the JVM
compiles during its first minute.
"""

import shutil
import subprocess
import sys
import time
from collections.abc import Iterator

import deltalake
import httpx
import orjson
import psycopg
import redis

from bench.output.figure import Figure
from bench.rivals import plain, rival
from bench.rivals.plain import rival_name
from bench.stage import Stage
from bench.workload import Data
from cdc.codec.record import RecordDecoder
from cdc.codec.table import codec
from cdc.compose.wheels import postgres_bin
from cdc.connectors.client import Connect
from cdc.errors import DivergenceError
from cdc.sink.contract import Sink
from cdc.sinks.delta.sink import Delta
from cdc.sinks.elasticsearch.sink import Elasticsearch
from cdc.sinks.redis.sink import Redis

LIMIT = "limit"
DISTINCT = "distinct"
"""Name of the pipeline whose log is a snapshot and nothing else."""


def capture(stage: Stage, rows: int, changes: int, times: int) -> Iterator[Figure]:
    """The connector drains what was written while it was stopped; pg_recvlogical reads the same
    from a copied slot.
    """
    figure = Figure("capture: Postgres to Kafka", "rows/s", 0.45, "limit", changes=changes)
    with (
        stage.extra_stage("captured", ["public.captured"], lambda data: data.fill(rows)) as source,
        Connect(source.endpoints.connect) as connect,
        psycopg.connect(source.dsn, autocommit=True) as connection,
    ):
        # The first time is to warm up.
        for number in range(-1, times):
            connect.stop(source.name)
            slot = f"limit_{number + 1}"
            connection.execute("SELECT pg_create_logical_replication_slot(%s, 'pgoutput')", [slot])
            source.data.mixed(changes)
            end = connection.execute("SELECT pg_current_wal_lsn()::text").fetchone()
            assert end
            limit = changes / _received(source, slot, str(end[0]))
            connection.execute("SELECT pg_drop_replication_slot(%s)", [slot])
            start = sum(source.end().offsets)
            with source.meter() as meter:
                connect.resume(source.name)
                ends = [end for end in source.drained() if end[1] > start]
            first, last = ends[0], ends[-1]
            if number >= 0:
                figure.limit.append(limit)
                figure.ours.append(
                    changes * (last[1] - first[1]) / (last[1] - start) / (last[0] - first[0])
                )
                figure.costs.append(meter.cost)
    yield figure


def _received(stage: Stage, slot: str, end: str) -> float:
    program = postgres_bin() / "pg_recvlogical"
    words = [
        "-d",
        stage.dsn,
        "-S",
        slot,
        "--start",
        "-f",
        "/dev/null",
        "--no-loop",
        "--endpos",
        end,
    ]
    began = time.monotonic()
    subprocess.run(
        [program, *words, "-o", "proto_version=1", "-o", f"publication_names={stage.name}"],
        check=True,
    )
    return time.monotonic() - began


def decoding(stage: Stage, records: int, times: int) -> Iterator[Figure]:
    """Bytes of the log to documents, on one core, without Spark; the rival parses and writes JSON
    again.
    """
    figure = Figure(
        "decode a record, make its document", "records/s", 0.0, "rival", changes=records
    )
    pairs = [
        (bytes(key), bytes(value))
        for key, value in stage.log()
        .where("value IS NOT NULL")
        .select("key", "value")
        .limit(records)
        .collect()
    ]
    decoder, rows, topic = (
        RecordDecoder([stage.table], stage.context.placeholder),
        codec(stage.table),
        stage.table.topic,
    )

    def ours() -> None:
        for key, value in pairs:
            if (row := decoder.decode(topic, key, value).row) is not None:
                rows.document(row)

    def rival_work() -> None:
        for key, value in pairs:
            _, _, row = plain.parsed(key, value)
            orjson.dumps(row)

    for _ in range(times):
        for into, work in ((figure.rival, rival_work), (figure.ours, ours)):
            began = time.monotonic()
            work()
            into.append(len(pairs) / (time.monotonic() - began))
    yield figure


def _behind(stage: Stage, records: int) -> int:
    """Let the topic hold at least so many records, by W1; how many they are."""
    while (count := stage.records()) < records:
        stage.data.mixed(max(300, (records - count) * 3 // 4))
        stage.drained()
    return count


def apply_redis(stage: Stage, records: int, times: int, goal: float = 0.0) -> Iterator[Figure]:
    figure = Figure(
        _applied(stage, "Redis"), "records/s", goal, "rival", changes=_behind(stage, records)
    )
    url = stage.endpoints.redis
    sink = Redis("cache", url, stage.name)

    def empty() -> None:
        with redis.Redis.from_url(url) as server:
            server.flushall()

    stage.apply(sink)
    for _ in range(times):
        empty()
        figure.limit.append(_limit(stage, "redis", url))
        empty()
        figure.rival.append(figure.changes / rival.alone(stage, "redis", url))
        empty()
        measure_ours(stage, sink, figure)
    yield figure


def apply_elasticsearch(
    stage: Stage, records: int, times: int, goal: float = 0.0
) -> Iterator[Figure]:
    figure = Figure(
        _applied(stage, "Elasticsearch"),
        "records/s",
        goal,
        "rival",
        changes=_behind(stage, records),
    )
    url = stage.endpoints.elasticsearch
    sink = Elasticsearch("search", url, stage.name)
    rival_index = rival_name(stage.table.topic)
    stage.apply(sink)
    for _ in range(times):
        rival.empty_index(stage, stage.table, LIMIT)
        figure.limit.append(_limit(stage, "elasticsearch", url))
        httpx.delete(f"{url}/{LIMIT}", timeout=60)
        rival.empty_index(stage, stage.table, rival_index)
        figure.rival.append(figure.changes / rival.alone(stage, "elasticsearch", url))
        httpx.delete(f"{url}/{rival_index}", timeout=60)
        sink.clear(stage.table)
        measure_ours(stage, sink, figure)
    sink.clear(stage.table)
    yield figure


def apply_changes(stage: Stage, records: int, times: int, goal: float = 0.0) -> Iterator[Figure]:
    """The warehouse's log of changes alone: both append. Ours by a mirror that has all of it
    already.
    """
    figure = Figure(
        _applied(stage, "Delta `changes`"),
        "records/s",
        goal,
        "rival",
        changes=_behind(stage, records),
    )
    folder = f"{stage.folder}/changes"
    log, rival_log = (
        f"{folder}/{stage.table.qualified}/changes",
        f"{folder}/{rival_name(stage.table.topic)}/changes",
    )
    stage.apply(Delta("warehouse", folder, "bench"))
    for _ in range(times):
        figure.rival.append(figure.changes / rival.alone(stage, "changes", folder))
        shutil.rmtree(log)
        measure_ours(stage, Delta("warehouse", folder, "bench"), figure, check=False)
        rows, rival_rows = (deltalake.DeltaTable(path).count() for path in (log, rival_log))
        if rows < rival_rows:
            raise DivergenceError(
                f"the log of changes has {rows} of {rival_rows} rows.", hint="a bug in the pipeline"
            )
        shutil.rmtree(rival_log)
    shutil.rmtree(folder)
    yield figure


def _applied(stage: Stage, target: str) -> str:
    return f"apply {'distinct rows' if stage.name == DISTINCT else 'W1'} to {target}"


def distinct(stage: Stage, records: int, times: int) -> Iterator[Figure]:
    """A snapshot, whose records are all of other rows: nothing is gained by folding."""
    yield from apply_redis(stage, records, times, 1.2)
    yield from apply_elasticsearch(stage, records, times, 1.0)
    yield from apply_changes(stage, records, times, 1.0)


def merge(stage: Stage, changes: int, times: int) -> Iterator[Figure]:
    """Random updates of the last table, each of another row: both write the log and merge into the
    mirror.
    """
    figure = Figure(
        f"merge {changes:,} into Delta, log and mirror", "changes/s", 1.0, "rival", changes=changes
    )
    stage.table = next(table for table in stage.tables if table.qualified == stage.data.tables[-1])
    folder = f"{stage.folder}/rival"
    (sink,) = stage.context.sinks(["warehouse"])
    stage.apply(sink)
    start = stage.end()
    rival.alone(stage, "warehouse", folder)
    for number in range(times):
        Data(stage.dsn, [stage.table.qualified]).scattered(changes, number)
        stage.drained()
        starts = {stage.table.topic: list(start.offsets)}
        figure.rival.append(changes / rival.alone(stage, "warehouse", folder, starts))
        measure_ours(stage, sink, figure, check=False)
        start = stage.end()
    shutil.rmtree(folder)
    yield figure


def measure_ours(stage: Stage, sink: Sink, figure: Figure, *, check: bool = True) -> None:
    with stage.meter() as meter:
        applied = stage.apply(sink)
    if check and not stage.equal(sink):
        raise DivergenceError(
            f"{figure.name}: the view differs from its source.", hint="a bug in the pipeline"
        )
    # Without the query's start, as the rival is without its own.
    figure.ours.append(figure.changes / (applied.batches()[-1].durable - applied.began))
    figure.costs.append(meter.cost)


def _limit(stage: Stage, target: str, place: str) -> float:
    """Records per second of a process that only sends what is prepared."""
    ends = {stage.table.topic: list(stage.end().offsets)}
    spans = (orjson.dumps(span).decode() for span in (rival.zero(ends), ends))
    words = [
        sys.executable,
        "-m",
        "bench.rivals.limits",
        target,
        stage.endpoints.kafka,
        place,
        LIMIT,
        *spans,
    ]
    records, seconds = subprocess.run(
        words, check=True, stdout=subprocess.PIPE, text=True
    ).stdout.split()
    return float(records) / float(seconds)
