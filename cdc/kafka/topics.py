"""Read and administer the pipeline's topics. Rows travel through Spark.

In:  the broker's address.
Out: positions of topics, settings, single records and their times; ConnectorError.
"""

import uuid
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from itertools import islice
from typing import Any

from tenacity import Retrying, retry_if_exception, stop_after_delay, wait_fixed

from cdc.errors import ConnectorError
from cdc.kafka.clients import (
    TIMEOUT_MS,
    check_reachable,
    connection_settings,
    kafka,
    translated_errors,
)
from cdc.kafka.log_refusals import forbidden, missing_topic
from cdc.kafka.records import Isolation, Record, RecordAddress, Records
from cdc.model.position import Position

UNKNOWN_TOPIC = 3
OWN_SETTING = "DYNAMIC_TOPIC_CONFIG"
PATIENCE_S = 60.0
"""Seconds without any progress after which making topics fails. Progress has no limit."""
TOPICS_AT_ONCE = 50
"""How many topics are created before the next: their logs take the broker longer than their names."""


@dataclass(frozen=True)
class Replicas:
    """The copies of a partition, how many of them are in sync, and whether it has a leader."""

    copies: int
    in_sync: int
    led: bool


class Topics:
    """A connection to the broker; use as a context manager. Every method raises ConnectorError."""

    def __init__(self, bootstrap: str, patience_s: float = TIMEOUT_MS / 1000) -> None:
        """`patience_s`: see `Records`."""
        self.bootstrap = bootstrap
        with self._errors():
            check_reachable(bootstrap)
            self._admin = kafka.KafkaAdminClient(
                **connection_settings(bootstrap),
                bootstrap_timeout_ms=TIMEOUT_MS,
                request_timeout_ms=TIMEOUT_MS,
            )
        self._records = Records(bootstrap, patience_s=patience_s)
        self._uncommitted_records = Records(bootstrap, "read_uncommitted")

    def __enter__(self) -> "Topics":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._records.close()
        self._uncommitted_records.close()
        self._admin.close()

    def require_reachable(self) -> None:
        """Raise ConnectorError at once if no server listens. A connection that stood open would
        wait for one as long as for an answer.
        """
        with self._errors():
            check_reachable(self.bootstrap)

    def cluster_id(self) -> str:
        with self._errors():
            return str(self._admin.describe_cluster()["cluster_id"])

    def existing(self, topics: Iterable[str]) -> set[str]:
        return set(self.describe(topics))

    def describe(self, topics: Iterable[str]) -> dict[str, dict[str, Any]]:
        """Describe the topics that exist, in the words of Kafka's protocol."""
        with self._errors():
            described = self._admin.describe_topics(list(topics))
            for topic in described:
                if topic["error_code"] == kafka.errors.TopicAuthorizationFailedError.errno:
                    raise forbidden(self.bootstrap, "Describe", topic["name"])
                if topic["error_code"] not in (0, UNKNOWN_TOPIC):
                    raise kafka.errors.for_code(topic["error_code"])(topic["name"])
            return {topic["name"]: topic for topic in described if topic["error_code"] == 0}

    def names(self) -> list[str]:
        """The names of all topics of the cluster that this client may see."""
        with self._errors():
            return [str(topic) for topic in self._admin.list_topics()]

    def replicas(self, topics: Iterable[str]) -> dict[str, list[Replicas]]:
        """The copies of each partition. Topics that don't exist are left out."""
        descriptions = self.describe(topics)
        return {
            topic: [
                Replicas(
                    len(partition["replica_nodes"]),
                    len(partition["isr_nodes"]),
                    partition["leader_id"] >= 0,
                )
                for partition in description["partitions"]
            ]
            for topic, description in descriptions.items()
        }

    def brokers(self) -> tuple[int, dict[str, str]]:
        """The number of brokers, and the settings of one of them."""
        kind = kafka.admin.ConfigResourceType.BROKER
        with self._errors():
            nodes = self._admin.describe_cluster()["brokers"]
            resource = kafka.admin.ConfigResource(kind, str(nodes[0]["broker_id"]))
            described = self._admin.describe_configs([resource], config_filter="all")
        (entries,) = described["broker"].values()
        return len(nodes), {name: entry["value"] for name, entry in entries.items()}

    def topic_name(self, topic_id: str) -> str | None:
        """The name of the topic with this id; None if there is none."""
        try:
            uuid_of_topic = uuid.UUID(bytes=urlsafe_b64decode(topic_id + "=="))
        except ValueError:
            return None
        with self._errors():
            described = self._admin.describe_topics([uuid_of_topic])
        return next((str(topic["name"]) for topic in described if topic["error_code"] == 0), None)

    def ends(self, topics: Sequence[str]) -> dict[str, Position]:
        """The last stable offset of each topic: what a read_committed reader gets lies before it."""
        return self._positions(dict.fromkeys(topics, kafka.admin.OffsetSpec.LATEST))

    def log_ends(self, topics: Sequence[str]) -> dict[str, Position]:
        """The end of each topic behind all of its records, including open transactions."""
        return self._positions(
            dict.fromkeys(topics, kafka.admin.OffsetSpec.LATEST), "read_uncommitted"
        )

    def starts(self, topics: Sequence[str]) -> dict[str, Position]:
        """The first offset that each topic still has."""
        return self._positions(dict.fromkeys(topics, kafka.admin.OffsetSpec.EARLIEST))

    def offsets_since(
        self, times: Mapping[str, float], ends: Mapping[str, Position]
    ) -> dict[str, Position]:
        """The first offsets written at a time or later, in Unix seconds by topic; the end where
        there are none.
        """
        specs = {topic: max(0, int(moment * 1000)) for topic, moment in times.items()}
        positions = {}
        for topic, position in self._positions(specs).items():
            # Kafka answers -1 for a partition without a record of that time or later.
            pairs = zip(position.offsets, ends[topic].offsets, strict=True)
            offsets = tuple(last if offset < 0 else offset for offset, last in pairs)
            positions[topic] = Position(position.topic_id, offsets)
        return positions

    def log_size_bytes(self, topics: Sequence[str]) -> int:
        """Bytes that the brokers store for these topics, compressed, one copy of each partition.

        0 if the brokers don't report it.
        """
        try:
            brokers = self._admin.describe_log_dirs(list(topics))
        except (kafka.errors.KafkaError, OSError, ValueError):
            return 0
        folders = (folder for broker in brokers for folder in broker["log_dirs"])
        stored_topics = (topic for folder in folders for topic in folder["topics"])
        copies = (
            ((topic["name"], partition["partition_index"]), partition["partition_size"])
            for topic in stored_topics
            for partition in topic["partitions"]
        )
        # In order of size, so that the largest copy of a partition is the one that remains.
        return sum(dict(sorted(copies)).values())

    def overrides(self, topics: Iterable[str]) -> dict[str, dict[str, str]]:
        """The settings that are set for each topic itself."""
        return {
            topic: {
                name: entry["value"]
                for name, entry in entries.items()
                if entry["config_source"] == OWN_SETTING
            }
            for topic, entries in self._entries(topics).items()
        }

    def settings(
        self, topics: Iterable[str], names: Collection[str] | None = None
    ) -> dict[str, dict[str, str]]:
        """The settings in force for each topic, its own or the broker's: the named ones, or all.

        A topic has some thirty, which for hundreds of topics takes long to read. One that is being
        deleted has none.
        """
        return {
            topic: {name: entry["value"] for name, entry in entries.items()}
            for topic, entries in self._entries(topics, names).items()
        }

    def override(self, changes: Mapping[str, Mapping[str, str | None]]) -> None:
        """Change settings by topic, and wait until the broker applies them; None removes a topic's
        own setting.

        Other settings stay. A broker learns of a change some time after its controller has accepted
        it.
        """
        operations = {
            topic: {
                name: ("DELETE" if value is None else "SET", value)
                for name, value in change.items()
            }
            for topic, change in changes.items()
        }
        self.alter(operations)
        retry_briefly(ConnectorError)(self._check_settings, changes)

    def alter(self, changes: Mapping[str, Mapping[str, Any]]) -> None:
        """Change settings by topic; a broker goes by them some time later."""
        resources = [
            kafka.admin.ConfigResource(kafka.admin.ConfigResourceType.TOPIC, topic, dict(settings))
            for topic, settings in changes.items()
            if settings
        ]
        with self._errors():
            for operation in ("DescribeConfigs", "AlterConfigs"):
                self._require(operation, changes)
            if resources:
                self._admin.alter_configs(resources)

    def read_all(self, topic: str) -> list[Record]:
        """Every committed record of a one-partition topic, for the small topics that the pipeline
        writes itself.
        """
        start = self.starts([topic])[topic].offsets[0]
        end = self.ends([topic])[topic].offsets[0]
        return self.read_range(topic, start, end)

    def read_range(self, topic: str, start: int, end: int) -> list[Record]:
        """The committed records of a one-partition topic in [start, end)."""
        return list(self.iterate_range(topic, start, end))

    def iterate_range(self, topic: str, start: int, end: int) -> Iterator[Record]:
        """Iterate over the same records. Nothing else may be read until the iterator ends."""
        return self._records.read(topic, start, end)

    def write(self, topic: str, records: Iterable[tuple[bytes, bytes | None]]) -> None:
        """Write records of the pipeline's own, durable on return. Rows travel through Spark."""
        self._records.write(topic, records)

    def last_record(
        self, topic: str, accept: Callable[[Record], bool] = lambda _: True
    ) -> Record | None:
        """The newest committed record of a one-partition topic that `accept` takes; None if there
        is none.

        Reads ever longer tails: the last offsets of a topic are transaction markers, not records.
        """
        end = self.ends([topic])[topic].offsets[0]
        start = self.starts([topic])[topic].offsets[0]
        tail = 16
        while end > start:
            first = max(start, end - tail)
            records = [record for record in self.iterate_range(topic, first, end) if accept(record)]
            if records or first == start:
                return records[-1] if records else None
            tail *= 16
        return None

    def write_times(self, addresses: Iterable[RecordAddress]) -> dict[RecordAddress, int]:
        """When the first record at or after each address was written, in Unix milliseconds.

        Left out: addresses after which no record is committed, and those not answered within 2 s.
        """
        places = list(addresses)
        if not places:
            return {}
        ends = self.ends(sorted({topic for topic, _, _ in places}))
        found = self._records.first_records(places, ends, patient=False)
        return {address: record[1] for address, record in found.items() if record}

    def next_records(
        self, places: Collection[RecordAddress]
    ) -> dict[RecordAddress, tuple[int, int] | None]:
        """The offset and the time, in Unix milliseconds, of the first record at or after each
        place, committed or not; None where there is none.

        Every place is answered. Raises ConnectorError.
        """
        if not places:
            return {}
        ends = self.log_ends(sorted({topic for topic, _, _ in places}))
        return self._uncommitted_records.first_records(places, ends, patient=True)

    def create_topics(self, shapes: Mapping[str, Mapping[str, Any]]) -> None:
        """Create topics, some at a time, and wait until each partition has its log: a broker knows
        hundreds of names long before it takes records for them.
        """
        remaining = iter(shapes.items())
        while group := dict(islice(remaining, TOPICS_AT_ONCE)):
            # What a broker answers too late it does nevertheless.
            expected = kafka.errors.RetriableError, kafka.errors.TopicAlreadyExistsError
            retrying(PATIENCE_S, *expected)(self._create, group)

    def request_topics(
        self, shapes: Mapping[str, Mapping[str, Any]], *, validate_only: bool = False
    ) -> None:
        """Ask for topics once, or only whether they could be created."""
        with self._errors():
            try:
                self._admin.create_topics(shapes, validate_only=validate_only)
            except kafka.errors.AuthorizationError as error:
                # The client doesn't report which one.
                raise forbidden(self.bootstrap, "Create", next(iter(shapes))) from error

    def remove(self, topics: Sequence[str]) -> None:
        """Delete topics, and wait until the broker no longer lists them. Topics that don't exist
        are skipped.
        """
        with self._errors():
            if existing := list(self.describe(topics)):
                try:
                    self._admin.delete_topics(existing)
                except kafka.errors.AuthorizationError as error:
                    raise forbidden(self.bootstrap, "Delete", existing[0]) from error
        retry_briefly(ConnectorError)(self._check_removed, topics)

    def _check_removed(self, topics: Sequence[str]) -> None:
        if remaining := sorted(self.existing(topics)):
            hint = (
                "does the broker delete topics (delete.topic.enable)? then the same command again"
            )
            raise ConnectorError(f"Topic {remaining[0]} is still there.", hint=hint)

    def _check_settings(self, changes: Mapping[str, Mapping[str, str | None]]) -> None:
        overrides = self.overrides(changes)
        for topic, expected in changes.items():
            if {name: overrides[topic].get(name) for name in expected} != expected:
                hint = "see the broker's log; then the same command again"
                raise ConnectorError(
                    f"The broker doesn't go by {topic}'s new settings yet.", hint=hint
                )

    def _errors(self) -> AbstractContextManager[None]:
        return translated_errors(self.bootstrap)

    def _require(self, operation: str, topics: Iterable[str]) -> None:
        """Raise KafkaForbidden where the ACLs don't allow an operation on a topic. The client
        doesn't report that such a request was refused.
        """
        for topic, described in self.describe(topics).items():
            allowed = described["authorized_operations"]
            # A broker before 2.3 doesn't report them.
            if allowed and operation.upper() not in {name.replace("_", "") for name in allowed}:
                raise forbidden(self.bootstrap, operation, topic)

    def _create(self, shapes: Mapping[str, Mapping[str, Any]]) -> None:
        described = self.describe(shapes)
        if missing := {topic: shapes[topic] for topic in shapes if topic not in described}:
            self.request_topics(missing)
            described = self.describe(shapes)
        partitions = {
            kafka.TopicPartition(topic, partition["partition_index"]): kafka.admin.OffsetSpec.LATEST
            for topic, description in described.items()
            for partition in description["partitions"]
        }
        if unknown := shapes.keys() - described.keys():
            with self._errors():
                raise kafka.errors.UnknownTopicOrPartitionError(*unknown)
        self._offsets(partitions)

    def _offsets(
        self,
        places: Mapping[kafka.TopicPartition, int],
        level: kafka.IsolationLevel = kafka.IsolationLevel.READ_UNCOMMITTED,
    ) -> Mapping[kafka.TopicPartition, Any]:
        """Ask for one offset of each partition."""
        with self._errors():
            try:
                offsets: Mapping[kafka.TopicPartition, Any] = self._admin.list_partition_offsets(
                    places, level
                )
            except kafka.errors.UnknownBrokerIdError as error:
                # A broker that fell silent has left partitions without a leader until it is back. The
                # client takes Kafka's "no leader", -1, for the number of a broker, and doesn't call
                # its own error one to retry after.
                raise kafka.errors.LeaderNotAvailableError(str(error)) from error
        return offsets

    def _entries(
        self, topics: Iterable[str], names: Collection[str] | None = None
    ) -> dict[str, dict[str, dict[str, Any]]]:
        wanted = None if names is None else list(names)
        resources = [
            kafka.admin.ConfigResource(kafka.admin.ConfigResourceType.TOPIC, topic, wanted)
            for topic in topics
        ]
        if not resources:
            return {}
        with self._errors():
            described: dict[str, dict[str, dict[str, Any]]] = self._admin.describe_configs(
                resources, config_filter="all"
            )["topic"]
            if empty := [topic for topic, entries in described.items() if not entries]:
                self._require("DescribeConfigs", empty)
        return described

    def _positions(
        self, specs: Mapping[str, int], isolation: Isolation = "read_committed"
    ) -> dict[str, Position]:
        """Return a position of each topic; `specs`: Kafka's offset spec by topic, or a time in Unix
        milliseconds.
        """
        if not specs:
            return {}
        described = self.describe(specs)
        if missing := [topic for topic in specs if topic not in described]:
            raise missing_topic(missing[0])
        counts = {topic: len(described[topic]["partitions"]) for topic in specs}
        places = {
            kafka.TopicPartition(topic, number): spec
            for topic, spec in specs.items()
            for number in range(counts[topic])
        }
        level = kafka.IsolationLevel[isolation.upper()]
        offsets = self._offsets(places, level)
        return {
            topic: Position(
                topic_id(described[topic]["topic_id"]),
                tuple(
                    int(offsets[kafka.TopicPartition(topic, number)].offset)
                    for number in range(count)
                ),
            )
            for topic, count in counts.items()
        }


