"""Read the newest heartbeat of a pipeline: the row that its connector updates in Postgres, as it
arrived in Kafka.

It proves that changes come through; a connector can be RUNNING without that.
"""

import json
from dataclasses import dataclass

from cdc.config.settings import Pipeline
from cdc.kafka.records import Record
from cdc.kafka.topics import Topics

RECORDS = 32
"""Records among which the first heartbeat since a time is looked for: some are another pipeline's,
and some offsets are markers of transactions.
"""


@dataclass(frozen=True)
class Heartbeat:
    """A heartbeat; times are Unix milliseconds: `committed_ms` by Postgres' clock, `arrived_ms` by
    the connector's. `lsn`: its place in the log of Postgres, in bytes.
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
    """The newest heartbeat that came from the log. The connector sends none before its snapshot is
    complete.
    """

    def streamed(record: Record) -> bool:
        return _heartbeat(record, pipeline.pipeline) is not None

    record = topics.last_record(pipeline.heartbeat_topic, streamed)
    return _heartbeat(record, pipeline.pipeline) if record else None


def first_heartbeat_since(topics: Topics, pipeline: Pipeline, since: float) -> Heartbeat | None:
    """The first heartbeat that arrived at a time or later, in Unix seconds; None also where other
    pipelines' rows fill the records that are looked at.
    """
    topic = pipeline.heartbeat_topic
    ends = topics.ends([topic])
    (start,) = topics.offsets_since({topic: since}, ends)[topic].offsets
    records = topics.read_range(topic, start, min(start + RECORDS, ends[topic].offsets[0]))
    beats = (_heartbeat(record, pipeline.pipeline) for record in records)
    return next((beat for beat in beats if beat), None)


def _heartbeat(record: Record, pipeline: str) -> Heartbeat | None:
    """The heartbeat in a record; None for another pipeline's row, and for a record that isn't from
    the log.
    """
    envelope = json.loads(record.value) if record.value else {}
    row, source = envelope.get("after") or {}, envelope.get("source") or {}
    if envelope.get("op") not in ("c", "u") or row.get("pipeline") != pipeline:
        return None
    return Heartbeat(record.offset, int(source["ts_ms"]), record.timestamp_ms, int(source["lsn"]))
