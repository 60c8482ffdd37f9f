"""Decide whether a topic can continue a view from its position: guarantee G5.

In:  the topics' starts, ends and settings, the ledger, positions of views. Out: Discontinued, with
a hint that repairs.

A view that stood still misses a delete for good if compaction has removed its tombstone meanwhile.
No tombstone is removed sooner than `delete.retention.ms` after it was written, nor sooner than that
after a reader saw the row that it deletes: the cleaner removes that row first. So a view has missed
no delete while the oldest record that it hasn't read, or the start of its first reading, is
younger.
"""

import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from cdc.config.view_settings import STATE
from cdc.kafka.ledger import Hole, Ledger
from cdc.kafka.log_refusals import (
    Discontinued,
    is_beyond,
    refuse_foreign,
    refuse_gap,
    remaking,
    unfilled_topic,
)
from cdc.kafka.records import Record, RecordAddress
from cdc.kafka.topic_setup import COMPACTION_LAG
from cdc.model.generation import generation_time
from cdc.model.position import Position, Reach, ViewCheckpoint, distance
from cdc.model.table import Table

if TYPE_CHECKING:
    from cdc.config.settings import Pipeline
    from cdc.kafka.topics import Topics

RETENTION = "delete.retention.ms"
HOLES_S = 60.0
"""The shortest time between two checks of a log of changes that is too far behind; also how far
behind it may be where nothing is set.
"""
LEAST_S = 1.0
"""The shortest time between two checks of any view."""


NextRecords = Mapping[RecordAddress, tuple[int, int] | None]
"""The offset of the first record at or after a place, and its time in Unix milliseconds; None:
there is none.
"""


@dataclass(frozen=True)
class Log:
    """What a topic holds for the views that resume from it, as of `read_at`, in Unix seconds.

    `retention_s`: how long tombstones stay. `recent`: the first offsets written within the last
    half of that time.
    """

    start: Position
    end: Position
    retention_s: float
    recent: Position
    read_at: float


