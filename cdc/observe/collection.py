"""Asks every server for the state of its hop, all at the same time, and answers in a few seconds
whatever hangs.

In:  the pipeline file, a function per sink that reads its positions. Out: `Status`. A part that
can't be reached, or doesn't answer in time, becomes a finding; the other parts are there.
Invariant: reads only.
"""

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from threading import Thread
from typing import Any

import structlog

from cdc.capture.new_tables import takes_snapshot
from cdc.capture.unsendable import read_causes
from cdc.config.settings import Pipeline
from cdc.config.view_settings import COMMIT, STATE
from cdc.control.definitions import Watch, watch
from cdc.errors import CdcError, Unexpected
from cdc.kafka.topics import TopicsPool
from cdc.model.finding import Finding, find
from cdc.model.finding_codes import APPLY, CAPTURE
from cdc.model.position import Position, ViewCheckpoint
from cdc.model.table import Table
from cdc.model.trace import trace
from cdc.observe.activity import Activity, LookConnections, describe_sink
from cdc.observe.forecast import slot_loss_s
from cdc.observe.registration_findings import choose_findings, find_registration_troubles
from cdc.observe.status import ConnectorStatus, DocumentsStatus, Status
from cdc.observe.topic_report import (
    TopicReport,
    describe_documents,
    find_tombstones_at_risk,
    read_topics,
    tables_of_sink,
    unmeasured_views,
)
from cdc.postgres import source
from cdc.readiness import replication_slot
from cdc.sink.remedy import classify

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
    own = connections or LookConnections()
    try:
        return _collect(pipeline, positions, sizes, own, started or time.monotonic())
    finally:
        if connections is None:
            own.close()


def _collect(
    pipeline: Pipeline,
    positions: Positions,
    sizes: Callable[[], Mapping[str, Any]] | None,
    connections: LookConnections,
    started: float,
) -> Status:
    documents = _start_request("state", sizes) if sizes else None
    runs = _start_request("runs", lambda: connections.activity.read(pipeline))
    waiting = _find_waiting(runs, started) if pipeline.views else ()
    tables = {name: tables_of_sink(pipeline, name, waiting) for name in positions}
    answers = _ask_servers(pipeline, tables, positions, connections.topics, started)
    report: TopicReport = answers["kafka"][0] or TopicReport()
    activity: Activity | None = _await_answer("runs", runs, started, ANSWER_S)[0]
    registration = answers.pop("registration")
    (definitions, _) = answers.pop("definitions")
    unread = [answers[part][1] for part in (*SERVERS, *positions)]
    changed = choose_findings(registration, unread)
    sinks = tuple(
        describe_sink(
            name,
            activity,
            report.views.get(name) or unmeasured_views(tables[name], answers[name][0]),
        )
        for name in positions
    )
    at_risk = find_tombstones_at_risk(pipeline, sinks, time.time())
    return Status(
        pipeline.pipeline,
        answers["connect"][0],
        answers["postgres"][0],
        report.heartbeat,
        sinks,
        tuple(finding for finding in (*unread, *changed, *at_risk) if finding),
        definitions,
        _documents_status(
            documents,
            activity,
            started,
            report.ends,
            tables.get(STATE, ()),
            {name: view.clock for name, view in pipeline.views.items() if view.clock != COMMIT},
        )
        if documents
        else None,
        slot_loss_s(answers["postgres"][0], report.heartbeat),
        _snapshot_records(pipeline, answers["connect"][0], answers["kafka"][0], started),
    )


def _snapshot_records(
    pipeline: Pipeline,
    connector: ConnectorStatus | None,
    report: TopicReport | None,
    started: float,
) -> int | None:
    """How many records there are of the first snapshot, while it is under way. Connect is asked for
    that only until the first heartbeat: it reads all offsets for an answer.
    """
    if connector is None or not connector.running or report is None or report.heartbeat:
        return None
    answer = _start_request("connect", lambda: _takes_snapshot(pipeline))
    return report.records if _await_answer("connect", answer, started, ANSWER_S)[0] else None


def _documents_status(
    answer: "Future[Answer]",
    activity: Activity | None,
    started: float,
    ends: Mapping[str, Position],
    tables: Sequence[Table],
    clock_columns: Mapping[str, str],
) -> DocumentsStatus | None:
    """The sizes, how many records of these tables wait for the state, and the clocks; that it can't be
    read is a problem of its positions already.
    """
    sizes, _ = _await_answer("state", answer, started, ANSWER_S)
    if sizes is None:
        return None
    sent_per_s = activity.sent_per_s if activity else None
    return describe_documents(sizes, tables, ends, sent_per_s, clock_columns)


