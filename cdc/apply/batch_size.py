"""How many offsets a batch of a stream may span: `cdc.apply.pace`, asked with what the topics hold."""

from cdc.apply import pace
from cdc.apply.plan import ResumePlan
from cdc.kafka.topics import Topics
from cdc.model.position import distance


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
            self._limit = pace.first(there, self._kafka.kept_bytes(topics))
        return self._limit

    def fits(self, plan: ResumePlan, offsets: int, took_s: float) -> bool:
        """Whether the limit suits what is left, when a batch of so many offsets has taken so long; else it changes."""
        if offsets < self._limit / 2:
            return True
        ends = self._kafka.ends(list(plan.shapes))
        remaining = plan.behind({topic: dict(enumerate(end.offsets)) for topic, end in ends.items()})
        before, self._limit = self._limit, pace.fitting(self._limit, offsets, took_s, remaining)
        return self._limit == before
