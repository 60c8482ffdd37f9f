"""Whether topics are still what can be replayed, and what views may have missed: told by settings and positions alone.

In:  the broker, the pipeline file, where each view stands. Out: findings; no record is read but the first one that a
view hasn't applied.
"""

from collections.abc import Iterator, Mapping

from cdc.audit.finding import ANEW, Finding
from cdc.config.settings import Pipeline
from cdc.errors import ConnectorError
from cdc.kafka.log_continuity import COMPACTION_LAG, RETENTION, Continuity, Discontinued, check_shape
from cdc.kafka.topics import Topics, topic_specs
from cdc.model.position import Position, ViewCheckpoint
from cdc.model.table import Table

CONTROL = ("cdc.truncation", "cdc.ddl")
"""Tables whose topics a replay reads as well."""
LONGER = "a longer changes_retention_hours in the pipeline file, then cdc -p FILE topics, keeps it from coming again"


def of_topics(kafka: Topics, pipeline: Pipeline, table: Table) -> list[Finding]:
    """What is wrong with a table's topic, and with those that a replay needs besides."""
    topics = [table.topic, *map(pipeline.topic, CONTROL)]
    existing = kafka.existing(topics)
    missing = [topic for topic in topics if topic not in existing]
    found = [Finding("missing", 1, f"there is no topic {topic}", "cdc -p FILE register") for topic in missing]
    there = [topic for topic in topics if topic in existing]
    settings, starts = kafka.settings(there), kafka.starts(there)
    for topic in there:
        found += _shape(topic, topic_specs(pipeline)[topic], starts[topic], settings[topic]["cleanup.policy"])
    if table.topic in existing:
        asked = (
            ("tombstones", RETENTION, pipeline.delete_retention_hours),
            ("superseded records", COMPACTION_LAG, pipeline.changes_kept_s / 3600),
        )
        for kept, name, asked_h in asked:
            kept_h = int(settings[table.topic][name]) / 3_600_000
            if kept_h < asked_h:
                what = f"{kept} are kept for {kept_h:g} h, the pipeline file says {asked_h:g} h"
                found.append(Finding("retention", 1, what, "cdc -p FILE topics brings it up to the file"))
    return found


def of_views(
    kafka: Topics, pipeline: Pipeline, table: Table, views: Mapping[str, ViewCheckpoint | None]
) -> list[Finding]:
    """Views that the log can't continue from where they stand, or that may have missed deletes."""
    continuity = Continuity(pipeline, kafka).read([table.topic])
    continuity.look((table, stored) for stored in views.values())
    found = [
        Finding("holes", 1, f"the log of changes in {name} may lack superseded records: {hole}", LONGER)
        for name in views
        for hole in continuity.ledger.holes(name, table.topic)
        if hole.end.topic_id == continuity.logs[table.topic].end.topic_id
    ]
    for name, stored in views.items():
        if stored is None:
            continue
        try:
            continuity.refuse(name, table, stored)
        except Discontinued as error:
            found.append(Finding(error.kind, 1, f"view {name}: {error.message}", error.hint))
    return found


def _shape(topic: str, partitions: int, start: Position, policy: str) -> Iterator[Finding]:
    count = start.partition_count
    for kind, expected, found in (("partitions", partitions, "compact"), ("policy", count, policy)):
        try:
            check_shape(topic, expected, count, found)
        except ConnectorError as error:
            yield Finding(kind, 1, error.message, error.hint)
    if lost := sum(offset > 0 for offset in start.offsets):
        yield Finding("start", lost, f"{lost} partitions of {topic} no longer hold their first records", ANEW)
