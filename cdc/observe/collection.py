"""Asks every server for the state of its hop, all at the same time, and answers in a few seconds
whatever hangs.

In:  the pipeline file, a function per sink that reads its positions, what `cdc run` last published.
Out: `Status`. A part that can't be reached, or doesn't answer in time, becomes a finding; the other
parts are there. Invariant: reads only.
"""

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from threading import Thread
from typing import Any

import structlog

from cdc.apply.progress import WORKING, Progress
from cdc.config.settings import Pipeline
from cdc.config.view_settings import STATE, tables_of
from cdc.control import registrations
from cdc.control.definitions import Watch, watch
from cdc.control.heartbeat import last_heartbeat
from cdc.errors import CdcError, Unexpected
from cdc.kafka.ledger import Ledger
from cdc.kafka.log_continuity import Continuity
from cdc.kafka.log_refusals import Discontinued
from cdc.kafka.topics import Topics
from cdc.kafka.unread_records import pending_records
from cdc.model.finding import Finding, find, find_error
from cdc.model.finding_codes import APPLY, CAPTURE
from cdc.model.position import Position, ViewCheckpoint, distance
from cdc.model.table import Table
from cdc.model.trace import trace
from cdc.observe.status import (
    ConnectorStatus,
    DocumentsStatus,
    HeartbeatStatus,
    SinkStatus,
    Status,
    ViewStatus,
)
from cdc.postgres import catalog, replication_slot, source, table_survey
from cdc.quarantine.log import QuarantineLog
from cdc.sink.remedy import classify

log = structlog.get_logger()
Positions = Mapping[str, Callable[[Sequence[Table]], Mapping[str, ViewCheckpoint | None]]]
"""By sink, a function that reads the checkpoints of its views: `cdc.sink.contract.positions`."""
ANSWER_S, TABLE_S = 4.0, 0.02
"""Seconds to wait for any answer: `ANSWER_S`, or `TABLE_S` a table where that is more (above 200
tables).
"""
SERVERS = {"postgres": "Postgres", "connect": "Kafka Connect", "kafka": "Kafka"}
UNREACHABLE = {
    "postgres": "source-unreachable",
    "connect": "connect-unreachable",
    "kafka": "kafka-unreachable",
    "registration": "registration-unreadable",
    "definitions": "source-unreachable",
}
"""The code for a part that couldn't be asked; any other part is a sink."""
POSITIONS_SHARE = 0.6
"""The share of that time in which a sink has to tell its positions, so that lag can still be
measured from them.
"""


Answer = tuple[Any, Finding | None]
TopicReport = tuple[HeartbeatStatus | None, dict[str, tuple[ViewStatus, ...]], Finding | None]
"""The heartbeat, the views of each sink, and a finding on the topics: what `_log` returns."""


def collect(
    pipeline: Pipeline,
    *,
    positions: Positions,
    progress: Mapping[str, Progress],
    sizes: Callable[[], Mapping[str, Any]] | None = None,
    started: float | None = None,
) -> Status:
    """Ask every server at the same time. Raises nothing that a server causes, waits for none beyond
    ANSWER_S.

    `sizes` reads what the state of documents holds. `started`: when the caller began, by the
    monotonic clock.
    """
    started = started or time.monotonic()
    documents = _start_request("state", sizes) if sizes else None
    tables = {name: _tables_of(pipeline, name) for name in positions}
    answers = _ask_servers(pipeline, tables, positions, started)
    report: TopicReport = answers["kafka"][0] or (None, {}, None)
    heartbeat, views, lowered = report
    registration, (definitions, _) = answers.pop("registration"), answers.pop("definitions")
    unread = [answers[part][1] for part in (*SERVERS, *positions)]
    changed = _registration_findings(registration, unread)
    return Status(
        pipeline.pipeline,
        answers["connect"][0],
        answers["postgres"][0],
        heartbeat,
        tuple(
            _sink_status(
                name,
                progress.get(name),
                views.get(name) or _unmeasured_views(tables[name], answers[name][0]),
            )
            for name in positions
        ),
        tuple(finding for finding in (*unread, *changed, lowered) if finding),
        definitions,
        _documents_status(documents, started) if documents else None,
    )


def _documents_status(answer: "Future[Answer]", started: float) -> DocumentsStatus | None:
    """The sizes; that the state can't be read is a problem of its positions already."""
    sizes, _ = _await_answer("state", answer, started, ANSWER_S)
    return DocumentsStatus(**sizes) if sizes is not None else None


