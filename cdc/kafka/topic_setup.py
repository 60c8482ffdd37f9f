"""Create and check the topics of a pipeline.

In:  a connection to the broker, and the pipeline file.
Out: topics with fixed partition counts; ConnectorError.
Invariant: `ensure_topics` checks every topic before it creates the first.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

from cdc.config.settings import Pipeline
from cdc.errors import ConnectorError
from cdc.kafka.clients import kafka, translated_errors
from cdc.kafka.ledger import Ledger, TopicShape
from cdc.kafka.log_refusals import missing_topic, renewal, renewed_name, shape_errors
from cdc.kafka.topics import Topics, retry_briefly, topic_id
from cdc.model.table import CONTROL_TABLES

MAX_MESSAGE_BYTES = 16 * 1024 * 1024
"""The largest record, and the largest batch: the connector's limit."""
RETENTION_MS = 24 * 3_600_000
"""How long a tombstone stays at least in a topic that `cdc.kafka.tail` follows."""
COMPACTION_LAG = "min.compaction.lag.ms"
"""How long records that were superseded stay at least."""
FOREVER_MS = str(2**63 - 1)
"""Of a topic of events, in which a delete supersedes an event that views keep."""
SEGMENT_MS = 10 * 60_000
"""How old a segment of such a topic gets before the broker may compact it."""


def topic_specs(pipeline: Pipeline) -> dict[str, int]:
    """Every topic of the pipeline, with its number of partitions."""
    tables = {pipeline.topic(entry.table): entry.partitions for entry in pipeline.source.tables}
    views = {
        pipeline.view_topic(name): _view_partitions(pipeline, view.root)
        for name, view in pipeline.views.items()
    }
    control = {pipeline.topic(table): 1 for table in CONTROL_TABLES}
    internal = (
        pipeline.quarantine_topic,
        pipeline.settings_topic,
        pipeline.registered_topic,
        pipeline.message_topic,
        pipeline.generations_topic,
        pipeline.runs_topic,
        pipeline.operations_topic,
    )
    return {
        **tables,
        **views,
        **control,
        f"{pipeline.debezium_prefix}.{pipeline.pipeline}": 1,
        **dict.fromkeys(internal, 1),
    }


def _view_partitions(pipeline: Pipeline, root: str) -> int:
    """As many as the root's topic has; an entry names the table, or is a pattern."""
    entries = pipeline.source.tables
    exact = [entry for entry in entries if entry.table == root]
    matching = [entry for entry in entries if entry.pattern and entry.matches(root)]
    return next(iter([*exact, *matching])).partitions


def topic_settings(pipeline: Pipeline, topics: Iterable[str]) -> dict[str, dict[str, str]]:
    """The settings that each topic gets in addition to its cleanup policy.

    Topics by which commands communicate are compacted within minutes, so that a reader needn't go
    through entries that have long been superseded.
    """
    retention_ms = int(pipeline.delete_retention_hours * 3_600_000)
    settings = {
        "delete.retention.ms": str(retention_ms),
        # A record in quarantine is a third longer than it was.
        "max.message.bytes": str(2 * MAX_MESSAGE_BYTES),
    }
    if least := pipeline.kafka_settings.min_insync_replicas:
        settings["min.insync.replicas"] = str(least)
    followed = {
        **settings,
        "delete.retention.ms": str(max(retention_ms, RETENTION_MS)),
        "segment.ms": str(SEGMENT_MS),
        "min.cleanable.dirty.ratio": "0.1",
    }
    internal = (
        pipeline.quarantine_topic,
        pipeline.settings_topic,
        pipeline.generations_topic,
        pipeline.runs_topic,
    )
    tables: dict[str, dict[str, str]] = {}
    for entry in pipeline.source.tables:
        listing = [name for name, sink in pipeline.sinks.items() if sink.lists(entry.table)]
        kept = {COMPACTION_LAG: FOREVER_MS} if entry.events else _lag(pipeline, listing)
        tables[pipeline.topic(entry.table)] = {**settings, **kept}
    special = {
        **dict.fromkeys(internal, followed),
        **tables,
        **{
            pipeline.view_topic(name): {**settings, **_lag(pipeline, view.to)}
            for name, view in pipeline.views.items()
        },
    }
    return {topic: special.get(topic, settings) for topic in topics}


def _lag(pipeline: Pipeline, sinks: Collection[str]) -> dict[str, str]:
    """The setting for a topic that these sinks have views of."""
    kept_s = pipeline.changes_kept_s(sinks)
    return {COMPACTION_LAG: str(int(kept_s * 1000))} if kept_s else {}


UNSETTLED = (kafka.errors.TopicAlreadyExistsError, kafka.errors.UnknownTopicOrPartitionError)
"""Errors for a topic that is being created or deleted at this moment."""


