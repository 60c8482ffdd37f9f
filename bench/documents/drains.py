"""Documents of several tables, from Postgres to their topic and to the cache: flights with five rows
of other tables each.

A change is drained when the last document of it is in the topic of documents, by the time that its
record has; the first record of its table in Kafka begins it. The connector stands still while
changes are written. `alone` no other sink is at work, else all three are. Postgres' own query of the
changed documents (`cdc.documents.sql`) is the limit.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from subprocess import CalledProcessError, TimeoutExpired

import psycopg
import redis

from bench.batches import Watched
from bench.documents.flights import Flights
from bench.documents.latency import LATENCIES, fan_out, late, mark
from bench.documents.pgsync import PGSync, Rates, identity, measure
from bench.documents.topic_times import flight_ends, span, view_of
from bench.latency import RATE, watched
from bench.output.cost import Cost
from bench.output.figure import Figure
from bench.stage import Stage
from cdc.config.view_settings import STATE
from cdc.connectors.client import Connect
from cdc.errors import DivergenceError
from cdc.model.table import row_id
from cdc.postgres.row_query import id_condition, row_query

QUERIED, SLICES = 2000, 5
"""The documents that Postgres is asked for at once, and how often."""
OWN_WORK = ("spark", "python", "redis")
"""Processes whose work on a change could grow with the tables."""
RIVAL_CHANGES = 3_000
"""PGSync takes some 250 a second; its start, which doesn't count, takes three."""
STARTED_S = 3.0
"""PGSync's start."""


@dataclass(frozen=True)
class Drain:
    """How long changes took to their documents, and what they cost."""

    seconds: float
    cost: Cost


def documents(stage: Stage, sizes: Sequence[int], changes: int, seconds: float) -> Iterator[Figure]:
    """Measure bootstrap and state, drains, growth, latencies and a fan-out; the documents in the
    cache have to equal Postgres' own at the end.
    """
    tables = [Flights(stage.dsn, number, rows) for number, rows in enumerate(sizes)]
    small, large = tables[0], tables[-1]
    rival, rival_figures = Rates(), list[Figure]()
    rival_flights = Flights(stage.dsn, len(sizes), sizes[0])
    # Why it can't do something, it has printed, unless it stood still.
    with suppress(CalledProcessError, TimeoutExpired):
        rival, rival_figures = _rival(stage, rival_flights, changes, seconds)
    yield from rival_figures
    yield from _bootstrap(stage, sum(sizes), rival.bootstrap)
    limit = _query_rate(stage, large)
    with stage.running([STATE]) as streams:
        for flights in tables:
            _drain(stage, streams, flights, min(changes, flights.rows))
        for moved, rate in ((False, rival.rows), (True, rival.keys)):
            figure = _drained(stage, streams, large, Case(changes, moved, ", alone"), limit)
            figure.rival = rate
            yield figure
        yield _growth(stage, streams, small, large)
    with stage.running() as streams:
        for moved in (False, True):
            yield _drained(stage, streams, large, Case(changes, moved, ""), limit)
        latencies = [late(stage, streams, large, rate, seconds) for rate in LATENCIES]
        yield from latencies
        yield from fan_out(stage, streams, large, latencies[0], seconds)
        if not stage.equal(*stage.context.sinks(["cache"])):
            raise DivergenceError(
                "A document differs from Postgres' own.", hint="a bug in the pipeline"
            )


@dataclass(frozen=True)
class Case:
    """Changes to drain. moved: whether they change the plane of a flight, a key of another table."""

    changes: int
    moved: bool
    suffix: str

    @property
    def name(self) -> str:
        """What the figure is called."""
        return f"documents of changed {'keys' if self.moved else 'rows'}{self.suffix}"

    @property
    def aim(self) -> float:
        """Changes a second to reach with all sinks at work."""
        return 0.0 if self.suffix else 5_000.0 if self.moved else 8_000.0


