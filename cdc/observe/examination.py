"""Examination: read the facts of each part, all parts at the same time, and judge them.

In:  the pipeline file, its sinks, the state folder. Out: findings, the worst first.
What is read of Postgres is in `cdc.readiness`.
Invariant: reads only. A part that can't be asked is a finding itself, and hides none of the others.
"""

import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import psutil
import structlog

from cdc.capture.configuration import configuration
from cdc.config.settings import Pipeline
from cdc.config.view_settings import SCHEMA, STATE
from cdc.connectors.client import SECRET, Connect
from cdc.connectors.debezium import PLUGIN
from cdc.documents.needs import examine_room
from cdc.documents.source_checks import examine_views
from cdc.documents.state import StateTooLarge
from cdc.errors import CdcError, ConnectorError, SettingsError, Unexpected
from cdc.kafka.log_continuity import RETENTION
from cdc.kafka.log_refusals import renewal, renewed_name, shape_errors
from cdc.kafka.topic_setup import COMPACTION_LAG, FOREVER_MS, topic_settings, topic_specs
from cdc.kafka.topics import Topics, TopicsPool
from cdc.model import mask
from cdc.model.finding import (
    LOOK_AGAIN,
    Finding,
    Severity,
    find,
    find_error,
    find_setting,
    worst_first,
)
from cdc.model.installation import install_command
from cdc.model.trace import trace
from cdc.model.wording import full_stopped
from cdc.observe.registration_findings import find_registration_troubles
from cdc.postgres import source, table_survey
from cdc.readiness.checks import check_source
from cdc.sink.contract import Examinable, FitChecker, SchemaMismatch, Sink
from cdc.sink.factory import build_state
from cdc.sink.remedy import classify

REGISTER = "cdc -p FILE register"
LOSING = ("3.6.",)
"""Beginnings of versions that lose rows when they are restarted: dbz#76, dbz#51, dbz#1554."""
DANGEROUS: Mapping[str, tuple[str, str]] = {
    "slot.drop.on.stop": ("false", "every stop loses the log since then"),
    "errors.tolerance": ("none", "records that fail are left out"),
    "event.converting.failure.handling.mode": ("fail", "values that it can't convert become null"),
    "tombstones.on.delete": ("true", "deleted rows never leave Kafka"),
    "publication.autocreate.mode": ("disabled", "it publishes tables by itself"),
    "decimal.handling.mode": ("string", "numbers lose digits"),
    "exactly.once.support": ("required", "records may come twice"),
    "offset.mismatch.strategy": ("trust_offset", "it goes on from wherever the slot stands"),
    "snapshot.mode": ("initial", "rows from before may never be sent"),
    "include.unknown.datatypes": ("true", "columns of unknown types are left out"),
    "skipped.operations": ("t", "a truncate event stops it, or changes are left out"),
}
"""By setting of the connector: the value that it needs, and what another one does."""
BEATS = ("heartbeat.interval.ms", "heartbeat.action.query")
TOPICS = "cdc -p FILE topics"
RESTART = " Each broker takes the setting at its next start."
MESSAGE_BYTES = "max.message.bytes"
LEAST = "min.insync.replicas"
UNCLEAN = "unclean.leader.election.enable"
OLDEST_JAVA = 17
ROOM_BYTES = 2 << 30
"""Memory that Spark and its workers take, at least."""
STATE_BYTES = 1 << 30
CLOCK_S = 2.0
"""Seconds by which a clock may be off: lag in seconds is wrong by as much."""


