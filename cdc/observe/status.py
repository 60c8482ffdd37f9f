"""Where each hop stands: Postgres -> connector -> topics -> each view. Plain data; others print it.

In:  the pipeline file, a function per sink that reads its positions, what `cdc run` last published.
Out: `Status`; a part that can't be reached, or doesn't answer in time, is named in `problems` and the rest is answers.
Invariant: reads only, and no number that the servers themselves don't hold: what wasn't read is None.
"""

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field, replace
from threading import Thread
from typing import Any, Literal

import structlog

from cdc.apply.progress import WORKING, Progress
from cdc.config.settings import Pipeline
from cdc.control import registrations
from cdc.control.definitions import Watch, watch
from cdc.control.heartbeat import last_beat
from cdc.errors import CdcError, ConnectorError, KafkaUnavailable, SinkError, SourceUnavailable, Unexpected
from cdc.kafka.ledger import Ledger
from cdc.kafka.log_continuity import Continuity, Discontinued, waiting
from cdc.kafka.topics import Topics
from cdc.model.outcome import Applied
from cdc.model.position import Position, ViewCheckpoint, distance
from cdc.model.table import Table
from cdc.model.trace import trace
from cdc.postgres import catalog, source
from cdc.quarantine.log import QuarantineLog
from cdc.sink.remedy import classify

log = structlog.get_logger()
Positions = Mapping[str, Callable[[Sequence[Table]], Mapping[str, ViewCheckpoint | None]]]
"""By sink, `cdc.sink.contract.positions`."""
Severity = Literal["down", "degraded"]
ANSWER_S, TABLE_S = 4.0, 0.02
"""How long anything is waited for, of more than two hundred tables longer: whatever hangs, the screen is there soon."""
CLASSES: Mapping[str, type[CdcError]] = {
    "postgres": SourceUnavailable,
    "connect": ConnectorError,
    "kafka": KafkaUnavailable,
}
SERVERS = {"postgres": "Postgres", "connect": "Kafka Connect", "kafka": "Kafka"}
POSITIONS = 0.6
"""For what part of that the topics' reading waits for where the views stand, to measure these."""


@dataclass(frozen=True)
class Problem:
    """Something that a person has to know, or to do something about.

    part      what couldn't be read, postgres, connect, kafka, registration or a sink's name; or what is wrong: topics,
              connector, slot, heartbeat, run, table, quarantine, lag
    code      the exit code of its class
    severity  down: nothing goes this way, or nobody can tell; degraded: something does, not all or not in time
    since     Unix seconds, where that is known
    """

    part: str
    message: str
    hint: str
    code: int = 1
    severity: Severity = "down"
    table: str | None = None
    sink: str | None = None
    since: float | None = None


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
    changes: int | None = None
    """Applied since the view was made; more than it has rows where these were changed."""
    at: float | None = None
    """Unix seconds of the last change to the view; None when nothing was ever applied, with 0 `changes`."""
    problem: str | None = None
    hint: str | None = None
    holes: tuple[str, ...] = ()
    """What its log of changes may lack for good, in words."""
    quarantined: int = 0
    """Records in quarantine: as long as there are any the view is degraded."""


@dataclass(frozen=True)
class Sink:
    """`state` and `error` are from `cdc run`, which leaves them on its own machine; elsewhere they aren't known."""

    name: str
    state: str = "not known here"
    since: float | None = None
    """Of the state, Unix seconds."""
    error: str | None = None
    hint: str | None = None
    rows_per_s: float | None = None
    views: tuple[View, ...] = ()
    applied: Applied | None = None
    """Records since `cdc run` started."""
    aside: Mapping[str, list[str]] = field(default_factory=dict)
    """See `Progress`, for this and what follows."""
    aside_since: Mapping[str, float] = field(default_factory=dict)
    looked_s: float = 0.0
    compared_s: float | None = None
    restarts: Mapping[str, int] = field(default_factory=dict)
    restarted: str | None = None

    @property
    def lag_seconds(self) -> float | None:
        """Of the views that go on; None when none could be measured."""
        going = (view for view in self.views if not view.problem and view.table not in self.aside)
        return max((view.lag_seconds for view in going if view.lag_seconds is not None), default=None)


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


