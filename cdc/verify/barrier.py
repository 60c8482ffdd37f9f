"""Wait until views hold everything that was committed before a moment, while others write."""

import time
from collections.abc import Callable, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, replace
from threading import Event

from cdc.config.settings import Pipeline
from cdc.config.view_settings import SCHEMA, STATE
from cdc.control.control_topics import Truncations
from cdc.control.floors import Floors
from cdc.control.heartbeat import last_heartbeat
from cdc.errors import CdcError, ConnectorError, SinkRejected, SinkUnavailable
from cdc.kafka.ledger import Ledger
from cdc.kafka.log_refusals import Discontinued, refuse_incomparable
from cdc.kafka.topics import Topics
from cdc.model.position import Position, Reach, distance
from cdc.model.table import Table
from cdc.model.wording import full_stopped
from cdc.postgres import source
from cdc.postgres.row_query import source_names
from cdc.sink.contract import Applier, SchemaMismatch, positions, require_same_shape
from cdc.sink.factory import late_topics, open_clocks, open_documents
from cdc.verify.comparison import View

POLL_S = 0.25
SILENT_S = 4.0
"""Seconds between two reports of what the wait is for. A wait that ends sooner reports nothing."""
AWAY_S = 10.0
"""Seconds that a sink may be away during a wait; a server starts within them."""
ASK_S = 1.0
"""Seconds between two looks at what runs report about views."""
LASTING_S = 15.0
"""Seconds for which a run has to report a view as stalled. A run checks every 10 s whether a view can go
on, and publishes that within 5 s, so a view that is still reported wasn't mended before the wait."""
NO_CLOCKS: Mapping[str, int] = {}


class StalledViews:
    """The views that don't move until somebody acts.

    find    reads what runs report: for each such view an error with a command. With the sink STATE it
            is a view whose documents aren't made.
    """

    def __init__(self, find: Callable[[], Mapping[View, CdcError]]) -> None:
        self._find = find
        self._reported: Mapping[View, CdcError] = {}
        self._first_seen: dict[View, float] = {}
        self._asked_at = float("-inf")

    def lasting(self) -> dict[View, CdcError]:
        """The views that have been reported for LASTING_S without a break."""
        now = time.monotonic()
        if now - self._asked_at >= ASK_S:
            self._reported = self._find()
            self._asked_at = now
            self._first_seen = {view: self._first_seen.get(view, now) for view in self._reported}
        return {
            view: error
            for view, error in self._reported.items()
            if now - self._first_seen[view] >= LASTING_S
        }


@dataclass(frozen=True)
class WaitOptions:
    """Options of a wait: its limit and its callbacks. All callbacks run in the thread that waits.

    timeout_s   seconds after which the wait fails
    report      called every 4 s with a sentence that says what the wait is for; ends the wait by
                raising
    stalled     with it, a view that doesn't move isn't waited for. Without it, a view that can never
                get there ends the wait with its error
    """

    timeout_s: float
    report: Callable[[str], object] = lambda _: None
    stalled: StalledViews | None = None

    def stalled_views(self) -> Mapping[View, CdcError]:
        return self.stalled.lasting() if self.stalled else {}


@dataclass(frozen=True)
class Barrier:
    """A barrier for views: the ends that positions must reach, and the floors that views must know.

    `ends` are by topic.
    """

    ends: Mapping[str, Position]
    floors: Floors

    def sort(
        self, sink: Applier, tables: Sequence[Table]
    ) -> tuple[dict[Table, str], dict[Table, CdcError]]:
        """Return the views that haven't passed yet, each with what it lacks, in words; and those that
        never will, each with its error. Makes as few requests as the sink allows.
        """
        problems: dict[Table, str] = {}
        stopped: dict[Table, CdcError] = {}
        try:
            checkpoints = positions(sink, tables)
        except SinkRejected as error:
            if len(tables) == 1:
                return {}, {tables[0]: error}
            # One view fails the request for all of them, so each is asked for alone.
            for table in tables:
                late, refused = self.sort(sink, [table])
                problems |= late
                stopped |= refused
            return problems, stopped
        for table in tables:
            stored = checkpoints[table.qualified]
            lag = distance(stored, self.ends[table.topic], self.floors.number(table.qualified))
            try:
                refuse_incomparable(sink.name, table, lag)
                require_same_shape(table.for_sink(sink.name), sink.name, stored)
            except (Discontinued, SchemaMismatch) as error:
                stopped[table] = error
                continue
            if not lag.reached:
                is_behind = lag.reach is Reach.BEHIND
                state = f"is {lag.offsets} offsets behind" if is_behind else lag.reach
                problems[table] = f"{table.qualified} in {sink.name} {state}"
        return problems, stopped


