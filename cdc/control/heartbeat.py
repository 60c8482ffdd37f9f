"""Read the newest heartbeat of a pipeline: the row that its connector updates in Postgres, as it
arrived in Kafka.

It proves that changes come through; a connector can be RUNNING without that.
"""

import json
from dataclasses import dataclass

from cdc.config.settings import Pipeline
from cdc.kafka.records import Record
from cdc.kafka.topics import Topics


@dataclass(frozen=True)
class Heartbeat:
    """A heartbeat; times are Unix milliseconds: `committed_ms` by Postgres' clock, `arrived_ms` by
    the connector's.
    """

    offset: int
    committed_ms: int
    arrived_ms: int

    @property
    def delay_s(self) -> float:
        """Seconds between commit and arrival."""
        return max(0.0, (self.arrived_ms - self.committed_ms) / 1000)


def last_heartbeat(topics: Topics, pipeline: Pipeline) -> Heartbeat | None:
    """The newest heartbeat that came from the log. The connector sends none before its snapshot is
    complete.
    """

    def streamed(record: Record) -> bool:
        return _heartbeat(record, pipeline.pipeline) is not None

    record = topics.last_record(pipeline.heartbeat_topic, streamed)
    return _heartbeat(record, pipeline.pipeline) if record else None


def _heartbeat(record: Record, pipeline: str) -> Heartbeat | None:
    """The heartbeat in a record; None for another pipeline's row, and for a record that isn't from
    the log.
    """
    envelope = json.loads(record.value) if record.value else {}
    row, source = envelope.get("after") or {}, envelope.get("source") or {}
    if envelope.get("op") not in ("c", "u") or row.get("pipeline") != pipeline:
        return None
    return Heartbeat(record.offset, int(source["ts_ms"]), record.timestamp_ms)
