"""A clock, a log and executors in memory, for streams without servers and without Spark."""

from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from threading import Event
from typing import Any
from uuid import uuid4

from cdc.apply.resume import Clock
from cdc.errors import KafkaUnavailable
from cdc.kafka.log_continuity import RETENTION
from cdc.kafka.log_ends import LogEnds
from cdc.kafka.log_reader import Block, OffsetRange, gone_error
from cdc.kafka.log_refusals import forbidden, missing_topic
from cdc.kafka.records import Record, RecordAddress
from cdc.kafka.topic_specs import COMPACTION_LAG
from cdc.kafka.topics import Topics
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
class MemoryTopic:
    partitions: list[list[Record]]
    id: str = field(default_factory=lambda: uuid4().hex)


class MemoryLog(Topics):
    """Topics in memory. All records are committed, and none is removed."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.topics: dict[str, MemoryTopic] = {}

    def create(self, topic: str, partitions: int = 1) -> None:
        """Create a topic, or create it again, empty."""
        self.topics[topic] = MemoryTopic([[] for _ in range(partitions)])

    def append(self, topic: str, partition: int, key: bytes | None, value: bytes | None) -> None:
        """Append a record."""
        records = self.topics[topic].partitions[partition]
        records.append(Record(len(records), int(self._clock.time() * 1000), key, value))

    def close(self) -> None:
        pass

    def require_reachable(self) -> None:
        pass

    def existing(self, topics: Iterable[str]) -> set[str]:
        return {topic for topic in topics if topic in self.topics}

    def ends(self, topics: Sequence[str]) -> dict[str, Position]:
        return {topic: self._position(topic, len) for topic in topics}

    def log_ends(self, topics: Sequence[str]) -> dict[str, Position]:
        return self.ends(topics)

    def starts(self, topics: Sequence[str]) -> dict[str, Position]:
        return {topic: self._position(topic, lambda _: 0) for topic in topics}

    def _position(self, topic: str, offset: Callable[[list[Record]], int]) -> Position:
        if topic not in self.topics:
            raise missing_topic(topic)
        partitions = self.topics[topic].partitions
        return Position(self.topics[topic].id, tuple(map(offset, partitions)))

    def offsets_since(
        self, times: Mapping[str, float], ends: Mapping[str, Position]
    ) -> dict[str, Position]:
        def first_since(records: list[Record], moment: float) -> int:
            earlier = (record for record in records if record.timestamp_ms < moment * 1000)
            return sum(1 for _ in earlier)

        return {
            topic: Position(
                ends[topic].topic_id,
                tuple(first_since(records, moment) for records in self.topics[topic].partitions),
            )
            for topic, moment in times.items()
        }

    def log_size_bytes(self, topics: Sequence[str]) -> int:
        return sum(
            len(record.value or b"")
            for topic in topics
            for records in self.topics[topic].partitions
            for record in records
        )

    def settings(
        self, topics: Iterable[str], names: Collection[str] | None = None
    ) -> dict[str, dict[str, str]]:
        return {topic: {RETENTION: str(DAY_MS), COMPACTION_LAG: "0"} for topic in topics}

    def read_all(self, topic: str) -> list[Record]:
        return list(self.topics[topic].partitions[0])

    def iterate_range(self, topic: str, start: int, end: int) -> Iterator[Record]:
        return iter(self.topics[topic].partitions[0][start:end])

    def write(self, topic: str, records: Iterable[tuple[bytes, bytes | None]]) -> None:
        for key, value in records:
            self.append(topic, 0, key, value)

    def last_record(
        self, topic: str, accept: Callable[[Record], bool] = lambda _: True
    ) -> Record | None:
        newest_first = reversed(self.topics[topic].partitions[0])
        return next((record for record in newest_first if accept(record)), None)

    def next_records(
        self, places: Collection[RecordAddress]
    ) -> dict[RecordAddress, tuple[int, int] | None]:
        def next_at(topic: str, partition: int, offset: int) -> tuple[int, int] | None:
            records = self.topics[topic].partitions[partition][offset:]
            return (records[0].offset, records[0].timestamp_ms) if records else None

        return {place: next_at(*place) for place in places}

    def read(self, _: str, ranges: Sequence[OffsetRange]) -> Generator[Block]:
        """Read ranges as `read_records` does."""
        for topic, partition, start, end, topic_id in ranges:
            if self.topics[topic].id != topic_id:
                raise gone_error(topic, f"{topic} was created again")
            records = self.topics[topic].partitions[partition][start:end]
            yield (
                topic,
                partition,
                [(record.key, record.value, record.offset) for record in records],
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
        ends = self._log.ends(list(partitions))
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
