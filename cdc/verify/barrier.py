"""Wait until views hold everything that was committed before a moment, while others write."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from cdc.config.settings import Pipeline
from cdc.control.control_topics import Truncations
from cdc.control.floors import Floors
from cdc.control.heartbeat import last_heartbeat
from cdc.errors import ConnectorError, SinkUnavailable
from cdc.kafka.log_refusals import refuse_incomparable
from cdc.kafka.topics import Topics
from cdc.model.position import Position, Reach, distance
from cdc.model.table import Table
from cdc.model.wording import full_stopped
from cdc.postgres import source
from cdc.sink.contract import Sink, positions
from cdc.sink.factory import late_topics, open_documents

POLL_S = 0.25
SILENT_S = 4.0
"""Seconds between two reports of what the wait is for. A wait that ends sooner reports nothing."""
AWAY_S = 10.0
"""Seconds that a sink may be away during a wait. A server that starts, or a new shard, answers
within them."""


@dataclass(frozen=True)
class WaitOptions:
    """Options of a wait: its limit and its callbacks. Both callbacks run in the thread that waits.

    timeout_s   seconds after which the wait fails
    on_poll     called after every unsuccessful poll; ends the wait by raising
    tell        called every 4 s with a sentence: what the wait is for
    """

    timeout_s: float
    on_poll: Callable[[], object] = lambda: None
    tell: Callable[[str], object] = lambda _: None


@dataclass(frozen=True)
class Barrier:
    """A barrier for views: the ends that positions must reach, and the floors that views must know.

    `ends` are by topic.
    """

    ends: Mapping[str, Position]
    floors: Floors

    def problem(self, sink: Sink, table: Table) -> str | None:
        """Say what the view lacks of this barrier, in words. None: the view has passed it.

        Raises:
            Discontinued: the view never will.
        """
        return self.problems(sink, [table]).get(table)

    def problems(self, sink: Sink, tables: Sequence[Table]) -> dict[Table, str]:
        """Return `problem` of each view that has one, with as few requests as the sink needs."""
        checkpoints, problems = positions(sink, tables), {}
        for table in tables:
            lag = distance(
                checkpoints[table.qualified],
                self.ends[table.topic],
                self.floors.number(table.qualified),
            )
            refuse_incomparable(sink.name, table, lag)
            if not lag.reached:
                state = (
                    f"is {lag.offsets} offsets behind" if lag.reach is Reach.BEHIND else lag.reach
                )
                problems[table] = f"{table.qualified} in {sink.name} {state}"
        return problems


def wait_until_current(
    pipeline: Pipeline,
    tables: Sequence[Table],
    sinks: Sequence[Sink],
    *,
    timeout_s: float,
    on_poll: Callable[[], object] = lambda: None,
    tell: Callable[[str], object] = lambda _: None,
) -> float:
    """Wait until the views hold what is committed now; return the seconds it took.

    Callbacks: see `WaitOptions`.

    Raises:
        ConnectorError: not within timeout_s; names the hop that is behind.
        SinkUnavailable: a sink has been away for 10 s.
    """
    start = time.monotonic()
    with source.connect(pipeline.source.dsn) as connection:
        (now_ms,) = connection.execute(
            "SELECT extract(epoch FROM clock_timestamp())::float8 * 1000"
        ).fetchone() or (0,)
    with Topics(pipeline.kafka) as kafka:
        barrier = place_barrier(
            pipeline, kafka, tables, now_ms, WaitOptions(timeout_s, on_poll, tell)
        )
    remaining_s = start + timeout_s - time.monotonic()
    await_barrier(barrier, tables, sinks, WaitOptions(remaining_s, on_poll, tell))
    return time.monotonic() - start


def place_barrier(
    pipeline: Pipeline, kafka: Topics, tables: Sequence[Table], now_ms: float, options: WaitOptions
) -> Barrier:
    """Place a barrier behind everything that was committed before now_ms, by the clock of Postgres.

    The connector sends changes in commit order. A heartbeat made after that moment therefore proves
    that everything before it is in the topics. The barrier takes the ends of what is written,
    committed in Kafka or not: the heartbeat's transaction may hold changes as well, and reaches the
    topics one by one.

    A view of several tables has a second hop: what was committed is in its topic once the documents
    are current in all topics that they are made of.

    Raises:
        ConnectorError: no heartbeat in time, or documents aren't current.
    """

    def missing_heartbeat() -> list[str]:
        beat = last_heartbeat(kafka, pipeline)
        if beat and beat.committed_ms > now_ms:
            return []
        return [f"no new heartbeat in {pipeline.heartbeat_topic}: is the connector running?"]

    _wait_while(missing_heartbeat, options)
    truncations = Truncations(pipeline, kafka)
    derived = [table for table in tables if table.derivation]
    if derived:
        truncations.read()
        _await_documents(pipeline, kafka, derived, truncations.floors, options)
    ends = kafka.log_ends([table.topic for table in tables])
    truncations.read()
    return Barrier(ends, truncations.floors)


def _await_documents(
    pipeline: Pipeline,
    kafka: Topics,
    views: Sequence[Table],
    floors: Floors,
    options: WaitOptions,
) -> None:
    """Wait until the documents of views are current in what their tables' topics hold now."""
    topics = {topic for view in views if view.derivation for _, topic in view.derivation.tables}
    ends = kafka.log_ends(sorted(topics))
    read = open_documents(pipeline)

    def lagging_documents() -> list[str]:
        notes = read()
        behind = dict.fromkeys(
            topic for view in views for topic in late_topics(notes, view, ends, floors.number)
        )
        return [f"documents are behind in {topic}: is `cdc run` at work?" for topic in behind]

    _wait_while(lagging_documents, options)


def await_barrier(
    barrier: Barrier, tables: Sequence[Table], sinks: Sequence[Sink], options: WaitOptions
) -> None:
    """Wait until every view has passed a barrier.

    Raises:
        ConnectorError: not in time; names the hop that is behind.
        SinkUnavailable: a sink has been away for 10 s.
    """
    waiting = [(sink, [table for table in tables if table.is_in(sink.name)]) for sink in sinks]
    last_answer = time.monotonic()

    def lagging_views() -> list[str]:
        nonlocal last_answer
        # A view that has passed isn't polled again: with many tables the requests are what takes
        # the time.
        try:
            problems = [
                (sink, barrier.problems(sink, pending)) for sink, pending in waiting if pending
            ]
        except SinkUnavailable as error:
            if time.monotonic() - last_answer > AWAY_S:
                raise
            return [error.message]
        last_answer = time.monotonic()
        waiting[:] = [(sink, list(late)) for sink, late in problems]
        return [problem for _, late in problems for problem in late.values()]

    _wait_while(lagging_views, options)


def _wait_while(find_problems: Callable[[], list[str]], options: WaitOptions) -> None:
    """Poll until there are no problems.

    Raises ConnectorError with the first of them after the limit.
    """
    last_report = start = time.monotonic()
    while problems := find_problems():
        options.on_poll()
        now = time.monotonic()
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        if now > start + options.timeout_s:
            message = full_stopped(f"Waited in vain: {problems[0]}{more}")
            raise ConnectorError(
                message, hint="cdc -p FILE status: it names the slow hop", more=len(problems) - 1
            )
        if now >= last_report + SILENT_S:
            last_report = now
            options.tell(
                f"waiting, {now - start:.0f} s of {options.timeout_s:.0f} s at most: {problems[0]}{more}"
            )
        time.sleep(POLL_S)
