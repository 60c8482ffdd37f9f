"""How many offsets a batch of a stream may span: what a sink applies in ten seconds.

A large batch costs most of a second besides its records, and writes a row once that has changed often. One that takes
long is stopped late and, after a crash, done again. Its bytes, whatever a record's size, are what the sink takes in
that time.
"""

from cdc.apply.plan import ResumePlan
from cdc.kafka.topics import Topics
from cdc.model.position import distance

LEAST, MOST = 10_000, 1_000_000
"""Offsets: the bounds of a batch."""
FIRST, FIRST_BYTES = 500_000, 64 << 20
"""Of a sink's first batch, at most: offsets, and bytes as the broker keeps them, compressed."""
TARGET_S = 10.0


class BatchSize:
    """Of one stream; used by the thread that owns it."""

    def __init__(self, kafka: Topics) -> None:
        self._kafka, self._limit = kafka, 0

    def limit(self, plan: ResumePlan) -> int:
        """The present one; the first is by how wide the records are, as it isn't known yet how long they take."""
        if not self._limit:
            topics = list(plan.shapes)
            starts = self._kafka.starts(topics)
            there = sum(distance(start, plan.shapes[topic]).offsets for topic, start in starts.items())
            self._limit = first_limit(there, self._kafka.log_size_bytes(topics))
        return self._limit

    def fits(self, plan: ResumePlan, offsets: int, took_s: float) -> bool:
        """Whether the limit suits what is left, when a batch of so many offsets has taken so long; else it changes."""
        if offsets < self._limit / 2:
            return True
        ends = self._kafka.ends(list(plan.shapes))
        remaining = plan.behind({topic: dict(enumerate(end.offsets)) for topic, end in ends.items()})
        before, self._limit = self._limit, fitting_limit(self._limit, offsets, took_s, remaining)
        return self._limit == before


def first_limit(offsets: int, kept_bytes: int) -> int:
    """How many offsets the first batch may span, when so many take so many bytes; 0 where that isn't known."""
    return max(LEAST, min(FIRST, offsets * FIRST_BYTES // kept_bytes)) if kept_bytes else FIRST


def fitting_limit(limit: int, offsets: int, took_s: float, left: int) -> int:
    """How many offsets a batch may span from now on, when one of so many has taken so long and so many are left.

    The same as before unless it is far off: another limit costs a start of the query, and half a batch takes more than
    half the time.
    """
    ideal = min(MOST, max(LEAST, int(offsets * TARGET_S / took_s)))
    slower, quicker = ideal < limit / 4 and left > ideal, ideal > limit * 2 and left > limit * 2
    return ideal if slower or quicker else limit
