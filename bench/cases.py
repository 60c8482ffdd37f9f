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

from bench import plain, rival
from bench.figure import Figure
from bench.plain import rival_name
from bench.stage import Stage
from bench.workload import Data
from cdc.codec.record import RecordDecoder
from cdc.codec.table import codec
from cdc.errors import DivergenceError
from cdc.sink.contract import Sink
from compose import artifacts
from connectors.client import Connect
from sinks.delta.sink import Delta
from sinks.elasticsearch.sink import Elasticsearch
from sinks.redis.sink import Redis

LIMIT = "limit"
DISTINCT = "distinct"
"""Name of the pipeline whose log is a snapshot and nothing else."""


def capture(stage: Stage, rows: int, changes: int, times: int) -> Iterator[Figure]:
    """The connector drains what was written while it was stopped; pg_recvlogical reads the same
    from a copied slot.
    """
    figure = Figure("capture: Postgres to Kafka", "rows/s", 0.45, "limit", changes=changes)
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
                figure.ours.append(
                    changes * (last[1] - first[1]) / (last[1] - before) / (last[0] - first[0])
                )
                figure.costs.append(meter.cost)
    yield figure


def _received(stage: Stage, slot: str, end: str) -> float:
    program = artifacts.servers().postgres_bin / "pg_recvlogical"
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
    held = [
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
        for key, value in held:
            if (row := decoder.decode(topic, key, value).row) is not None:
                rows.document(row)

    def others() -> None:
        for key, value in held:
            _, _, row = plain.parsed(key, value)
            orjson.dumps(row)

    for _ in range(times):
        for into, work in ((figure.rival, others), (figure.ours, ours)):
            began = time.monotonic()
            work()
            into.append(len(held) / (time.monotonic() - began))
    yield figure


def _behind(stage: Stage, records: int) -> int:
    """Let the topic hold at least so many records, by W1; how many they are."""
    while (held := stage.records()) < records:
        stage.data.mixed(max(300, (records - held) * 3 // 4))
        stage.drained()
    return held


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
        _ours(stage, sink, figure)
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
    other = rival_name(stage.table.topic)
    stage.apply(sink)
    for _ in range(times):
        rival.empty_index(stage, stage.table, LIMIT)
        figure.limit.append(_limit(stage, "elasticsearch", url))
        httpx.delete(f"{url}/{LIMIT}", timeout=60)
        rival.empty_index(stage, stage.table, other)
        figure.rival.append(figure.changes / rival.alone(stage, "elasticsearch", url))
        httpx.delete(f"{url}/{other}", timeout=60)
        sink.clear(stage.table)
        _ours(stage, sink, figure)
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
    log, other = (
        f"{folder}/{stage.table.qualified}/changes",
        f"{folder}/{rival_name(stage.table.topic)}/changes",
    )
    stage.apply(Delta("warehouse", folder, "bench"))
    for _ in range(times):
        figure.rival.append(figure.changes / rival.alone(stage, "changes", folder))
        shutil.rmtree(log)
        _ours(stage, Delta("warehouse", folder, "bench"), figure, check=False)
        held, asked = (deltalake.DeltaTable(path).count() for path in (log, other))
        if held < asked:
            raise DivergenceError(
                f"the log of changes has {held} of {asked} rows.", hint="a bug in the pipeline"
            )
        shutil.rmtree(other)
    shutil.rmtree(folder)
    yield figure


def _applied(stage: Stage, where: str) -> str:
    return f"apply {'distinct rows' if stage.name == DISTINCT else 'W1'} to {where}"


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
        since = {stage.table.topic: list(start.offsets)}
        figure.rival.append(changes / rival.alone(stage, "warehouse", folder, since))
        _ours(stage, sink, figure, check=False)
        start = stage.end()
    shutil.rmtree(folder)
    yield figure


def _ours(stage: Stage, sink: Sink, figure: Figure, *, check: bool = True) -> None:
    with stage.meter() as meter:
        applied = stage.apply(sink)
    if check and not stage.equal(sink):
        raise DivergenceError(
            f"{figure.name}: the view differs from its source.", hint="a bug in the pipeline"
        )
    # Without the query's start, as the rival is without its own.
    figure.ours.append(figure.changes / (applied.batches()[-1].durable - applied.began))
    figure.costs.append(meter.cost)


def _limit(stage: Stage, target: str, where: str) -> float:
    """Records per second of a process that only sends what is prepared."""
    ends = {stage.table.topic: list(stage.end().offsets)}
    spans = (orjson.dumps(span).decode() for span in (rival.zero(ends), ends))
    words = [
        sys.executable,
        "-m",
        "bench.limits",
        target,
        stage.endpoints.kafka,
        where,
        LIMIT,
        *spans,
    ]
    records, seconds = subprocess.run(
        words, check=True, stdout=subprocess.PIPE, text=True
    ).stdout.split()
    return float(records) / float(seconds)
