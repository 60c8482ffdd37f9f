"""Asks every server for the state of its hop, all at the same time, and answers in a few seconds
whatever hangs.

In:  the pipeline file, a function per sink that reads its positions. Out: `Status`. A part that
can't be reached, or doesn't answer in time, becomes a finding; the other parts are there.
Invariant: reads only.
"""

import os
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import closing
from dataclasses import replace
from functools import partial
from threading import Thread
from typing import Any, NamedTuple

import structlog

from cdc.apply.progress import WORKING
from cdc.capture.aside import read_causes
from cdc.config.settings import Pipeline
from cdc.config.view_settings import COMMIT, SCHEMA, STATE, tables_of
from cdc.connectors.client import Connect, takes_snapshot
from cdc.control.definitions import Watch, watch
from cdc.control.heartbeat import first_heartbeat_since, last_heartbeat
from cdc.errors import CdcError, Unexpected
from cdc.kafka.log_continuity import Continuity, pending_records
from cdc.kafka.log_refusals import Discontinued
from cdc.kafka.topics import TopicsPool
from cdc.model.finding import Finding, find
from cdc.model.finding_codes import APPLY, CAPTURE
from cdc.model.generation import generation_time
from cdc.model.position import Position, ViewCheckpoint, distance
from cdc.model.table import Table
from cdc.model.trace import trace
from cdc.model.wording import UNKNOWN, duration
from cdc.observe.activity import Activity, LookConnections, describe_sink
from cdc.observe.forecast import WINDOW_S, slot_loss_s, wal_pace
from cdc.observe.registration_findings import find_registration_troubles
from cdc.observe.status import (
    ClockStatus,
    ConnectorStatus,
    DocumentsStatus,
    HeartbeatStatus,
    SinkStatus,
    Status,
    ViewStatus,
)
from cdc.postgres import source, table_survey
from cdc.quarantine.log import QuarantineLog
from cdc.readiness import facts
from cdc.scalar.instants import FIRST
from cdc.sink.contract import SchemaMismatch, require_same_shape
from cdc.sink.remedy import classify

AT_RISK_SHARE = 0.75
"""The share of the time that tombstones are kept at which a view that is so far behind is at risk."""


class TopicReport(NamedTuple):
    """What `read_topics` returns: the heartbeat, the views of each sink, how many records the topics of
    tables have had, markers of transactions among them, and the ends of all topics.
    """

    heartbeat: HeartbeatStatus | None = None
    views: Mapping[str, tuple[ViewStatus, ...]] = {}
    records: int = 0
    ends: Mapping[str, Position] = {}


def tables_of_sink(pipeline: Pipeline, sink: str, waiting: Collection[str]) -> tuple[Table, ...]:
    """The tables that a sink has views of, by name only; for the state of documents, those that
    documents are made of. `waiting`: views whose documents aren't made.
    """
    captured = table_survey.tables_by_name_only(pipeline)
    views = table_survey.views_by_name_only(pipeline)
    if sink == STATE:
        used = {
            table
            for name, view in pipeline.views.items()
            if f"{SCHEMA}.{name}" not in waiting
            for table in tables_of(view)
        }
        return tuple(table for table in captured if table.qualified in used)
    return table_survey.tables_in([sink], (*captured, *views))


