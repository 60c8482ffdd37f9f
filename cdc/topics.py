"""The pipeline's topics: created, checked and measured. Administration only; rows travel through Spark.

In:  the broker's address and the pipeline file.
Out: topics with fixed partition counts, their positions, single records' times; ConnectorError.
Invariant: `ensure` checks every topic before it creates the first.
"""

import contextlib
import logging
import socket
import time
import uuid
import warnings
from base64 import urlsafe_b64encode
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from cdc.change import Position
from cdc.errors import ConnectorError
from cdc.settings import Pipeline
from cdc.source import CONTROL_TABLES

# kafka-python reads its schemas through a function that Python 3.11 deprecates, and 3.13 brings back.
with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)
    from kafka import IsolationLevel, KafkaAdminClient, KafkaConsumer, TopicPartition
    from kafka.admin import ConfigResource, ConfigResourceType, OffsetSpec
    from kafka.errors import KafkaError, TopicAlreadyExistsError, for_code

# kafka-python logs every failed connection attempt as an error of its own; ours says it once.
logging.getLogger("kafka").setLevel(logging.CRITICAL)

TIMEOUT_MS = 5000
MAX_MESSAGE_BYTES = 16 * 1024 * 1024
"""Of a record and of a batch: the producer's limit and every topic's."""


@dataclass(frozen=True)
class Created:
    topic: str
    partitions: int


@dataclass(frozen=True)
class Kept:
    """`changed` names the settings that were brought up to the pipeline file."""

    topic: str
    partitions: int
    changed: tuple[str, ...] = ()


@dataclass(frozen=True)
class Record:
    """One record; `timestamp_ms` is when the connector handed it to Kafka."""

    offset: int
    timestamp_ms: int
    key: bytes | None
    value: bytes | None


def wanted(pipeline: Pipeline) -> dict[str, int]:
    """Every topic that the connector writes, with its number of partitions."""
    tables = {pipeline.topic(entry.table): entry.partitions for entry in pipeline.source.tables}
    control = {pipeline.topic(table): 1 for table in CONTROL_TABLES}
    return {**tables, **control, f"__debezium-heartbeat.{pipeline.pipeline}": 1}


