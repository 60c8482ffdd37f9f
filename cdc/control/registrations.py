"""The registration: what `cdc register` last gave the connector, stored in Kafka beside the topics
it describes.

In:  the topic `<pipeline>.registered`, one record. Out: `Registration`: which server's log the
topics have, from which offsets on, and with which columns and keys.
Invariant: the record is written while the connector is stopped, so every later record follows it.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace

import msgspec

from cdc.config.settings import Pipeline
from cdc.errors import AnotherServer, ConnectorError, SettingsError, SourceError
from cdc.kafka.topics import Topics
from cdc.model.mask import Mask
from cdc.model.obstacle import Obstacle
from cdc.model.position import Position, Server

KEY = b"registration"
TAKE_OVER = (
    "cdc -p FILE migrate, then cdc -p FILE register --another-server, "
    "which makes every view again from a new snapshot"
)


@dataclass(frozen=True)
class Captured:
    """How the connector sends one table."""

    exclude: tuple[str, ...] = ()
    """`exclude` of the pipeline file."""
    key: tuple[str, ...] = ()
    unpublished: tuple[str, ...] = ()
    """Generated columns that the log doesn't carry. They are excluded from snapshots as well."""
    withdrawn: tuple[str, ...] = ()
    """Excluded columns that were sent once. The topic still has their values."""
    events: bool = False
    """Whether the rows are events."""
    mask: Mapping[str, Mask] = field(default_factory=dict)

    @property
    def unsent(self) -> frozenset[str]:
        return frozenset(self.exclude) | frozenset(self.unpublished)

    def with_withdrawn(self, previous: "Captured") -> "Captured":
        """The same, with the withdrawn columns: the previous registration's, and those that
        were sent until now.
        """
        hidden = (set(previous.withdrawn) | (self.unsent - previous.unsent)) & set(self.exclude)
        return replace(self, withdrawn=tuple(sorted(hidden)))


@dataclass(frozen=True)
class Registration:
    """`epoch` is the number of earlier servers whose records the topics have. LSNs of different
    epochs can't be compared.
    """

    server: Server | None = None
    """None if the server's identity can't be read."""
    epoch: int = 0
    tables: Mapping[str, Captured] = field(default_factory=dict)
    since: Mapping[str, Position] = field(default_factory=dict)
    """By topic: the position below which all records are dead."""
    topic_ids: Mapping[str, str] = field(default_factory=dict)
    """Ids of the topics of tables and views, by topic. When an id changes, a run checks all of its
    topics again.
    """
    aside: Mapping[str, Obstacle] = field(default_factory=dict)
    """Tables that are set aside, each with the obstacle. They aren't in `tables`, so all of their
    rows are sent when they are captured again.
    """
    former_events: tuple[str, ...] = ()
    """Tables of events that aren't in `tables` any more. Their topics still have all of their events."""

    @property
    def events(self) -> frozenset[str]:
        """The tables whose topics have events."""
        captured = (name for name, table in self.tables.items() if table.events)
        return frozenset((*captured, *self.former_events))

    @property
    def names(self) -> list[str]:
        """All tables that the pipeline has views of: captured, or set aside."""
        return [*self.tables, *self.aside]

    def set_aside(self, table: str, obstacle: Obstacle) -> "Registration":
        """This registration with one table set aside."""
        captured = {name: entry for name, entry in self.tables.items() if name != table}
        return replace(
            self,
            tables=captured,
            aside={**self.aside, table: obstacle},
            former_events=tuple(sorted(self.events - captured.keys())),
        )

    def renew(
        self,
        current: "Registration",
        previous: Mapping[str, Captured],
        dead: Mapping[str, Position],
        *,
        moved: bool,
    ) -> "Registration":
        """The next registration: `current`, with the columns withdrawn since `previous`, and the
        ends of dead topics. A table stays set aside unless `current` captures it.
        """
        captured = {
            name: table.with_withdrawn(previous.get(name, table))
            for name, table in current.tables.items()
        }
        return Registration(
            current.server or self.server,
            self.epoch + moved,
            captured,
            {**self.since, **dead},
            current.topic_ids,
            {table: entry for table, entry in self.aside.items() if table not in captured},
            tuple(sorted(self.events - captured.keys())),
        )

    def start(self, topic: str, topic_id: str) -> tuple[int, ...]:
        """The first offsets of a topic that aren't dead; empty if the topic was recreated since."""
        position = self.since.get(topic)
        return position.offsets if position and position.topic_id == topic_id else ()


def refuse_changed(registration: Registration | None, pipeline: Pipeline) -> None:
    """Raise SettingsError if the file has other columns or another key for a table than are
    registered, or says otherwise whether its rows are events.
    """
    for entry in pipeline.source.tables:
        captured = registration.tables.get(entry.table) if registration else None
        if captured is None:
            continue
        changed = {
            "key": captured.key != entry.key,
            "events": captured.events != entry.events,
            "exclude": set(captured.exclude) != set(entry.exclude),
            "mask": captured.mask != entry.mask,
        }
        for setting in filter(changed.get, changed):
            raise SettingsError(
                f"`{setting}` of {entry.table} in the pipeline file isn't what the connector was registered with.",
                finding_key="file-changed",
                hint="cdc -p FILE migrate, then cdc -p FILE register: it has all rows of the table sent again",
                table=entry.table,
            )