def wait_until_current(
    pipeline: Pipeline, tables: Sequence[Table], sinks: Sequence[Applier], options: WaitOptions
) -> dict[View, CdcError]:
    """Wait until the views hold what is committed now.

    Returns the views that weren't waited for because they don't move, each with its error; none
    without `options.stalled`.

    Raises:
        ConnectorError: not in time; names the hop that is behind.
        SinkUnavailable: a sink has been away for 10 s.
    """
    start = time.monotonic()
    now_ms = read_time_ms(pipeline)
    with Topics(pipeline.kafka) as kafka:
        barrier = place_barrier(pipeline, kafka, tables, now_ms, options)
    remaining_s = start + options.timeout_s - time.monotonic()
    return await_barrier(barrier, tables, sinks, replace(options, timeout_s=remaining_s))


def read_time_ms(pipeline: Pipeline) -> float:
    """Read the time of Postgres' clock in Unix milliseconds. Raises SourceError."""
    with source.connect_to_read(pipeline.source) as connection:
        row = connection.execute(
            "SELECT extract(epoch FROM clock_timestamp())::float8 * 1000"
        ).fetchone()
    assert row is not None
    return float(row[0])


def place_barrier(
    pipeline: Pipeline,
    kafka: Topics,
    tables: Sequence[Table],
    now_ms: float,
    options: WaitOptions,
    clocks: Mapping[str, int] = NO_CLOCKS,
) -> Barrier:
    """Place a barrier behind everything that was committed before now_ms, by the clock of Postgres.

    The connector sends changes in commit order. A heartbeat made after that moment therefore proves
    that everything before it is in the topics. The barrier takes the ends of what is written,
    committed in Kafka or not: the heartbeat's transaction may hold changes as well, and reaches the
    topics one by one. After a new snapshot, rows that it hasn't sent have to be deleted first.

    A view of several tables has a second hop: what was committed is in its topic once the documents
    are current in all topics that they are made of. A view whose documents aren't made until
    somebody acts isn't waited for.

    clocks: by view, a time that its documents must be as of, or of a later one

    Raises:
        ConnectorError: no heartbeat in time, or vanished rows are still there, or documents aren't current.
    """

    def missing_heartbeat() -> list[str]:
        beat = last_heartbeat(kafka, pipeline)
        if beat and beat.committed_ms > now_ms:
            return []
        return [f"no new heartbeat in {pipeline.heartbeat_topic}: is the connector running?"]

    topics = {pipeline.topic(name) for table in tables for name in source_names(table)}

    def vanished_rows() -> list[str]:
        if all(topics.isdisjoint(own) for own in Ledger(pipeline, kafka).read().snapshots.values()):
            return []
        return ["rows that a new snapshot hasn't sent aren't deleted yet: is `cdc run` at work?"]

    _wait_while(missing_heartbeat, options)
    _wait_while(vanished_rows, options)
    truncations = Truncations(pipeline, kafka)
    derived = [table for table in tables if table.derivation]
    if derived:
        truncations.read()
        _await_documents(pipeline, kafka, derived, truncations.floors, clocks, options)
    ends = kafka.log_ends([table.topic for table in tables])
    truncations.read()
    return Barrier(ends, truncations.floors)


def _await_documents(
    pipeline: Pipeline,
    kafka: Topics,
    views: Sequence[Table],
    floors: Floors,
    clocks: Mapping[str, int],
    options: WaitOptions,
) -> None:
    """Wait until the documents of views are current in what their tables' topics hold now, and as of
    the times of `clocks`.
    """
    topics = {topic for view in views if view.derivation for _, topic in view.derivation.tables}
    ends = kafka.log_ends(sorted(topics))
    read = open_documents(pipeline)
    read_clocks = open_clocks(pipeline)

    def lagging_documents() -> list[str]:
        notes = read()
        noted = read_clocks().noted if clocks else {}
        late = {view: late_topics(notes, view, ends, floors.number) for view in views}
        behind = [name for name, now in clocks.items() if noted.get(name, now - 1) < now]
        stopped = options.stalled_views() if behind or any(late.values()) else {}
        late_in = dict.fromkeys(
            topic
            for view, names in late.items()
            if (STATE, view.qualified) not in stopped
            for topic in names
        )
        return [
            *(f"documents are behind in {topic}: is `cdc run` at work?" for topic in late_in),
            *(
                f"documents of {name} are behind their clock: is `cdc run` at work?"
                for name in behind
                if (STATE, f"{SCHEMA}.{name}") not in stopped
            ),
        ]

    _wait_while(lagging_documents, options)