def read_topics(
    pipeline: Pipeline,
    tables: Mapping[str, Sequence[Table]],
    read_positions: Callable[[], Mapping[str, Mapping[str, ViewCheckpoint | None]]],
    pool: TopicsPool,
) -> TopicReport:
    """Read the heartbeat, measure each sink's views against the topics, inspect the topics. Raises
    ConnectorError.
    """
    with pool.borrowed(pipeline.kafka) as topics:
        names = {table.topic: None for of_sink in tables.values() for table in of_sink}
        continuity = Continuity(pipeline, topics).read(list(names))
        ends = {topic: topic_log.end for topic, topic_log in continuity.logs.items()}
        # The time of what was read: a broker that hangs from here on makes no heartbeat older.
        beat = last_heartbeat(topics, pipeline)
        looked_at = time.time()
        earlier = first_heartbeat_since(topics, pipeline, looked_at - WINDOW_S) if beat else None
        quarantined = Counter(
            (record.entry.sink, record.entry.topic)
            for record in QuarantineLog(topics, pipeline).read()
            if not record.entry.redrive
        )
        stored_by_sink = read_positions()
        oldest = topics.write_times(
            place
            for name, stored in stored_by_sink.items()
            for table in tables[name]
            for place in pending_records(table.topic, stored[table.topic], ends[table.topic])
        )
        continuity.load_next_records(
            (table, stored[table.topic])
            for name, stored in stored_by_sink.items()
            for table in tables[name]
        )
        views = {
            name: tuple(
                replace(
                    _inspect_view(continuity, name, table, stored[table.topic], oldest),
                    quarantined=quarantined[name, table.topic],
                )
                for table in tables[name]
            )
            for name, stored in stored_by_sink.items()
        }
    heartbeat = None
    if beat:
        age = max(0.0, looked_at - beat.arrived_ms / 1000)
        pace = wal_pace(earlier, beat) if earlier else None
        heartbeat = HeartbeatStatus(
            round(age, 3),
            beat.delay_s,
            pipeline.source.heartbeat_s,
            pace,
            beat.committed_ms / 1000,
        )
    captured = {pipeline.topic(entry.table) for entry in pipeline.source.tables}
    records = sum(sum(ends[topic].offsets) for topic in ends.keys() & captured)
    return TopicReport(heartbeat, views, records, ends)


def find_tombstones_at_risk(
    pipeline: Pipeline, sinks: Sequence[SinkStatus], now: float
) -> Iterator[Finding]:
    """Find sinks that are nearly as far behind as tombstones are kept: they would miss deletes. A
    view misses none that is younger than the start of its first reading, whatever it reads.
    """
    kept_s = pipeline.delete_retention_hours * 3600
    for sink in sinks:
        behind_s, table = max(
            (
                (min(view.lag_seconds or 0.0, now - generation_time(view.generation)), view.table)
                for view in sink.views
                if view.generation is not None and not view.problem
            ),
            default=(0.0, ""),
        )
        if behind_s >= AT_RISK_SHARE * kept_s:
            message = (
                f"{table} in {sink.name} has had records to apply for {duration(behind_s)}; Kafka keeps"
                f" tombstones for {duration(kept_s)}, so it has {duration(max(0.0, kept_s - behind_s))} left."
            )
            fix = _continuation(sink)
            yield find("tombstones-at-risk", table, message, fix, table=table, sink=sink.name)


def _continuation(sink: SinkStatus) -> str:
    """Choose the command after which a sink catches up. Beside a run that is at work, perhaps unseen,
    another one would fence it.
    """
    if sink.paused_by:
        return f"cdc -p FILE resume {sink.name}"
    if sink.state in (*WORKING, UNKNOWN) or sink.restart_at:
        return "cdc -p FILE status --watch"
    return f"cdc -p FILE run --sink {sink.name}"


def _inspect_view(
    continuity: Continuity,
    sink: str,
    table: Table,
    stored: ViewCheckpoint | None,
    oldest: Mapping[tuple[str, int, int], int],
) -> ViewStatus:
    """Measure a view, and say where it can't be continued."""
    end = continuity.logs[table.topic].end
    holes = continuity.ledger.holes(sink, table.topic)
    view = replace(
        measure(table, stored, end, oldest, time.time()),
        holes=tuple(str(hole) for hole in holes if hole.end.topic_id == end.topic_id),
    )
    try:
        continuity.resume(sink, table, stored)
        require_same_shape(table, sink, stored)
    except (Discontinued, SchemaMismatch) as error:
        return replace(view, problem=error.message, hint=error.hint)
    return view


def measure(
    table: Table,
    stored: ViewCheckpoint | None,
    end: Position,
    oldest: Mapping[tuple[str, int, int], int],
    now: float,
) -> ViewStatus:
    """Measure a view against the end of its topic. `oldest`: Unix milliseconds of the records that
    `waiting` names.
    """
    view = _unmeasured_view(table, stored)
    gap = distance(stored, end)
    if not gap.comparable:
        return view
    places = pending_records(table.topic, stored, end)
    times = [oldest[place] for place in places if place in oldest]
    lag = max(0.0, now - min(times) / 1000) if times else 0.0
    # The remaining offsets may be transaction markers alone: then there is nothing to apply.
    return replace(view, lag_records=gap.offsets, lag_seconds=round(lag, 3))