def _ask_servers(
    pipeline: Pipeline,
    tables: Mapping[str, Sequence[Table]],
    positions: Positions,
    pool: TopicsPool,
    started: float,
) -> "dict[str, Answer]":
    """The answers of sinks by name, and of postgres, connect, kafka, registration and
    definitions.
    """
    patience_s = max([ANSWER_S, *(len(of_sink) * TABLE_S for of_sink in tables.values())])
    requests = {
        name: _start_request(name, partial(_read_positions, position, tables[name]))
        for name, position in positions.items()
    }

    def stored_in_time() -> dict[str, dict[str, ViewCheckpoint | None]]:
        """The positions of the sinks that answered in time, by sink and topic."""
        share_s = patience_s * POSITIONS_SHARE
        stored = {
            name: _await_answer(name, requests[name], started, share_s)[0] for name in positions
        }
        return {name: by_topic for name, by_topic in stored.items() if by_topic is not None}

    requests |= {
        "postgres": _start_request("postgres", lambda: read_slot(pipeline)),
        "connect": _start_request("connect", lambda: read_connector(pipeline)),
        "registration": _start_request(
            "registration", lambda: find_registration_troubles(pipeline, pool)
        ),
        "definitions": _start_request("definitions", lambda: read_definitions(pipeline)),
        "kafka": _start_request(
            "kafka", lambda: read_topics(pipeline, tables, stored_in_time, pool)
        ),
    }
    answers = {
        part: _await_answer(part, request, started, patience_s)
        for part, request in requests.items()
    }
    slot, unread = answers["postgres"]
    if unread is None and not requests["definitions"].done():
        # It has begun to hang during this look, and the next one would say so only seconds later.
        answers["postgres"] = slot, _silence("postgres", patience_s)
    return answers


def _start_request(part: str, ask: Callable[[], Any]) -> "Future[Answer]":
    """Send a request in a daemon thread: one that hangs ends with the program, and nobody waits for
    it.
    """
    answer: Future[Answer] = Future()
    Thread(
        target=lambda: answer.set_result(_ask(part, ask)), name=f"ask-{part}", daemon=True
    ).start()
    return answer


def _await_answer(part: str, answer: "Future[Answer]", started: float, patience_s: float) -> Answer:
    try:
        return answer.result(max(0.0, started + patience_s - time.monotonic()))
    except TimeoutError:
        return None, _silence(part, patience_s)


def _silence(part: str, patience_s: float) -> Finding:
    message = f"{SERVERS.get(part, part)} gives no answer within {patience_s:.0f} s."
    hint = "look at that server, and at the network to it: it takes connections, or did, and doesn't answer"
    return _unreachable(part, CdcError(message, hint=hint))


def _ask(part: str, ask: Callable[[], Any]) -> Answer:
    try:
        return ask(), None
    except Exception as error:
        failure = classify(error, part, "cdc -p FILE status")
        if isinstance(failure, Unexpected):
            log.error("status_not_read", part=part, exception=trace(error))
        return None, replace(_unreachable(part, failure), exit_code=failure.exit_code)


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


def read_slot(pipeline: Pipeline) -> replication_slot.Slot | None:
    with source.connect(pipeline.source.dsn) as conn:
        return replication_slot.slot(conn, pipeline.pipeline)


def read_definitions(pipeline: Pipeline) -> Watch:
    with source.connect(pipeline.source.dsn) as conn:
        return watch(conn)


def read_connector(pipeline: Pipeline) -> ConnectorStatus:
    from cdc.connectors.client import Connect

    with Connect(pipeline.connect) as connect:
        state = connect.state(pipeline.pipeline)
    change = read_causes(state.causes, pipeline.pipeline)
    unsendable = f"{change.table or 'a table'}: {change.obstacle.reason}" if change else None
    return ConnectorStatus(state.connector, state.tasks, state.trace, unsendable)


def _takes_snapshot(pipeline: Pipeline) -> bool:
    from cdc.connectors.client import Connect

    with Connect(pipeline.connect) as connect:
        return takes_snapshot(connect.offsets(pipeline.pipeline))


def _read_positions(
    positions: Callable[[Sequence[Table]], Mapping[str, ViewCheckpoint | None]],
    tables: Sequence[Table],
) -> dict[str, ViewCheckpoint | None]:
    """Read the checkpoints of a sink's views, by topic."""
    stored = positions(tables)
    return {table.topic: stored[table.qualified] for table in tables}


def _find_waiting(runs: "Future[Answer]", started: float) -> Collection[str]:
    """The views whose documents aren't made, if the run's topic is read in time. Which tables the
    state is asked for depends on them.
    """
    activity, _ = _await_answer("runs", runs, started, RUNS_S)
    return activity.progress[STATE].aside if activity and STATE in activity.progress else ()
