"""Name the requests by which a topic gets all rows of its table, and check whether the last one is
served.

In:  the topics of the connector's signals and heartbeats, where a request comes first and its mark
after the rows. Out: whether a topic has the rows that were requested for it.
"""

import json
from typing import TYPE_CHECKING

from cdc.kafka.records import Record
from cdc.model.position import Position

if TYPE_CHECKING:
    from cdc.config.settings import Pipeline
    from cdc.kafka.topics import Topics


def request_name(reason: str, end: Position) -> str:
    """Name the request of a topic's rows; `end`: where the topic ends when they are requested."""
    return f"{reason.rsplit(maxsplit=1)[-1][:3]}-{end.topic_id}-{sum(end.offsets)}"


def is_filled(
    kafka: "Topics", pipeline: "Pipeline", topic_id: str, since_lsn: int = 0
) -> bool | None:
    """Whether the topic with this id has the rows that were last requested for it, at an LSN or
    later. None if none were requested: a topic doesn't show by itself whether rows are missing.

    Raises ConnectorError.
    """

    def concerns(record: Record) -> bool:
        return (
            _op(record) in ("c", "r")
            and f"-{topic_id}-" in _name(record)
            and _lsn(record) >= since_lsn
        )

    request = kafka.last_record(pipeline.topic("cdc.signal"), concerns)
    if request is None:
        return None
    # Beside the log the mark is the request's own row, read again; with the log held up it is among
    # the heartbeats.
    return _op(request) == "r" or _is_marked(kafka, pipeline.heartbeat_topic, request)


def _is_marked(kafka: "Topics", topic: str, request: Record) -> bool:
    ends = kafka.ends([topic])
    (start,) = kafka.offsets_since({topic: request.timestamp_ms / 1000}, ends)[topic].offsets
    records = kafka.read_range(topic, start, ends[topic].offsets[0])
    return any(_op(record) == "r" and _name(record) == _name(request) for record in records)


def _op(record: Record) -> str:
    """The kind of change; nothing for a tombstone."""
    return str(json.loads(record.value).get("op")) if record.value else ""


def _lsn(record: Record) -> int:
    """The place of a change in the log of Postgres; 0 where the record names none."""
    source = json.loads(record.value or b"{}").get("source") or {}
    return int(source.get("lsn") or 0)


def _name(record: Record) -> str:
    """The value of the key, which has one column."""
    return str(next(iter(json.loads(record.key or b"{}").values()), ""))