def refuse_meaningless(names: Collection[str], pipeline: Pipeline) -> None:
    """Raise SettingsError for a pattern that matches no registered table, because a check of no
    table always passes; and for what a sink lists, if patterns leave it open and nothing registered is
    meant.
    """
    for entry in pipeline.patterns:
        if not any(entry.matches(name) for name in names):
            raise SettingsError(
                f"{entry.table} in source.tables means none of the tables that are registered.",
                finding_key="tables-undecided/pattern",
                hint="correct it; or, if it means new ones: cdc -p FILE migrate, then cdc -p FILE register",
            )
    pipeline.with_tables(names).refuse_unknown_tables(unregistered=pipeline.patterns)


def refuse_waiting(registration: Registration | None, names: Iterable[str]) -> None:
    """Raise SettingsError for tables of the file that aren't captured yet, except those set aside,
    which have a separate finding.
    """
    captured = registration.names if registration else None
    waiting = [] if captured is None else [name for name in names if name not in captured]
    if waiting:
        more = f" and {len(waiting) - 1} more" if waiting[1:] else ""
        raise SettingsError(
            f"{waiting[0]}{more} of the pipeline file isn't captured yet: its rows are in no view.",
            finding_key="file-changed/tables",
            hint="cdc -p FILE migrate, then cdc -p FILE register; a running `cdc run` takes it up",
            table=waiting[0],
        )


def refuse_another(
    registration: Registration | None, server: Server | None, pipeline: Pipeline
) -> None:
    """Raise AnotherServer if the topics have the log of another server. Passes if either server is
    unknown.
    """
    registered = registration.server if registration else None
    if registered is None or server is None or registered.system == server.system:
        return
    raise AnotherServer(
        f"Postgres is another server than the one that {pipeline.pipeline} was registered with: its system identifier"
        f" is {server.system}, that one's was {registered.system}.",
        hint=f"correct source.dsn; or, if it has taken that one's place: {TAKE_OVER}",
        server=server.system,
    )


def refuse_promoted(
    registration: Registration | None, server: Server | None, pipeline: Pipeline
) -> None:
    """Raise SourceError if a standby was promoted since the registration. The topics may have
    changes that the standby hadn't received.
    """
    registered = registration.server if registration else None
    if registered is None or server is None or registered == server:
        return
    if registered.system != server.system:
        return
    raise SourceError(
        f"Postgres was promoted since {pipeline.pipeline} was registered: its timeline is {server.timeline}, it was"
        f" {registered.timeline}. Changes that it hadn't got by then may be in the topics and views.",
        finding_key="server-promoted",
        hint="cdc -p FILE verify: it finds what was lost; if nothing was: cdc -p FILE register; else: "
        + TAKE_OVER,
        server=server.system,
    )


# Made here, in one thread: threads that decode a class for the first time at the same time crash msgspec 0.22.
_decode = msgspec.json.Decoder(Registration).decode
_members = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode


def read(topics: Topics, pipeline: Pipeline) -> Registration | None:
    """The last registration; None if there is none. Raises ConnectorError, also for a record that isn't
    one: taken for an empty registration, it would make records of a former server count again.
    """
    if not topics.existing([pipeline.registered_topic]):
        return None
    record = topics.last_record(pipeline.registered_topic)
    if record is None or not record.value:
        return None
    try:
        named = _members(record.value).keys()
        if named != {field.name for field in fields(Registration)}:
            raise ValueError
        return _decode(record.value)
    except ValueError:
        raise ConnectorError(
            f"The record at offset {record.offset} of {pipeline.registered_topic} isn't a registration of this"
            " version of cdc.",
            hint="does anything else write to it? else run the version that has registered the pipeline",
            topic=pipeline.registered_topic,
        ) from None


def write(topics: Topics, pipeline: Pipeline, registration: Registration) -> None:
    """Write the registration. It is durable on return. Raises ConnectorError."""
    topics.write(pipeline.registered_topic, [(KEY, msgspec.json.encode(registration))])


def describe(
    topics: Topics, pipeline: Pipeline, server: Server | None, tables: Mapping[str, Captured]
) -> Registration:
    """The registration of these tables, with the current ids of their topics and the views' topics.
    Raises ConnectorError.
    """
    views = map(pipeline.view_topic, pipeline.views)
    ends = topics.ends([*map(pipeline.topic, tables), *views])
    ids = {topic: end.topic_id for topic, end in ends.items()}
    return Registration(server, tables=tables, topic_ids=ids)


def captured_tables(
    pipeline: Pipeline, unpublished: Mapping[str, Iterable[str]]
) -> dict[str, Captured]:
    """How the pipeline file wants each table sent, by table."""
    return {
        entry.table: Captured(
            entry.exclude,
            entry.key,
            tuple(unpublished.get(entry.table, ())),
            events=entry.events,
            mask=entry.mask,
        )
        for entry in pipeline.source.tables
    }
