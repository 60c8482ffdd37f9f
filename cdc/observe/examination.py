"""Examination: read the facts of each part, all parts at the same time, and judge them.

In:  the pipeline file, its sinks, the state folder. Out: findings, the worst first.
Invariant: reads only. A part that can't be asked is a finding itself, and hides none of the others.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import structlog

from cdc.capture.configuration import configuration
from cdc.config.settings import Pipeline
from cdc.config.view_settings import SCHEMA, STATE
from cdc.connectors.client import Connect
from cdc.connectors.debezium import PLUGIN
from cdc.documents.needs import examine_room
from cdc.documents.source_checks import examine_views
from cdc.documents.state import StateTooLarge
from cdc.errors import CdcError, ConnectorError, SettingsError, Unexpected
from cdc.kafka.topics import Topics, TopicsPool
from cdc.model.finding import Finding, Severity, find_error, worst_first
from cdc.model.trace import trace
from cdc.observe.fitness import (
    check_clock,
    check_connect,
    check_log,
    check_machine,
    read_log,
    read_machine,
)
from cdc.observe.registration_findings import find_registration_troubles
from cdc.postgres import source, table_survey
from cdc.readiness.checks import check_source
from cdc.sink.contract import Examinable, FitChecker, SchemaMismatch, Sink
from cdc.sink.factory import build_state
from cdc.sink.remedy import classify

log = structlog.get_logger()
CONSEQUENCES = {
    "registration-unreadable": {"source-unreachable", "kafka-unreachable"},
    "connector-refused": {
        "control-missing",
        "wal_level",
        "role-unfit",
        "publication-differs",
        "table-refused",
        "source-unreachable",
    },
    "connector-differs": {"table-refused"},
    "table-slipped": {"table-refused"},
    "view-refused": {"tables-undecided"},
}
"""By code: the codes or subjects that cause it. A finding is left out while a cause is down or
degraded.
"""


@dataclass(frozen=True)
class Examination:
    """What is examined: the pipeline file, its sinks and the state of its documents, the folder of
    the state of runs.
    """

    pipeline: Pipeline
    sinks: Sequence[Sink]
    state: Path

    def findings(self) -> tuple[Finding, ...]:
        """Examine every part, and sort what is found. Raises nothing that a server causes."""
        parts: list[tuple[str, str, Callable[[], Iterable[Finding]]]] = [
            ("source-unreachable", "Postgres", self._source),
            ("connect-unreachable", "Kafka Connect", self._connect),
            ("kafka-unreachable", "Kafka", self._log),
            ("registration-unreadable", "the registration", self._registration),
            ("machine-unfit", "this machine", lambda: check_machine(read_machine(self.state))),
        ]
        if self.pipeline.views:
            parts.append(("sink-unreachable", STATE, self._room))
        sinks = [*self.sinks, *([build_state(self.pipeline)] if self.pipeline.state else [])]
        parts += [("sink-unreachable", sink.name, partial(self._sink, sink)) for sink in sinks]
        with ThreadPoolExecutor(len(parts)) as pool:
            answers = [pool.submit(_examine, *part) for part in parts]
            findings = [finding for answer in answers for finding in answer.result()]
        return worst_first(without_consequences(findings))

    def _source(self) -> Iterator[Finding]:
        with (
            source.connect_to_read(self.pipeline.source) as conn,
            Connect(self.pipeline.connect) as connect,
        ):
            facts = table_survey.read_source(
                conn, self.pipeline, connected=_is_connected(connect, self.pipeline)
            )
            yield from (fault.finding for fault in check_source(facts))
            yield from check_clock("Postgres", facts.clock_off_s)
            views = examine_views(conn, self.pipeline, table_survey.survey(conn, self.pipeline))
            for name, error in views.refused.items():
                yield find_error("view-refused", f"{SCHEMA}.{name}", error)

    def _connect(self) -> Iterator[Finding]:
        pipeline = self.pipeline
        with Connect(pipeline.connect) as connect:
            current = connect.config(pipeline.pipeline)
            try:
                with (
                    source.connect_to_read(pipeline.source) as conn,
                    Topics(pipeline.kafka) as topics,
                ):
                    expected = configuration(
                        pipeline,
                        tables=table_survey.survey(conn, pipeline).tables,
                        server_version=conn.info.server_version,
                        cluster_id=topics.cluster_id(),
                        unpublished=table_survey.unreplicated_columns(conn, pipeline),
                    )
            except SettingsError as error:
                yield find_error("connector-refused", pipeline.pipeline, error)
                return
            except CdcError:
                return  # A server that is away is a finding of its own part.
            plugin = connect.plugins().get(PLUGIN)
            refusal = None
            if plugin is not None:
                try:
                    connect.validate(expected)
                except ConnectorError as error:
                    refusal = error.message
            yield from check_connect(
                pipeline.pipeline,
                plugin=plugin,
                refusal=refusal,
                current=current,
                expected=expected,
            )

    def _log(self) -> Iterator[Finding]:
        with Topics(self.pipeline.kafka) as topics:
            yield from check_log(read_log(topics, self.pipeline))

    def _registration(self) -> Iterable[Finding]:
        with closing(TopicsPool()) as pool:
            return find_registration_troubles(self.pipeline, pool)

    def _room(self) -> Iterator[Finding]:
        """Whether the state of documents has room for what the next run reads."""
        pipeline = self.pipeline
        try:
            with source.connect_to_read(pipeline.source) as conn, Topics(pipeline.kafka) as kafka:
                survey = table_survey.survey(conn, pipeline)
                refused = examine_views(conn, pipeline, survey).refused
                state = build_state(pipeline)
                risk = examine_room(pipeline, state, kafka, survey.tables, refused)
        except StateTooLarge as error:
            yield find_error("state-too-large", STATE, error, sink=STATE)
        except CdcError:
            return  # A server that is away is a finding of its own part.
        else:
            yield from [risk] if risk else []

    def _sink(self, sink: Sink) -> Iterator[Finding]:
        tables = (
            *table_survey.tables_by_name_only(self.pipeline),
            *table_survey.views_by_name_only(self.pipeline),
        )
        if isinstance(sink, Examinable):
            yield from sink.examine([table for table in tables if table.is_in(sink.name)])
        if not isinstance(sink, FitChecker):
            return
        try:
            with source.connect_to_read(self.pipeline.source) as conn:
                survey = table_survey.survey(conn, self.pipeline)
                views = examine_views(conn, self.pipeline, survey).tables
        except CdcError:
            return  # Postgres' own part reports that.
        for table in table_survey.tables_in([sink.name], (*survey.tables, *views)):
            try:
                sink.require_fit(table)
            except SchemaMismatch as error:
                key = "table-waiting" if error.waits else "setting-differs/index"
                yield find_error(key, table.qualified, error, sink=sink.name)


def without_consequences(findings: Sequence[Finding]) -> list[Finding]:
    """Leave out what only follows from another finding. Pure."""
    troubles = [part for part in findings if part.severity in (Severity.DOWN, Severity.DEGRADED)]
    names = {name for trouble in troubles for name in (trouble.code, trouble.subject)}
    consequences = {code for code, causes in CONSEQUENCES.items() if names & causes}
    return [finding for finding in findings if finding.code not in consequences]


def _is_connected(connect: Connect, pipeline: Pipeline) -> bool:
    """Say whether Connect has the connector; as good as yes where it can't be asked."""
    try:
        return connect.config(pipeline.pipeline) is not None
    except CdcError:
        return True


def _examine(key: str, subject: str, examine: Callable[[], Iterable[Finding]]) -> list[Finding]:
    """Examine a part; what it raises becomes a finding beside those that it has found by then."""
    findings: list[Finding] = []
    try:
        for finding in examine():
            findings.append(finding)  # what was found before an error counts
    except Exception as error:
        failure = classify(error, subject, "cdc -p FILE doctor")
        if isinstance(failure, Unexpected):
            log.error("part_not_examined", part=subject, exception=trace(error))
        sink = subject if key == "sink-unreachable" else None
        findings.append(find_error(key, subject, failure, sink=sink))
    return findings
