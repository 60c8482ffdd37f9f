"""The broker's administrative requests about topics. Raises the client's errors."""

import uuid
from base64 import urlsafe_b64encode
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from tenacity import Retrying, retry_if_exception_type, stop_after_delay, wait_fixed

from cdc.kafka.clients import TIMEOUT_MS, kafka
from cdc.kafka.log_refusals import forbidden, missing_topic
from cdc.kafka.records import Isolation
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


class TopicAdmin:
    """A connection for administration: `client`, and the requests that need more than one call of
    it.
    """

    def __init__(self, bootstrap: str) -> None:
        self._bootstrap = bootstrap
        self.client = kafka.KafkaAdminClient(
            bootstrap_servers=bootstrap,
            bootstrap_timeout_ms=TIMEOUT_MS,
            request_timeout_ms=TIMEOUT_MS,
        )

    def describe(self, topics: Iterable[str]) -> dict[str, dict[str, Any]]:
        """Describe the topics that exist. Also raises KafkaForbidden."""
        described = self.client.describe_topics(list(topics))
        for topic in described:
            if topic["error_code"] == kafka.errors.TopicAuthorizationFailedError.errno:
                raise forbidden(self._bootstrap, "Describe", topic["name"])
            if topic["error_code"] not in (0, UNKNOWN_TOPIC):
                raise kafka.errors.for_code(topic["error_code"])(topic["name"])
        return {topic["name"]: topic for topic in described if topic["error_code"] == 0}

    def _require(self, operation: str, topics: Iterable[str]) -> None:
        """Raise KafkaForbidden where the ACLs don't allow an operation on a topic. The client
        doesn't report that such a request was refused.
        """
        for topic, described in self.describe(topics).items():
            allowed = described["authorized_operations"]
            # A broker before 2.3 doesn't report them.
            if allowed and operation.upper() not in {name.replace("_", "") for name in allowed}:
                raise forbidden(self._bootstrap, operation, topic)

    def positions(self, specs: Mapping[str, int], isolation: Isolation) -> dict[str, Position]:
        """Return a position of each topic; `specs`: Kafka's offset spec by topic, or a time in Unix
        milliseconds. Also raises ConnectorError: a topic is missing.
        """
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

    def settings(
        self, topics: Iterable[str], names: Collection[str] | None = None
    ) -> dict[str, dict[str, str]]:
        """Read the settings in force for each topic: the named ones, or all. A topic that is being
        deleted has none.
        """
        described = self._entries(topics, names)
        return {
            topic: {name: entry["value"] for name, entry in entries.items()}
            for topic, entries in described.items()
        }

    def overrides(self, topics: Iterable[str]) -> dict[str, dict[str, str]]:
        """Read the settings that are set for each topic itself."""
        return {
            topic: {
                name: entry["value"]
                for name, entry in entries.items()
                if entry["config_source"] == OWN_SETTING
            }
            for topic, entries in self._entries(topics).items()
        }

    def create(self, shapes: Mapping[str, Mapping[str, Any]]) -> None:
        """Create topics, some at a time, and wait until each partition has its log: a broker knows
        hundreds of names long before it takes records for them.
        """
        remaining = iter(shapes.items())
        while group := dict(islice(remaining, TOPICS_AT_ONCE)):
            Retrying(
                # What a broker answers too late it does nevertheless.
                retry=retry_if_exception_type(
                    (kafka.errors.RetriableError, kafka.errors.TopicAlreadyExistsError)
                ),
                stop=stop_after_delay(PATIENCE_S),
                wait=wait_fixed(0.1),
                reraise=True,
            )(self._create, group)

    def request_topics(
        self, shapes: Mapping[str, Mapping[str, Any]], *, validate_only: bool = False
    ) -> None:
        """Ask for topics once, or only whether they could be created. Also raises KafkaForbidden."""
        try:
            self.client.create_topics(shapes, validate_only=validate_only)
        except kafka.errors.AuthorizationError as error:
            # The client doesn't report which one.
            raise forbidden(self._bootstrap, "Create", next(iter(shapes))) from error

    def remove(self, topics: Sequence[str]) -> None:
        """Delete topics; a broker goes by it some time later. Also raises KafkaForbidden."""
        try:
            self.client.delete_topics(topics)
        except kafka.errors.AuthorizationError as error:
            raise forbidden(self._bootstrap, "Delete", topics[0]) from error

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
        if len(described) < len(shapes):
            raise kafka.errors.UnknownTopicOrPartitionError(*(shapes.keys() - described.keys()))
        self._offsets(partitions)

    def _offsets(
        self,
        places: Mapping[kafka.TopicPartition, int],
        level: kafka.IsolationLevel = kafka.IsolationLevel.READ_UNCOMMITTED,
    ) -> Mapping[kafka.TopicPartition, Any]:
        """Ask for one offset of each partition. Also raises LeaderNotAvailableError: a broker that
        fell silent has left partitions without a leader until it is back.
        """
        try:
            offsets: Mapping[kafka.TopicPartition, Any] = self.client.list_partition_offsets(
                places, level
            )
        except kafka.errors.UnknownBrokerIdError as error:
            # The client takes Kafka's "no leader", -1, for the number of a broker, and doesn't call
            # its own error one to retry after.
            raise kafka.errors.LeaderNotAvailableError(str(error)) from error
        return offsets

    def alter(self, changes: Mapping[str, Mapping[str, Any]]) -> None:
        """Change settings by topic; a broker goes by them some time later. Also raises
        KafkaForbidden.
        """
        for operation in ("DescribeConfigs", "AlterConfigs"):
            self._require(operation, changes)
        resources = [
            kafka.admin.ConfigResource(kafka.admin.ConfigResourceType.TOPIC, topic, dict(settings))
            for topic, settings in changes.items()
            if settings
        ]
        if resources:
            self.client.alter_configs(resources)

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
        described: dict[str, dict[str, dict[str, Any]]] = self.client.describe_configs(
            resources, config_filter="all"
        )["topic"]
        if empty := [topic for topic, entries in described.items() if not entries]:
            self._require("DescribeConfigs", empty)
        return described


def topic_id(value: object) -> str:
    """Format a topic's id as Kafka's own tools print it: base64 without padding."""
    return urlsafe_b64encode(uuid.UUID(str(value)).bytes).decode().rstrip("=")
