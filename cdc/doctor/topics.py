"""Topics and brokers: whether the log keeps what views need, and survives a broker."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from cdc.config.settings import Pipeline
from cdc.kafka.log_continuity import RETENTION
from cdc.kafka.log_refusals import renewal, renewed_name, shape_errors
from cdc.kafka.topic_specs import COMPACTION_LAG, FOREVER_MS, topic_settings, topic_specs
from cdc.kafka.topics import Topics
from cdc.model.finding import Finding, find, find_setting

TOPICS = "cdc -p FILE topics"
REGISTER = "cdc -p FILE register"
RESTART = " Each broker takes the setting at its next start."
MESSAGE_BYTES = "max.message.bytes"
LEAST = "min.insync.replicas"
UNCLEAN = "unclean.leader.election.enable"


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
            yield from _check_settings(topic, topic_facts)
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


def _check_settings(topic: str, facts: TopicFacts) -> Iterator[Finding]:
    for name, subject in ((RETENTION, "tombstones"), (COMPACTION_LAG, "superseded records")):
        actual_ms, expected_ms = (
            int(settings.get(name, 0)) for settings in (facts.settings, facts.expected)
        )
        if actual_ms < expected_ms:
            hours = actual_ms / 3_600_000
            is_forever = expected_ms == int(FOREVER_MS)
            needed = "for ever" if is_forever else f"{expected_ms / 3_600_000:g} h"
            message = f"{topic} keeps {subject} for {hours:g} h, the pipeline file says {needed}."
            yield find_setting(name, message, TOPICS, of=topic)
    actual, needed_bytes = (
        int(settings.get(MESSAGE_BYTES, 0)) for settings in (facts.settings, facts.expected)
    )
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
    if facts.copies == 1 and brokers > 1:
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
