"""Read the newest heartbeat of a pipeline: the row that its connector updates in Postgres, as it
arrived in Kafka.

It proves that changes come through. A connector can be RUNNING while none do.
"""

from dataclasses import dataclass

from cdc.config.settings import Pipeline
from cdc.kafka.records import Record
from cdc.kafka.topics import Topics

RECORDS = 32
"""Offsets in which to look for the first heartbeat since a time. Some are other pipelines' records,
some are transaction markers.
"""


@dataclass(frozen=True)
class Heartbeat:
    """A heartbeat. Times are Unix milliseconds: `committed_ms` by Postgres' clock, `arrived_ms` by
    the connector's. `lsn` is its position in Postgres' log, in bytes.
    """

    offset: int
    committed_ms: int
    arrived_ms: int
    lsn: int

    @property
    def delay_s(self) -> float:
        """Seconds between commit and arrival."""
        return max(0.0, (self.arrived_ms - self.committed_ms) / 1000)


def last_heartbeat(topics: Topics, pipeline: Pipeline) -> Heartbeat | None:
    """The newest heartbeat from the log. None before the connector's snapshot is complete."""

    def streamed(record: Record) -> bool:
        return _heartbeat(record, pipeline.pipeline) is not None

    record = topics.last_record(pipeline.heartbeat_topic, streamed)
    return _heartbeat(record, pipeline.pipeline) if record else None


def first_heartbeat_since(topics: Topics, pipeline: Pipeline, since: float) -> Heartbeat | None:
    """The first heartbeat that arrived at `since` (Unix seconds) or later. Also None if the first
    RECORDS offsets have only other pipelines' heartbeats.
    """
    topic = pipeline.heartbeat_topic
    ends = topics.ends([topic])
    (start,) = topics.offsets_since({topic: since}, ends)[topic].offsets
    records = topics.read_range(topic, start, min(start + RECORDS, ends[topic].offsets[0]))
    beats = (_heartbeat(record, pipeline.pipeline) for record in records)
    return next((beat for beat in beats if beat), None)


def _heartbeat(record: Record, pipeline: str) -> Heartbeat | None:
    """The heartbeat in a record. None for another pipeline's row, and for a snapshot's record."""
    change = record.change
    if (
        change.get("op") not in ("c", "u")
        or (change.get("after") or {}).get("pipeline") != pipeline
    ):
        return None
    source = change["source"]
    return Heartbeat(record.offset, int(source["ts_ms"]), record.timestamp_ms, int(source["lsn"]))
