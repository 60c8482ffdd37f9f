"""The newest heartbeat of a pipeline: the row its connector updates in Postgres, arrived in Kafka.

It proves the whole way: a connector can be RUNNING while nothing gets through it.
"""

import json
from dataclasses import dataclass

from cdc.config.settings import Pipeline
from cdc.kafka.records import Record
from cdc.kafka.topics import Topics


@dataclass(frozen=True)
class Heartbeat:
    """Times are Unix milliseconds: `committed_ms` by Postgres' clock, `arrived_ms` by the connector's."""

    offset: int
    committed_ms: int
    arrived_ms: int

    @property
    def delay_s(self) -> float:
        return max(0.0, (self.arrived_ms - self.committed_ms) / 1000)


def last_heartbeat(topics: Topics, pipeline: Pipeline) -> Heartbeat | None:
    """The newest beat that came from the log. The connector beats only after its snapshot is complete."""

    def streamed(record: Record) -> bool:
        return _beat(record, pipeline.pipeline) is not None

    record = topics.last_record(pipeline.heartbeat_topic, streamed)
    return _beat(record, pipeline.pipeline) if record else None


def _beat(record: Record, pipeline: str) -> Heartbeat | None:
    """None for the row of another pipeline in the same database, and for what isn't a beat from the log."""
    envelope = json.loads(record.value) if record.value else {}
    row, source = envelope.get("after") or {}, envelope.get("source") or {}
    if envelope.get("op") not in ("c", "u") or row.get("pipeline") != pipeline:
        return None
    return Heartbeat(record.offset, int(source["ts_ms"]), record.timestamp_ms)
