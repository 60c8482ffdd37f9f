"""What a changed pipeline file will do, before anything is done: one line for each thing, by the verb that does it.

In:  the file with the tables that it means now, what was published, registered and applied until now.
Out: `Plan`. Pure: `cdc.cli.plan` asks the servers.
Invariant: what a verb would refuse is told here with the same words, for it is the same check that says so.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from cdc.control.registrations import Captured, Registration
from cdc.errors import CdcError

CONNECTORS_TABLES = ("table.include.list", "column.exclude.list", "message.key.columns")
"""What follows from the tables, which are told one by one."""


@dataclass(frozen=True)
class Refusal:
    what: str
    hint: str

    @classmethod
    def of(cls, error: CdcError) -> "Refusal":
        return cls(error.message, error.hint)


@dataclass(frozen=True)
class CurrentState:
    """How things stand. What nobody could read is None, and is then not spoken of."""

    unprepared: Sequence[str] = ()
    """What is missing in Postgres, in the words of `cdc migrate`."""
    known: Registration | None = None
    config: Mapping[str, str] | None = None
    """Of the connector."""
    topics: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """The settings of those topics of tables that exist, by table."""
    views: Mapping[str, Mapping[str, Refusal | bool]] = field(default_factory=dict)
    """By sink and table: why a view can't go on, else whether there is one."""
    idle: Sequence[str] = ()
    """Pipelines that were prepared in this database and whose slots nobody reads."""


@dataclass(frozen=True)
class RequestedState:
    """What the file asks for."""

    tables: Mapping[str, Captured]
    config: Mapping[str, str] = field(default_factory=dict)
    settings: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """Of topics, by table."""
    refused: Sequence[Refusal] = ()
    left_out: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Plan:
    """`refused` has to be seen to first; the verbs come in this order."""

    migrate: tuple[str, ...] = ()
    register: tuple[str, ...] = ()
    run: tuple[str, ...] = ()
    refused: tuple[Refusal, ...] = ()
    left_out: Mapping[str, str] = field(default_factory=dict)
    idle: tuple[str, ...] = ()
    """What may be this pipeline under its former name."""

    @property
    def empty(self) -> bool:
        return not (self.migrate or self.register or self.run or self.refused)


def plan(before: CurrentState, after: RequestedState) -> Plan:
    views = [(sink, table, view) for sink, tables in before.views.items() for table, view in tables.items()]
    stuck = [view for _, _, view in views if isinstance(view, Refusal)]
    return Plan(
        tuple(before.unprepared),
        tuple(_registered(before, after)),
        tuple(f"make {table} in {sink}, from its first record on" for sink, table, view in views if view is False),
        (*after.refused, *stuck),
        after.left_out,
        tuple(before.idle) if before.config is None else (),
    )


def _registered(before: CurrentState, after: RequestedState) -> list[str]:
    lines = ["create the connector; it begins with all rows of every table"] if before.config is None else []
    sent = before.known.tables if before.known else {}
    if before.config is not None:
        lines += [line for table, now in after.tables.items() for line in _sent(table, sent.get(table), now)]
        lines += [
            f"no longer capture {table}: its topic and its views stay as they are, and nobody updates them"
            for table in sent
            if table not in after.tables
        ]
        changed = _differing(before.config, after.config, CONNECTORS_TABLES)
        lines += [f"restart the connector with another {', '.join(changed)}"] if changed else []
    for table, settings in after.settings.items():
        if changed := _differing(before.topics.get(table, settings), settings):
            lines.append(f"set {', '.join(f'{name} = {settings[name]}' for name in changed)} on the topic of {table}")
    return lines


def _sent(table: str, was: Captured | None, now: Captured) -> list[str]:
    """What becomes of one table's rows."""
    if was is None:
        return [f"capture {table}: all its rows are sent, beside the stream"]
    if was.key != now.key:
        return [f"give {table} another key: what was sent of it until now is dead, all its rows are sent again"]
    hidden, shown = sorted(now.unsent - was.unsent), sorted(was.unsent - now.unsent)
    lines = [f"withdraw {', '.join(hidden)} of {table} from every view: all its rows are sent again"] if hidden else []
    return lines + ([f"capture {', '.join(shown)} of {table}: all its rows are sent again"] if shown else [])


def _differing(before: Mapping[str, str], after: Mapping[str, str], but: Collection[str] = ()) -> list[str]:
    """Names of settings alone: the connector's hold a password."""
    names = [name for name in after if before.get(name) != after[name]]
    return [name for name in names if name not in but]