def _tables_of(pipeline: Pipeline, sink: str) -> tuple[Table, ...]:
    """The tables that a sink has views of, by name only; for the state of documents, those that
    documents are made of.
    """
    captured, views = (
        table_survey.tables_by_name_only(pipeline),
        table_survey.views_by_name_only(pipeline),
    )
    if sink == STATE:
        used = {name for view in pipeline.views.values() for name in tables_of(view)}
        return tuple(table for table in captured if table.qualified in used)
    return (*captured, *(view for view in views if view.is_in(sink)))


def _ask_servers(
    pipeline: Pipeline, tables: Mapping[str, Sequence[Table]], positions: Positions, started: float
) -> "dict[str, Answer]":
    """The answers of sinks by name, and of postgres, connect, kafka, registration and
    definitions.
    """
    patience_s = max([ANSWER_S, *(len(of_sink) * TABLE_S for of_sink in tables.values())])
    requests = {
        name: _start_request(name, _stored(position, tables[name]))
        for name, position in positions.items()
    }

    def stored_in_time() -> dict[str, dict[str, ViewCheckpoint | None]]:
        """The positions of the sinks that have told them in time, by sink and topic."""
        share_s = patience_s * POSITIONS_SHARE
        stored = {
            name: _await_answer(name, requests[name], started, share_s)[0] for name in positions
        }
        return {name: by_topic for name, by_topic in stored.items() if by_topic is not None}

    requests |= {
        "postgres": _start_request("postgres", lambda: _slot(pipeline)),
        "connect": _start_request("connect", lambda: _connector(pipeline)),
        "registration": _start_request(
            "registration", lambda: find_registration_troubles(pipeline)
        ),
        "definitions": _start_request("definitions", lambda: _definitions(pipeline)),
        "kafka": _start_request("kafka", lambda: _log(pipeline, tables, stored_in_time)),
    }
    return {
        part: _await_answer(part, request, started, patience_s)
        for part, request in requests.items()
    }


def _registration_findings(
    registration: tuple[list[Finding] | None, Finding | None], unread: Sequence[Finding | None]
) -> list[Finding]:
    """Choose the findings on the registration. A server that is silent is reported by the request
    to that server.
    """
    changed, unsure = registration
    codes = {finding.code for finding in unread if finding}
    silent = {"source-unreachable", "kafka-unreachable"} & codes
    if unsure:
        return [unsure] if unsure.exit_code == Unexpected.exit_code or not silent else []
    return changed or []


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
        message = f"{SERVERS.get(part, part)} gives no answer within {patience_s:.0f} s."
        hint = "look at that server, and at the network to it: it takes connections, or did, and doesn't answer"
        return None, _unreachable(part, CdcError(message, hint=hint))


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
    code, sink = UNREACHABLE.get(part, "sink-unreachable"), None
    subject, message = SERVERS.get(part, part), failure.message
    if code == "sink-unreachable":
        sink = part
        message = f"{APPLY.replace('SINK', part)} can't be judged: {message}"
    elif part in SERVERS:
        message = f"{CAPTURE} can't be judged: {message}"
    return find(code, subject, message, failure.hint, sink=sink)


def _slot(pipeline: Pipeline) -> replication_slot.Slot | None:
    with source.connect(pipeline.source.dsn) as conn:
        return replication_slot.slot(conn, pipeline.pipeline)


def find_registration_troubles(pipeline: Pipeline) -> list[Finding]:
    """Find all that makes the registration differ from the file, the catalog or the server.

    Raises:
        SourceError, ConnectorError: it can't be read.
    """
    with source.connect(pipeline.source.dsn) as conn, Topics(pipeline.kafka) as topics:
        registration, server = registrations.read(topics, pipeline), source.server(conn)
        if not registration:
            return []
        captured = registration.tables
        findings = [
            *_refusal(
                "another-server", registrations.refuse_another, registration, server, pipeline
            ),
            *_refusal("settings-changed", registrations.refuse_changed, registration, pipeline),
            *_refusal("pattern-meaningless", registrations.refuse_meaningless, captured, pipeline),
            *_refusal(
                "server-promoted", registrations.refuse_promoted, registration, server, pipeline
            ),
        ]
        # Last: the catalog may not answer, and that must hide none of the others.
        try:
            choice = catalog.find_tables(conn, pipeline)
        except CdcError as error:
            # A pattern that means nothing registered means nothing in the catalog either.
            if not any(finding.code == "pattern-meaningless" for finding in findings):
                findings.append(find_error("tables-undecided", "source.tables", error))
            return findings
        findings += _refusal("table-slipped", catalog.refuse_slipped, captured, choice, pipeline)
        findings += _refusal(
            "tables-waiting", registrations.refuse_waiting, registration, choice.names
        )
    return findings


