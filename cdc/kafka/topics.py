"""The pipeline's topics: created, checked and measured. Administration only; rows travel through Spark.

In:  the broker's address and the pipeline file.
Out: topics with fixed partition counts, their positions, single records' times; ConnectorError.
Invariant: `ensure` checks every topic before it creates the first.
"""

import uuid
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from tenacity import Retrying, retry_if_exception_type, stop_after_delay, wait_fixed

from cdc.config.settings import CONTROL_TABLES, Pipeline
from cdc.errors import ConnectorError
from cdc.kafka.ledger import Ledger, TopicShape
from cdc.kafka.log_continuity import check_shape, missing_topic
from cdc.kafka.records import TIMEOUT_MS, Record, RecordAddress, Records, check_reachable, kafka, translated_errors
from cdc.model.position import Position

NO_SUCH_TOPIC = 3
OWN_SETTING = "DYNAMIC_TOPIC_CONFIG"
UNSETTLED = (kafka.errors.TopicAlreadyExistsError, kafka.errors.UnknownTopicOrPartitionError)
"""What a topic causes that is being made or deleted at this moment."""
MAX_MESSAGE_BYTES = 16 * 1024 * 1024
"""Of a record and of a batch: the connector's limit."""

RETENTION_MS = 24 * 3_600_000
"""So long at least a deletion stays in what `cdc.kafka.tail` follows."""
SEGMENT_MS = 10 * 60_000
"""The broker compacts what is older."""


@dataclass(frozen=True)
class CreatedTopic:
    topic: str
    partitions: int


@dataclass(frozen=True)
class ExistingTopic:
    """`changed` names the settings that were brought up to the pipeline file."""

    topic: str
    partitions: int
    changed: tuple[str, ...] = ()


def topic_specs(pipeline: Pipeline) -> dict[str, int]:
    """Every topic of the pipeline, with its number of partitions."""
    tables = {pipeline.topic(entry.table): entry.partitions for entry in pipeline.source.tables}
    control = {pipeline.topic(table): 1 for table in CONTROL_TABLES}
    own = (
        pipeline.quarantine_topic,
        pipeline.settings_topic,
        pipeline.registered_topic,
        pipeline.message_topic,
        pipeline.generations_topic,
    )
    return {**tables, **control, f"__debezium-heartbeat.{pipeline.pipeline}": 1, **dict.fromkeys(own, 1)}


def settings_of(pipeline: Pipeline, topics: Iterable[str]) -> dict[str, dict[str, str]]:
    """What each topic is to have of its own besides its policy.

    What commands tell each other is compacted within minutes, so that nobody has to read what it said long ago.
    """
    retention_ms = int(pipeline.delete_retention_hours * 3_600_000)
    settings = {
        "delete.retention.ms": str(retention_ms),
        # A record in quarantine is a third longer than it was.
        "max.message.bytes": str(2 * MAX_MESSAGE_BYTES),
    }
    followed = {
        **settings,
        "delete.retention.ms": str(max(retention_ms, RETENTION_MS)),
        "segment.ms": str(SEGMENT_MS),
        "min.cleanable.dirty.ratio": "0.1",
    }
    own = (pipeline.quarantine_topic, pipeline.settings_topic, pipeline.generations_topic)
    kept = {"min.compaction.lag.ms": str(int(pipeline.changes_kept_s * 1000))} if pipeline.changes_kept_s else {}
    special = {
        **dict.fromkeys(own, followed),
        **{pipeline.topic(entry.table): {**settings, **kept} for entry in pipeline.source.tables},
    }
    return {topic: special.get(topic, settings) for topic in topics}