class Topics:
    """A connection to the broker; use as a context manager. Every method raises ConnectorError."""

    def __init__(self, bootstrap: str) -> None:
        self.bootstrap = bootstrap
        with self._reaching():
            _knock(bootstrap)
            self._admin = KafkaAdminClient(
                bootstrap_servers=bootstrap, bootstrap_timeout_ms=TIMEOUT_MS, request_timeout_ms=TIMEOUT_MS
            )
        self._consumer: Any = None

    def __enter__(self) -> "Topics":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._consumer is not None:
            self._consumer.close(autocommit=False)
        self._admin.close()

    def cluster_id(self) -> str:
        with self._reaching():
            return str(self._admin.describe_cluster()["cluster_id"])

    def ensure(self, pipeline: Pipeline) -> list[Created | Kept]:
        """Create what is missing; nothing at all when a topic exists with another shape."""
        topics = wanted(pipeline)
        settings = {
            "delete.retention.ms": str(int(pipeline.delete_retention_hours * 3_600_000)),
            "max.message.bytes": str(MAX_MESSAGE_BYTES),
        }
        with self._reaching():
            existing = self._described(topics)
            found = self._settings(existing)
            for topic, described in existing.items():
                _check(topic, topics[topic], len(described["partitions"]), found[topic]["cleanup.policy"])
            missing = {topic: count for topic, count in topics.items() if topic not in existing}
            if missing:
                self._create(missing, {"cleanup.policy": "compact", **settings})
            changed = {topic: dict(settings.items() - found[topic].items()) for topic in existing}
            self._alter(changed)
        return [
            Created(topic, count) if topic in missing else Kept(topic, count, tuple(changed[topic]))
            for topic, count in topics.items()
        ]

    def ends(self, topics: Sequence[str]) -> dict[str, Position]:
        """The end of each topic as a read_committed reader sees it: past the last decided transaction."""
        return self._positions(topics, OffsetSpec.LATEST)

    def starts(self, topics: Sequence[str]) -> dict[str, Position]:
        """The first offset that each topic still has."""
        return self._positions(topics, OffsetSpec.EARLIEST)

    def last(self, topic: str, accept: Callable[[Record], bool] = lambda _: True) -> Record | None:
        """The newest committed record of a one-partition topic that `accept` takes; None when there is none.

        Reads ever longer tails: the last offsets of a topic are transaction markers, not records.
        """
        partition = TopicPartition(topic, 0)
        end, start = self.ends([topic])[topic].offsets[0], self.starts([topic])[topic].offsets[0]
        tail = 16
        while end > start:
            since = max(start, end - tail)
            records = [record for record in self._read(partition, since, end) if accept(record)]
            if records or since == start:
                return records[-1] if records else None
            tail *= 16
        return None

    def times(self, at: Iterable[tuple[str, int, int]]) -> dict[tuple[str, int, int], int]:
        """When the first record at or after (topic, partition, offset) was written, in Unix milliseconds.

        Left out: places after which no record is committed, and those not answered within 2 s.
        """
        rounds: list[dict[TopicPartition, int]] = []
        for topic, partition, offset in sorted(set(at)):
            place = TopicPartition(topic, partition)
            free = next((batch for batch in rounds if place not in batch), None)
            if free is None:
                rounds.append(free := {})
            free[place] = offset
        found: dict[tuple[str, int, int], int] = {}
        ends = self.ends(sorted({place.topic for batch in rounds for place in batch}))
        with self._reaching():
            for batch in rounds:
                found.update(self._first(batch, ends))
        return found

    def _described(self, topics: Iterable[str]) -> dict[str, dict[str, Any]]:
        described = self._admin.describe_topics(list(topics))
        for topic in described:
            if topic["error_code"] not in (0, 3):
                raise for_code(topic["error_code"])(topic["name"])
        return {topic["name"]: topic for topic in described if topic["error_code"] == 0}

    def _settings(self, topics: Iterable[str]) -> dict[str, dict[str, str]]:
        resources = [ConfigResource(ConfigResourceType.TOPIC, topic) for topic in topics]
        if not resources:
            return {}
        described = self._admin.describe_configs(resources, config_filter="all")["topic"]
        return {topic: {name: entry["value"] for name, entry in described[topic].items()} for topic in topics}

    def _create(self, missing: Mapping[str, int], settings: Mapping[str, str]) -> None:
        # Created by someone else a moment ago: the next `ensure` checks it.
        with contextlib.suppress(TopicAlreadyExistsError):
            configs = dict(settings)
            shapes = {topic: {"num_partitions": n, "configs": configs} for topic, n in missing.items()}
            self._admin.create_topics(shapes, wait_for_metadata=True)

    def _alter(self, changed: Mapping[str, Mapping[str, str]]) -> None:
        resources = [
            ConfigResource(ConfigResourceType.TOPIC, topic, dict(settings))
            for topic, settings in changed.items()
            if settings
        ]
        if resources:
            self._admin.alter_configs(resources)

    def _positions(self, topics: Sequence[str], spec: OffsetSpec) -> dict[str, Position]:
        with self._reaching():
            described = self._described(topics)
            if missing := [topic for topic in topics if topic not in described]:
                raise ConnectorError(
                    f"There is no topic {missing[0]}.",
                    hint="create the topics with: cdc -p FILE register",
                    topic=missing[0],
                )
            counts = {topic: len(described[topic]["partitions"]) for topic in topics}
            places = {TopicPartition(topic, at): spec for topic in topics for at in range(counts[topic])}
            offsets = self._admin.list_partition_offsets(places, IsolationLevel.READ_COMMITTED)
        return {
            topic: Position(
                _topic_id(described[topic]["topic_id"]),
                tuple(int(offsets[TopicPartition(topic, at)].offset) for at in range(counts[topic])),
            )
            for topic in topics
        }

    def _reader(self, places: Mapping[TopicPartition, int]) -> Any:
        if self._consumer is None:
            self._consumer = KafkaConsumer(
                bootstrap_servers=self.bootstrap,
                bootstrap_timeout_ms=TIMEOUT_MS,
                request_timeout_ms=TIMEOUT_MS,
                isolation_level="read_committed",
                enable_auto_commit=False,
                group_id=None,
                fetch_max_wait_ms=50,
                auto_offset_reset="earliest",
            )
        self._consumer.assign(list(places))
        for place, offset in places.items():
            self._consumer.seek(place, offset)
        return self._consumer

    def _read(self, place: TopicPartition, since: int, end: int) -> Iterator[Record]:
        with self._reaching():
            consumer = self._reader({place: since})
            deadline = time.monotonic() + TIMEOUT_MS / 1000
            while consumer.position(place) < end and time.monotonic() < deadline:
                for record in consumer.poll(timeout_ms=100).get(place, []):
                    if record.offset < end:
                        yield Record(record.offset, record.timestamp, record.key, record.value)

    def _first(
        self, batch: Mapping[TopicPartition, int], ends: Mapping[str, Position]
    ) -> dict[tuple[str, int, int], int]:
        found: dict[tuple[str, int, int], int] = {}
        waiting, deadline = dict(batch), time.monotonic() + 2
        while waiting and time.monotonic() < deadline:
            consumer = self._reader(waiting)
            answered: dict[TopicPartition, Any] = {}
            while not answered and time.monotonic() < deadline:
                polled = consumer.poll(timeout_ms=100)
                past = [at for at in waiting if consumer.position(at) >= ends[at.topic].offsets[at.partition]]
                answered = {**dict.fromkeys(past), **{place: first for place, (first, *_) in polled.items()}}
            for place, record in answered.items():
                offset = waiting.pop(place)
                if record is not None:
                    found[(place.topic, place.partition, offset)] = int(record.timestamp)
        return found

    @contextlib.contextmanager
    def _reaching(self) -> Iterator[None]:
        try:
            yield
        except (KafkaError, OSError, ValueError) as error:
            raise ConnectorError(
                f"Kafka at {self.bootstrap} can't be reached or refuses: {type(error).__name__}.",
                hint="check `kafka` in the pipeline file; the local stack is started by: cdc -p FILE up",
                server=self.bootstrap,
            ) from error


