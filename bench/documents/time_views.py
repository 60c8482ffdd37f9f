"""Views of time beside documents: joins in time, patterns, groups, windows, deadlines.

Each kind has a view over a small and a large table of flights that no other view reads, so it alone
is at work while its flights change. The rates are compared with documents with one row of another
table, the cheapest ones. The same changes are made in both tables, of the earliest flights: so how
many fall into one window doesn't depend on the table. They are drained, from the first one in Kafka
on, once all documents are noted to be current: the last ones may stay what they were, and aren't in
the topic then.
"""

import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from statistics import median
from typing import Any, cast

import psycopg
import redis

from bench.batches import Watched
from bench.documents import flights
from bench.documents.drains import Drain, work_us
from bench.documents.flights import Flights
from bench.documents.latency import late
from bench.documents.topic_times import flight_ends, span, view_of
from bench.latency import RATE
from bench.output.figure import Figure
from bench.stage import Stage
from bench.workload import Data
from cdc.config.view_settings import STATE
from cdc.errors import DivergenceError
from cdc.model.position import ViewCheckpoint, distance
from cdc.model.table import row_id
from cdc.sample.probe import redis_watch
from cdc.sink.factory import open_documents

POLL_S = 0.02
PANES = 1.0
"""The least rate of changes in groups and windows, beside documents."""
GROWTH = 1.5
DOCUMENTS = "documents with one row"
DEADLINE = "deadline"
DEADLINE_S = 30 * 86_400
ABSENCE_S = 2.0
"""How late a deadline may be noticed, in addition to the interval of heartbeats."""
HOPPING = "hopping window, 1 hour every 10 minutes"
WEATHER = "columns: [temp, wind_speed, visib]"
SELECT = (
    "select: {flights: count(*), late: count(*) FILTER (WHERE dep_delay > 15),"
    " mean_delay: avg(dep_delay), updated_at: max(updated_at)}"
)


@dataclass(frozen=True)
class Kind:
    """A kind of views. view: its settings but for the table, as the file has them. ratio: the least that
    its rate may be, divided by the rate of documents.
    """

    name: str
    view: str
    ratio: float = 0.0


KINDS = (
    Kind(
        DOCUMENTS,
        "root: TABLE, include: {weather: {table: desk.weather, on: {origin: origin,"
        f" \"date_trunc('hour', sched_dep)\": time_hour}}, {WEATHER}}}}}",
    ),
    Kind(
        "join in time, as_of",
        "root: TABLE, include: {weather: {table: desk.weather, on: {origin: origin},"
        f" as_of: {{dep_time: time_hour}}, within: 2 hours, {WEATHER}}}}}",
    ),
    Kind(
        "pattern, three late in a row",
        "from: TABLE, pattern: {by: [carrier], order_by: dep_time, within: 24 hours,"
        " steps: {late: {where: dep_delay > 30, times: 3}}}, columns: [dest, dep_time, dep_delay]",
    ),
    Kind(DEADLINE, "root: TABLE, where: \"now() < updated_at + interval '30 days'\""),
    Kind(
        "groups without a window",
        "from: TABLE, group_by: [tailnum], select: {flights: count(*), minutes: sum(dep_delay)}",
        PANES,
    ),
    Kind(
        "tumbling window, 1 hour",
        f"from: TABLE, group_by: [origin], window: {{tumbling: 1 hour, time: dep_time}}, {SELECT}",
        PANES,
    ),
    Kind(
        HOPPING,
        "from: TABLE, group_by: [origin],"
        f" window: {{hopping: 1 hour, every: 10 minutes, time: dep_time}}, {SELECT}",
        PANES,
    ),
    # Its clock is far from the windows' ends: so its documents can change all the time.
    Kind(
        "closing window, 1 hour",
        "from: TABLE, group_by: [origin], window: {tumbling: 1 hour, time: dep_time, lateness: 9999 days},"
        f" clock: dep_time, {SELECT}",
        PANES,
    ),
    # A carrier's flights leave 1 or 14 minutes after each other, and then pause for half an hour.
    Kind(
        "session, 20 minutes",
        f"from: TABLE, group_by: [carrier], window: {{session: 20 minutes, time: dep_time}}, {SELECT}",
    ),
    Kind(
        "sliding window, 20 minutes",
        f"from: TABLE, group_by: [carrier], window: {{sliding: 20 minutes, time: dep_time}}, {SELECT}",
    ),
)
ENTRIES = """
local page, entries = redis.call('SCAN', ARGV[1], 'COUNT', 10000), 0
local counting = {hash = 'HLEN', set = 'SCARD', zset = 'ZCARD'}
for _, key in ipairs(page[2]) do
  local count = counting[redis.call('TYPE', key).ok]
  entries = entries + (count and redis.call(count, key) or 1)
end
return {page[1], entries}
"""


