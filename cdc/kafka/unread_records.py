"""Compute until when a view can't have missed a delete, from its offsets and the times of a log.

A view that stood still misses a delete for good if compaction has removed its tombstone meanwhile.
No tombstone is removed sooner than `delete.retention.ms` after it was written, nor sooner than that
after a reader saw the row that it deletes: the cleaner removes that row first. So a view has missed
no delete while the oldest record that it hasn't read, or the start of its first reading, is
younger.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from cdc.kafka.ledger import Hole
from cdc.kafka.records import RecordAddress
from cdc.model.position import Position, ViewCheckpoint, distance

NextRecords = Mapping[RecordAddress, tuple[int, int] | None]
"""The offset of the first record at or after a place, and its time in Unix milliseconds; None:
there is none.
"""


@dataclass(frozen=True)
class Log:
    """What a topic holds for the views that resume from it, as of `read_at`, in Unix seconds.

    `retention_s`: how long tombstones stay. `recent`: the first offsets written within the last
    half of that time.
    """

    start: Position
    end: Position
    retention_s: float
    recent: Position
    read_at: float


def pending_records(
    topic: str, stored: ViewCheckpoint | None, end: Position
) -> list[RecordAddress]:
    """The address of the next record of each partition that isn't applied to its end."""
    if not distance(stored, end).comparable:
        return []
    offsets = stored.position.offsets if stored else (0,) * end.partition_count
    pairs = enumerate(zip(offsets, end.offsets, strict=True))
    return [(topic, partition, offset) for partition, (offset, last) in pairs if offset < last]


def uncertain_records(log: Log, topic: str, stored: ViewCheckpoint | None) -> list[RecordAddress]:
    """The addresses at which only the next record shows how long a view has been behind."""
    if stored is None:
        return []
    return [
        (topic, partition, offset)
        for _, partition, offset in pending_records(topic, stored, log.end)
        if offset < log.recent.offsets[partition]
    ]


def safe_until(
    log: Log,
    topic: str,
    stored: ViewCheckpoint | None,
    following: NextRecords,
    created_at: float = 0.0,
) -> float:
    """Until when a view can't have missed a delete, in Unix seconds.

    A time before `log.read_at` means that it may have missed one.

    `created_at`: when the view began to read from offset zero, or earlier.
    """
    if stored is None:
        return log.read_at + log.retention_s
    return max(created_at, _unseen_since(log, topic, stored, following)) + log.retention_s


def hole_behind(
    log: Log, topic: str, stored: ViewCheckpoint, following: NextRecords, removable: Position
) -> Hole:
    """The changes that a log of changes at this checkpoint may have missed; records below
    `removable` needn't stay.
    """
    end = tuple(map(max, stored.position.offsets, removable.offsets))
    oldest = _unseen_since(log, topic, stored, following)
    latest = max(oldest, log.read_at - log.retention_s)
    return Hole(stored.position, Position(removable.topic_id, end), oldest, latest)


def _unseen_since(log: Log, topic: str, stored: ViewCheckpoint, following: NextRecords) -> float:
    """The earliest time at which records that the view lacks may have been written, in Unix seconds."""
    times = []
    for address in pending_records(topic, stored, log.end):
        _, partition, offset = address
        if offset >= log.recent.offsets[partition]:
            times.append(log.read_at - log.retention_s / 2)
            continue
        next_offset, written_ms = following[address] or (None, log.read_at * 1000)
        # Where compaction removed the records in between, their times are unknown. The view stored its
        # checkpoint before they were written.
        latest = stored.changed_at if next_offset != offset else float("inf")
        times.append(min(written_ms / 1000, latest))
    return min(times, default=log.read_at)
