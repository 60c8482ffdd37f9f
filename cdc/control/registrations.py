"""What `cdc register` last gave the connector, kept in Kafka beside the log that it is true of.

In:  the topic `<pipeline>.registered`, one record. Out: `Registration`: whose log the topics hold, since which offsets,
and with which columns and keys.
Invariant: written while the connector stands still, so that every record from there on was made by what it says.
"""

import json
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, field

from cdc.config.settings import Pipeline
from cdc.errors import AnotherServer, SettingsError, SourceError
from cdc.kafka.topics import Topics
from cdc.model.position import Position, Server

KEY = b"registration"
TAKE_OVER = (
    "cdc -p FILE migrate, then cdc -p FILE register --another-server, which makes every view again from a new snapshot"
)


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

    def with_withdrawn(self, before: "Captured") -> "Captured":
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

    def renew(
        self,
        server: Server | None,
        tables: Mapping[str, Captured],
        before: Mapping[str, Captured],
        dead: Mapping[str, Position],
        *,
        moved: bool,
    ) -> "Registration":
        """The next one: how tables are sent from now on, how they were before, and where topics end that are dead."""
        sent = {name: one.with_withdrawn(before.get(name, one)) for name, one in tables.items()}
        return Registration(server or self.server, self.epoch + moved, sent, {**self.since, **dead})

    def start(self, topic: str, topic_id: str) -> tuple[int, ...]:
        """The first offsets of a topic that count; nothing for one that was made anew since."""
        at = self.since.get(topic)
        return at.offsets if at and at.topic_id == topic_id else ()


def refuse_changed(known: Registration | None, pipeline: Pipeline) -> None:
    """Raise SettingsError when the file has other columns or another key for a table than the connector sends."""
    for entry in pipeline.source.tables:
        sent = known.tables.get(entry.table) if known else None
        if sent and (set(sent.exclude) != set(entry.exclude) or sent.key != entry.key):
            what = "key" if sent.key != entry.key else "exclude"
            raise SettingsError(
                f"`{what}` of {entry.table} in the pipeline file isn't what the connector was registered with.",
                hint="cdc -p FILE migrate, then cdc -p FILE register: it has all rows of the table sent again",
                table=entry.table,
            )


def refuse_meaningless(names: Collection[str], pipeline: Pipeline) -> None:
    """Raise SettingsError for a pattern that means none of the registered tables: of no table all would be well."""
    for entry in pipeline.patterns:
        if not any(entry.matches(name) for name in names):
            raise SettingsError(
                f"{entry.table} in source.tables means none of the tables that are registered.",
                hint="correct it; or, if it means new ones: cdc -p FILE migrate, then cdc -p FILE register",
            )


def refuse_waiting(known: Registration | None, names: Iterable[str]) -> None:
    """Raise SettingsError for tables that the file means and that aren't captured yet."""
    if known and (waiting := [name for name in names if name not in known.tables]):
        more = f" and {len(waiting) - 1} more" if waiting[1:] else ""
        raise SettingsError(
            f"{waiting[0]}{more} of the pipeline file isn't captured yet: its rows are in no view.",
            hint="cdc -p FILE migrate, then cdc -p FILE register; a running `cdc run` takes it up",
            table=waiting[0],
        )


def refuse_another(known: Registration | None, server: Server | None, pipeline: Pipeline) -> None:
    """Raise AnotherServer unless the log is of this server, as far as both are known."""
    before = known.server if known else None
    if before is None or server is None or before.system == server.system:
        return
    raise AnotherServer(
        f"Postgres is another server than the one that {pipeline.pipeline} was registered with: its system identifier"
        f" is {server.system}, that one's was {before.system}.",
        hint=f"correct source.dsn; or, if it has taken that one's place: {TAKE_OVER}",
        server=server.system,
    )


def refuse_promoted(known: Registration | None, server: Server | None, pipeline: Pipeline) -> None:
    """Raise SourceError when a standby was promoted since: what it hadn't got by then is in the log all the same."""
    before = known.server if known else None
    if before is None or server is None or before == server or before.system != server.system:
        return
    raise SourceError(
        f"Postgres was promoted since {pipeline.pipeline} was registered: its timeline is {server.timeline}, it was"
        f" {before.timeline}. Changes that it hadn't got by then may be in the topics and views.",
        hint="cdc -p FILE verify tells; if nothing was lost: cdc -p FILE register; else: " + TAKE_OVER,
        server=server.system,
    )


def read(topics: Topics, pipeline: Pipeline) -> Registration | None:
    """The last registration; None when there was none, or an older version made it. Raises ConnectorError."""
    if not topics.existing([pipeline.registered_topic]):
        return None
    found = topics.last_record(pipeline.registered_topic, lambda record: record.key == KEY)
    return Registration.from_json(found.value) if found and found.value else None


def write(topics: Topics, pipeline: Pipeline, registration: Registration) -> None:
    topics.write(pipeline.registered_topic, [(KEY, registration.to_json().encode())])


def captured_tables(pipeline: Pipeline, unpublished: Mapping[str, Iterable[str]]) -> dict[str, Captured]:
    """What the pipeline file says, by table."""
    return {
        entry.table: Captured(entry.exclude, entry.key, tuple(unpublished.get(entry.table, ())))
        for entry in pipeline.source.tables
    }