def _rival(
    stage: Stage, flights: Flights, changes: int, seconds: float
) -> tuple[Rates, list[Figure]]:
    """PGSync's rates, and how late its index has a document; nothing where it isn't installed."""
    pgsync = PGSync(stage, flights)
    if not pgsync.is_installed:
        return Rates(), []
    figure = Figure(f"PGSync: document in the index at {RATE:,.0f}/s", "s")
    with pgsync:
        rates = measure(pgsync, flights, min(changes, RIVAL_CHANGES))
        with pgsync.running() as watch:
            time.sleep(STARTED_S)
            changes = int(RATE * seconds)
            watched(
                {"search": watch},
                lambda: flights.change(changes, size=1, rate=RATE),
                lambda: mark(stage, flights, seconds, watch, identity),
            )
            figure.hops["visible"] = watch.latencies
            figure.unseen = watch.unseen + len(watch.pending)
    return rates, [figure]


def _bootstrap(stage: Stage, rows: int, rival: list[float]) -> Iterator[Figure]:
    """From the start of the stream, of tables that lie in Kafka, to the last document; and the
    memory that the state takes for it, with the rows of the other tables.
    """
    bootstrap = Figure("documents, bootstrap into the topic", "documents/s", rate=15_000)
    bootstrap.rival, bootstrap.changes = rival, rows
    size = Figure("documents, state with its indexes", "bytes/row", rate=700, at_most=True)
    with redis.Redis.from_url(stage.endpoints.redis) as server:
        used, began = server.info("memory")["used_memory"], time.time()
        with stage.meter() as meter, stage.running([STATE]):
            pass
        size.ours.append((server.info("memory")["used_memory"] - used) / rows)
    _, last = span(stage, {view.topic: None for view in stage.context.views})
    bootstrap.ours.append(rows / (last - began))
    bootstrap.costs.append(meter.cost)
    yield bootstrap
    yield size


def _query_rate(stage: Stage, flights: Flights) -> float:
    """Documents a second of Postgres' own query, by the keys of their roots."""
    table, rows = view_of(stage, flights), 0
    with psycopg.connect(stage.dsn, options="-c timezone=UTC") as connection:
        keys = connection.execute(
            "SELECT carrier, flight, origin,"
            " to_char(sched_dep AT TIME ZONE 'UTC', 'YYYY-MM-DD\"T\"HH24:MI:SS.US\"Z\"')"
            f" FROM {flights.table} ORDER BY md5(sched_dep::text) LIMIT %s",
            [QUERIED * SLICES],
        ).fetchall()
        ids = [row_id(list(key)) for key in keys]
        began = time.monotonic()
        for start in range(0, len(ids), QUERIED):
            query = row_query(table, id_condition(table, ids[start : start + QUERIED]))
            rows += len(connection.execute(query).fetchall())
    assert rows == len(ids)
    return rows / (time.monotonic() - began)


def _drained(
    stage: Stage, streams: list[Watched], flights: Flights, case: Case, limit: float
) -> Figure:
    figure = Figure(case.name, "changes/s", rate=case.aim, limit=[limit], changes=case.changes)
    drained = _drain(stage, streams, flights, case.changes, moved=case.moved)
    figure.ours.append(case.changes / drained.seconds)
    figure.costs.append(drained.cost)
    return figure


def _growth(stage: Stage, streams: list[Watched], small: Flights, large: Flights) -> Figure:
    """The work of a change; the rows are all over their tables."""
    changes = small.rows // 2
    figure = Figure(
        f"documents, {large.rows:,} flights / {small.rows:,}",
        "µs of CPU/change",
        1.2,
        "limit",
        at_most=True,
        changes=changes,
    )
    for into, flights in ((figure.limit, small), (figure.ours, large)):
        drained = _drain(stage, streams, flights, changes)
        into.append(work_us(drained.cost, changes))
    figure.costs.append(drained.cost)
    return figure


def work_us(cost: Cost, changes: int) -> float:
    """The work of a change, by the CPU of who does it."""
    return sum(cost.cpu_s.get(name, 0.0) for name in OWN_WORK) / changes * 1e6


def _drain(
    stage: Stage, streams: list[Watched], flights: Flights, changes: int, *, moved: bool = False
) -> Drain:
    starts = flight_ends(stage, flights)
    with Connect(stage.endpoints.connect) as connect:
        connect.stop(stage.name)
        flights.change(changes, moved=moved)
        with stage.meter() as meter:
            connect.resume(stage.name)
            stage.settle(streams)
    table_topic, view_topic = starts
    first, _ = span(stage, {table_topic: starts[table_topic]})
    _, last = span(stage, {view_topic: starts[view_topic]})
    return Drain(last - first, meter.cost)