@dataclass(frozen=True)
class Pair:
    """A kind and its two tables; of the large one only as many flights change as the small one has."""

    kind: Kind
    small: Flights
    large: Flights


def names(sizes: Sequence[int]) -> list[str]:
    """Name the tables, schema.table: the weather, and the flights of each kind."""
    return flights.names(_all(sizes), ["weather"])


def make(data: Data, sizes: Sequence[int]) -> None:
    """Make a small and a large table of flights for each kind, with what they name."""
    flights.make(data, _all(sizes))
    with psycopg.connect(data.dsn, autocommit=True) as connection:
        for pair in _pairs(data.dsn, sizes[0]):
            for table in (pair.small.table, pair.large.table):
                # The queries of patterns and sliding windows, which documents are compared with, ask for
                # each row.
                connection.execute(f"CREATE INDEX ON {table} (carrier, dep_time)")


def views(dsn: str, sizes: Sequence[int]) -> str:
    """Write that part of a pipeline file."""
    lines = [
        f"  {made.view}: {{{pair.kind.view.replace('TABLE', made.table)}, to: [cache]}}\n"
        for pair in _pairs(dsn, sizes[0])
        for made in (pair.small, pair.large)
    ]
    return "views:\n" + "".join(lines)


def _all(sizes: Sequence[int]) -> list[int]:
    return [*sizes] * len(KINDS)


def _pairs(dsn: str, rows: int) -> list[Pair]:
    return [
        Pair(kind, Flights(dsn, 2 * number, rows), Flights(dsn, 2 * number + 1, rows))
        for number, kind in enumerate(KINDS)
    ]


def views_of_time(
    stage: Stage, sizes: Sequence[int], times: int, seconds: float
) -> Iterator[Figure]:
    """Measure rates, growth, what the state keeps of flights that have gone, and latencies. There
    are figures only if all documents in the cache equal Postgres' own at the end.
    """
    pairs = _pairs(stage.dsn, sizes[0])
    by_kind = {pair.kind.name: pair for pair in pairs}
    with stage.running([STATE]) as streams:
        figures = _drains(stage, streams, pairs, sizes[-1], times)
        figures.append(_returned(stage, streams, [pair.small for pair in pairs]))
    with stage.running([STATE, "cache"]) as streams:
        document = late(stage, streams, by_kind[DOCUMENTS].large, RATE, seconds)
        window = late(stage, streams, by_kind[HOPPING].large, RATE, seconds, "window", _last_window)
        withdrawn = _withdrawn(stage, by_kind[DEADLINE].large)
        if not stage.equal(*stage.context.sinks(["cache"])):
            raise DivergenceError(
                "A document differs from Postgres' own.", hint="a bug in the pipeline"
            )
    window.asked = (median(document.hops["visible"]),)
    yield from [*figures, document, window, withdrawn]


def _rate(name: str, ratio: float, changes: int) -> Figure:
    return Figure(f"{name}, alone", "changes/s", ratio, "rival", changes=changes)


def _drains(
    stage: Stage, streams: list[Watched], pairs: Sequence[Pair], rows: int, times: int
) -> list[Figure]:
    """Rates, and growth: `limit` is the work of a change of the small table."""
    changes = pairs[0].small.rows
    rates = [_rate(pair.kind.name, pair.kind.ratio, changes) for pair in pairs]
    growths = [
        Figure(
            f"{pair.kind.name}, {rows:,} flights / {changes:,}",
            "µs of CPU/change",
            GROWTH,
            at_most=True,
            changes=changes,
        )
        for pair in pairs
    ]
    # Once for Java's compilers.
    _drain(stage, streams, pairs[0].large, changes)
    rounds = [*zip(pairs, rates, growths, strict=True)]
    # Documents come first and last.
    for pair, rate, growth in [*(rounds * times), rounds[0]]:
        small = _drain(stage, streams, pair.small, changes)
        large = _drain(stage, streams, pair.large, changes)
        growth.limit.append(work_us(small.cost, changes))
        growth.ours.append(work_us(large.cost, changes))
        growth.costs.append(large.cost)
        rate.ours.append(changes / large.seconds)
        rate.costs.append(large.cost)
    (hopping,) = [pair for pair in pairs if pair.kind.name == HOPPING]
    scattered = _rate(f"{HOPPING}, flights all over", 0.0, changes)
    everywhere = Flights(stage.dsn, hopping.large.number, rows)
    scattered.ours.append(changes / _drain(stage, streams, everywhere, changes).seconds)
    rates.append(scattered)
    for rate in rates[1:]:
        rate.rival = rates[0].ours
    return [*rates, *growths]


