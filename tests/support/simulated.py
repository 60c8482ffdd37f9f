"""A clock, a log and executors in memory, for streams without servers and without Spark."""

from bisect import bisect_left
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from threading import Event
from typing import Any
from uuid import uuid4

from cdc.errors import KafkaUnavailable
from cdc.kafka.log_continuity import RETENTION
from cdc.kafka.log_ends import LogEnds
from cdc.kafka.log_reader import Block, OffsetRange, gone_error
from cdc.kafka.log_refusals import forbidden, missing_topic
from cdc.kafka.records import Record, RecordAddress
from cdc.kafka.topic_setup import COMPACTION_LAG
from cdc.kafka.topics import Topics
from cdc.model.clock import Clock
from cdc.model.position import Position
from cdc.sink.lane import Lane
from cdc.spark.lane_records import LoggedRecords, Reports

DAY_MS = 24 * 3600 * 1000


class SimulatedClock(Clock):
    """A clock that only waits move on. It is years ahead of the computer's, so that nothing that
    takes its time from that one works.
    """

    def __init__(self, on_wait: Callable[[], object] = lambda: None) -> None:
        """`on_wait` is called at each wait."""
        self.now = 4_000_000_000.0
        self.waited_s: list[float] = []
        self._on_wait = on_wait

    def time(self) -> float:
        return self.now

    def monotonic(self) -> float:
        return self.now

    def wait(self, event: Event, seconds: float) -> bool:
        self.waited_s.append(seconds)
        self.now += seconds
        self._on_wait()
        return event.is_set()


@dataclass
class MemoryPartition:
    """A partition of a topic. `open` are the first offsets of transactions that nobody has ended yet."""

    records: list[Record] = field(default_factory=list)
    start: int = 0
    end: int = 0
    open: dict[str, int] = field(default_factory=dict)
    removable_at: dict[int, float] = field(default_factory=dict)
    """When compaction may remove a tombstone, by its offset: it has left it out once."""

    @property
    def stable_end(self) -> int:
        """The last stable offset."""
        return min(self.open.values(), default=self.end)

    def between(self, start: int, end: int) -> list[Record]:
        first = bisect_left(self.records, start, key=_offset)
        return self.records[first : bisect_left(self.records, end, first, key=_offset)]

    def append(self, timestamp_ms: int, key: bytes | None, value: bytes | None) -> None:
        self.records.append(Record(self.end, timestamp_ms, key, value))
        self.end += 1

    def mark(self, transaction: str, *, is_committed: bool) -> None:
        """Write the marker that ends a transaction: an offset without a record. Readers don't get the
        records of one that is aborted.
        """
        first = self.open.pop(transaction)
        if not is_committed:
            # There is one transactional writer: all from its first record on is its own.
            self.records = self.between(0, first)
        self.end += 1

    def compact(self, now: float, retention_s: float) -> None:
        """Remove what Kafka's cleaner may: all but the newest record of each key, and tombstones that it has
        left for as long as the topic's setting says. The last stable record stays: its segment is open.
        """
        last = self.stable_end - 1
        newest = {record.key: record.offset for record in self.between(0, last)}
        kept = []
        for record in self.records:
            if record.offset >= last:
                kept.append(record)
            elif newest[record.key] == record.offset:
                if record.value is None:
                    due = self.removable_at.setdefault(record.offset, now + retention_s)
                    if now >= due:
                        continue
                kept.append(record)
        self.records = kept

    def delete_before(self, offset: int) -> None:
        """Remove the beginning, as `kafka-delete-records.sh` does."""
        self.start = max(self.start, min(offset, self.stable_end))
        self.records = self.between(self.start, self.end)


def _offset(record: Record) -> int:
    return record.offset


@dataclass
class MemoryTopic:
    partitions: list[MemoryPartition]
    id: str = field(default_factory=lambda: uuid4().hex)