def check_connect(
    connector: str,
    *,
    plugin: str | None,
    refusal: str | None,
    current: Mapping[str, str] | None,
    expected: Mapping[str, str],
) -> Iterator[Finding]:
    """Judge the worker and the connector's settings. Texts hold no password.

    plugin    version of Debezium's plugin; None where the worker hasn't got it
    refusal   why the worker refuses the configuration that `register` would put
    current   the connector's settings; None where there is no connector
    expected  the settings that `register` would put
    """
    if plugin is None:
        message = "The worker has no plugin for Postgres: Debezium isn't in its plugin.path."
        yield find("plugin-unfit", "plugin.path", message, "ls /path/of/plugin.path")
    elif plugin.startswith(LOSING):
        message = f"Debezium {plugin} loses rows when it is restarted."
        yield find("plugin-unfit/loses-rows", "Debezium", message, "ls /path/of/plugin.path")
    if refusal:
        yield _refusal(refusal)
    if current is not None:
        yield from _check_settings(connector, current, expected)


def _refusal(text: str) -> Finding:
    if "exactly.once.support" in text or "exactly-once" in text:
        message = (
            "The worker has exactly.once.source.support off. It takes a restart to be turned on."
        )
        fix = "echo exactly.once.source.support=enabled >> connect-distributed.properties"
        return find_setting("exactly.once.source.support", message, fix)
    if ".override." in text:
        message = full_stopped(f"The worker doesn't let the connector set its producer: {text}")
        message += " It takes a restart to let it."
        fix = "echo connector.client.config.override.policy=All >> connect-distributed.properties"
        return find_setting("connector.client.config.override.policy", message, fix)
    return find("connector-refused", "the connector", full_stopped(text), LOOK_AGAIN)


def _check_settings(
    connector: str, current: Mapping[str, str], expected: Mapping[str, str]
) -> Iterator[Finding]:
    dangerous = set()
    for setting, (value, danger) in DANGEROUS.items():
        if current.get(setting) != value:
            dangerous.add(setting)
            actual = current.get(setting, "not set")
            message = f"{setting} of the connector is {actual}, not {value}: {danger}."
            yield find_setting(setting, message, REGISTER)
    if any(current.get(setting) in (None, "", "0") for setting in BEATS):
        dangerous |= set(BEATS)
        message = "The connector sends no heartbeat: an idle database keeps its log for ever."
        yield find_setting(BEATS[0], message, REGISTER)
    masks = [
        {name: value for name, value in config.items() if name.startswith(mask.SETTINGS)}
        for config in (current, expected)
    ]
    # Their names hold the salt, so they aren't printed.
    dangerous |= {*masks[0], *masks[1]}
    if masks[0] != masks[1]:
        message = "The connector masks other columns than the file says, or in another way."
        yield find_setting("column.mask", message, REGISTER)
    differing = sorted(
        name
        for name in {*current, *expected} - dangerous
        if current.get(name) != expected.get(name) and not SECRET.search(name)
    )
    if differing:
        message = (
            f"The connector has other settings than the file gives it: {', '.join(differing)}."
        )
        yield find("connector-differs", connector, message, REGISTER)


@dataclass(frozen=True)
class TopicFacts:
    """A topic as it is, and as the pipeline file wants it."""

    partitions: int
    copies: int
    """The fewest copies of a partition."""
    in_sync: int
    """The fewest copies of a partition that are current."""
    leaderless: int
    """Partitions without a leader."""
    truncated: int
    """Partitions that no longer hold their first records."""
    settings: Mapping[str, str]
    expected_partitions: int
    expected: Mapping[str, str]
    expected_copies: int = 1


@dataclass(frozen=True)
class LogFacts:
    """What was read of Kafka. A topic that is missing is None."""

    topics: Mapping[str, TopicFacts | None]
    tables: frozenset[str]
    """Topics of tables: all of their records from the first on are needed."""
    brokers: int
    broker_settings: Mapping[str, str]
    registered: bool
    """Whether `register` has made topics."""


