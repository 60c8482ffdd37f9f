"""Adapt the size of a stream's batches: as many offsets as the sink applies in about ten seconds.

A batch costs most of a second besides its records, and a large one writes a row once that has
changed often. A batch that takes long is stopped late and, after a crash, repeated. Limiting its
duration also limits its bytes, whatever the size of a record.
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
    """The batch size of one stream; used by the thread that owns it."""

    def __init__(self, kafka: Topics) -> None:
        self._kafka, self._limit = kafka, 0

    def limit(self, plan: ResumePlan) -> int:
        """The present limit, in offsets. The first follows from the size of records, since no batch
        was timed yet.
        """
        if not self._limit:
            topics = list(plan.shapes)
            starts = self._kafka.starts(topics)
            available = sum(
                distance(start, plan.shapes[topic]).offsets for topic, start in starts.items()
            )
            self._limit = first_limit(available, self._kafka.log_size_bytes(topics))
        return self._limit

    def fits(self, plan: ResumePlan, offsets: int, took_s: float) -> bool:
        """Whether the limit suits the remaining offsets, after a batch of `offsets` took `took_s`;
        else it changes.
        """
        if offsets < self._limit / 2:
            return True
        ends = self._kafka.ends(list(plan.shapes))
        remaining = plan.behind(
            {topic: dict(enumerate(end.offsets)) for topic, end in ends.items()}
        )
        previous, self._limit = self._limit, fitting_limit(self._limit, offsets, took_s, remaining)
        return self._limit == previous


def first_limit(offsets: int, size_bytes: int) -> int:
    """The limit of the first batch, if so many offsets take so many bytes; 0 bytes means
    unknown.
    """
    return max(LEAST, min(FIRST, offsets * FIRST_BYTES // size_bytes)) if size_bytes else FIRST


def fitting_limit(limit: int, offsets: int, took_s: float, remaining: int) -> int:
    """The limit from now on, after a batch of `offsets` took `took_s` and `remaining` offsets are
    left.

    Unchanged unless it is far off: a new limit costs a start of the query, and half a batch takes
    more than half the time.
    """
    ideal = min(MOST, max(LEAST, int(offsets * TARGET_S / took_s)))
    slower, quicker = (
        ideal < limit / 4 and remaining > ideal,
        ideal > limit * 2 and remaining > limit * 2,
    )
    return ideal if slower or quicker else limit
