"""Where each hop stands: Postgres -> connector -> topics -> each view. Plain data; others print it.

In:  the pipeline file, a function per sink that reads its positions, what `cdc run` last published.
Out: `Status`; a part that can't be reached is named in `problems` and the rest is still told.
Invariant: reads only, and no number that the servers themselves don't hold.
"""

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import structlog

from cdc import catalog, registered, source
from cdc.change import Applied, Position, Progress, Stored, Table, distance
from cdc.continuity import Continuity, Discontinued, waiting
from cdc.definitions import Watch, watch
from cdc.errors import KafkaUnavailable, SourceUnavailable, Unexpected
from cdc.failures import classify
from cdc.heartbeat import last_beat
from cdc.held import QuarantineLog
from cdc.ledger import Ledger
from cdc.settings import Pipeline
from cdc.topics import Topics
from cdc.trace import trace

log = structlog.get_logger()
Positions = Mapping[str, Callable[[Table], Stored | None]]


@dataclass(frozen=True)
class Problem:
    """A part that couldn't be read: postgres, connect, kafka or a sink's name; or what is wrong with the topics."""

    part: str
    message: str
    hint: str


@dataclass(frozen=True)
class Connector:
    """Connect's own words, RUNNING or FAILED; MISSING when there is no such connector."""

    state: str
    tasks: tuple[str, ...]
    trace: str | None


@dataclass(frozen=True)
class Heartbeat:
    """`age_s` since the last beat arrived in Kafka; `delay_s` from its commit to its arrival."""

    age_s: float
    delay_s: float
    interval_s: float

    @property
    def late(self) -> bool:
        return self.age_s > 3 * self.interval_s + 1


@dataclass(frozen=True)
class View:
    """One table in one sink. `lag_seconds` is at least so much: the age of the oldest record not applied."""

    table: str
    lag_records: int | None = None
    lag_seconds: float | None = None
    rows: int = 0
    at: float | None = None
    """Unix seconds of the last change to the view; None when nothing was ever applied."""
    problem: str | None = None
    hint: str | None = None
    holes: tuple[str, ...] = ()
    """What its log of changes may lack for good, in words."""
    quarantined: int = 0
    """Records in quarantine: as long as there are any the view is degraded."""


@dataclass(frozen=True)
class Sink:
    """`state` and `error` are from `cdc run`; "not running" when it has published nothing."""

    name: str
    state: str = "not running"
    error: str | None = None
    hint: str | None = None
    rows_per_s: float = 0.0
    views: tuple[View, ...] = ()
    applied: Applied | None = None
    """Records since `cdc run` started."""
    aside: Mapping[str, list[str]] = field(default_factory=dict)
    """See `Progress.aside`."""
    looked_s: float = 0.0
    """See `Progress.looked_s`."""

    @property
    def lag_seconds(self) -> float:
        return max((view.lag_seconds or 0.0 for view in self.views), default=0.0)


@dataclass(frozen=True)
class Status:
    pipeline: str
    connector: Connector | None = None
    slot: source.Slot | None = None
    heartbeat: Heartbeat | None = None
    sinks: tuple[Sink, ...] = ()
    problems: tuple[Problem, ...] = field(default=())
    definitions: Watch | None = None
    """What notes it when a captured table's definition changes; None when that couldn't be asked."""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def collect(pipeline: Pipeline, *, positions: Positions, progress: Mapping[str, Progress]) -> Status:
    """Ask every server at the same time; raises nothing that a server causes."""
    tables = source.undescribed(pipeline)
    asked: dict[str, Callable[[], Any]] = {
        "postgres": lambda: _slot(pipeline),
        "connect": lambda: _connector(pipeline),
        "registration": lambda: _registration(pipeline),
        "definitions": lambda: _definitions(pipeline),
        **{name: _stored(position, tables) for name, position in positions.items()},
    }
    with ThreadPoolExecutor(len(asked)) as pool:
        answers = {part: pool.submit(_ask, part, ask) for part, ask in asked.items()}
        told = {part: answer.result() for part, answer in answers.items()}
    stored = {name: told[name][0] for name in positions}
    (heartbeat, views, lowered), unread = _ask("kafka", lambda: _log(pipeline, tables, stored), (None, {}, None))
    return Status(
        pipeline.pipeline,
        told["connect"][0],
        told["postgres"][0],
        heartbeat,
        tuple(_sink(name, progress.get(name), views.get(name) or _unread(tables, stored[name])) for name in positions),
        tuple(problem for problem in (*(problem for _, problem in told.values()), unread, lowered) if problem),
        told["definitions"][0],
    )


def _ask(part: str, ask: Callable[[], Any], without: Any = None) -> tuple[Any, Problem | None]:
    try:
        return ask(), None
    except Exception as error:
        failure = classify(error, part, "cdc -p FILE status")
        if isinstance(failure, Unexpected):
            log.error("status_not_read", part=part, exception=trace(error))
        return without, Problem(part, failure.message, failure.hint)


def _slot(pipeline: Pipeline) -> source.Slot | None:
    with source.connect(pipeline.source.dsn) as conn:
        return source.slot(conn, pipeline.pipeline)