class Continuity:
    """The logs of the pipeline's tables, as of the last `read`. Reads a record only if offsets
    don't decide.
    """

    def __init__(
        self, pipeline: "Pipeline", kafka: "Topics", now: Callable[[], float] = time.time
    ) -> None:
        """`now` returns Unix seconds."""
        self._pipeline = pipeline
        self._kafka = kafka
        self._now = now
        self.ledger = Ledger(pipeline, kafka)
        self._next: dict[RecordAddress, tuple[int, int] | None] = {}
        self._compaction_lag_s: dict[str, float] = {}
        self.logs: dict[str, Log] = {}
        self.sure_until = float("inf")
        """Until when no accepted view can have missed a delete, in Unix seconds."""

    def read(self, topics: Sequence[str]) -> "Continuity":
        """Load starts, ends and settings of the topics, and the ledger. Raises ConnectorError."""
        self._next = {}
        self.sure_until = float("inf")
        now = self._now()
        self.ledger.read()
        starts = self._kafka.starts(topics)
        ends = self._kafka.ends(topics)
        settings = self._kafka.settings(topics, (RETENTION, COMPACTION_LAG))
        configured_s = self._pipeline.delete_retention_hours * 3600
        changes_s = self._pipeline.changes_retention_hours * 3600
        retention: dict[str, float] = {}
        for topic in topics:
            retention[topic] = min(configured_s, int(settings[topic][RETENTION]) / 1000)
            lag_s = min(changes_s, int(settings[topic][COMPACTION_LAG]) / 1000)
            self._compaction_lag_s[topic] = lag_s or HOLES_S
        recent = self._kafka.offsets_since(
            {topic: now - retention[topic] / 2 for topic in topics}, ends
        )
        self.logs = {
            topic: Log(
                starts[topic],
                ends[topic],
                retention[topic],
                recent[topic],
                now,
            )
            for topic in topics
        }
        return self

    def load_next_records(
        self,
        views: Iterable[tuple[Table, ViewCheckpoint | None]],
        logs: Mapping[str, Log] | None = None,
    ) -> None:
        """Load the next record of each view that needs it, in one request for all. Raises
        ConnectorError.
        """
        logs = logs or self.logs
        places = {
            place
            for table, stored in views
            for place in uncertain_records(logs[table.topic], table.topic, stored)
        }
        self._next |= self._kafka.next_records(places - self._next.keys())

    def record_holes(self, sink: str, views: Iterable[tuple[Table, ViewCheckpoint | None]]) -> None:
        """Write to the ledger which changes these views may miss from now on. Raises
        ConnectorError.
        """
        checkpoints = {
            table: stored
            or ViewCheckpoint(Position(log.end.topic_id, (0,) * log.end.partition_count))
            for table, stored in views
            for log in [self.logs[table.topic]]
        }
        logs = self._logs_of_changes([table.topic for table in checkpoints])
        self.load_next_records(checkpoints.items(), logs)
        broken: dict[Table, ViewCheckpoint] = {}
        for table, stored in checkpoints.items():
            log = logs[table.topic]
            sure_until = safe_until(log, table.topic, stored, self._next)
            if sure_until < log.read_at:
                broken[table] = stored
                sure_until = log.read_at + max(log.retention_s / 2, HOLES_S)
            self.sure_until = min(self.sure_until, max(sure_until, log.read_at + LEAST_S))
        removable = self._kafka.offsets_since(
            {t.topic: logs[t.topic].read_at - logs[t.topic].retention_s for t in broken}, self._ends
        )
        for table, stored in broken.items():
            hole = hole_behind(
                logs[table.topic], table.topic, stored, self._next, removable[table.topic]
            )
            self.ledger.add_hole(sink, table.topic, hole)

    @property
    def _ends(self) -> dict[str, Position]:
        return {topic: log.end for topic, log in self.logs.items()}

    def _logs_of_changes(self, topics: Sequence[str]) -> dict[str, Log]:
        """The same logs for views that need superseded records, with how long these are kept."""
        logs = {topic: self.logs[topic] for topic in topics}
        recent = self._kafka.offsets_since(
            {topic: log.read_at - self._compaction_lag_s[topic] / 2 for topic, log in logs.items()},
            self._ends,
        )
        return {
            topic: replace(
                log,
                retention_s=self._compaction_lag_s[topic],
                recent=recent[topic],
            )
            for topic, log in logs.items()
        }

    def resume(
        self, sink: str, table: Table, stored: ViewCheckpoint | None
    ) -> ViewCheckpoint | None:
        """Return the checkpoint that a view goes on from; None where it is read again from offset
        zero.

        Only the state of documents is, as it has no readers and no other generation. Raises as
        `refuse` does.
        """
        try:
            self.refuse(sink, table, stored)
        except Discontinued as refusal:
            if sink != STATE or not refusal.rereadable:
                raise
            self.refuse(sink, table, None)
            return None
        return stored

    def refuse_unfilled(
        self, sink: str, table: Table, stored: ViewCheckpoint | None, floor_lsn: int | None = None
    ) -> None:
        """Refuse to read a table of the state again whose topic may lack rows: documents would lack
        what readers have seen. Other views are made again beside those that readers see.

        `floor_lsn`: of a floor that the state hasn't carried out. Rows that were requested with it
        are waited for; a TRUNCATE requests none.

        Raises:
            Discontinued: a topic was recreated, or its records are dead, and not all rows that were
                requested for it have come. ConnectorError: the log can't be read.
        """
        end = self.logs[table.topic].end
        is_recreated = distance(stored, end).reach is Reach.OTHER_TOPIC
        if sink != STATE or not (is_recreated or floor_lsn is not None):
            return
        since_lsn = 0 if is_recreated else floor_lsn or 0
        filled = is_filled(self._kafka, self._pipeline, end.topic_id, since_lsn)
        if filled is False or (is_recreated and filled is None):
            raise unfilled_topic(table)

    def refuse(
        self, sink: str, table: Table, stored: ViewCheckpoint | None, *, complete: bool = False
    ) -> None:
        """Refuse a view that the log can't continue.

        `complete`: the view has once reached the end of its topic, so that its creation time
        doesn't count.

        Raises:
            Discontinued: with the view and the command that repairs it. ConnectorError: the log
                can't be read.
        """
        if stored and is_beyond(stored.position, self.logs[table.topic].end):
            # A run may have moved the view after the ends were read, so compare it with later ends.
            ends = self._kafka.ends(list(self.logs))
            self.logs = {topic: replace(log, end=ends[topic]) for topic, log in self.logs.items()}
        log = self.logs[table.topic]
        refuse_foreign(self._kafka, sink, table, stored, log.end)
        self.refuse_unfilled(sink, table, stored)
        refuse_gap(sink, table, log.start, log.end, stored.position if stored else None)
        if table.events:
            return
        self.load_next_records([(table, stored)])
        created_at = 0.0 if complete or stored is None else generation_time(stored.generation)
        sure_until = safe_until(log, table.topic, stored, self._next, created_at)
        if sure_until < log.read_at:
            raise Discontinued(
                f"The view of {table.qualified} in {sink} may have missed deletes: it is further behind than tombstones"
                " last.",
                rereadable=True,
                hint=remaking(sink, table.qualified),
                topic=table.topic,
                sink=sink,
            )
        self.sure_until = min(self.sure_until, max(sure_until, log.read_at + LEAST_S))


