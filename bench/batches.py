"""Batches of a stream: when each began, when it was durable, how far it went."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from cdc.apply.machine import Continue, Decision, Ends
from cdc.apply.stream import Stream
from cdc.model.position import Position

LATE_S = 30.0
Span = tuple[float, float, float]
"""Start and end in seconds, and records a second between them."""


@dataclass(frozen=True)
class Batch:
    """Times are Unix seconds. `ends` are offsets by topic and partition."""

    began: float
    durable: float
    rows: int
    ends: Ends

    def past(self, ends: Mapping[str, Position]) -> bool:
        return all(
            self.ends[topic][partition] >= offset
            for topic, end in ends.items()
            for partition, offset in enumerate(end.offsets)
        )


class Watched(Stream):
    """A stream that remembers its batches, and when it was first ready to begin one, Unix
    seconds.
    """

    began = 0.0

    def _follow(self, last_ends: Ends | None) -> Decision:
        self.began = self.began or time.time()
        self._remembered: list[Batch] = []
        return super()._follow(last_ends)

    def _apply(self, ends: Ends) -> Decision:
        began = time.time()
        rows_before = self.progress.applied.read
        decision = super()._apply(ends)
        if isinstance(decision, Continue):
            rows = self.progress.applied.read - rows_before
            self._remembered.append(Batch(began, time.time(), rows, ends))
        return decision

    def batches(self, ends: Mapping[str, Position] | None = None) -> list[Batch]:
        """Return the ended batches since the last start. With `ends`, wait until the last one is
        past them.
        """
        deadline = time.monotonic() + LATE_S
        while True:
            batches = list(self._remembered)
            if ends is None or (batches and batches[-1].past(ends)):
                return batches
            if time.monotonic() > deadline:
                raise TimeoutError(f"{self.sink.name} hasn't applied its last batch")
            time.sleep(0.1)


def spans(batches: Sequence[Batch], start: float, early_s: float) -> list[Span]:
    """Return a span for each batch with rows that began after `start`, or up to `early_s` before;
    times count from `start`.
    """
    return [
        (batch.began - start, batch.durable - start, batch.rows / (batch.durable - batch.began))
        for batch in batches
        if batch.rows and batch.began >= start - early_s
    ]