def _registration(pipeline: Pipeline) -> None:
    """Raises what is the matter with it."""
    try:
        with source.connect(pipeline.source.dsn) as conn, Topics(pipeline.kafka) as topics:
            known, server = registered.read(topics, pipeline), source.server(conn)
            meant = catalog.tables(conn, pipeline).names
    except (SourceUnavailable, KafkaUnavailable):
        # Those two are asked by others as well, which say so.
        return
    registered.refuse_another(known, server, pipeline)
    registered.refuse_changed(known, pipeline)
    registered.refuse_waiting(known, meant)
    registered.refuse_promoted(known, server, pipeline)


def _definitions(pipeline: Pipeline) -> Watch | None:
    try:
        with source.connect(pipeline.source.dsn) as conn:
            return watch(conn)
    except SourceUnavailable:
        # The slot is asked for there as well, which says so.
        return None


def _connector(pipeline: Pipeline) -> Connector:
    from connectors.client import Connect

    with Connect(pipeline.connect) as connect:
        state = connect.state(pipeline.pipeline)
    return Connector(state.connector, state.tasks, state.trace)


def _stored(
    position: Callable[[Table], Stored | None], tables: Sequence[Table]
) -> Callable[[], dict[str, Stored | None]]:
    return lambda: {table.topic: position(table) for table in tables}


def _log(
    pipeline: Pipeline, tables: Sequence[Table], stored: Mapping[str, Mapping[str, Stored | None] | None]
) -> tuple[Heartbeat | None, dict[str, tuple[View, ...]], Problem | None]:
    """The heartbeat, each sink's views measured against the topics, what is wrong with these. Raises ConnectorError."""
    with Topics(pipeline.kafka) as topics:
        continuity = Continuity(pipeline, topics).read([table.topic for table in tables])
        ends = {topic: one.end for topic, one in continuity.logs.items()}
        beat = last_beat(topics, pipeline)
        kept = Counter(
            (one.entry.sink, one.entry.topic) for one in QuarantineLog(topics, pipeline).read() if not one.entry.redrive
        )
        known = {name: found for name, found in stored.items() if found is not None}
        oldest = topics.times(
            place
            for found in known.values()
            for table in tables
            for place in waiting(table.topic, found[table.topic], ends[table.topic])
        )
        continuity.look((table, found[table.topic]) for found in known.values() for table in tables)
        views = {
            name: tuple(
                replace(
                    _judged(continuity, name, table, found[table.topic], oldest), quarantined=kept[name, table.topic]
                )
                for table in tables
            )
            for name, found in known.items()
        }
    heartbeat = None
    if beat:
        age = max(0.0, time.time() - beat.arrived_ms / 1000)
        heartbeat = Heartbeat(round(age, 3), beat.delay_s, pipeline.source.heartbeat_s)
    return heartbeat, views, _lowered(continuity.ledger)


def _lowered(ledger: Ledger) -> Problem | None:
    """Settings that an interrupted compaction has left as they are good for it alone."""
    if not ledger.lowered or ledger.at_work:
        return None
    first, *others = sorted(ledger.lowered)
    more = f" and {len(others)} more" if others else ""
    return Problem(
        "topics",
        f"`cdc topics compact` was interrupted and has left settings of {first}{more} lowered.",
        "cdc -p FILE topics",
    )


def _judged(
    continuity: Continuity,
    sink: str,
    table: Table,
    stored: Stored | None,
    oldest: Mapping[tuple[str, int, int], int],
) -> View:
    """One view, and what is the matter where the log can't continue it."""
    end = continuity.logs[table.topic].end
    holes = continuity.ledger.holes(sink, table.topic)
    view = replace(
        measure(table, stored, end, oldest, time.time()),
        holes=tuple(str(one) for one in holes if one.end.topic_id == end.topic_id),
    )
    try:
        continuity.refuse(sink, table, stored)
    except Discontinued as error:
        return replace(view, problem=error.message, hint=error.hint)
    return view


def measure(
    table: Table, stored: Stored | None, end: Position, oldest: Mapping[tuple[str, int, int], int], now: float
) -> View:
    """One view against the end of its topic; `oldest` holds Unix milliseconds of the places of `waiting`."""
    rows, last = (stored.rows, stored.at) if stored else (0, None)
    there = distance(stored, end)
    if not there.comparable:
        return View(table.qualified, rows=rows, at=last)
    places = waiting(table.topic, stored, end)
    times = [oldest[place] for place in places if place in oldest]
    lag = max(0.0, now - min(times) / 1000) if times else 0.0
    # What is left may be transaction markers alone: then there are offsets to go, but nothing to apply.
    return View(table.qualified, there.offsets, round(lag, 3), rows, last)


def _sink(name: str, progress: Progress | None, views: tuple[View, ...]) -> Sink:
    if progress is None:
        return Sink(name, views=views)
    return Sink(
        name,
        progress.state,
        progress.error,
        progress.hint,
        progress.rows_per_s,
        views,
        progress.applied,
        progress.aside,
        progress.looked_s,
    )


def _unread(tables: Sequence[Table], stored: Mapping[str, Stored | None] | None) -> tuple[View, ...]:
    """Views that couldn't be measured: what the sink itself told is shown, lag isn't."""
    told = stored or {}
    return tuple(
        View(table.qualified, rows=found.rows, at=found.at)
        if (found := told.get(table.topic))
        else View(table.qualified)
        for table in tables
    )