class TopicsPool:
    """Connections that stay open between their uses: making one costs more than most requests. What
    has failed, in whatever way, is closed and used no more.

    Any thread may borrow from it, and close it. There are as many connections as users at once.
    """

    def __init__(self) -> None:
        self._idle: list[Topics] = []

    @contextmanager
    def borrowed(self, bootstrap: str) -> Iterator[Topics]:
        """Borrow a connection while the block runs. Raises ConnectorError."""
        topics = self._take(bootstrap) or Topics(bootstrap)
        try:
            topics.require_reachable()
            yield topics
        except BaseException:
            topics.close()
            raise
        self._idle.append(topics)

    def close(self) -> None:
        """Close those that nobody uses. The pool may be used again."""
        with suppress(IndexError):
            while True:
                self._idle.pop().close()

    def _take(self, bootstrap: str) -> Topics | None:
        """Take one to this broker; those to others are closed: the file names another now."""
        with suppress(IndexError):
            while True:
                topics = self._idle.pop()
                if topics.bootstrap == bootstrap:
                    return topics
                topics.close()
        return None


def retrying(limit_s: float, *errors: type[Exception]) -> Retrying:
    """Retry after these errors, or after our own errors that were raised for one of them."""
    return Retrying(
        retry=retry_if_exception(
            lambda error: isinstance(error, errors) or isinstance(error.__cause__, errors)
        ),
        stop=stop_after_delay(limit_s),
        wait=wait_fixed(0.1),
        reraise=True,
    )


def retry_briefly(*errors: type[Exception]) -> Retrying:
    """Retry what the broker knows only some moments later, for as long as a request may last."""
    return retrying(TIMEOUT_MS / 1000, *errors)


def topic_id(value: object) -> str:
    """Format a topic's id as Kafka's own tools print it: base64 without padding."""
    return urlsafe_b64encode(uuid.UUID(str(value)).bytes).decode().rstrip("=")
