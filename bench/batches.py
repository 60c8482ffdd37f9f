"""Batches of a stream as Spark tells of them: when each began, when it was durable, how far it
went.
"""

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from pyspark.sql.streaming.query import StreamingQuery

from cdc.apply.stream import Stream
from cdc.model.position import Position

REMEMBERED = {"spark.sql.streaming.numRecentProgressUpdates": "100000"}
"""Settings of the session: Spark would keep a hundred batches otherwise, 20 s of a quick sink's."""
LATE_S = 30.0
Span = tuple[float, float, float]
"""Start and end in seconds, and records a second between them."""


@dataclass(frozen=True)
class Batch:
    """Times are Unix seconds. `ends` are offsets by topic and partition."""

    began: float
    durable: float
    rows: int
    ends: Mapping[str, Mapping[str, int]]

    def past(self, ends: Mapping[str, Position]) -> bool:
        return all(
            self.ends[topic][str(partition)] >= offset
            for topic, end in ends.items()
            for partition, offset in enumerate(end.offsets)
        )


class Watched(Stream):
    """A stream that keeps its last query, ended or not, and when the first one was ready to begin,
    Unix seconds.
    """

    query: StreamingQuery
    began = 0.0

    def _start(self, folder: str, until_caught_up: bool) -> StreamingQuery:
        self.query = super()._start(folder, until_caught_up)
        self.began = self.began or time.time()
        return self.query

    def batches(self, ends: Mapping[str, Position] | None = None) -> list[Batch]:
        """Return the ended batches of the last query. With `ends`, wait until the last one is past
        them, because Spark tells of a batch after its end.
        """
        deadline = time.monotonic() + LATE_S
        while True:
            batches = [
                self._batch_of(progress)
                for progress in self.query.recentProgress
                if progress["sources"][0]["endOffset"]
            ]
            if ends is None or (batches and batches[-1].past(ends)):
                return batches
            if time.monotonic() > deadline:
                raise TimeoutError(f"{self.sink.name} hasn't told of its last batch")
            time.sleep(0.1)

    def _batch_of(self, progress: Any) -> Batch:
        began = datetime.fromisoformat(progress["timestamp"]).timestamp()
        took, source = progress["durationMs"], progress["sources"][0]
        durable = began + (took["triggerExecution"] - took.get("commitOffsets", 0)) / 1000
        return Batch(began, durable, progress["numInputRows"], _offsets(source["endOffset"]))


def _offsets(offsets: Any) -> Mapping[str, Mapping[str, int]]:
    return json.loads(offsets) if isinstance(offsets, str) else offsets or {}


def spans(batches: Sequence[Batch], start: float, early_s: float) -> list[Span]:
    """Return a span for each batch with rows that began after `start`, or up to `early_s` before;
    times count from `start`.
    """
    return [
        (batch.began - start, batch.durable - start, batch.rows / (batch.durable - batch.began))
        for batch in batches
        if batch.rows and batch.began >= start - early_s
    ]
