"""Read and administer the pipeline's topics. Rows travel through Spark.

In:  the broker's address.
Out: positions of topics, settings, single records and their times; ConnectorError.
"""

import uuid
from base64 import urlsafe_b64decode
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress

from tenacity import Retrying, retry_if_exception_type, stop_after_delay, wait_fixed

from cdc.errors import ConnectorError
from cdc.kafka.clients import TIMEOUT_MS, check_reachable, kafka, translated_errors
from cdc.kafka.records import Isolation, Record, RecordAddress, Records
from cdc.kafka.topic_admin import Replicas, TopicAdmin
from cdc.model.position import Position


class Topics:
    """A connection to the broker; use as a context manager. Every method raises ConnectorError."""

    def __init__(self, bootstrap: str, patience_s: float = TIMEOUT_MS / 1000) -> None:
        """`patience_s`: see `Records`."""
        self.bootstrap = bootstrap
        with translated_errors(bootstrap):
            check_reachable(bootstrap)
            self.admin = TopicAdmin(bootstrap)
        self._records = Records(bootstrap, patience_s=patience_s)
        self._uncommitted_records = Records(bootstrap, "read_uncommitted")

    def __enter__(self) -> "Topics":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close all connections to the broker."""
        self._records.close()
        self._uncommitted_records.close()
        self.admin.client.close()

    def require_reachable(self) -> None:
        """Raise ConnectorError at once if no server listens. A connection that stood open would
        wait for one as long as for an answer.
        """
        with translated_errors(self.bootstrap):
            check_reachable(self.bootstrap)

    def cluster_id(self) -> str:
        """The id of the Kafka cluster."""
        with translated_errors(self.bootstrap):
            return str(self.admin.client.describe_cluster()["cluster_id"])

    def existing(self, topics: Iterable[str]) -> set[str]:
        """Which of the topics exist."""
        with translated_errors(self.bootstrap):
            return set(self.admin.describe(topics))

    def names(self) -> list[str]:
        """The names of all topics of the cluster that this client may see."""
        with translated_errors(self.bootstrap):
            return [str(topic) for topic in self.admin.client.list_topics()]

    def replicas(self, topics: Iterable[str]) -> dict[str, list[Replicas]]:
        """The copies of each partition. Topics that don't exist are left out."""
        with translated_errors(self.bootstrap):
            descriptions = self.admin.describe(topics)
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
        with translated_errors(self.bootstrap):
            nodes = self.admin.client.describe_cluster()["brokers"]
            resource = kafka.admin.ConfigResource(kind, str(nodes[0]["broker_id"]))
            described = self.admin.client.describe_configs([resource], config_filter="all")
        (entries,) = described["broker"].values()
        return len(nodes), {name: entry["value"] for name, entry in entries.items()}

    def topic_name(self, topic_id: str) -> str | None:
        """The name of the topic with this id; None if there is none."""
        try:
            uuid_of_topic = uuid.UUID(bytes=urlsafe_b64decode(topic_id + "=="))
        except ValueError:
            return None
        with translated_errors(self.bootstrap):
            described = self.admin.client.describe_topics([uuid_of_topic])
        return next((str(topic["name"]) for topic in described if topic["error_code"] == 0), None)

    def ends(self, topics: Sequence[str]) -> dict[str, Position]:
        """The last stable offset of each topic: what a read_committed reader gets lies before it."""
        return self._positions(topics, kafka.admin.OffsetSpec.LATEST)

    def log_ends(self, topics: Sequence[str]) -> dict[str, Position]:
        """The end of each topic behind all of its records, including open transactions."""
        return self._positions(topics, kafka.admin.OffsetSpec.LATEST, "read_uncommitted")

    def starts(self, topics: Sequence[str]) -> dict[str, Position]:
        """The first offset that each topic still has."""
        return self._positions(topics, kafka.admin.OffsetSpec.EARLIEST)

    def offsets_since(
        self, times: Mapping[str, float], ends: Mapping[str, Position]
    ) -> dict[str, Position]:
        """The first offsets written at a time or later, in Unix seconds by topic; the end where
        there are none.
        """
        specs = {topic: max(0, int(moment * 1000)) for topic, moment in times.items()}
        positions = {}
        for topic, position in self._positions(list(times), specs).items():
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
            brokers = self.admin.client.describe_log_dirs(list(topics))
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
        with translated_errors(self.bootstrap):
            return self.admin.overrides(topics)

    def settings(
        self, topics: Iterable[str], names: Collection[str] | None = None
    ) -> dict[str, dict[str, str]]:
        """The settings in force for each topic, its own or the broker's: the named ones, or all.

        A topic has some thirty, which for hundreds of topics takes long to read.
        """
        with translated_errors(self.bootstrap):
            return self.admin.settings(topics, names)

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
        with translated_errors(self.bootstrap):
            self.admin.alter(operations)
        retry_briefly(ConnectorError)(self._check_settings, changes)

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

    def remove(self, topics: Sequence[str]) -> None:
        """Delete topics, and wait until the broker no longer lists them. Topics that don't exist
        are skipped.
        """
        with translated_errors(self.bootstrap):
            if existing := list(self.admin.describe(topics)):
                self.admin.remove(existing)
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

    def _positions(
        self,
        topics: Sequence[str],
        spec: int | Mapping[str, int],
        isolation: Isolation = "read_committed",
    ) -> dict[str, Position]:
        """Positions of topics, for all topics alike or by topic.

        `spec`: Kafka's offset spec, or a time in Unix milliseconds.
        """
        if not topics:
            return {}
        specs = spec if isinstance(spec, Mapping) else dict.fromkeys(topics, spec)
        with translated_errors(self.bootstrap):
            return self.admin.positions(specs, isolation)


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


def retry_briefly(*errors: type[Exception]) -> Retrying:
    """Retry what the broker knows only some moments later, for as long as a request may last."""
    stop = stop_after_delay(TIMEOUT_MS / 1000)
    return Retrying(
        retry=retry_if_exception_type(errors), stop=stop, wait=wait_fixed(0.1), reraise=True
    )
