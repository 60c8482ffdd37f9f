"""The state of each hop: Postgres -> connector -> topics -> each view, as plain data.

`cdc.observe.collection` fills it, `cdc.observe.diagnosis` judges it, `cdc.cli.status` draws it.
Invariant: every number is one that a server holds itself. What wasn't read is None.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from cdc.control.definitions import Watch
from cdc.model.finding import Finding
from cdc.model.outcome import Applied
from cdc.model.wording import UNKNOWN
from cdc.readiness.facts import Slot

NEVER_RUN = "never run"
"""The state of a sink that no run has reported on yet."""


@dataclass(frozen=True)
class ConnectorStatus:
    """The connector and its tasks in Connect's words, such as RUNNING or FAILED; MISSING when there
    is none.
    """

    state: str
    tasks: tuple[str, ...]
    trace: str | None
    unsendable: str | None = None
    """Why a change can't be sent, after the name of its table if the trace has that."""

    @property
    def running(self) -> bool:
        return self.state == "RUNNING" and set(self.tasks) == {"RUNNING"}


@dataclass(frozen=True)
class HeartbeatStatus:
    """The last heartbeat: `age_s` since it arrived in Kafka, `delay_s` from its commit to its
    arrival.
    """

    age_s: float
    delay_s: float
    interval_s: float
    wal_per_s: float | None = None
    """Bytes of log that Postgres has written a second, in the minutes before the last heartbeat."""
    committed_at: float | None = None
    """Unix seconds of its commit, by Postgres' clock."""

    @property
    def late(self) -> bool:
        """Whether more than three intervals, and a second, have passed since the last heartbeat."""
        return self.age_s > 3 * self.interval_s + 1


@dataclass(frozen=True)
class ViewStatus:
    """A table in a sink. `lag_seconds` is a lower bound: the age of the oldest record that isn't
    applied yet.
    """

    table: str
    lag_records: int | None = None
    lag_seconds: float | None = None
    changes: int | None = None
    """Changes applied since the view was made: more than it has rows, where rows were changed."""
    at: float | None = None
    """Unix seconds of the last change to the view; None when nothing was ever applied, with 0
    `changes`.
    """
    problem: str | None = None
    hint: str | None = None
    holes: tuple[str, ...] = ()
    """Ranges of records that the view's log of changes may lack for good, as text."""
    quarantined: int = 0
    """Records in quarantine. The view is degraded while there are any."""
    generation: str | None = None
    """The live generation: empty for the first; None when the sink holds no position."""
    proved_through: float | None = None
    """Unix seconds: the view was proved equal to Postgres as of then; None when it wasn't."""
    complete_at: float | None = None
    """Unix seconds since which every row was compared for that."""
    repaired: int = 0
    """Rows that `cdc run` has repaired by itself since `cdc verify` or a rebuild compared all of them."""
    wrong_at: float | None = None
    """Unix seconds: when the view was last found to differ from Postgres; None when it wasn't."""
    wrong: int = 0
    """Rows that differed then."""
    wrong_ids: tuple[str, ...] = ()
    """Some of their keys."""
    unrepaired: str = ""
    """Why `cdc run`, which repairs rows, hasn't repaired these; empty if it repairs none."""


@dataclass(frozen=True)
class BuildStatus:
    """A rebuild or rollback of a sink: its phase, and `done` of `total` records. `at_work`: its
    command is alive.
    """

    phase: str
    done: int
    total: int
    at_work: bool


@dataclass(frozen=True)
class SinkStatus:
    """A sink: what its `cdc run` last published, on whatever host, and its views."""

    name: str
    state: str = UNKNOWN
    since: float | None = None
    """Unix seconds at which the state began."""
    error: str | None = None
    hint: str | None = None
    rows_per_s: float | None = None
    views: tuple[ViewStatus, ...] = ()
    applied: Applied | None = None
    """Counts of records since `cdc run` started."""
    aside: Mapping[str, list[str]] = field(default_factory=dict)
    """Tables that wait: message and hint. This field and those below are copied from `Progress`."""
    aside_since: Mapping[str, float] = field(default_factory=dict)
    looked_s: float = 0.0
    compared_s: float | None = None
    restarts: Mapping[str, int] = field(default_factory=dict)
    restarted: str | None = None
    stands_s: float = 0.0
    """Seconds for which a batch has been at hand and the position of no view has moved; 0 between
    batches.
    """
    paused_by: str | None = None
    """Who paused the sink; None while nobody has."""
    catch_up_s: float | None = None
    """Seconds until all is applied that waits, see `cdc.observe.forecast`."""
    build: BuildStatus | None = None
    """The rebuild or rollback of the sink that isn't complete."""
    restart_at: float | None = None
    """Unix seconds at which a stream that has failed starts again by itself."""

    @property
    def lag_seconds(self) -> float | None:
        """The largest lag of the views that aren't stopped; None when none could be measured."""
        going = (view for view in self.views if not view.problem and view.table not in self.aside)
        return max(
            (view.lag_seconds for view in going if view.lag_seconds is not None), default=None
        )


@dataclass(frozen=True)
class ClockStatus:
    """The clock of a view: what `now()` is in it, and by what its windows close.

    at      Unix seconds
    column  whose latest time that is; None: the time of Postgres by which all that was committed is in
            the state
    """

    at: float
    column: str | None = None


@dataclass(frozen=True)
class DocumentsStatus:
    """What the state of documents holds, and has to do: see `cdc.documents.state.StateSizes`.

    rows, bytes  by table; bytes of rows and their entries, without indexes and keys
    dirty        by view: documents to send; of a large fan-out those that remain
    pending      chunks of changed rows whose documents aren't known yet
    used_bytes   memory of the state's whole server; None where the user may not ask for it
    limit_bytes  of the server's memory; None also where it has no limit
    sent_per_s   documents that the run sends a second; None while it has none to send
    applied      by table, records that are in the state, markers of transactions among them
    waiting      by table, the like that aren't yet; None where the topics couldn't be read
    late         by view, changes that came after a window had closed; views without any are left out
    late_since   Unix seconds since which they are counted, when the state began
    clocks       by view, of those that have one, once all of their documents have been sent
    """

    rows: Mapping[str, int]
    bytes: Mapping[str, int]
    dirty: Mapping[str, int]
    pending: int
    used_bytes: int | None = None
    limit_bytes: int | None = None
    sent_per_s: float | None = None
    applied: Mapping[str, int] = field(default_factory=dict)
    waiting: Mapping[str, int] | None = None
    late: Mapping[str, int] = field(default_factory=dict)
    late_since: float | None = None
    clocks: Mapping[str, ClockStatus] = field(default_factory=dict)

    @property
    def done_s(self) -> float | None:
        """Seconds until all documents are sent that are to be sent now, at the present pace."""
        return sum(self.dirty.values()) / self.sent_per_s if self.sent_per_s else None


@dataclass(frozen=True)
class Status:
    """The state of a pipeline. A part that couldn't be read is None and has a finding."""

    pipeline: str
    connector: ConnectorStatus | None = None
    slot: Slot | None = None
    heartbeat: HeartbeatStatus | None = None
    sinks: tuple[SinkStatus, ...] = ()
    findings: tuple[Finding, ...] = ()
    definitions: Watch | None = None
    """How changes of table definitions are noticed; None when that couldn't be read."""
    documents: DocumentsStatus | None = None
    """None also without views of several tables."""
    slot_loss_s: float | None = None
    """Seconds until Postgres gives the slot up, see `cdc.observe.forecast`."""
    snapshot_records: int | None = None
    """About as many records as the first snapshot has sent by now; None when it isn't under way."""