def _refusal(code: str, check: Callable[..., None], *arguments: Any) -> list[Finding]:
    """Run a check that raises, and make a finding of its error."""
    try:
        check(*arguments)
    except CdcError as error:
        return [find_error(code, _subject(error), error)]
    return []


def _subject(error: CdcError) -> str:
    return str(error.details.get("table") or "the registration")


def _definitions(pipeline: Pipeline) -> Watch:
    with source.connect(pipeline.source.dsn) as conn:
        return watch(conn)


def _connector(pipeline: Pipeline) -> ConnectorStatus:
    from connectors.client import Connect

    with Connect(pipeline.connect) as connect:
        state = connect.state(pipeline.pipeline)
    return ConnectorStatus(state.connector, state.tasks, state.trace)


def _stored(
    positions: Callable[[Sequence[Table]], Mapping[str, ViewCheckpoint | None]],
    tables: Sequence[Table],
) -> Callable[[], dict[str, ViewCheckpoint | None]]:
    def by_topic() -> dict[str, ViewCheckpoint | None]:
        stored = positions(tables)
        return {table.topic: stored[table.qualified] for table in tables}

    return by_topic


def _log(
    pipeline: Pipeline,
    tables: Mapping[str, Sequence[Table]],
    read_positions: Callable[[], Mapping[str, Mapping[str, ViewCheckpoint | None]]],
) -> TopicReport:
    """Read the heartbeat, measure each sink's views against the topics, inspect the topics. Raises
    ConnectorError.
    """
    with Topics(pipeline.kafka) as topics:
        names = {table.topic: None for of_sink in tables.values() for table in of_sink}
        continuity = Continuity(pipeline, topics).read(list(names))
        ends = {topic: topic_log.end for topic, topic_log in continuity.logs.items()}
        beat = last_heartbeat(topics, pipeline)
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
        age = max(0.0, time.time() - beat.arrived_ms / 1000)
        heartbeat = HeartbeatStatus(round(age, 3), beat.delay_s, pipeline.source.heartbeat_s)
    return heartbeat, views, _lowered(continuity.ledger)


def _lowered(ledger: Ledger) -> Finding | None:
    """Find topics whose settings an interrupted compaction has left lowered."""
    if not ledger.lowered or ledger.at_work:
        return None
    first, *remaining = sorted(ledger.lowered)
    more = f" and {len(remaining)} more" if remaining else ""
    return find(
        "settings-lowered",
        first,
        f"`cdc topics compact` was interrupted and has left settings of {first}{more} lowered."
        " Views may miss records.",
        "cdc -p FILE topics",
    )


def _inspect_view(
    continuity: Continuity,
    sink: str,
    table: Table,
    stored: ViewCheckpoint | None,
    oldest: Mapping[tuple[str, int, int], int],
) -> ViewStatus:
    """Measure a view, and say where the log can't continue it."""
    end = continuity.logs[table.topic].end
    holes = continuity.ledger.holes(sink, table.topic)
    view = replace(
        measure(table, stored, end, oldest, time.time()),
        holes=tuple(str(hole) for hole in holes if hole.end.topic_id == end.topic_id),
    )
    try:
        continuity.refuse(sink, table, stored)
    except Discontinued as error:
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
    rows, last = (stored.rows, stored.changed_at) if stored else (0, None)
    gap = distance(stored, end)
    if not gap.comparable:
        return ViewStatus(table.qualified, changes=rows, at=last)
    places = pending_records(table.topic, stored, end)
    times = [oldest[place] for place in places if place in oldest]
    lag = max(0.0, now - min(times) / 1000) if times else 0.0
    # The remaining offsets may be transaction markers alone: then there is nothing to apply.
    return ViewStatus(table.qualified, gap.offsets, round(lag, 3), rows, last)


def _sink_status(name: str, progress: Progress | None, views: tuple[ViewStatus, ...]) -> SinkStatus:
    if progress is None:
        return SinkStatus(name, views=views)
    return SinkStatus(
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


def _unmeasured_views(
    tables: Sequence[Table], stored: Mapping[str, ViewCheckpoint | None] | None
) -> tuple[ViewStatus, ...]:
    """Describe views that couldn't be measured: with what the sink itself holds, without lag."""
    if stored is None:
        return tuple(ViewStatus(table.qualified) for table in tables)
    views = []
    for table in tables:
        checkpoint = stored[table.topic]
        rows = checkpoint.rows if checkpoint else 0
        changed_at = checkpoint.changed_at if checkpoint else None
        views.append(ViewStatus(table.qualified, changes=rows, at=changed_at))
    return tuple(views)
