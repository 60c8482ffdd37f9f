"""The state of each hop: Postgres -> connector -> topics -> each view, as plain data.

`cdc.observe.collection` fills it, `cdc.observe.diagnosis` judges it, `cdc.cli.render` prints it.
Invariant: every number is one that a server holds itself. What wasn't read is None.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from cdc.control.definitions import Watch
from cdc.model.outcome import Applied
from cdc.postgres import source

Severity = Literal["down", "degraded"]


@dataclass(frozen=True)
class Problem:
    """Something that a person has to know, or to do something about.

    part      what couldn't be read, postgres, connect, kafka, registration or a sink's name; or what is wrong: topics,
              connector, slot, heartbeat, run, table, quarantine, lag
    code      the exit code of its class
    severity  down: nothing goes this way, or nobody can tell; degraded: something does, not all or not in time
    since     Unix seconds, where that is known
    """

    part: str
    message: str
    hint: str
    code: int = 1
    severity: Severity = "down"
    table: str | None = None
    sink: str | None = None
    since: float | None = None


@dataclass(frozen=True)
class ConnectorStatus:
    """Connect's own words, RUNNING or FAILED; MISSING when there is no such connector."""

    state: str
    tasks: tuple[str, ...]
    trace: str | None


@dataclass(frozen=True)
class HeartbeatStatus:
    """`age_s` since the last beat arrived in Kafka; `delay_s` from its commit to its arrival."""

    age_s: float
    delay_s: float
    interval_s: float

    @property
    def late(self) -> bool:
        return self.age_s > 3 * self.interval_s + 1


@dataclass(frozen=True)
class ViewStatus:
    """One table in one sink. `lag_seconds` is at least so much: the age of the oldest record not applied."""

    table: str
    lag_records: int | None = None
    lag_seconds: float | None = None
    changes: int | None = None
    """Applied since the view was made; more than it has rows where these were changed."""
    at: float | None = None
    """Unix seconds of the last change to the view; None when nothing was ever applied, with 0 `changes`."""
    problem: str | None = None
    hint: str | None = None
    holes: tuple[str, ...] = ()
    """What its log of changes may lack for good, in words."""
    quarantined: int = 0
    """Records in quarantine: as long as there are any the view is degraded."""


@dataclass(frozen=True)
class SinkStatus:
    """`state` and `error` are from `cdc run`, which leaves them on its own machine; elsewhere they aren't known."""

    name: str
    state: str = "not known here"
    since: float | None = None
    """Of the state, Unix seconds."""
    error: str | None = None
    hint: str | None = None
    rows_per_s: float | None = None
    views: tuple[ViewStatus, ...] = ()
    applied: Applied | None = None
    """Records since `cdc run` started."""
    aside: Mapping[str, list[str]] = field(default_factory=dict)
    """See `Progress`, for this and what follows."""
    aside_since: Mapping[str, float] = field(default_factory=dict)
    looked_s: float = 0.0
    compared_s: float | None = None
    restarts: Mapping[str, int] = field(default_factory=dict)
    restarted: str | None = None

    @property
    def lag_seconds(self) -> float | None:
        """Of the views that go on; None when none could be measured."""
        going = (view for view in self.views if not view.problem and view.table not in self.aside)
        return max((view.lag_seconds for view in going if view.lag_seconds is not None), default=None)


@dataclass(frozen=True)
class Status:
    pipeline: str
    connector: ConnectorStatus | None = None
    slot: source.Slot | None = None
    heartbeat: HeartbeatStatus | None = None
    sinks: tuple[SinkStatus, ...] = ()
    problems: tuple[Problem, ...] = field(default=())
    definitions: Watch | None = None
    """What notes it when a captured table's definition changes; None when that couldn't be asked."""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)