def _drain(stage: Stage, streams: list[Watched], table: Flights, changes: int) -> Drain:
    """Change so many rows, in one transaction: so it isn't measured how fast Postgres writes."""
    starts = flight_ends(stage, table)
    topic = next(iter(starts))
    stop = threading.Event()
    with ThreadPoolExecutor(1) as pool, stage.meter() as meter:
        noting = pool.submit(_notes, stage, table, stop)
        try:
            table.change(changes, size=changes)
            stage.settle(streams)
        finally:
            stop.set()
    end = stage.ends()[topic]
    began, _ = span(stage, {topic: starts[topic]})
    noted = next(at for at, note in noting.result() if distance(note.get(topic), end).reached)
    return Drain(noted - began, meter.cost)


def _notes(
    stage: Stage, table: Flights, stop: threading.Event
) -> list[tuple[float, Mapping[str, ViewCheckpoint]]]:
    """Up to where the documents were current, by topic, and when that was noted, Unix seconds."""
    read = open_documents(stage.pipeline)
    notes: list[tuple[float, Mapping[str, ViewCheckpoint]]] = []
    is_over = False
    while not is_over:
        is_over = stop.wait(POLL_S)
        note = read().get(table.view, {})
        if not notes or note != notes[-1][1]:
            notes.append((time.time(), note))
    return notes


def _returned(stage: Stage, streams: list[Watched], tables: Sequence[Flights]) -> Figure:
    """What the state keeps: its keys, with the fields and members that they have."""
    figure = Figure("state after as many flights came and went", "entries", 1.0, at_most=True)
    figure.limit.append(_entries(stage))
    for table in tables:
        table.add(table.rows)
    stage.settle(streams)
    if _entries(stage) == figure.limit[0]:
        raise DivergenceError("The state has no more of new flights.", hint="a bug in the pipeline")
    for table in tables:
        table.remove_added()
    stage.settle(streams)
    figure.ours.append(_entries(stage))
    return figure


def _entries(stage: Stage) -> int:
    entries = 0
    cursor = b"0"
    with redis.Redis.from_url(stage.endpoints.environment()["CDC_DOCUMENTS"]) as server:
        while True:
            cursor, page = cast(tuple[bytes, int], server.eval(ENTRIES, 0, cursor))
            entries += page
            if cursor == b"0":
                return entries


def _withdrawn(stage: Stage, flights: Flights) -> Figure:
    """How long after their deadlines documents are gone from the cache, while no table changes: the clock
    goes by heartbeats alone.
    """
    figure = Figure("document gone from the cache after its deadline", "s")
    figure.asked = (stage.pipeline.source.heartbeat_s + ABSENCE_S,) * 2
    watch = redis_watch(stage.endpoints.redis, stage.name, view_of(stage, flights).qualified)
    deadlines: dict[str, float] = {}
    with psycopg.connect(stage.dsn, autocommit=True) as connection:
        for number in range(20):
            # Soon, and at any place between two heartbeats.
            key, updated = flights.age(connection, number, DEADLINE_S - 5 - number * 0.37)
            deadlines[row_id(key)] = updated.timestamp() + DEADLINE_S
    while deadlines:
        shown = watch.find(list(deadlines))
        now = time.time()
        for document_id in deadlines.keys() - shown.keys():
            figure.hops.setdefault("visible", []).append(now - deadlines.pop(document_id))
        time.sleep(POLL_S)
    return figure


def _last_window(key: list[Any]) -> str:
    """Return the id of the last hopping window that a flight is in, by its key."""
    _, _, origin, departure = key
    return row_id([origin, f"{departure[:15]}0:00.000000Z"])