def await_barrier(
    barrier: Barrier, tables: Sequence[Table], sinks: Sequence[Applier], options: WaitOptions
) -> dict[View, CdcError]:
    """Wait until every view has passed a barrier.

    Returns the views that weren't waited for because they don't move, each with its error; none
    without `options.stalled`.

    Raises:
        CdcError: without `options.stalled`, if a view can never get there.
        ConnectorError: not in time; names the hop that is behind.
        SinkUnavailable: a sink has been away for 10 s.
    """
    waiting = [(sink, [table for table in tables if table.is_in(sink.name)]) for sink in sinks]
    last_answer = time.monotonic()
    not_awaited: dict[View, CdcError] = {}

    def lagging_views() -> list[str]:
        nonlocal last_answer
        # A view that has passed isn't polled again: with many tables the requests are what takes
        # the time.
        try:
            sorted_views = [
                (sink, *barrier.sort(sink, pending)) for sink, pending in waiting if pending
            ]
        except SinkUnavailable as away:
            if time.monotonic() - last_answer > AWAY_S:
                raise
            return [away.message]
        last_answer = time.monotonic()
        is_late = any(late for _, late, _ in sorted_views)
        lasting = options.stalled_views() if is_late else {}
        waiting.clear()
        problems: list[str] = []
        for sink, late, stopped in sorted_views:
            if stopped and not options.stalled:
                raise next(iter(stopped.values()))
            errors = stopped | {
                table: lasting[sink.name, table.qualified]
                for table in late
                if (sink.name, table.qualified) in lasting
            }
            not_awaited.update({(sink.name, table.qualified): errors[table] for table in errors})
            pending = [table for table in late if table not in errors]
            waiting.append((sink, pending))
            problems += [late[table] for table in pending]
        return problems

    _wait_while(lagging_views, options)
    if any(table.derivation for table in tables):
        # A view that gets no documents isn't behind its topic, but isn't current either.
        lasting = options.stalled_views()
        not_awaited |= {
            (sink.name, table.qualified): lasting[STATE, table.qualified]
            for sink in sinks
            for table in tables
            if table.is_in(sink.name) and (STATE, table.qualified) in lasting
        }
    return not_awaited


def passed_views(
    barrier: Barrier,
    tables: Sequence[Table],
    sinks: Sequence[Applier],
    limit_s: float,
    not_awaited: Set[View],
    stopping: Event,
) -> frozenset[View]:
    """Wait until views pass a barrier, for `limit_s` seconds at most. Doesn't wait for the views in
    `not_awaited`. Returns the views that have passed it. A sink that is away has passed nothing.
    """
    deadline = time.monotonic() + limit_s
    passed: set[View] = set()
    waiting = {sink: [table for table in tables if table.is_in(sink.name)] for sink in sinks}
    while True:
        for sink, pending in waiting.items():
            if not pending:
                continue
            with suppress(SinkUnavailable):
                late, stopped = barrier.sort(sink, pending)
                waiting[sink] = list(late)
                passed |= {
                    (sink.name, table.qualified)
                    for table in pending
                    if table not in late and table not in stopped
                }
        awaited = {
            (sink.name, table.qualified) for sink, pending in waiting.items() for table in pending
        }
        if awaited <= not_awaited or time.monotonic() > deadline or stopping.wait(POLL_S):
            return frozenset(passed)


def _wait_while(find_problems: Callable[[], list[str]], options: WaitOptions) -> None:
    """Poll until there are no problems.

    Raises ConnectorError with the first of them after the limit.
    """
    last_report = start = time.monotonic()
    while problems := find_problems():
        now = time.monotonic()
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        if now > start + options.timeout_s:
            message = full_stopped(f"Waited in vain: {problems[0]}{more}")
            raise ConnectorError(
                message, hint="cdc -p FILE status: it names the slow hop", more=len(problems) - 1
            )
        if now >= last_report + SILENT_S:
            last_report = now
            options.report(
                f"waiting, {now - start:.0f} s of {options.timeout_s:.0f} s at most: {problems[0]}{more}"
            )
        time.sleep(POLL_S)
