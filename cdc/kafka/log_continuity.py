"""Whether a topic is still what was made, and can continue a view from where it stands: guarantee G5.

In:  the topics' starts, ends and settings, the ledger, where views stand. Out: Discontinued, with what repairs it.

A view that was away misses a delete for good when its tombstone has gone meanwhile. No tombstone goes sooner than
`delete.retention.ms` after it was written, nor sooner than that after a reader found the row that it removes: the
cleaner removes that first. So a view has missed none while what it hasn't seen, or its first reading, is younger.
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
"""The offset of the first record at or after a place, and its time in Unix milliseconds; None: there is none."""
RETENTION = "delete.retention.ms"
COMPACTION_LAG = "min.compaction.lag.ms"
HOLES_S = 60.0
"""How often a log of changes is looked at that is too far behind, at most; how long it may be where nothing is set."""
LEAST_S = 1.0
"""How often anything is looked at, at most."""


class Discontinued(ConnectorError):
    """The log can't continue a view; other views may go on. `kind` is what an audit calls it."""

    def __init__(self, message: str, *, kind: str = "behind", hint: str, **where: object) -> None:
        super().__init__(message, hint=hint, **where)
        self.kind = kind


@dataclass(frozen=True)
class Log:
    """What a topic holds for views that go on from it, as it was `at` Unix seconds.

    `retention_s`: how long tombstones stay; `recent`: where what was written within half of that begins.
    """

    start: Position
    end: Position
    retention_s: float
    recent: Position
    at: float
    compaction: Compaction | None = None
    removal: Compaction | None = None
    """The last compaction that removed what is kept for `retention_s` else."""


class Continuity:
    """The logs of the pipeline's tables as `read` found them; asks for a record only where nothing less tells."""

    def __init__(self, pipeline: "Pipeline", kafka: "Topics") -> None:
        self._pipeline, self._kafka = pipeline, kafka
        self.ledger = Ledger(pipeline, kafka)
        self._next: dict[RecordAddress, tuple[int, int] | None] = {}
        self._kept_s: dict[str, float] = {}
        self.logs: dict[str, Log] = {}
        self.sure_until = float("inf")
        """Until when none of the views that were accepted can have missed a delete, in Unix seconds."""

    def read(self, topics: Sequence[str]) -> "Continuity":
        """Raises ConnectorError."""
        self._next, self.sure_until, now = {}, float("inf"), time.time()
        self.ledger.read()
        starts, ends, settings = self._kafka.starts(topics), self._kafka.ends(topics), self._kafka.settings(topics)
        named = self._pipeline.delete_retention_hours * 3600
        kept_s = self._pipeline.changes_kept_s
        lags = {topic: min(kept_s, int(settings[topic][COMPACTION_LAG]) / 1000) for topic in topics}
        self._kept_s = {topic: lag or HOLES_S for topic, lag in lags.items()}
        retention = {topic: min(named, int(settings[topic][RETENTION]) / 1000) for topic in topics}
        recent = self._kafka.offsets_since({topic: now - retention[topic] / 2 for topic in topics}, ends)
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

    def look(self, views: Iterable[tuple[Table, ViewCheckpoint | None]]) -> None:
        """Ask for the next records of all these views at once, where they are needed. Raises ConnectorError."""
        places = {
            place for table, stored in views for place in uncertain_records(self.logs[table.topic], table.topic, stored)
        }
        self._next |= self._kafka.next_records(places - self._next.keys())

    def holes(self, sink: str, views: Iterable[tuple[Table, ViewCheckpoint | None]]) -> None:
        """Take down what logs of changes miss that have read as far as these. Raises ConnectorError."""
        standing = {
            table: stored or ViewCheckpoint(Position(log.end.topic_id, (0,) * log.end.partition_count))
            for table, stored in views
            for log in [self.logs[table.topic]]
        }
        logs = self._as_kept([table.topic for table in standing])
        places = {
            place
            for table, stored in standing.items()
            for place in uncertain_records(logs[table.topic], table.topic, stored)
        }
        self._next |= self._kafka.next_records(places - self._next.keys())
        broken: dict[Table, ViewCheckpoint] = {}
        for table, stored in standing.items():
            log = logs[table.topic]
            sure_until = safe_until(log, table.topic, stored, self._next)
            if sure_until < log.at:
                broken[table] = stored
                sure_until = log.at + max(log.retention_s / 2, HOLES_S)
            self.sure_until = min(self.sure_until, max(sure_until, log.at + LEAST_S))
        gone = self._kafka.offsets_since(
            {t.topic: logs[t.topic].at - logs[t.topic].retention_s for t in broken}, self._ends
        )
        for table, stored in broken.items():
            hole = hole_behind(logs[table.topic], table.topic, stored, self._next, gone[table.topic])
            self.ledger.add_hole(sink, table.topic, hole)

    @property
    def _ends(self) -> dict[str, Position]:
        return {topic: log.end for topic, log in self.logs.items()}

    def _as_kept(self, topics: Sequence[str]) -> dict[str, Log]:
        """The same logs, for those who need superseded records: how long these stay, and what compaction has taken."""
        logs = {topic: self.logs[topic] for topic in topics}
        recent = self._kafka.offsets_since(
            {topic: log.at - self._kept_s[topic] / 2 for topic, log in logs.items()}, self._ends
        )
        return {
            topic: replace(log, retention_s=self._kept_s[topic], recent=recent[topic], removal=log.compaction)
            for topic, log in logs.items()
        }

    def refuse(self, sink: str, table: Table, stored: ViewCheckpoint | None, *, complete: bool = False) -> None:
        """Stop where the log can't continue a view.

        `complete`: the view was whole before, so that nothing counts from when it was made.

        Raises:
            Discontinued: naming the view and what repairs it. ConnectorError: the log can't be read.
        """
        log = self.logs[table.topic]
        refuse_foreign(self._kafka, sink, table, stored, log.end)
        refuse_gap(sink, table, log.start, log.end, stored.position if stored else None)
        self.look([(table, stored)])
        made = 0.0 if complete or stored is None else generation_time(stored.generation)
        sure_until = safe_until(log, table.topic, stored, self._next, made)
        if sure_until < log.at:
            raise Discontinued(
                f"The view of {table.qualified} in {sink} may have missed deletes: it is further behind than tombstones"
                " last.",
                kind="deletes",
                hint=f"cdc -p FILE rebuild {sink} --table {table.qualified}",
                topic=table.topic,
                sink=sink,
            )
        self.sure_until = min(self.sure_until, max(sure_until, log.at + LEAST_S))


