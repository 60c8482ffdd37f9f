"""Topic health: whether topics can still be replayed, and which deletes views may have missed.

In:  the broker's settings, the pipeline file, the views' positions. Out: flaws. The only record
     that is read is the
first one that a view hasn't applied.
"""

from collections.abc import Iterator, Mapping

from cdc.audit.finding import TOPIC_HINTS, Flaw
from cdc.config.settings import Pipeline
from cdc.errors import ConnectorError
from cdc.kafka.log_continuity import RETENTION, Continuity
from cdc.kafka.log_refusals import Discontinued, check_shape
from cdc.kafka.topic_specs import COMPACTION_LAG, topic_specs
from cdc.kafka.topics import Topics
from cdc.model.position import Position, ViewCheckpoint
from cdc.model.table import Table

CONTROL_TABLES = ("cdc.truncation", "cdc.ddl")
"""Tables of the control schema whose topics a replay reads as well."""


def topic_flaws(kafka: Topics, pipeline: Pipeline, table: Table) -> list[Flaw]:
    """Check the settings of a table's topic, and of the control topics that a replay needs."""
    topics = [table.topic, *map(pipeline.topic, CONTROL_TABLES)]
    existing = kafka.existing(topics)
    missing = [topic for topic in topics if topic not in existing]
    flaws = [
        Flaw("missing", 1, f"there is no topic {topic}", TOPIC_HINTS["missing"])
        for topic in missing
    ]
    present = [topic for topic in topics if topic in existing]
    settings, starts = kafka.settings(present), kafka.starts(present)
    specs = topic_specs(pipeline)
    for topic in present:
        flaws += _shape_flaws(topic, specs[topic], starts[topic], settings[topic]["cleanup.policy"])
    if table.topic in existing:
        requirements = (
            ("retention", "tombstones", RETENTION, pipeline.delete_retention_hours),
            (
                "compaction lag",
                "superseded records",
                COMPACTION_LAG,
                pipeline.changes_kept_s / 3600,
            ),
        )
        for kind, subject, name, required_h in requirements:
            actual_h = int(settings[table.topic][name]) / 3_600_000
            if actual_h < required_h:
                what = f"{subject} are kept for {actual_h:g} h, the pipeline file says {required_h:g} h"
                flaws.append(Flaw(kind, 1, what, TOPIC_HINTS[kind]))
    return flaws


def view_flaws(
    kafka: Topics, pipeline: Pipeline, table: Table, views: Mapping[str, ViewCheckpoint | None]
) -> list[Flaw]:
    """Find views that the log can't continue, or that may have missed deletes."""
    continuity = Continuity(pipeline, kafka).read([table.topic])
    continuity.load_next_records((table, checkpoint) for checkpoint in views.values())
    flaws = [
        Flaw(
            "holes",
            1,
            f"the log of changes in {name} may lack superseded records: {hole}",
            TOPIC_HINTS["holes"],
            sink=name,
        )
        for name in views
        for hole in continuity.ledger.holes(name, table.topic)
        if hole.end.topic_id == continuity.logs[table.topic].end.topic_id
    ]
    for name, checkpoint in views.items():
        if checkpoint is None:
            continue
        try:
            continuity.refuse(name, table, checkpoint)
        except Discontinued as error:
            what = f"view {name}: {error.message}"
            flaws.append(Flaw(error.kind, 1, what, error.hint, sink=name))
    return flaws


def _shape_flaws(topic: str, partitions: int, start: Position, policy: str) -> Iterator[Flaw]:
    count = start.partition_count
    # Two checks, so that either mistake is a finding of its own: each lets the other one pass.
    for kind, expected, actual_policy in (
        ("partitions", partitions, "compact"),
        ("policy", count, policy),
    ):
        try:
            check_shape(topic, expected, count, actual_policy)
        except ConnectorError as error:
            yield Flaw(kind, 1, error.message, error.hint)
    if lost := sum(offset > 0 for offset in start.offsets):
        yield Flaw(
            "start",
            lost,
            f"{lost} partitions of {topic} no longer hold their first records",
            TOPIC_HINTS["start"],
        )