def unmeasured_views(
    tables: Sequence[Table], stored: Mapping[str, ViewCheckpoint | None] | None
) -> tuple[ViewStatus, ...]:
    """Describe views that couldn't be measured: with what the sink itself holds, without lag."""
    if stored is None:
        return tuple(ViewStatus(table.qualified) for table in tables)
    return tuple(_unmeasured_view(table, stored[table.topic]) for table in tables)


def _unmeasured_view(table: Table, stored: ViewCheckpoint | None) -> ViewStatus:
    if stored is None:
        return ViewStatus(table.qualified, changes=0)
    return ViewStatus(
        table.qualified,
        changes=stored.rows,
        at=stored.changed_at,
        generation=stored.generation,
    )


def describe_documents(
    sizes: Mapping[str, Any],
    tables: Sequence[Table],
    ends: Mapping[str, Position],
    sent_per_s: float | None,
    clock_columns: Mapping[str, str],
) -> DocumentsStatus:
    """Add to the sizes how many records of these tables are applied, and how many wait.

    sizes: what `sizes_reader` reads; ends: by topic, empty where they couldn't be read; clock_columns:
    by view, of those whose clock is a column.
    """
    stored = {name: checkpoint for name, checkpoint in sizes["applied"].items() if checkpoint}
    applied = {name: sum(checkpoint.position.offsets) for name, checkpoint in stored.items()}
    waiting = {}
    for table in tables:
        if end := ends.get(table.topic):
            gap = distance(stored.get(table.qualified), end)
            # All records wait where the view is of another topic.
            waiting[table.qualified] = gap.offsets if gap.comparable else sum(end.offsets)
    clocks = {
        view: ClockStatus(now / 1_000_000, clock_columns.get(view))
        for view, now in sizes["clocks"].items()
        if now > FIRST
    }
    return DocumentsStatus(
        **{**sizes, "applied": applied, "clocks": clocks},
        sent_per_s=sent_per_s,
        waiting=waiting if ends else None,
    )


log = structlog.get_logger()
Positions = Mapping[str, Callable[[Sequence[Table]], Mapping[str, ViewCheckpoint | None]]]
"""By sink, a function that reads the checkpoints of its views: `cdc.sink.contract.positions`."""
ANSWER_S = 4.0
"""The least seconds to wait for an answer."""
TABLE_S = 0.02
"""Seconds to wait for each table, where that is more: above 200 tables."""
SERVERS = {"postgres": "Postgres", "connect": "Kafka Connect", "kafka": "Kafka"}
UNREACHABLE = {
    "postgres": "source-unreachable",
    "connect": "connect-unreachable",
    "kafka": "kafka-unreachable",
    "registration": "registration-unreadable",
    "definitions": "source-unreachable",
}
"""The code for a part that couldn't be asked; any other part is a sink."""
RUNS_S = 1.0
"""Seconds to wait for the topic of runs to show which documents aren't made."""
POSITIONS_SHARE = 0.6
"""The share of the time for any answer in which a sink has to return its positions, so that lag can
still be measured from them.
"""


Answer = tuple[Any, Finding | None]
"""What a part has answered, or why it hasn't."""


class _Request:
    """A question to a part, in a daemon thread: one that hangs ends with the program, and nobody
    waits for it.
    """

    def __init__(self, part: str, ask: Callable[[], Any], started: float) -> None:
        self._part = part
        self._started = started
        self._answer: Future[Answer] = Future()
        work = partial(self._work, ask)
        Thread(target=work, name=f"ask-{part}", daemon=True).start()

    def answer(self, patience_s: float) -> Answer:
        """Return the answer, if it comes within so many seconds from the begin of the look."""
        try:
            return self._answer.result(max(0.0, self._started + patience_s - time.monotonic()))
        except TimeoutError:
            return None, _silence(self._part, patience_s)

    @property
    def is_done(self) -> bool:
        return self._answer.done()

    def _work(self, ask: Callable[[], Any]) -> None:
        try:
            self._answer.set_result((ask(), None))
        except Exception as error:
            failure = classify(error, self._part, "cdc -p FILE status")
            if isinstance(failure, Unexpected):
                log.error("status_not_read", part=self._part, exception=trace(error))
            finding = replace(_unreachable(self._part, failure), exit_code=failure.exit_code)
            self._answer.set_result((None, finding))


