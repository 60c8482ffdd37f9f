"""Plan the effects of a changed pipeline file: one line for each effect, under the verb that causes
it.

In:  the file with the tables that it names now; what is published, registered and applied so far.
Out: `Plan`. Pure: `cdc.cli.plan` asks the servers.
Invariant: a verb's refusal appears here in the same words, because it comes from the same check.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from cdc.control.registrations import Captured, Registration
from cdc.errors import CdcError
from cdc.model import mask

TABLE_SETTINGS = (
    "table.include.list",
    "column.exclude.list",
    "message.key.columns",
    *mask.SETTINGS,
)
"""Beginnings of settings of the connector that follow from the tables; the plan has a line for each
table instead.
"""


@dataclass(frozen=True)
class Refusal:
    """A reason why a verb would stop, and what to do about it."""

    what: str
    hint: str

    @classmethod
    def of(cls, error: CdcError) -> "Refusal":
        return cls(error.message, error.hint)


Effect = Literal["nothing", "made", "rows sent again", "rebuild", "refused", "not known"]


@dataclass(frozen=True)
class PlannedView:
    """What a sink has of a table, and what the plan means for its view.

    columns  of the table, and the sink's other names for them
    rows     the condition that they meet
    effect   made: by `cdc run`, from the first record on. rebuild: the view stays as it is until `cdc rebuild`.
             refused: it stays as it is until the file or the table is changed. not known: the sink
             can't be asked
    """

    sink: str
    table: str
    columns: str
    rows: str
    effect: Effect = "nothing"


@dataclass(frozen=True)
class CurrentState:
    """The current state. A part that couldn't be read is None; the plan then says nothing about
    it.
    """

    unprepared: Sequence[str] = ()
    """Objects missing in Postgres, in the words of `cdc migrate`."""
    registration: Registration | None = None
    config: Mapping[str, str] | None = None
    """The connector's configuration."""
    topics: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """Settings of existing topics, by the table or the view of several tables."""
    views: Mapping[str, Mapping[str, Refusal | bool]] = field(default_factory=dict)
    """By sink and table: why a view can't continue, or whether it exists."""
    kept: Sequence[str] = ()
    """Views that sinks have and the file doesn't give them any more: `public.orders in cache`."""
    idle: Sequence[str] = ()
    """Pipelines that were prepared in this database, and whose slots no connector reads."""
    adapted: Sequence[str] = ()
    """What a run changes of views that are there: `change public.orders in search, in place: field note`."""


@dataclass(frozen=True)
class RequestedState:
    tables: Mapping[str, Captured]
    config: Mapping[str, str] = field(default_factory=dict)
    settings: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """Settings of topics, by the table or the view of several tables."""
    refused: Sequence[Refusal] = ()
    left_out: Mapping[str, str] = field(default_factory=dict)
    listed: Sequence[PlannedView] = ()
    """What sinks with a list have, of whatever effect."""


@dataclass(frozen=True)
class Plan:
    """The effects of each verb, in the order in which to run them; `refused` has to be resolved
    first.
    """

    migrate: tuple[str, ...] = ()
    register: tuple[str, ...] = ()
    run: tuple[str, ...] = ()
    refused: tuple[Refusal, ...] = ()
    left_out: Mapping[str, str] = field(default_factory=dict)
    kept: tuple[str, ...] = ()
    """Views that nobody updates, since the file doesn't give them to their sinks any more."""
    idle: tuple[str, ...] = ()
    """Pipelines that may be this one under a former name."""
    listed: tuple[PlannedView, ...] = ()
    """What goes where: the views of sinks that have a list."""

    @property
    def empty(self) -> bool:
        """Whether the verbs would change nothing."""
        return not (self.migrate or self.register or self.run or self.refused)


