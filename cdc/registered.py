"""What `cdc register` last gave the connector, kept in Kafka beside the log that it is true of.

In:  the topic `<pipeline>.registered`, one record. Out: `Registration`: whose log the topics hold, since which offsets,
and with which columns and keys.
Invariant: written while the connector stands still, so that every record from there on was made by what it says.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field

from cdc.change import Position, Server
from cdc.settings import Pipeline
from cdc.topics import Topics

KEY = b"registration"


@dataclass(frozen=True)
class Captured:
    """How one table is sent."""

    exclude: tuple[str, ...] = ()
    """As the pipeline file had it."""
    key: tuple[str, ...] = ()
    unpublished: tuple[str, ...] = ()
    """Generated columns that the log doesn't carry: they are left out of snapshots as well."""
    withdrawn: tuple[str, ...] = ()
    """Excluded columns whose values the log still holds: they were sent once."""

    @property
    def unsent(self) -> frozenset[str]:
        return frozenset(self.exclude) | frozenset(self.unpublished)

    @classmethod
    def from_mapping(cls, stored: Mapping[str, Iterable[str]]) -> "Captured":
        return cls(**{name: tuple(columns) for name, columns in stored.items()})

    def after(self, before: "Captured") -> "Captured":
        """The same, knowing what the log holds from before it."""
        hidden = (set(before.withdrawn) | (self.unsent - before.unsent)) & set(self.exclude)
        return Captured(self.exclude, self.key, self.unpublished, tuple(sorted(hidden)))


@dataclass(frozen=True)
class Registration:
    """`epoch` counts the servers that the topics hold records of: LSNs of two epochs can't be compared."""

    server: Server | None = None
    """None: it doesn't tell who it is."""
    epoch: int = 0
    tables: Mapping[str, Captured] = field(default_factory=dict)
    since: Mapping[str, Position] = field(default_factory=dict)
    """By topic: below it everything is dead."""

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> "Registration":
        stored = json.loads(text)
        server = stored["server"]
        return cls(
            Server(**server) if server else None,
            int(stored["epoch"]),
            {name: Captured.from_mapping(one) for name, one in stored["tables"].items()},
            {topic: Position(at["topic_id"], tuple(at["offsets"])) for topic, at in stored["since"].items()},
        )

    def renewed(
        self,
        server: Server | None,
        tables: Mapping[str, Captured],
        before: Mapping[str, Captured],
        dead: Mapping[str, Position],
    ) -> "Registration":
        """The next one: how tables are sent from now on, how they were before, and where topics end that are dead."""
        sent = {name: one.after(before.get(name, one)) for name, one in tables.items()}
        return Registration(server or self.server, self.epoch, sent, {**self.since, **dead})

    def start(self, topic: str, topic_id: str) -> tuple[int, ...]:
        """The first offsets of a topic that count; nothing for one that was made anew since."""
        at = self.since.get(topic)
        return at.offsets if at and at.topic_id == topic_id else ()


def read(topics: Topics, pipeline: Pipeline) -> Registration | None:
    """The last registration; None when there was none, or an older version made it. Raises ConnectorError."""
    if not topics.existing([pipeline.registered_topic]):
        return None
    found = topics.last(pipeline.registered_topic, lambda record: record.key == KEY)
    return Registration.from_json(found.value) if found and found.value else None


def write(topics: Topics, pipeline: Pipeline, registration: Registration) -> None:
    topics.write(pipeline.registered_topic, [(KEY, registration.to_json().encode())])


def captured(pipeline: Pipeline, unpublished: Mapping[str, Iterable[str]]) -> dict[str, Captured]:
    """What the pipeline file says, by table."""
    return {
        entry.table: Captured(entry.exclude, entry.key, tuple(unpublished.get(entry.table, ())))
        for entry in pipeline.source.tables
    }
