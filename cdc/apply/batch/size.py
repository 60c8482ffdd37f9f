"""Adapt the size of a stream's batches: as many offsets as the sink applies in about ten seconds.

A batch costs most of a second besides its records, and a large one writes a row once that has
changed often. A batch that takes long is stopped late and, after a crash, repeated. Limiting its
duration also limits its bytes, whatever the size of a record.
"""

from math import ceil

from cdc.apply.plan import Ends, ResumePlan
from cdc.kafka.topics import Topics
from cdc.model.position import distance

LEAST, MOST = 10_000, 1_000_000
"""Offsets: the bounds of a batch's limit."""
FIRST, FIRST_BYTES = 500_000, 64 << 20
"""Of a sink's first batch, at most: offsets, and bytes as the broker keeps them, compressed."""
TARGET_S = 10.0


class BatchSize:
    """The batch size of one stream; used by the thread that owns it."""

    def __init__(self, kafka: Topics) -> None:
        self._kafka, self._limit = kafka, 0

    def begin(self, plan: ResumePlan) -> None:
        """Set the first limit, which follows from the size of records, since no batch was timed
        yet.
        """
        if not self._limit:
            topics = list(plan.shapes)
            starts = self._kafka.starts(topics)
            available = sum(
                distance(start, plan.shapes[topic]).offsets for topic, start in starts.items()
            )
            self._limit = first_limit(available, self._kafka.log_size_bytes(topics))

    def limited(self, plan: ResumePlan, ends: Ends) -> Ends | None:
        """The ends of a batch of what the topics have up to `ends`, of so many offsets at most as
        the limit says; each partition gives its share of them. None: there is nothing new.
        """
        starts = plan.starts()
        missing = {
            topic: [
                max(0, ends[topic][partition] - start) for partition, start in enumerate(of_topic)
            ]
            for topic, of_topic in starts.items()
        }
        total = sum(map(sum, missing.values()))
        if not total:
            return None
        share = min(1.0, self._limit / total)
        return {
            topic: {
                # Rounded up, so that every partition moves.
                partition: start + ceil(share * missing[topic][partition])
                for partition, start in enumerate(of_topic)
            }
            for topic, of_topic in starts.items()
        }

    def adapt(self, offsets: int, took_s: float) -> None:
        """Adapt the limit after a batch of so many offsets, which took so long. A batch that is
        small for the limit says nothing about it.
        """
        if offsets >= self._limit / 2:
            self._limit = fitting_limit(offsets, took_s)


def first_limit(offsets: int, size_bytes: int) -> int:
    """The limit of the first batch, if so many offsets take so many bytes; 0 bytes means
    unknown.
    """
    return max(LEAST, min(FIRST, offsets * FIRST_BYTES // size_bytes)) if size_bytes else FIRST


def fitting_limit(offsets: int, took_s: float) -> int:
    """The limit from now on, after a batch of `offsets` took `took_s`."""
    return min(MOST, max(LEAST, int(offsets * TARGET_S / took_s)))