def collect(
    pipeline: Pipeline,
    *,
    positions: Positions,
    sizes: Callable[[], Mapping[str, Any]] | None = None,
    connections: LookConnections | None = None,
    started: float | None = None,
) -> Status:
    """Ask every server at the same time. Raises nothing that a server causes, waits for none beyond
    ANSWER_S.

    `sizes` reads what the state of documents holds. `connections`: open ones that repeated looks
    share. `started`: when the caller began, by the monotonic clock.
    """
    started = started or time.monotonic()
    if connections is None:
        with closing(LookConnections()) as own:
            return collect(
                pipeline, positions=positions, sizes=sizes, connections=own, started=started
            )
    state = _Request("state", sizes, started) if sizes else None
    runs = _Request("runs", lambda: connections.read_activity(pipeline), started)
    tables = _tables_by_sink(pipeline, positions, runs)
    answers = _ask_servers(pipeline, tables, positions, connections.topics, started)
    report: TopicReport = answers["kafka"][0] or TopicReport()
    activity: Activity | None = runs.answer(ANSWER_S)[0]
    unread = [answers[part][1] for part in (*SERVERS, *positions)]
    sinks = tuple(
        describe_sink(
            name,
            activity,
            report.views.get(name) or unmeasured_views(tables[name], answers[name][0]),
        )
        for name in positions
    )
    findings = (
        *unread,
        *_registration_findings(answers["registration"], unread),
        *find_tombstones_at_risk(pipeline, sinks, time.time()),
    )
    # That the sizes can't be read is a problem of the state's positions already.
    held = state.answer(ANSWER_S)[0] if state else None
    documents = None
    if held is not None:
        clocks = {name: view.clock for name, view in pipeline.views.items() if view.clock != COMMIT}
        sent_per_s = activity.sent_per_s if activity else None
        documents = describe_documents(held, tables.get(STATE, ()), report.ends, sent_per_s, clocks)
    connector: ConnectorStatus | None = answers["connect"][0]
    slot = answers["postgres"][0]
    snapshot_records = None
    # Connect reads all offsets for an answer: it is asked for them only until the first heartbeat.
    if connector and connector.running and answers["kafka"][0] and not report.heartbeat:
        snapshot = _Request("connect", lambda: _takes_snapshot(pipeline), started)
        snapshot_records = report.records if snapshot.answer(ANSWER_S)[0] else None
    return Status(
        pipeline.pipeline,
        connector,
        slot,
        report.heartbeat,
        sinks,
        tuple(filter(None, findings)),
        answers["definitions"][0],
        documents,
        slot_loss_s(slot, report.heartbeat),
        snapshot_records,
    )


def _tables_by_sink(
    pipeline: Pipeline, sinks: Iterable[str], runs: _Request
) -> dict[str, tuple[Table, ...]]:
    """The tables that each sink is asked for. Of the state they depend on the views whose documents
    aren't made, if the topic of runs is read in time.
    """
    activity: Activity | None = runs.answer(RUNS_S)[0] if pipeline.views else None
    stream = activity.progress.get(STATE) if activity else None
    waiting = stream.aside if stream else ()
    return {name: tables_of_sink(pipeline, name, waiting) for name in sinks}


def _registration_findings(
    registration: Answer, unread: Iterable[Finding | None]
) -> Sequence[Finding]:
    """Choose the findings on the registration. A server that is silent is reported by the request
    to that server.
    """
    changed, unsure = registration
    if unsure is None:
        return changed or ()
    silent = {"source-unreachable", "kafka-unreachable"} & {part.code for part in unread if part}
    return [unsure] if unsure.exit_code == Unexpected.exit_code or not silent else ()


