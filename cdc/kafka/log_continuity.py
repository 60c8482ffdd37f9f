"""Decide whether a topic can continue a view from its position: guarantee G5.

In:  the topics' starts, ends and settings, the ledger, positions of views. Out: Discontinued, with
a hint that repairs.

A view that stood still misses a delete for good if compaction has removed its tombstone meanwhile.
No tombstone is removed sooner than `delete.retention.ms` after it was written, nor sooner than that
after a reader saw the row that it deletes: the cleaner removes that row first. So a view has missed
no delete while the oldest record that it hasn't read, or the start of its first reading, is
younger.
"""

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from cdc.errors import ConnectorError
from cdc.kafka.ledger import Compaction, Hole, Ledger
from cdc.model.generation import generation_time
from cdc.model.position import Distance, Position, Reach, ViewCheckpoint, distance
from cdc.model.table import Table

if TYPE_CHECKING:
    from cdc.config.settings import Pipeline
    from cdc.kafka.topics import Topics

RecordAddress = tuple[str, int, int]
"""Topic, partition, offset."""
NextRecords = Mapping[RecordAddress, tuple[int, int] | None]
"""The offset of the first record at or after a place, and its time in Unix milliseconds; None:
there is none.
"""
RETENTION = "delete.retention.ms"
COMPACTION_LAG = "min.compaction.lag.ms"
HOLES_S = 60.0
"""The shortest time between two checks of a log of changes that is too far behind; also how far
behind it may be where nothing is set.
"""
LEAST_S = 1.0
"""The shortest time between two checks of any view."""


class Discontinued(ConnectorError):
    """The log can't continue a view; other views may go on. `kind` is the name of the finding in an
    audit.
    """

    def __init__(self, message: str, *, kind: str = "behind", hint: str, **where: object) -> None:
        super().__init__(message, hint=hint, **where)
        self.kind = kind


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
    compaction: Compaction | None = None
    removal: Compaction | None = None
    """The last compaction that removed records which otherwise stay for `retention_s`."""