def ensure_topics(broker: Topics, pipeline: Pipeline) -> dict[str, bool]:
    """Create missing topics and set their settings. Returns for each topic whether it was missing.

    Creates none if one of them exists with another number of partitions.
    """
    topics = topic_specs(pipeline)
    settings = topic_settings(pipeline, topics)
    with translated_errors(broker.bootstrap):
        shapes = Ledger(pipeline, broker).read().original_shapes
        existing = retry_briefly(*UNSETTLED)(
            _create_missing, broker, pipeline, topics, settings, shapes
        )
        broker.alter(
            {topic: dict(settings[topic].items() - existing[topic].items()) for topic in existing}
        )
        _save_shapes(broker, pipeline, shapes)
    return {topic: topic not in existing for topic in topics}


def ensure_topic(broker: Topics, pipeline: Pipeline, topic: str) -> None:
    """Create one topic of the pipeline, where it is missing: for what is written before the others
    exist.
    """
    with translated_errors(broker.bootstrap):
        topics = {topic: topic_specs(pipeline)[topic]}
        settings = topic_settings(pipeline, topics)
        retry_briefly(*UNSETTLED)(_create_missing, broker, pipeline, topics, settings, {})


def check_topics(broker: Topics, pipeline: Pipeline) -> None:
    """Refuse topics that differ from what `ensure_topics` creates: one that was changed may have lost
    or moved records.

    Raises:
        ConnectorError: for the first topic that is missing or has other partitions or another
            cleanup policy.
    """
    topics = topic_specs(pipeline)
    existing = broker.describe(topics)
    settings = broker.settings(existing)
    shapes = Ledger(pipeline, broker).read().original_shapes
    # A topic that is being deleted may still be listed, but has no settings.
    if missing := [topic for topic in topics if not settings.get(topic)]:
        raise missing_topic(missing[0])
    for refusal in _refusals(topics, existing, settings, shapes):
        raise refusal


def refuse_others(broker: Topics, pipeline: Pipeline, renewed: Collection[str]) -> None:
    """Refuse topics that `ensure_topics` would refuse once the renewed ones are deleted.

    Raises:
        ConnectorError: for the first of them; its hint renews them all together.
    """
    topics = topic_specs(pipeline)
    existing = broker.describe(topics.keys() - set(renewed))
    settings = broker.settings(existing)
    shapes = Ledger(pipeline, broker).read().original_shapes
    settled = {topic: described for topic, described in existing.items() if settings[topic]}
    refusals = list(_refusals(topics, settled, settings, shapes))
    names = [renewed_name(str(refusal.details["topic"])) for refusal in refusals]
    for refusal, name in zip(refusals, names, strict=True):
        if name is not None:
            # A topic may be refused for two reasons.
            together = dict.fromkeys(filter(None, [*map(renewed_name, renewed), *names]))
            refusal.hint = f"{renewal(*together)}; then rebuild their views"
        raise refusal


def _refusals(
    topics: Mapping[str, int],
    existing: Mapping[str, Mapping[str, Any]],
    settings: Mapping[str, Mapping[str, str]],
    original: Mapping[str, TopicShape],
) -> Iterator[ConnectorError]:
    """Say of each existing topic that differs from its description why it is refused."""
    for topic, count in topics.items():
        if topic in existing:
            policy = settings[topic]["cleanup.policy"]
            shape = original.get(topic)
            is_same = shape and shape.topic_id == topic_id(existing[topic]["topic_id"])
            partitions = shape.partitions if shape and is_same else None
            actual = len(existing[topic]["partitions"])
            yield from shape_errors(topic, count, actual, policy, partitions)


def _save_shapes(
    broker: Topics, pipeline: Pipeline, known_shapes: Mapping[str, TopicShape]
) -> None:
    """Write the shapes of topics that are new in the ledger."""
    described = broker.describe(pipeline.topic(entry.table) for entry in pipeline.source.tables)
    unsaved = {}
    for topic, description in described.items():
        shape = TopicShape(topic_id(description["topic_id"]), len(description["partitions"]))
        if topic not in known_shapes or known_shapes[topic].topic_id != shape.topic_id:
            unsaved[topic] = shape
    if unsaved:
        Ledger(pipeline, broker).add_shapes(unsaved)


def _create_missing(
    broker: Topics,
    pipeline: Pipeline,
    topics: Mapping[str, int],
    settings: Mapping[str, Mapping[str, str]],
    original: Mapping[str, TopicShape],
) -> dict[str, dict[str, str]]:
    """Check the topics, then create missing ones. Returns the settings of the others.

    Raises UNSETTLED, which is to be retried.
    """
    existing = broker.describe(topics)
    in_force = broker.settings(existing)
    if unsettled := [topic for topic in existing if not in_force[topic]]:
        raise kafka.errors.UnknownTopicOrPartitionError(unsettled[0])
    for refusal in _refusals(topics, existing, in_force, original):
        raise refusal
    shapes = {
        topic: {
            "num_partitions": count,
            # -1 is the brokers' default.
            "replication_factor": pipeline.kafka_settings.replication_factor or -1,
            "configs": {"cleanup.policy": "compact", **settings[topic]},
        }
        for topic, count in topics.items()
        if topic not in existing
    }
    if shapes:
        # A request isn't all or nothing, and what a broker describes lags behind what its
        # controller knows.
        broker.request_topics(shapes, validate_only=True)
        broker.create_topics(shapes)
    return in_force