def pending_records(topic: str, stored: ViewCheckpoint | None, end: Position) -> list[RecordAddress]:
    """The places where each partition that isn't applied to its end goes on."""
    if not distance(stored, end).comparable:
        return []
    offsets = stored.position.offsets if stored else (0,) * end.partition_count
    pairs = enumerate(zip(offsets, end.offsets, strict=True))
    return [(topic, partition, offset) for partition, (offset, last) in pairs if offset < last]


def uncertain_records(log: Log, topic: str, stored: ViewCheckpoint | None) -> list[RecordAddress]:
    """The places where only the next record tells how long a view has been behind."""
    if stored is None:
        return []
    return [place for place in pending_records(topic, stored, log.end) if place[2] < log.recent.offsets[place[1]]]


def safe_until(log: Log, topic: str, stored: ViewCheckpoint | None, following: NextRecords, made: float = 0.0) -> float:
    """Until when a view can't have missed a delete, in Unix seconds; before `log.at`: it may have.

    `made`: when the view began to read from nothing, or before that.
    """
    if stored is None:
        return log.at + log.retention_s
    done = log.removal
    early = done is not None and (not done.ended or made < done.ended)
    if done and early and distance(stored.position, done.position).reach is Reach.BEHIND:
        return 0.0
    unseen = [_unseen_since(log, place, stored, following) for place in pending_records(topic, stored, log.end)]
    return max(made, min(unseen, default=log.at)) + log.retention_s


def hole_behind(log: Log, topic: str, stored: ViewCheckpoint, following: NextRecords, gone: Position) -> Hole:
    """What a log of changes that stands there may have missed: `gone` is where what hasn't to stay any more ends."""
    below = log.removal.position.offsets if log.removal and log.removal.position.topic_id == gone.topic_id else ()
    removed = map(max, gone.offsets, below or gone.offsets)
    until = tuple(map(max, stored.position.offsets, removed))
    unseen = [_unseen_since(log, place, stored, following) for place in pending_records(topic, stored, log.end)]
    since = min(unseen, default=log.at)
    return Hole(stored.position, Position(gone.topic_id, until), since, max(since, log.at - log.retention_s))


def _unseen_since(log: Log, place: RecordAddress, stored: ViewCheckpoint, following: NextRecords) -> float:
    """What lies in a partition from a place on was written then or later, in Unix seconds."""
    _, partition, offset = place
    if offset >= log.recent.offsets[partition]:
        since = log.at - log.retention_s / 2
    else:
        # Of what lay between the place and the next record nothing tells the time; the view was there before.
        found, at_ms = following[place] or (None, log.at * 1000)
        since = at_ms / 1000 if found == offset else min(at_ms / 1000, stored.changed_at)
    done = log.compaction
    if done and done.position.topic_id == log.end.topic_id and offset >= done.position.offsets[partition]:
        since = max(since, done.began)
    return since


