"""Whether topics are still what can be replayed, and what views may have missed: told by settings and positions alone.

In:  the broker, the pipeline file, where each view stands. Out: findings; no record is read but the first one that a
view hasn't applied.
"""

import time
from collections.abc import Iterator, Mapping

from cdc.change import Position, Reach, Stored, Table, distance
from cdc.continuity import check_shape, refuse_gap
from cdc.errors import ConnectorError
from cdc.finding import ANEW, Finding
from cdc.settings import Pipeline
from cdc.status import waiting
from cdc.topics import Topics, wanted

CONTROL = ("cdc.truncation", "cdc.ddl")
"""Tables whose topics a replay reads as well."""
RETENTION = "delete.retention.ms"
NEVER = -1


def of_topics(kafka: Topics, pipeline: Pipeline, table: Table) -> list[Finding]:
    """What is wrong with a table's topic, and with those that a replay needs besides."""
    topics = [table.topic, *map(pipeline.topic, CONTROL)]
    existing = kafka.existing(topics)
    found = [Finding("missing", 1, f"there is no topic {topic}", ANEW) for topic in topics if topic not in existing]
    there = [topic for topic in topics if topic in existing]
    settings, starts = kafka.settings(there), kafka.starts(there)
    for topic in there:
        found += _shape(topic, wanted(pipeline)[topic], starts[topic], settings[topic]["cleanup.policy"])
    kept_h = int(settings.get(table.topic, {}).get(RETENTION, 0)) / 3_600_000
    if table.topic in existing and kept_h < pipeline.delete_retention_hours:
        what = f"tombstones are kept for {kept_h:g} h, the pipeline file says {pipeline.delete_retention_hours:g} h"
        found.append(Finding("retention", 1, what, "cdc -p FILE topics brings it up to the file"))
    return found


def of_views(kafka: Topics, table: Table, views: Mapping[str, Stored | None]) -> list[Finding]:
    """Views that can't go on from where they stand, or that may have missed deletes."""
    start, end = kafka.starts([table.topic])[table.topic], kafka.ends([table.topic])[table.topic]
    retention_ms = int(kafka.settings([table.topic])[table.topic][RETENTION])
    found = []
    for name, stored in views.items():
        if stored is None:
            continue
        at = stored.position
        if distance(at, end).reach is Reach.REPARTITIONED:
            what = (
                f"view {name} was made from {at.partition_count} partitions of {end.partition_count}: keys have moved"
            )
            found.append(Finding("partitions", 1, what, ANEW))
            continue
        try:
            refuse_gap(name, table, start, end, at)
        except ConnectorError as error:
            found.append(Finding("behind", 1, f"view {name}: {error.message}", f"cdc -p FILE rebuild {name}"))
            continue
        if _misses(kafka, table, stored, end, retention_ms):
            what = (
                f"view {name} of {table.qualified} may have missed deletes: it is further behind than tombstones last"
            )
            found.append(Finding("deletes", 1, what, f"cdc -p FILE rebuild {name} --table {table.qualified}"))
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


def _misses(kafka: Topics, table: Table, stored: Stored, end: Position, retention_ms: int) -> bool:
    """Whether a tombstone that the view hasn't seen may be gone: it would be older than they are kept.

    Of what lay between the view and the first record after it nothing tells the time; the view was there before.
    """
    places = waiting(table.topic, stored, end)
    first, now_ms = kafka.first(places), time.time() * 1000
    for place in places:
        offset, at_ms = first.get(place, (NEVER, now_ms))
        since_ms = at_ms if offset == place[2] else min(at_ms, stored.at * 1000)
        if now_ms - since_ms > retention_ms:
            return True
    return False
