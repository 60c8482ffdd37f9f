"""Specify the pipeline's topics: their partitions and their settings. Pure.

In:  the pipeline file. Out: by topic, what `ensure_topics` creates and what `cdc plan` compares
with.
"""

from collections.abc import Collection, Iterable

from cdc.config.settings import Pipeline
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