def plan(current: CurrentState, requested: RequestedState) -> Plan:
    """Compare the current state with the requested one."""
    views = [
        (sink, table, view)
        for sink, tables in current.views.items()
        for table, view in tables.items()
    ]
    stuck = [view for _, _, view in views if isinstance(view, Refusal)]
    return Plan(
        tuple(current.unprepared),
        tuple(_register_lines(current, requested)),
        (
            *(
                f"make {table} in {sink}, from its first record on"
                for sink, table, view in views
                if view is False
            ),
            *current.adapted,
        ),
        (*requested.refused, *stuck),
        requested.left_out,
        tuple(current.kept),
        tuple(current.idle) if current.config is None else (),
        tuple(replace(view, effect=_effect(view, current, requested)) for view in requested.listed),
    )


def _effect(planned: PlannedView, current: CurrentState, requested: RequestedState) -> Effect:
    views = current.views.get(planned.sink, {})
    view = views.get(planned.table)
    if isinstance(view, Refusal):
        return "rebuild" if f" rebuild {planned.sink} " in f"{view.hint} " else "refused"
    if view is None:
        return "not known"
    registered = current.registration.tables if current.registration else {}
    was = registered.get(planned.table)
    now = requested.tables.get(planned.table)
    if was and now and _table_lines(planned.table, was, now):
        return "rows sent again"
    return "nothing" if view else "made"


def _register_lines(current: CurrentState, requested: RequestedState) -> list[str]:
    lines = (
        ["create the connector; it begins with all rows of every table"]
        if current.config is None
        else []
    )
    registered = current.registration.tables if current.registration else {}
    if current.config is not None:
        for table, now in requested.tables.items():
            lines += _table_lines(table, registered.get(table), now)
        lines += [
            f"no longer capture {table}: its topic and its views stay as they are, and nobody updates them"
            for table in registered
            if table not in requested.tables
        ]
        changed = _changed_settings(current.config, requested.config, TABLE_SETTINGS)
        lines += [f"restart the connector with another {', '.join(changed)}"] if changed else []
        views = requested.settings.keys() - requested.tables.keys() - current.topics.keys()
        lines += [f"make the topic of {view}" for view in sorted(views)]
    for table, settings in requested.settings.items():
        if changed := _changed_settings(current.topics.get(table, settings), settings):
            lines.append(
                f"set {', '.join(f'{name} = {settings[name]}' for name in changed)} on the topic of {table}"
            )
    return lines


def _table_lines(table: str, was: Captured | None, now: Captured) -> list[str]:
    """The effects on one table's rows."""
    if was is None:
        return [f"capture {table}: all its rows are sent, beside the stream"]
    if was.key != now.key:
        return [
            f"give {table} another key: what was sent of it until now is dead, all its rows are sent again"
        ]
    if was.events != now.events:
        other = "events" if now.events else "rows that change"
        return [
            f"take the rows of {table} as {other}: what was sent of it until now is dead, all its rows are sent again"
        ]
    hidden = sorted(now.unsent - was.unsent)
    shown = sorted(was.unsent - now.unsent)
    lines = (
        [f"withdraw {', '.join(hidden)} of {table} from every view: all its rows are sent again"]
        if hidden
        else []
    )
    lines += (
        [f"capture {', '.join(shown)} of {table}: all its rows are sent again"] if shown else []
    )
    for column in sorted(now.mask.keys() | was.mask.keys()):
        if now.mask.get(column) == was.mask.get(column) or column in now.unsent:
            continue
        if column in now.mask:
            what = f"mask {column} of {table} ({now.mask[column]})"
            after = "the topic keeps what was sent before until it is compacted"
        else:
            what = f"send {column} of {table} without a mask"
            after = "every view gets its values"
        lines.append(f"{what}: all its rows are sent again; {after}")
    return lines


def _changed_settings(
    current: Mapping[str, str], requested: Mapping[str, str], excluded: tuple[str, ...] = ()
) -> list[str]:
    """The names of settings that differ. Not their values, because one is the connector's
    password.
    """
    names = [name for name in requested if current.get(name) != requested[name]]
    return [name for name in names if not name.startswith(excluded)]
