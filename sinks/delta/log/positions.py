"""Where the two parts of a warehouse's view stand, and where a batch leads them: forward, each for itself.

The log of changes and the mirror have a position each. Reading starts where neither misses anything, so a batch may
bring one of them what it has: that one stays where it is.
"""

from collections.abc import Mapping
from dataclasses import replace

from cdc.model.position import Position, Reach, ViewCheckpoint, distance


def known(stored: ViewCheckpoint | None, topic: Position) -> tuple[int, ...]:
    """Below which offsets of a topic, of the id and partitions that `topic` has, a part knows all records.

    Of another topic of that name it knows none. Partitions that were added since leave the records of the others where
    they are.
    """
    if stored is None or distance(stored, topic).reach is Reach.OTHER_TOPIC:
        return (0,) * topic.partition_count
    offsets = stored.position.offsets
    return (offsets + (0,) * topic.partition_count)[: topic.partition_count]


def further(stored: ViewCheckpoint | None, until: Position) -> Position:
    """Where a part stands after a batch up to `until`: never before where it stood."""
    return Position(until.topic_id, tuple(map(max, known(stored, until), until.offsets)))


def oldest(changes: ViewCheckpoint | None, mirror: ViewCheckpoint | None) -> ViewCheckpoint | None:
    """Where reading has to start so that neither of the two misses anything; None while there is no mirror."""
    if mirror is None:
        return None
    offsets = tuple(map(min, known(changes, mirror.position), mirror.position.offsets))
    return replace(mirror, position=Position(mirror.position.topic_id, offsets))


def oldest_of(parts: Mapping[str, ViewCheckpoint | None]) -> ViewCheckpoint | None:
    """The same of the parts that there are, by kind: a second generation is a mirror alone."""
    mirror = parts["mirror"]
    return oldest(parts["changes"], mirror) if "changes" in parts else mirror
