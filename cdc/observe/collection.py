"""Asks every server for the state of its hop, all at the same time, and answers in a few seconds
whatever hangs.

In:  the pipeline file, a function per sink that reads its positions. Out: `Status`. A part that
can't be reached, or doesn't answer in time, becomes a finding; the other parts are there.
Invariant: reads only.
"""

import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import closing
from dataclasses import replace
from functools import partial
from threading import Thread
from typing import Any

import structlog

from cdc.capture.aside import read_causes
from cdc.config.settings import Pipeline
from cdc.config.view_settings import COMMIT, STATE
from cdc.connectors.client import Connect, takes_snapshot
from cdc.control.definitions import Watch, watch
from cdc.errors import CdcError, Unexpected
from cdc.kafka.topics import TopicsPool
from cdc.model.finding import Finding, find
from cdc.model.finding_codes import APPLY, CAPTURE
from cdc.model.position import ViewCheckpoint
from cdc.model.table import Table
from cdc.model.trace import trace
from cdc.observe.activity import Activity, LookConnections, describe_sink
from cdc.observe.forecast import slot_loss_s
from cdc.observe.registration_findings import find_registration_troubles
from cdc.observe.status import ConnectorStatus, Status
from cdc.observe.topic_report import (
    TopicReport,
    describe_documents,
    find_tombstones_at_risk,
    read_topics,
    tables_of_sink,
    unmeasured_views,
)
from cdc.postgres import source
from cdc.readiness import facts
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
        """Whether there is an answer."""
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