def _ask_servers(
    pipeline: Pipeline,
    tables: Mapping[str, Sequence[Table]],
    positions: Positions,
    pool: TopicsPool,
    started: float,
) -> dict[str, Answer]:
    """The answers of sinks by name, and of postgres, connect, kafka, registration and
    definitions.
    """
    patience_s = max([ANSWER_S, *(len(of_sink) * TABLE_S for of_sink in tables.values())])

    def stored_in_time() -> dict[str, dict[str, ViewCheckpoint | None]]:
        """The positions of the sinks that answered in time, by sink and topic."""
        share_s = patience_s * POSITIONS_SHARE
        stored = {name: requests[name].answer(share_s)[0] for name in positions}
        return {name: by_topic for name, by_topic in stored.items() if by_topic is not None}

    questions: dict[str, Callable[[], Any]] = {
        **{
            name: partial(_read_positions, position, tables[name])
            for name, position in positions.items()
        },
        "postgres": lambda: read_slot(pipeline),
        "connect": lambda: read_connector(pipeline),
        "registration": lambda: find_registration_troubles(pipeline, pool),
        "definitions": lambda: read_definitions(pipeline),
    }
    requests = {part: _Request(part, ask, started) for part, ask in questions.items()}
    read = partial(read_topics, pipeline, tables, stored_in_time, pool)
    requests["kafka"] = _Request("kafka", read, started)
    answers = {part: request.answer(patience_s) for part, request in requests.items()}
    slot, unread = answers["postgres"]
    if unread is None and not requests["definitions"].is_done:
        # It has begun to hang during this look, and the next one would say so only seconds later.
        answers["postgres"] = slot, _silence("postgres", patience_s)
    return answers


def _silence(part: str, patience_s: float) -> Finding:
    message = f"{SERVERS.get(part, part)} gives no answer within {patience_s:.0f} s."
    hint = "look at that server, and at the network to it: it takes connections, or did, and doesn't answer"
    if os.getloadavg()[0] > (os.cpu_count() or 1):
        message += " It may only be slow: this machine has more work than its cores can do."
        hint = "cdc -p FILE status: ask again once this machine is less busy; if that server stays silent, look at it"
    return _unreachable(part, CdcError(message, hint=hint))


def _unreachable(part: str, failure: CdcError) -> Finding:
    """Say that a part couldn't be asked, and which hop can't be judged for that."""
    code = UNREACHABLE.get(part, "sink-unreachable")
    sink = None
    subject = SERVERS.get(part, part)
    message = failure.message
    if code == "sink-unreachable":
        sink = part
        message = f"{APPLY.replace('SINK', part)} can't be judged: {message}"
    elif part in SERVERS:
        message = f"{CAPTURE} can't be judged: {message}"
    return find(code, subject, message, failure.hint, sink=sink)


def read_slot(pipeline: Pipeline) -> facts.Slot | None:
    with source.connect_to_read(pipeline.source) as conn:
        return facts.read_slot(conn, pipeline.pipeline)


def read_definitions(pipeline: Pipeline) -> Watch:
    with source.connect_to_read(pipeline.source) as conn:
        return watch(conn)


def read_connector(pipeline: Pipeline) -> ConnectorStatus:
    with Connect(pipeline.connect) as connect:
        state = connect.state(pipeline.pipeline)
    change = read_causes(state.causes, pipeline.pipeline)
    unsendable = f"{change.table or 'a table'}: {change.obstacle.reason}" if change else None
    return ConnectorStatus(state.connector, state.tasks, state.trace, unsendable)


def _takes_snapshot(pipeline: Pipeline) -> bool:
    with Connect(pipeline.connect) as connect:
        return takes_snapshot(connect.offsets(pipeline.pipeline))


def _read_positions(
    positions: Callable[[Sequence[Table]], Mapping[str, ViewCheckpoint | None]],
    tables: Sequence[Table],
) -> dict[str, ViewCheckpoint | None]:
    """Read the checkpoints of a sink's views, by topic."""
    stored = positions(tables)
    return {table.topic: stored[table.qualified] for table in tables}