def _knock(bootstrap: str) -> None:
    """Raise OSError when no server listens: a client that can't start leaves sockets and a thread behind."""
    refused: OSError = ConnectionRefusedError(bootstrap)
    for server in bootstrap.split(","):
        host, _, port = server.strip().rpartition(":")
        try:
            with socket.create_connection((host.strip("[]"), int(port)), TIMEOUT_MS / 1000):
                return
        except OSError as error:
            refused = error
    raise refused


def _check(topic: str, partitions: int, found: int, policy: str) -> None:
    if found != partitions:
        raise ConnectorError(
            f"Topic {topic} has {found} partitions, the pipeline file says {partitions}; none was created.",
            hint=f"write partitions: {found} for it in the pipeline file, or delete the topic, then run"
            " cdc -p FILE register and cdc -p FILE rebuild",
            topic=topic,
        )
    if policy != "compact":
        raise ConnectorError(
            f"Topic {topic} has cleanup.policy {policy}, the pipeline takes compact; nothing was created.",
            hint="it may have lost records: delete it, then run cdc -p FILE register and cdc -p FILE rebuild",
            topic=topic,
        )


def _topic_id(value: object) -> str:
    """As Kafka's own tools print it: base64 without padding."""
    return urlsafe_b64encode(uuid.UUID(str(value)).bytes).decode().rstrip("=")