def refuse_foreign(kafka: "Topics", sink: str, table: Table, stored: ViewCheckpoint | None, end: Position) -> None:
    """Stop where a view is of another pipeline's topic: to make it again would take it away from that one.

    Raises:
        Discontinued: naming that topic. Of one in another cluster nothing is known here.
    """
    if stored is None or distance(stored, end).reach is not Reach.OTHER_TOPIC:
        return
    other = kafka.topic_name(stored.position.topic_id)
    if other and other != table.topic:
        raise Discontinued(
            f"The view of {table.qualified} in {sink} is another pipeline's: it was made from {other}.",
            hint=f"give the sink {sink} a prefix or path of its own in the pipeline file",
            topic=table.topic,
            sink=sink,
        )


def refuse_gap(sink: str, table: Table, start: Position, end: Position, at: Position | None) -> None:
    """Stop where the log, from `start` to `end`, can't continue a view that stands at `at`.

    Raises:
        Discontinued: the topic is another one, has other partitions, or no longer holds the next record.
    """
    name = table.topic
    repair = f"cdc -p FILE rebuild {sink} --table {table.qualified}"
    anew = f"{renewal(table.qualified)}, then {repair}"
    if at is None:
        if any(start.offsets):
            raise Discontinued(
                f"{name} no longer holds its first records (it starts at {list(start.offsets)}); a view made from it"
                " would lack rows.",
                hint=anew,
                topic=name,
            )
        return
    there = distance(at, end)
    if there.reach is Reach.OTHER_TOPIC:
        what = "is not the topic that the view was made from: it has been created anew"
    elif there.reach is Reach.REPARTITIONED:
        what = f"has {end.partition_count} partitions, the view was made from {at.partition_count}: keys have moved"
    elif any(have < first for have, first in zip(at.offsets, start.offsets, strict=True)):
        what = f"has lost records that the view still needs (it starts at {list(start.offsets)})"
    elif any(have > last for have, last in zip(at.offsets, end.offsets, strict=True)):
        what = f"ends at {list(end.offsets)}, before the view's position {list(at.offsets)}: its log was cut"
    else:
        return
    kind, hint = ("partitions", anew) if there.reach is Reach.REPARTITIONED else ("behind", repair)
    if there.reach is Reach.OTHER_TOPIC:
        hint = f"{repair}; where a pipeline of another Kafka writes to it: give {sink} a place of its own instead"
    raise Discontinued(f"{name} {what}.", kind=kind, hint=hint, topic=name, sink=sink)


def refuse_incomparable(sink: str, table: Table, there: Distance) -> None:
    """Stop who waits for a view whose offsets count other records: it never gets there. Raises Discontinued."""
    if there.comparable:
        return
    repair = f"cdc -p FILE rebuild {sink} --table {table.qualified}"
    moved = there.reach is Reach.REPARTITIONED
    raise Discontinued(
        f"The view of {table.qualified} in {sink} {there.reach}.",
        hint=f"{renewal(table.qualified)}, then {repair}" if moved else repair,
        topic=table.topic,
        sink=sink,
    )


def renewal(table: str) -> str:
    """What makes a topic anew that can't make right views any more."""
    return f"cdc -p FILE topics renew --table {table}"


def check_shape(topic: str, partitions: int, found: int, policy: str, made: int | None = None) -> None:
    """Refuse a topic that isn't what `Topics.ensure` makes. Raises ConnectorError.

    `made`: with how many partitions it was made, as far as that is known.
    """
    _, _, table = topic.partition(".")
    if found != (made or found):
        raise ConnectorError(
            f"Topic {topic} has {found} partitions, it was made with {made}: keys have moved, their records have no"
            " order.",
            hint=f"{renewal(table)}, then cdc -p FILE rebuild of its views",
            topic=topic,
        )
    if found != partitions:
        raise ConnectorError(
            f"Topic {topic} has {found} partitions, the pipeline file says {partitions}.",
            hint=f"{renewal(table)}, then cdc -p FILE rebuild of its views; or write partitions: {found} again",
            topic=topic,
        )
    if policy != "compact":
        raise ConnectorError(
            f"Topic {topic} has cleanup.policy {policy}, the pipeline takes compact: it may have lost records.",
            hint=f"{renewal(table)}, then cdc -p FILE rebuild of its views",
            topic=topic,
        )


def missing_topic(topic: str) -> ConnectorError:
    return ConnectorError(
        f"There is no topic {topic}.", hint="create the topics with: cdc -p FILE register", topic=topic
    )