def read_log(topics: Topics, pipeline: Pipeline) -> LogFacts:
    """Read the facts. Raises ConnectorError."""
    specs = topic_specs(pipeline)
    expected = topic_settings(pipeline, specs)
    replicas = topics.replicas(specs)
    settings = topics.settings(replicas)
    starts = topics.starts(list(replicas))
    facts: dict[str, TopicFacts | None] = dict.fromkeys(specs)
    for topic, partitions in replicas.items():
        facts[topic] = TopicFacts(
            len(partitions),
            min(partition.copies for partition in partitions),
            min(partition.in_sync for partition in partitions),
            sum(not partition.led for partition in partitions),
            sum(offset > 0 for offset in starts[topic].offsets),
            settings[topic],
            specs[topic],
            expected[topic],
            pipeline.kafka_settings.replication_factor or 1,
        )
    tables = frozenset(pipeline.topic(entry.table) for entry in pipeline.source.tables)
    brokers, broker_settings = topics.brokers()
    registered = pipeline.registered_topic in replicas
    return LogFacts(facts, tables, brokers, broker_settings, registered)


def check_log(facts: LogFacts) -> Iterator[Finding]:
    """Judge brokers and topics."""
    if facts.broker_settings.get("auto.create.topics.enable") == "true":
        message = "Brokers create topics by themselves, with other partitions and another policy."
        message += RESTART
        fix = "echo auto.create.topics.enable=false >> server.properties"
        yield find_setting("auto.create.topics.enable", message, fix)
    if facts.broker_settings.get("log.cleaner.enable") == "false":
        message = "Brokers don't compact: topics grow with every change."
        message += RESTART
        fix = "echo log.cleaner.enable=true >> server.properties"
        yield find_setting("log.cleaner.enable", message, fix)
    missing = [topic for topic, topic_facts in facts.topics.items() if topic_facts is None]
    if missing and facts.registered:
        more = f" and {len(missing) - 1} more" if missing[1:] else ""
        yield find("topic-missing", missing[0], f"There is no topic {missing[0]}{more}.", REGISTER)
    for topic, topic_facts in facts.topics.items():
        if topic_facts is not None:
            yield from _check_shape(topic, topic_facts, topic in facts.tables)
            yield from _check_topic_settings(topic, topic_facts)
            yield from _check_copies(topic, topic_facts, facts.brokers)


def _check_shape(topic: str, facts: TopicFacts, of_table: bool) -> Iterator[Finding]:
    policy = facts.settings.get("cleanup.policy", "compact")
    for error in shape_errors(topic, facts.expected_partitions, facts.partitions, policy):
        yield find(str(error.finding_key), topic, error.message, error.hint)
    if of_table and facts.truncated:
        message = f"{facts.truncated} partitions of {topic} no longer hold their first records."
        name = renewed_name(topic) or topic
        fix = f"{renewal(name)}; then rebuild its views"
        yield find("topic-unfit/truncated", topic, message, fix)


def _check_topic_settings(topic: str, facts: TopicFacts) -> Iterator[Finding]:
    for name, subject in ((RETENTION, "tombstones"), (COMPACTION_LAG, "superseded records")):
        actual_ms = int(facts.settings.get(name, 0))
        expected_ms = int(facts.expected.get(name, 0))
        if actual_ms < expected_ms:
            hours = actual_ms / 3_600_000
            is_forever = expected_ms == int(FOREVER_MS)
            needed = "for ever" if is_forever else f"{expected_ms / 3_600_000:g} h"
            message = f"{topic} keeps {subject} for {hours:g} h, the pipeline file says {needed}."
            yield find_setting(name, message, TOPICS, of=topic)
    actual = int(facts.settings.get(MESSAGE_BYTES, 0))
    needed_bytes = int(facts.expected.get(MESSAGE_BYTES, 0))
    if actual < needed_bytes:
        message = f"{topic} takes records of {actual} bytes at most; the connector's may have {needed_bytes}."
        yield find_setting(MESSAGE_BYTES, message, TOPICS, of=topic)


