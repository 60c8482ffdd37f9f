"""Positions of the parts of a warehouse's view: the log of changes and the mirror have one each.

Reading starts where neither part misses anything. So a batch may bring one of them events that it
has already: that part's position stays where it is.
"""

from collections.abc import Mapping
from dataclasses import replace

from cdc.model.position import Position, Reach, ViewCheckpoint, distance


def known_offsets(checkpoint: ViewCheckpoint | None, topic: Position) -> tuple[int, ...]:
    """Return by partition the offset below which a part has all records of a topic.

    topic: of which the id and the number of partitions matter. A part has no records of another topic
    of the same name. Partitions that were added since change nothing for the records of the others.
    """
    if checkpoint is None or distance(checkpoint, topic).reach is Reach.OTHER_TOPIC:
        return (0,) * topic.partition_count
    offsets = checkpoint.position.offsets
    return (offsets + (0,) * topic.partition_count)[: topic.partition_count]


def advance(checkpoint: ViewCheckpoint | None, end: Position) -> Position:
    """Return a part's position after a batch that ends at `end`: never before where it was."""
    return Position(end.topic_id, tuple(map(max, known_offsets(checkpoint, end), end.offsets)))


def oldest(changes: ViewCheckpoint | None, mirror: ViewCheckpoint | None) -> ViewCheckpoint | None:
    """Return where reading has to start so that neither part misses anything.

    None while there is no mirror.
    """
    if mirror is None:
        return None
    offsets = tuple(map(min, known_offsets(changes, mirror.position), mirror.position.offsets))
    return replace(mirror, position=Position(mirror.position.topic_id, offsets))


def oldest_of(parts: Mapping[str, ViewCheckpoint | None]) -> ViewCheckpoint | None:
    """Return the same of those parts that exist, by kind: a standby is a mirror alone."""
    mirror = parts["mirror"]
    return oldest(parts["changes"], mirror) if "changes" in parts else mirror