Answer = tuple[Any, Problem | None]
Read = tuple[Heartbeat | None, dict[str, tuple[View, ...]], Problem | None]
"""What the topics tell: see `_log`."""


def collect(
    pipeline: Pipeline, *, positions: Positions, progress: Mapping[str, Progress], began: float | None = None
) -> Status:
    """Ask every server at the same time; raises nothing that a server causes, and waits for none beyond ANSWER_S.

    `began`: when the caller did, by the monotonic clock.
    """
    tables, began = source.undescribed(pipeline), began or time.monotonic()
    patience_s = max(ANSWER_S, len(tables) * TABLE_S)
    asked = {name: _asked(name, _stored(position, tables)) for name, position in positions.items()}

    def standing() -> dict[str, dict[str, ViewCheckpoint | None]]:
        """Where the views stand of those sinks that have told in time."""
        stored = {name: _answered(name, asked[name], began, patience_s * POSITIONS)[0] for name in positions}
        return {name: places for name, places in stored.items() if places is not None}

    asked |= {
        "postgres": _asked("postgres", lambda: _slot(pipeline)),
        "connect": _asked("connect", lambda: _connector(pipeline)),
        "registration": _asked("registration", lambda: _registration(pipeline)),
        "definitions": _asked("definitions", lambda: _definitions(pipeline)),
        "kafka": _asked("kafka", lambda: _log(pipeline, tables, standing)),
    }
    answers = {part: _answered(part, answer, began, patience_s) for part, answer in asked.items()}
    topics: Read = answers["kafka"][0] or (None, {}, None)
    heartbeat, views, lowered = topics
    registration, (definitions, _) = answers.pop("registration"), answers.pop("definitions")
    unread = sorted((problem for _, problem in answers.values() if problem), key=lambda one: one.part not in SERVERS)
    changed = _unlike(registration, unread)
    return Status(
        pipeline.pipeline,
        answers["connect"][0],
        answers["postgres"][0],
        heartbeat,
        tuple(
            _sink(name, progress.get(name), views.get(name) or _unread(tables, answers[name][0])) for name in positions
        ),
        tuple(problem for problem in (*unread, changed, lowered) if problem),
        definitions,
    )


def _unlike(registration: tuple[Problem | None, Problem | None], unread: Sequence[Problem]) -> Problem | None:
    """What is the matter with the registration; that its servers don't answer is told by those who ask them alone."""
    changed, unsure = registration
    silent = {"postgres", "kafka"} & {problem.part for problem in unread}
    return unsure if unsure and (unsure.code == Unexpected.exit_code or not silent) else changed


def _asked(part: str, ask: Callable[[], Any]) -> "Future[Answer]":
    """Ask in a thread that nobody waits for in the end: one that hangs ends with the program."""
    answer: Future[Answer] = Future()
    Thread(target=lambda: answer.set_result(_ask(part, ask)), name=f"ask-{part}", daemon=True).start()
    return answer


def _answered(part: str, answer: "Future[Answer]", began: float, patience_s: float) -> Answer:
    try:
        return answer.result(max(0.0, began + patience_s - time.monotonic()))
    except TimeoutError:
        what = f"{SERVERS.get(part, part)} gives no answer within {patience_s:.0f} s."
        kind = CLASSES.get(part, SinkError)
        hint = "look at that server, and at the way to it: it takes connections, or did, and says nothing"
        return None, Problem(part, what, hint, kind.exit_code)


def _ask(part: str, ask: Callable[[], Any]) -> Answer:
    try:
        return ask(), None
    except Exception as error:
        failure = classify(error, part, "cdc -p FILE status")
        if isinstance(failure, Unexpected):
            log.error("status_not_read", part=part, exception=trace(error))
        return None, Problem(part, failure.message, failure.hint, failure.exit_code)