def _check_copies(topic: str, facts: TopicFacts, brokers: int) -> Iterator[Finding]:
    least = int(facts.settings.get(LEAST, 1))
    if facts.leaderless:
        message = f"{facts.leaderless} partitions of {topic} have no leader."
        yield find("topic-copies/leaderless", topic, message, _describe(topic))
    elif facts.in_sync < facts.copies:
        message = f"A partition of {topic} has {facts.in_sync} of {facts.copies} copies in sync."
        yield find("topic-copies/out-of-sync", topic, message, _describe(topic))
    if facts.copies < facts.expected_copies:
        message = f"{topic} has {facts.copies} copies; kafka.replication_factor in the file is {facts.expected_copies}."
        yield find("topic-copies/fewer", topic, message, _describe(topic))
    elif facts.copies == 1 and brokers > 1:
        message = f"{topic} has one copy, and {brokers} brokers could hold more."
        yield find("topic-copies/single", topic, message, _describe(topic))
    if facts.copies > 1 and least >= facts.copies:
        message = f"{topic} takes no record while one of its {facts.copies} copies is away."
        yield find_setting(f"{LEAST}=all", message, _describe(topic), of=topic)
    if facts.copies > 2 and least == 1:
        message = f"A record of {topic} counts as stored with one copy of {facts.copies}."
        yield find_setting(f"{LEAST}=1", message, _describe(topic), of=topic)
    if facts.settings.get(UNCLEAN) == "true":
        message = f"A copy of {topic} that lacks records may become its leader."
        yield find_setting(UNCLEAN, message, _describe(topic), of=topic)


def _describe(topic: str) -> str:
    return f"kafka-topics.sh --bootstrap-server BROKER --describe --topic {topic}"


@dataclass(frozen=True)
class MachineFacts:
    """What was read of this machine; sizes in bytes."""

    java: int | None
    """Major version; None where there is no Java."""
    spark: bool
    memory_free: int
    state_free: int
    state: str
    """The folder in which the state of runs lies."""


def read_machine(state: Path) -> MachineFacts:
    """Read the facts. Asks `java -version`, which takes a tenth of a second."""
    folder = next(path for path in (state, *state.absolute().parents) if path.exists())
    return MachineFacts(
        _java_major(),
        find_spec("pyspark") is not None,
        psutil.virtual_memory().available,
        shutil.disk_usage(folder).free,
        str(folder),
    )


def _java_major() -> int | None:
    home = os.environ.get("JAVA_HOME")
    program = shutil.which("java", path=f"{home}/bin" if home else None)
    if program is None:
        return None
    answer = subprocess.run([program, "-version"], check=False, capture_output=True, text=True)
    version = re.search(r'version "(?:1\.)?(\d+)', answer.stderr)
    return int(version[1]) if version else None


def check_machine(facts: MachineFacts) -> Iterator[Finding]:
    if facts.java is None:
        message = "There is no Java runtime on this machine, which Spark needs."
        yield find("machine-unfit/java", "java", message, "apt install openjdk-17-jre-headless")
    elif facts.java < OLDEST_JAVA:
        message = f"Java {facts.java} is too old for Spark, which needs {OLDEST_JAVA}."
        yield find("machine-unfit/old-java", "java", message, "apt install openjdk-17-jre-headless")
    if not facts.spark:
        message = "PySpark isn't installed, which `run`, `rebuild` and `verify` need."
        yield find("machine-unfit/spark", "pyspark", message, install_command("spark"))
    if facts.memory_free < ROOM_BYTES:
        message = (
            f"{facts.memory_free >> 20} MiB of memory are free; Spark and its workers take 2 GiB."
        )
        yield find("memory-low/machine", "memory", message, "ps aux --sort -rss")
    if facts.state_free < STATE_BYTES:
        message = f"{facts.state_free >> 20} MiB are free in {facts.state}."
        yield find("disk-low/state", facts.state, message, f"du -sh {facts.state}")


def check_clock(server: str, off_s: float) -> Iterator[Finding]:
    """Judge a server's clock, which is so many seconds ahead of this machine's."""
    if abs(off_s) > CLOCK_S:
        order = "ahead of" if off_s > 0 else "behind"
        message = f"The clock of {server} is {abs(off_s):.0f} s {order} this machine's."
        yield find("clock-off", server, message, "timedatectl status")


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
