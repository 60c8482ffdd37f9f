"""A one-partition topic of the pipeline's own, followed: each read costs what has been written since the last.

In:  the topic; what takes its records. Out: nothing but calls, in the order of offsets.
Invariant: what has been taken stands for all that the topic ever said. A reader that was at its end lately misses
nothing that compaction removes: a deletion stays for a day at least (`topics.RETENTION_MS`).
"""

import time
from collections.abc import Callable, Mapping

from cdc.kafka.records import Record
from cdc.kafka.topics import Topics
from cdc.model.position import Position

ABSENT_S = 12 * 3600.0
"""One that hasn't been at the end for so long begins again: deletions may have gone by now."""


class Tail:
    """`begin` is called before the first record, and again when it is another topic: all comes again then.

    `take` is given each record once. What it raises is raised by `read`, which gives it that record again.
    """

    def __init__(self, kafka: Topics, topic: str, *, begin: Callable[[], object], take: Callable[[Record], object]):
        self.topic, self._kafka, self._begin, self._take = topic, kafka, begin, take
        self._end: Position | None = None
        self._next = 0
        self._level_at = 0.0

    def read(self, end: Position | None = None) -> None:
        """Take what has been written up to now, or to `end`. Raises ConnectorError; it goes on from there."""
        end = end or self._kafka.ends([self.topic])[self.topic]
        if self._other(end):
            self._begin()
            self._next = self._kafka.starts([self.topic])[self.topic].offsets[0]
            self._end = Position(end.topic_id, (self._next,))
            self._level_at = time.time()
        if self._next < end.offsets[0]:
            for record in self._kafka.iterate_range(self.topic, self._next, end.offsets[0]):
                self._take(record)
                self._next = record.offset + 1
        self._next = max(self._next, end.offsets[0])
        self._end, self._level_at = end, time.time()

    def has_changed(self, ends: Mapping[str, Position] | None = None) -> bool:
        """Whether `read` would find something; `ends`: where the topic ends, if that was just asked."""
        if self._end is None:
            return True
        end = (ends or self._kafka.ends([self.topic]))[self.topic]
        if end != self._end or self._absent():
            return True
        self._level_at = time.time()
        return False

    def _other(self, end: Position) -> bool:
        """Whether what has been taken isn't the beginning of what is there."""
        before = self._end
        gone = before is None or before.topic_id != end.topic_id or end.offsets[0] < self._next
        return gone or self._absent()

    def _absent(self) -> bool:
        return time.time() - self._level_at > ABSENT_S