class Topics:
    """A connection to the broker; use as a context manager. Every method raises ConnectorError."""

    def __init__(self, bootstrap: str, patience_s: float = TIMEOUT_MS / 1000) -> None:
        """`patience_s`: see `Records`."""
        self.bootstrap = bootstrap
        with translated_errors(bootstrap):
            check_reachable(bootstrap)
            self._admin = kafka.KafkaAdminClient(
                bootstrap_servers=bootstrap, bootstrap_timeout_ms=TIMEOUT_MS, request_timeout_ms=TIMEOUT_MS
            )
        self._records = Records(bootstrap, patience_s=patience_s)
        self._written = Records(bootstrap, decided=False)

    def __enter__(self) -> "Topics":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        self._records.close()
        self._written.close()
        self._admin.close()

    def cluster_id(self) -> str:
        with translated_errors(self.bootstrap):
            return str(self._admin.describe_cluster()["cluster_id"])

    def ensure(self, pipeline: Pipeline) -> list[CreatedTopic | ExistingTopic]:
        """Create what is missing; nothing at all when a topic exists with another shape."""
        topics = topic_specs(pipeline)
        settings = settings_of(pipeline, topics)
        with translated_errors(self.bootstrap):
            made = self._shapes(pipeline)
            found = _briefly(*UNSETTLED)(self._make, topics, settings, made)
            changed = {topic: dict(settings[topic].items() - found[topic].items()) for topic in found}
            self._alter(changed)
            self._note_shapes(pipeline, made)
        return [
            ExistingTopic(topic, count, tuple(changed[topic])) if topic in found else CreatedTopic(topic, count)
            for topic, count in topics.items()
        ]

    def check(self, pipeline: Pipeline) -> None:
        """Refuse topics that aren't what `ensure` makes: in one that was changed since, records may be lost or moved.

        Raises:
            ConnectorError: for the first that is missing, has other partitions or is cleaned up in another way.
        """
        topics = topic_specs(pipeline)
        with translated_errors(self.bootstrap):
            existing = self._described(topics)
            found = self._settings(existing)
            made = self._shapes(pipeline) if pipeline.settings_topic in existing else {}
        # One that is being deleted may still be listed, but has no settings.
        if missing := [topic for topic in topics if not found.get(topic)]:
            raise missing_topic(missing[0])
        for topic, count in topics.items():
            policy, as_made = found[topic]["cleanup.policy"], _as_made(made.get(topic), existing[topic])
            check_shape(topic, count, len(existing[topic]["partitions"]), policy, as_made)

    def existing(self, topics: Iterable[str]) -> set[str]:
        with translated_errors(self.bootstrap):
            return set(self._described(topics))

    def topic_name(self, topic_id: str) -> str | None:
        """The topic that has this id; None when none has."""
        try:
            known = uuid.UUID(bytes=urlsafe_b64decode(topic_id + "=="))
        except ValueError:
            return None
        with translated_errors(self.bootstrap):
            described = self._admin.describe_topics([known])
        return next((str(topic["name"]) for topic in described if topic["error_code"] == 0), None)

    def ends(self, topics: Sequence[str], *, decided: bool = True) -> dict[str, Position]:
        """The end of each topic as a read_committed reader sees it: past the last decided transaction.

        Not `decided`: past everything that was written, whatever becomes of it.
        """
        return self._positions(topics, kafka.admin.OffsetSpec.LATEST, decided)

    def starts(self, topics: Sequence[str]) -> dict[str, Position]:
        """The first offset that each topic still has."""
        return self._positions(topics, kafka.admin.OffsetSpec.EARLIEST)

    def offsets_since(self, times: Mapping[str, float], ends: Mapping[str, Position]) -> dict[str, Position]:
        """Where what was written at a time or later, in Unix seconds by topic, begins; the end where nothing was."""
        specs = {topic: max(0, int(at * 1000)) for topic, at in times.items()}
        found = self._positions(list(times), specs)
        return {
            topic: Position(
                at.topic_id,
                tuple(
                    last if offset < 0 else offset for offset, last in zip(at.offsets, ends[topic].offsets, strict=True)
                ),
            )
            for topic, at in found.items()
        }

    def log_size_bytes(self, topics: Sequence[str]) -> int:
        """What the brokers keep of these topics, one copy of each partition, compressed; 0 where they don't tell."""
        try:
            told = self._admin.describe_log_dirs(list(topics))
        except (kafka.errors.KafkaError, OSError, ValueError):
            return 0
        held = (topic for broker in told for folder in broker["log_dirs"] for topic in folder["topics"])
        copies = (
            ((topic["name"], p["partition_index"]), p["partition_size"]) for topic in held for p in topic["partitions"]
        )
        # Of several copies the largest is the last.
        return sum(dict(sorted(copies)).values())

    def overrides(self, topics: Iterable[str]) -> dict[str, dict[str, str]]:
        """The settings that each topic has of its own."""
        with translated_errors(self.bootstrap):
            described = self._entries(topics)
        return {
            topic: {name: one["value"] for name, one in found.items() if one["config_source"] == OWN_SETTING}
            for topic, found in described.items()
        }

    def settings(self, topics: Iterable[str]) -> dict[str, dict[str, str]]:
        """The settings that hold for each topic, its own or the broker's."""
        with translated_errors(self.bootstrap):
            return self._settings(topics)

    def override(self, changes: Mapping[str, Mapping[str, str | None]]) -> None:
        """Change settings by topic, and wait until the broker goes by them; None: the topic has none of its own.

        A setting that isn't named stays. A broker learns of a change after its controller has taken it.
        """
        operations = {
            topic: {name: ("DELETE" if value is None else "SET", value) for name, value in change.items()}
            for topic, change in changes.items()
        }
        with translated_errors(self.bootstrap):
            self._alter(operations)
        _briefly(ConnectorError)(self._check_settings, changes)

    def read_all(self, topic: str) -> list[Record]:
        """Every committed record of a one-partition topic: for the small ones that the pipeline keeps about itself."""
        start, end = self.starts([topic])[topic].offsets[0], self.ends([topic])[topic].offsets[0]
        return self.read_range(topic, start, end)

    def read_range(self, topic: str, since: int, end: int) -> list[Record]:
        """The committed records of a one-partition topic in [since, end)."""
        return list(self.iterate_range(topic, since, end))

    def iterate_range(self, topic: str, since: int, end: int) -> Iterator[Record]:
        """The same, one by one; nothing else may be read meanwhile."""
        return self._records.read(topic, since, end)

    def write(self, topic: str, records: Iterable[tuple[bytes, bytes | None]]) -> None:
        """Write records of the pipeline's own, durable on return. Rows travel through Spark."""
        self._records.write(topic, records)

    def pending(
        self, name: str, topic: str, records: Iterable[tuple[bytes, bytes | None]], timeout_s: float
    ) -> AbstractContextManager[None]:
        """See `Records.pending`."""
        return self._records.pending(name, topic, records, timeout_s)

    def last_record(self, topic: str, accept: Callable[[Record], bool] = lambda _: True) -> Record | None:
        """The newest committed record of a one-partition topic that `accept` takes; None when there is none."""
        end, start = self.ends([topic])[topic].offsets[0], self.starts([topic])[topic].offsets[0]
        return self._records.last_record(topic, start, end, accept)

    def write_times(self, at: Iterable[RecordAddress]) -> dict[RecordAddress, int]:
        """When the first record at or after each place was written, in Unix milliseconds; see `first_records`."""
        return {place: at_ms for place, (_, at_ms) in self.first_records(at).items()}

    def first_records(self, at: Iterable[RecordAddress]) -> dict[RecordAddress, tuple[int, int]]:
        """The offset and the time, in Unix milliseconds, of the first record at or after each place.

        Left out: places after which no record is committed, and those not answered within 2 s.
        """
        places = list(at)
        if not places:
            return {}
        return self._records.first_records(places, self.ends(sorted({topic for topic, _, _ in places})))

    def next_records(
        self, places: Collection[RecordAddress], *, decided: bool = False
    ) -> dict[RecordAddress, tuple[int, int] | None]:
        """The offset and the time, in Unix milliseconds, of the first record at or after each place.

        None: there is none; `decided`: none that is committed. Every place is answered. Raises ConnectorError.
        """
        if not places:
            return {}
        ends = self.ends(sorted({topic for topic, _, _ in places}), decided=decided)
        return (self._records if decided else self._written).next_records(places, ends)

    def remove(self, topics: Sequence[str]) -> None:
        """Delete topics, and wait until the broker tells of them no more. Absent is fine."""
        with translated_errors(self.bootstrap):
            if there := list(self._described(topics)):
                self._admin.delete_topics(there)
        _briefly(ConnectorError)(self._check_gone, topics)

    def _check_gone(self, topics: Sequence[str]) -> None:
        if left := sorted(self.existing(topics)):
            hint = "does the broker delete topics (delete.topic.enable)? then the same command again"
            raise ConnectorError(f"Topic {left[0]} is still there.", hint=hint)

    def _shapes(self, pipeline: Pipeline) -> dict[str, TopicShape]:
        """As the topics of tables were made."""
        return Ledger(pipeline, self).read().made

    def _note_shapes(self, pipeline: Pipeline, made: Mapping[str, TopicShape]) -> None:
        """Remember what has been made, or is seen for the first time."""
        described = self._described(pipeline.topic(entry.table) for entry in pipeline.source.tables)
        shapes = {
            topic: TopicShape(_topic_id(one["topic_id"]), len(one["partitions"])) for topic, one in described.items()
        }
        new = {t: shape for t, shape in shapes.items() if t not in made or made[t].topic_id != shape.topic_id}
        if new:
            Ledger(pipeline, self).add_shapes(new)

    def _make(
        self, topics: Mapping[str, int], settings: Mapping[str, Mapping[str, str]], made: Mapping[str, TopicShape]
    ) -> dict[str, dict[str, str]]:
        """Check, then create what is missing; the settings of what was there. Raises UNSETTLED to be tried again."""
        existing = self._described(topics)
        found = self._settings(existing)
        for topic, described in existing.items():
            if not found[topic]:
                raise kafka.errors.UnknownTopicOrPartitionError(topic)
            policy, as_made = found[topic]["cleanup.policy"], _as_made(made.get(topic), described)
            check_shape(topic, topics[topic], len(described["partitions"]), policy, as_made)
        shapes = {
            topic: {"num_partitions": count, "configs": {"cleanup.policy": "compact", **settings[topic]}}
            for topic, count in topics.items()
            if topic not in existing
        }
        if shapes:
            # A request isn't all or nothing, and what a broker describes lags behind what its controller knows.
            self._admin.create_topics(shapes, validate_only=True)
            self._admin.create_topics(shapes, wait_for_metadata=True)
        return found

    def _described(self, topics: Iterable[str]) -> dict[str, dict[str, Any]]:
        described = self._admin.describe_topics(list(topics))
        for topic in described:
            if topic["error_code"] not in (0, NO_SUCH_TOPIC):
                raise kafka.errors.for_code(topic["error_code"])(topic["name"])
        return {topic["name"]: topic for topic in described if topic["error_code"] == 0}

    def _settings(self, topics: Iterable[str]) -> dict[str, dict[str, str]]:
        described = self._entries(topics)
        return {topic: {name: one["value"] for name, one in found.items()} for topic, found in described.items()}

    def _entries(self, topics: Iterable[str]) -> dict[str, dict[str, dict[str, Any]]]:
        resources = [kafka.admin.ConfigResource(kafka.admin.ConfigResourceType.TOPIC, topic) for topic in topics]
        return self._admin.describe_configs(resources, config_filter="all")["topic"] if resources else {}

    def _alter(self, changed: Mapping[str, Mapping[str, Any]]) -> None:
        resources = [
            kafka.admin.ConfigResource(kafka.admin.ConfigResourceType.TOPIC, topic, dict(settings))
            for topic, settings in changed.items()
            if settings
        ]
        if resources:
            self._admin.alter_configs(resources)

    def _check_settings(self, changes: Mapping[str, Mapping[str, str | None]]) -> None:
        own = self.overrides(changes)
        for topic, new in changes.items():
            if {name: own[topic].get(name) for name in new} != new:
                hint = "see the broker's log; then the same command again"
                raise ConnectorError(f"The broker doesn't go by {topic}'s new settings yet.", hint=hint)

    def _positions(
        self, topics: Sequence[str], spec: int | Mapping[str, int], decided: bool = True
    ) -> dict[str, Position]:
        """`spec`: what Kafka calls so, or a time in Unix milliseconds, for all topics or by topic."""
        if not topics:
            return {}
        specs = spec if isinstance(spec, Mapping) else dict.fromkeys(topics, spec)
        with translated_errors(self.bootstrap):
            described = self._described(topics)
            if missing := [topic for topic in topics if topic not in described]:
                raise missing_topic(missing[0])
            counts = {topic: len(described[topic]["partitions"]) for topic in topics}
            places = {kafka.TopicPartition(topic, at): specs[topic] for topic in topics for at in range(counts[topic])}
            level = kafka.IsolationLevel.READ_COMMITTED if decided else kafka.IsolationLevel.READ_UNCOMMITTED
            offsets = self._admin.list_partition_offsets(places, level)
        return {
            topic: Position(
                _topic_id(described[topic]["topic_id"]),
                tuple(int(offsets[kafka.TopicPartition(topic, at)].offset) for at in range(counts[topic])),
            )
            for topic in topics
        }


def _as_made(made: TopicShape | None, described: Mapping[str, Any]) -> int | None:
    """With how many partitions a topic was made; None when that isn't known."""
    return made.partitions if made and made.topic_id == _topic_id(described["topic_id"]) else None


def _briefly(*errors: type[Exception]) -> Retrying:
    stop = stop_after_delay(TIMEOUT_MS / 1000)
    return Retrying(retry=retry_if_exception_type(errors), stop=stop, wait=wait_fixed(0.1), reraise=True)


def _topic_id(value: object) -> str:
    """As Kafka's own tools print it: base64 without padding."""
    return urlsafe_b64encode(uuid.UUID(str(value)).bytes).decode().rstrip("=")
