"""Follow a one-partition topic of the pipeline: each read costs only the records since the last
one.

In:  the topic; a function that takes its records. Out: calls of it, in the order of offsets.
Invariant: the records taken account for all that the topic ever held. A reader that was at the end
within the last hours misses nothing that compaction removes: a tombstone stays for a day at least
(`topic_setup.RETENTION_MS`).
"""

import time
from collections.abc import Callable, Mapping

from cdc.kafka.records import Record
from cdc.kafka.topics import Topics
from cdc.model.position import Position

ABSENT_S = 12 * 3600.0
"""A reader that hasn't been at the end for so long starts again: tombstones may have been removed
meanwhile.
"""


class Tail:
    """A reader that remembers its offset. One thread uses it.

    `begin` is called before the first record, and again if the topic was recreated: all records
    come again then. `take` gets each record once. An error of `take` is raised by `read`, and the
    next `read` passes that record again.
    """

    def __init__(
        self,
        kafka: Topics,
        topic: str,
        *,
        begin: Callable[[], object],
        take: Callable[[Record], object],
        now: Callable[[], float] = time.time,
    ) -> None:
        """`now` returns Unix seconds."""
        self.topic = topic
        self._kafka = kafka
        self._begin = begin
        self._take = take
        self._now = now
        self._end: Position | None = None
        self._next = 0
        self._last_at_end = 0.0

    def read(self, end: Position | None = None) -> None:
        """Take the records up to the topic's end, or to `end`. After a ConnectorError the next call
        resumes there.
        """
        end = end or self._kafka.ends([self.topic])[self.topic]
        if self._must_restart(end):
            self._begin()
            self._next = self._kafka.starts([self.topic])[self.topic].offsets[0]
            self._end = Position(end.topic_id, (self._next,))
            self._last_at_end = self._now()
        if self._next < end.offsets[0]:
            for record in self._kafka.iterate_range(self.topic, self._next, end.offsets[0]):
                self._take(record)
                self._next = record.offset + 1
        self._next = max(self._next, end.offsets[0])
        self._end = end
        self._last_at_end = self._now()

    def has_changed(self, ends: Mapping[str, Position] | None = None) -> bool:
        """Whether `read` would take something. `ends`: ends of topics, if the caller has just asked
        for them.
        """
        if self._end is None:
            return True
        end = (ends or self._kafka.ends([self.topic]))[self.topic]
        if end != self._end or self._was_absent():
            return True
        self._last_at_end = self._now()
        return False

    def _must_restart(self, end: Position) -> bool:
        """Whether the records taken aren't the beginning of those in the topic."""
        is_other = self._end is None or self._end.topic_id != end.topic_id
        return is_other or end.offsets[0] < self._next or self._was_absent()

    def _was_absent(self) -> bool:
        return self._now() - self._last_at_end > ABSENT_S