def pending_records(
    topic: str, stored: ViewCheckpoint | None, end: Position
) -> list[RecordAddress]:
    """The address of the next record of each partition that isn't applied to its end."""
    if not distance(stored, end).comparable:
        return []
    offsets = stored.position.offsets if stored else (0,) * end.partition_count
    pairs = enumerate(zip(offsets, end.offsets, strict=True))
    return [(topic, partition, offset) for partition, (offset, last) in pairs if offset < last]


def uncertain_records(log: Log, topic: str, stored: ViewCheckpoint | None) -> list[RecordAddress]:
    """The addresses at which only the next record shows how long a view has been behind."""
    if stored is None:
        return []
    return [
        (topic, partition, offset)
        for _, partition, offset in pending_records(topic, stored, log.end)
        if offset < log.recent.offsets[partition]
    ]


def safe_until(
    log: Log,
    topic: str,
    stored: ViewCheckpoint | None,
    following: NextRecords,
    created_at: float = 0.0,
) -> float:
    """Until when a view can't have missed a delete, in Unix seconds.

    A time before `log.read_at` means that it may have missed one.

    `created_at`: when the view began to read from offset zero, or earlier.
    """
    if stored is None:
        return log.read_at + log.retention_s
    return max(created_at, _unseen_since(log, topic, stored, following)) + log.retention_s


def hole_behind(
    log: Log, topic: str, stored: ViewCheckpoint, following: NextRecords, removable: Position
) -> Hole:
    """The changes that a log of changes at this checkpoint may have missed; records below
    `removable` needn't stay.
    """
    end = tuple(map(max, stored.position.offsets, removable.offsets))
    oldest = _unseen_since(log, topic, stored, following)
    latest = max(oldest, log.read_at - log.retention_s)
    return Hole(stored.position, Position(removable.topic_id, end), oldest, latest)


def _unseen_since(log: Log, topic: str, stored: ViewCheckpoint, following: NextRecords) -> float:
    """The earliest time at which records that the view lacks may have been written, in Unix seconds."""
    times = []
    for address in pending_records(topic, stored, log.end):
        _, partition, offset = address
        if offset >= log.recent.offsets[partition]:
            times.append(log.read_at - log.retention_s / 2)
            continue
        next_offset, written_ms = following[address] or (None, log.read_at * 1000)
        # Where compaction removed the records in between, their times are unknown. The view stored its
        # checkpoint before they were written.
        latest = stored.changed_at if next_offset != offset else float("inf")
        times.append(min(written_ms / 1000, latest))
    return min(times, default=log.read_at)


def request_name(reason: str, end: Position) -> str:
    """Name the request of a topic's rows; `end`: where the topic ends when they are requested."""
    return f"{reason.rsplit(maxsplit=1)[-1][:3]}-{end.topic_id}-{sum(end.offsets)}"


def is_filled(
    kafka: "Topics", pipeline: "Pipeline", topic_id: str, since_lsn: int = 0
) -> bool | None:
    """Whether the topic with this id has the rows that were last requested for it, at an LSN or
    later. None if none were requested: a topic doesn't show by itself whether rows are missing.

    A request comes first, its mark after the rows. Raises ConnectorError.
    """

    def concerns(record: Record) -> bool:
        return (
            record.change.get("op") in ("c", "r")
            and f"-{topic_id}-" in _name(record)
            and int((record.change.get("source") or {}).get("lsn") or 0) >= since_lsn
        )

    request = kafka.last_record(pipeline.topic("cdc.signal"), concerns)
    if request is None:
        return None
    # Beside the log the mark is the request's own row, read again; with the log held up it is among
    # the heartbeats.
    return request.change["op"] == "r" or _is_marked(kafka, pipeline.heartbeat_topic, request)


def _is_marked(kafka: "Topics", topic: str, request: Record) -> bool:
    ends = kafka.ends([topic])
    (start,) = kafka.offsets_since({topic: request.timestamp_ms / 1000}, ends)[topic].offsets
    records = kafka.read_range(topic, start, ends[topic].offsets[0])
    return any(
        record.change.get("op") == "r" and _name(record) == _name(request) for record in records
    )


def _name(record: Record) -> str:
    """The value of the key, which has one column."""
    return str(next(iter(json.loads(record.key or b"{}").values()), ""))