class MemoryLog(Topics):
    """Topics in memory. What is written without a transaction is committed at once."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.topics: dict[str, MemoryTopic] = {}
        self.compaction_lag_s = 0

    def create(self, topic: str, partitions: int = 1) -> None:
        """Create a topic, or create it again, empty."""
        self.topics[topic] = MemoryTopic([MemoryPartition() for _ in range(partitions)])

    def append(
        self,
        topic: str,
        partition: int,
        key: bytes | None,
        value: bytes | None,
        transaction: str = "",
    ) -> None:
        """Append a record, of a transaction if it has a name. `end_transaction` ends it."""
        there = self.topics[topic].partitions[partition]
        if transaction:
            there.open.setdefault(transaction, there.end)
        there.append(int(self._clock.time() * 1000), key, value)

    def end_transaction(self, transaction: str, *, is_committed: bool) -> Iterator[None]:
        """End a transaction in one partition after another, as brokers do; yields after each."""
        for topic in list(self.topics.values()):
            for partition in topic.partitions:
                if transaction in partition.open:
                    partition.mark(transaction, is_committed=is_committed)
                    yield

    def compact(self, topic: str) -> None:
        """Run the cleaner once."""
        for partition in self.topics[topic].partitions:
            partition.compact(self._clock.time(), DAY_MS / 1000)

    def close(self) -> None:
        pass

    def require_reachable(self) -> None:
        pass

    def existing(self, topics: Iterable[str]) -> set[str]:
        return {topic for topic in topics if topic in self.topics}

    def topic_name(self, topic_id: str) -> str | None:
        return next((name for name, topic in self.topics.items() if topic.id == topic_id), None)

    def ends(self, topics: Sequence[str]) -> dict[str, Position]:
        return {topic: self._position(topic, lambda there: there.stable_end) for topic in topics}

    def log_ends(self, topics: Sequence[str]) -> dict[str, Position]:
        return {topic: self._position(topic, lambda there: there.end) for topic in topics}

    def starts(self, topics: Sequence[str]) -> dict[str, Position]:
        return {topic: self._position(topic, lambda there: there.start) for topic in topics}

    def _position(self, topic: str, offset: Callable[[MemoryPartition], int]) -> Position:
        if topic not in self.topics:
            raise missing_topic(topic)
        partitions = self.topics[topic].partitions
        return Position(self.topics[topic].id, tuple(map(offset, partitions)))

    def offsets_since(
        self, times: Mapping[str, float], ends: Mapping[str, Position]
    ) -> dict[str, Position]:
        def first_since(there: MemoryPartition, moment: float, end: int) -> int:
            written = (r.offset for r in there.records if r.timestamp_ms >= moment * 1000)
            return next(written, end)

        return {
            topic: Position(
                ends[topic].topic_id,
                tuple(
                    first_since(there, moment, end)
                    for there, end in zip(
                        self.topics[topic].partitions, ends[topic].offsets, strict=True
                    )
                ),
            )
            for topic, moment in times.items()
        }

    def log_size_bytes(self, topics: Sequence[str]) -> int:
        return sum(
            len(record.value or b"")
            for topic in topics
            for there in self.topics[topic].partitions
            for record in there.records
        )

    def settings(
        self, topics: Iterable[str], names: Collection[str] | None = None
    ) -> dict[str, dict[str, str]]:
        lag_ms = str(self.compaction_lag_s * 1000)
        return {topic: {RETENTION: str(DAY_MS), COMPACTION_LAG: lag_ms} for topic in topics}

    def read_all(self, topic: str) -> list[Record]:
        there = self.topics[topic].partitions[0]
        return there.between(there.start, there.stable_end)

    def iterate_range(self, topic: str, start: int, end: int) -> Iterator[Record]:
        return iter(self.topics[topic].partitions[0].between(start, end))

    def write(self, topic: str, records: Iterable[tuple[bytes, bytes | None]]) -> None:
        for key, value in records:
            self.append(topic, 0, key, value)

    def last_record(
        self, topic: str, accept: Callable[[Record], bool] = lambda _: True
    ) -> Record | None:
        newest_first = reversed(self.read_all(topic))
        return next((record for record in newest_first if accept(record)), None)

    def next_records(
        self, places: Collection[RecordAddress]
    ) -> dict[RecordAddress, tuple[int, int] | None]:
        def next_at(topic: str, partition: int, offset: int) -> tuple[int, int] | None:
            there = self.topics[topic].partitions[partition]
            following = there.between(offset, there.end)[:1]
            return next(((r.offset, r.timestamp_ms) for r in following), None)

        return {place: next_at(*place) for place in places}

    def read(self, _: str, ranges: Sequence[OffsetRange]) -> Generator[Block]:
        """Read ranges as `read_records` does."""
        for topic, partition, start, end, topic_id in ranges:
            if topic not in self.topics or topic_id not in ("", self.topics[topic].id):
                raise gone_error(topic, f"{topic} was created again")
            there = self.topics[topic].partitions[partition]
            if start < there.start:
                raise gone_error(topic, f"{topic} doesn't hold the record that comes next")
            if there.stable_end < end:
                raise gone_error(topic, f"{topic} ends at {there.stable_end}, before {end}")
            yield (
                topic,
                partition,
                [(record.key, record.value, record.offset) for record in there.between(start, end)],
            )


class MemoryEnds(LogEnds):
    """The ends of a log in memory. `away`: topics for which nobody answers. `forbidden`: topics that ACLs forbid."""

    def __init__(self, log: MemoryLog) -> None:
        self._log = log
        self.away: set[str] = set()
        self.forbidden: set[str] = set()

    def read(
        self,
        partitions: Mapping[str, int],
        *,
        is_committed: bool = True,
        since: float | None = None,
    ) -> dict[str, tuple[int, ...]]:
        if self.away.intersection(partitions):
            raise KafkaUnavailable("Kafka doesn't answer.", hint="wait", server="kafka")
        for topic in self.forbidden.intersection(partitions):
            raise forbidden("127.0.0.1:1", "Describe", topic)
        ends = (self._log.ends if is_committed else self._log.log_ends)(list(partitions))
        return {topic: end.offsets for topic, end in ends.items()}


class InProcess(LoggedRecords):
    """Records of a log in memory. Lanes run in this process, also where a sink has executors."""

    def begin(self, sink: str) -> None:
        pass

    def run(self, lane: Lane) -> Reports:
        return self.run_here(lane)


def in_process(log: MemoryLog) -> InProcess:
    """The records of a log. They are never of the quarantine: a redrive isn't simulated."""
    no_spark: Any = None
    return InProcess(no_spark, "", read=log.read)