class Continuity:
    """The logs of the pipeline's tables, as of the last `read`. Reads a record only if offsets
    don't decide.
    """

    def __init__(self, pipeline: "Pipeline", kafka: "Topics") -> None:
        self._pipeline, self._kafka = pipeline, kafka
        self.ledger = Ledger(pipeline, kafka)
        self._next: dict[RecordAddress, tuple[int, int] | None] = {}
        self._compaction_lag_s: dict[str, float] = {}
        self.logs: dict[str, Log] = {}
        self.sure_until = float("inf")
        """Until when no accepted view can have missed a delete, in Unix seconds."""

    def read(self, topics: Sequence[str]) -> "Continuity":
        """Load starts, ends and settings of the topics, and the ledger. Raises ConnectorError."""
        self._next, self.sure_until, now = {}, float("inf"), time.time()
        self.ledger.read()
        starts, ends, settings = (
            self._kafka.starts(topics),
            self._kafka.ends(topics),
            self._kafka.settings(topics),
        )
        configured_s = self._pipeline.delete_retention_hours * 3600
        changes_kept_s = self._pipeline.changes_kept_s
        lags = {
            topic: min(changes_kept_s, int(settings[topic][COMPACTION_LAG]) / 1000)
            for topic in topics
        }
        self._compaction_lag_s = {topic: lag or HOLES_S for topic, lag in lags.items()}
        retention = {
            topic: min(configured_s, int(settings[topic][RETENTION]) / 1000) for topic in topics
        }
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
                self.ledger.compacted.get(topic),
                self.ledger.tombstones_removed.get(topic),
            )
            for topic in topics
        }
        return self

    def load_next_records(self, views: Iterable[tuple[Table, ViewCheckpoint | None]]) -> None:
        """Load the next record of each view that needs it, in one request for all. Raises
        ConnectorError.
        """
        places = {
            place
            for table, stored in views
            for place in uncertain_records(self.logs[table.topic], table.topic, stored)
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
        places = {
            place
            for table, stored in checkpoints.items()
            for place in uncertain_records(logs[table.topic], table.topic, stored)
        }
        self._next |= self._kafka.next_records(places - self._next.keys())
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
        """The same logs for views that need superseded records: retention and compaction are those
        of such records.
        """
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
                removal=log.compaction,
            )
            for topic, log in logs.items()
        }

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
        log = self.logs[table.topic]
        refuse_foreign(self._kafka, sink, table, stored, log.end)
        refuse_gap(sink, table, log.start, log.end, stored.position if stored else None)
        self.load_next_records([(table, stored)])
        created_at = 0.0 if complete or stored is None else generation_time(stored.generation)
        sure_until = safe_until(log, table.topic, stored, self._next, created_at)
        if sure_until < log.read_at:
            raise Discontinued(
                f"The view of {table.qualified} in {sink} may have missed deletes: it is further behind than tombstones"
                " last.",
                kind="deletes",
                hint=f"cdc -p FILE rebuild {sink} --table {table.qualified}",
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
    """The addresses at which only the next record tells how long a view has been behind."""
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
    removal = log.removal
    overlaps = removal is not None and (not removal.ended or created_at < removal.ended)
    if removal and overlaps and distance(stored.position, removal.position).reach is Reach.BEHIND:
        return 0.0
    unseen = [
        _unseen_since(log, address, stored, following)
        for address in pending_records(topic, stored, log.end)
    ]
    return max(created_at, min(unseen, default=log.read_at)) + log.retention_s


def hole_behind(
    log: Log, topic: str, stored: ViewCheckpoint, following: NextRecords, removable: Position
) -> Hole:
    """The changes that a log of changes at this checkpoint may have missed; records below
    `removable` needn't stay.
    """
    below = (
        log.removal.position.offsets
        if log.removal and log.removal.position.topic_id == removable.topic_id
        else ()
    )
    removed = map(max, removable.offsets, below or removable.offsets)
    end = tuple(map(max, stored.position.offsets, removed))
    unseen = [
        _unseen_since(log, address, stored, following)
        for address in pending_records(topic, stored, log.end)
    ]
    oldest = min(unseen, default=log.read_at)
    latest = max(oldest, log.read_at - log.retention_s)
    return Hole(stored.position, Position(removable.topic_id, end), oldest, latest)


def _unseen_since(
    log: Log, address: RecordAddress, stored: ViewCheckpoint, following: NextRecords
) -> float:
    """The earliest time at which the records from an address on may have been written, in Unix
    seconds.
    """
    _, partition, offset = address
    if offset >= log.recent.offsets[partition]:
        earliest = log.read_at - log.retention_s / 2
    else:
        next_offset, written_ms = following[address] or (None, log.read_at * 1000)
        earliest = written_ms / 1000
        if next_offset != offset:
            # Compaction removed the records in between, so nothing tells their times. The view
            # stored its checkpoint before they were written.
            earliest = min(earliest, stored.changed_at)
    compaction = log.compaction
    if (
        compaction
        and compaction.position.topic_id == log.end.topic_id
        and offset >= compaction.position.offsets[partition]
    ):
        earliest = max(earliest, compaction.began)
    return earliest


def refuse_foreign(
    kafka: "Topics", sink: str, table: Table, stored: ViewCheckpoint | None, end: Position
) -> None:
    """Refuse a view of another pipeline's topic: a rebuild would take it away from that pipeline.

    Raises:
        Discontinued: naming that topic. A topic of another cluster can't be recognised.
    """
    if stored is None or distance(stored, end).reach is not Reach.OTHER_TOPIC:
        return
    actual_topic = kafka.topic_name(stored.position.topic_id)
    if actual_topic and actual_topic != table.topic:
        raise Discontinued(
            f"The view of {table.qualified} in {sink} is another pipeline's: it was made from {actual_topic}.",
            hint=f"give the sink {sink} a prefix or path of its own in the pipeline file",
            topic=table.topic,
            sink=sink,
        )


def refuse_gap(
    sink: str, table: Table, start: Position, end: Position, position: Position | None
) -> None:
    """Refuse a view at `position` that the log, from `start` to `end`, can't continue.

    Raises:
        Discontinued: the topic is another one, has other partitions, or no longer holds the next
            record.
    """
    name = table.topic
    repair = f"cdc -p FILE rebuild {sink} --table {table.qualified}"
    anew = f"{renewal(table.qualified)}, then {repair}"
    if position is None:
        if any(start.offsets):
            raise Discontinued(
                f"{name} no longer holds its first records (it starts at {list(start.offsets)}); a view made from it"
                " would lack rows.",
                hint=anew,
                topic=name,
            )
        return
    lag = distance(position, end)
    if lag.reach is Reach.OTHER_TOPIC:
        problem = "is not the topic that the view was made from: it has been created anew"
    elif lag.reach is Reach.REPARTITIONED:
        problem = (
            f"has {end.partition_count} partitions, "
            f"the view was made from {position.partition_count}: keys have moved"
        )
    elif any(offset < first for offset, first in zip(position.offsets, start.offsets, strict=True)):
        problem = f"has lost records that the view still needs (it starts at {list(start.offsets)})"
    elif any(offset > last for offset, last in zip(position.offsets, end.offsets, strict=True)):
        problem = f"ends at {list(end.offsets)}, before the view's position {list(position.offsets)}: its log was cut"
    else:
        return
    kind, hint = ("partitions", anew) if lag.reach is Reach.REPARTITIONED else ("behind", repair)
    if lag.reach is Reach.OTHER_TOPIC:
        hint = f"{repair}; where a pipeline of another Kafka writes to it: give {sink} a place of its own instead"
    raise Discontinued(f"{name} {problem}.", kind=kind, hint=hint, topic=name, sink=sink)


def refuse_incomparable(sink: str, table: Table, lag: Distance) -> None:
    """Refuse to wait for a view whose offsets count other records: it never catches up. Raises
    Discontinued.
    """
    if lag.comparable:
        return
    repair = f"cdc -p FILE rebuild {sink} --table {table.qualified}"
    moved = lag.reach is Reach.REPARTITIONED
    raise Discontinued(
        f"The view of {table.qualified} in {sink} {lag.reach}.",
        hint=f"{renewal(table.qualified)}, then {repair}" if moved else repair,
        topic=table.topic,
        sink=sink,
    )


def renewal(table: str) -> str:
    """The command that creates a topic anew, for one whose records can't make correct views."""
    return f"cdc -p FILE topics renew --table {table}"


def check_shape(
    topic: str, partitions: int, actual: int, policy: str, original: int | None = None
) -> None:
    """Refuse a topic that differs from what `Topics.ensure` creates. Raises ConnectorError.

    `original`: the number of partitions that it was created with; None if unknown.
    """
    _, _, table = topic.partition(".")
    if actual != (original or actual):
        raise ConnectorError(
            f"Topic {topic} has {actual} partitions, it was made with {original}: keys have moved, their records"
            " have no order.",
            hint=f"{renewal(table)}, then cdc -p FILE rebuild of its views",
            topic=topic,
        )
    if actual != partitions:
        raise ConnectorError(
            f"Topic {topic} has {actual} partitions, the pipeline file says {partitions}.",
            hint=f"{renewal(table)}, then cdc -p FILE rebuild of its views; or write partitions: {actual} again",
            topic=topic,
        )
    if policy != "compact":
        raise ConnectorError(
            f"Topic {topic} has cleanup.policy {policy}, the pipeline takes compact: it may have lost records.",
            hint=f"{renewal(table)}, then cdc -p FILE rebuild of its views",
            topic=topic,
        )


def missing_topic(topic: str) -> ConnectorError:
    """The error for a topic that doesn't exist."""
    return ConnectorError(
        f"There is no topic {topic}.",
        hint="create the topics with: cdc -p FILE register",
        topic=topic,
    )