def _slot(pipeline: Pipeline) -> source.Slot | None:
    with source.connect(pipeline.source.dsn) as conn:
        return source.slot(conn, pipeline.pipeline)


def _registration(pipeline: Pipeline) -> Problem | None:
    """What is the matter with it."""
    with source.connect(pipeline.source.dsn) as conn, Topics(pipeline.kafka) as topics:
        known, server = registrations.read(topics, pipeline), source.server(conn)
        if not known:
            return None
        severity: Severity = "down"
        try:
            registrations.refuse_another(known, server, pipeline)
            registrations.refuse_changed(known, pipeline)
            registrations.refuse_meaningless(known.tables, pipeline)
            severity = "degraded"
            registrations.refuse_promoted(known, server, pipeline)
            # Last: what the patterns mean now may have no answer, which must hide nothing of the above.
            choice = catalog.tables(conn, pipeline)
            catalog.refuse_slipped(known.tables, choice, pipeline)
            registrations.refuse_waiting(known, choice.names)
        except CdcError as error:
            return Problem("registration", error.message, error.hint, error.exit_code, severity)
    return None


def _definitions(pipeline: Pipeline) -> Watch:
    with source.connect(pipeline.source.dsn) as conn:
        return watch(conn)


def _connector(pipeline: Pipeline) -> Connector:
    from connectors.client import Connect

    with Connect(pipeline.connect) as connect:
        state = connect.state(pipeline.pipeline)
    return Connector(state.connector, state.tasks, state.trace)


def _stored(
    positions: Callable[[Sequence[Table]], Mapping[str, ViewCheckpoint | None]], tables: Sequence[Table]
) -> Callable[[], dict[str, ViewCheckpoint | None]]:
    def by_topic() -> dict[str, ViewCheckpoint | None]:
        stored = positions(tables)
        return {table.topic: stored[table.qualified] for table in tables}

    return by_topic


def _log(
    pipeline: Pipeline,
    tables: Sequence[Table],
    standing: Callable[[], Mapping[str, Mapping[str, ViewCheckpoint | None]]],
) -> Read:
    """The heartbeat, each sink's views measured against the topics, what is wrong with these. Raises ConnectorError."""
    with Topics(pipeline.kafka) as topics:
        continuity = Continuity(pipeline, topics).read([table.topic for table in tables])
        ends = {topic: one.end for topic, one in continuity.logs.items()}
        beat = last_beat(topics, pipeline)
        kept = Counter(
            (one.entry.sink, one.entry.topic) for one in QuarantineLog(topics, pipeline).read() if not one.entry.redrive
        )
        known = standing()
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
        ConnectorError.exit_code,
        "degraded",
    )


def _judged(
    continuity: Continuity,
    sink: str,
    table: Table,
    stored: ViewCheckpoint | None,
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
    table: Table, stored: ViewCheckpoint | None, end: Position, oldest: Mapping[tuple[str, int, int], int], now: float
) -> View:
    """One view against the end of its topic; `oldest` holds Unix milliseconds of the places of `waiting`."""
    rows, last = (stored.rows, stored.changed_at) if stored else (0, None)
    there = distance(stored, end)
    if not there.comparable:
        return View(table.qualified, changes=rows, at=last)
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
        progress.state_since,
        progress.error,
        progress.hint,
        progress.rows_per_s if progress.state in WORKING else None,
        views,
        progress.applied,
        progress.aside,
        progress.aside_since,
        progress.looked_s,
        progress.compared_s,
        progress.restarts,
        progress.restarted,
    )


def _unread(tables: Sequence[Table], stored: Mapping[str, ViewCheckpoint | None] | None) -> tuple[View, ...]:
    """Views that couldn't be measured: what the sink itself told is shown, lag isn't."""
    if stored is None:
        return tuple(View(table.qualified) for table in tables)
    return tuple(
        View(table.qualified, changes=place.rows if place else 0, at=place.changed_at if place else None)
        for table in tables
        for place in [stored[table.topic]]
    )
