"""Decide a stream's next step from its plan and from what was observed since.

Pure: the owner of the stream observes and acts. The first row that fits applies. Another writer is
a failure that a retry can't fix, unless a promotion is under way.

Two things are decided elsewhere. What follows `failed` is in `cdc.apply.supervisor`. `Stream` decides
what it notices without an observation: a sink that is paused when the stream starts, and a topic
that ends before its view's position.

| state   | event                                              | next                     | guarantee              |
|---------|----------------------------------------------------|--------------------------|------------------------|
| any     | a failure that an immediate retry can't fix        | failed, with the reason  | never silent           |
| any     | asked to stop                                      | stopped, after the batch | positions are stored   |
| any     | a failure that may pass, and hasn't kept recurring | waiting, then starting   | the view continues     |
| running | another writer, while a promotion is under way     | starting: switched       | one writer a view      |
| running | the end of the log, and the run was to end there   | caught up, or failed     | a refused view fails   |
| running | the same, but documents need more of the log       | starting: documents      | none with a late row   |
| running | a new registration                                 | starting: registration   | its tables first       |
| running | a new floor: rows went with a TRUNCATE             | starting: truncate       | floors first           |
| running | a new definition of a table                        | starting: schema         | columns first          |
| running | a promotion waits for its views to catch up        | waits, 5 s at most       | no reader goes back    |
| running | somebody paused the sink                           | starting: paused         | no batch meanwhile     |
| running | readers see another generation                     | starting: switched       | readers' view moves on |
| running | another standby is due, or one can be retried      | starting: standby        | rollback never waits   |
| running | the log may have lost what a view needs            | starting: continuity     | no delete is missed    |
| running | a waiting table can continue                       | starting: unblocked      | no needless wait       |
| running | a topic was recreated, cut or repartitioned        | starting: topic          | order within a key     |
| running | a view went back, or no longer fits its table      | starting: view           | the view is the log's  |
| running | a redrive was requested                            | starting: quarantine     | requests are answered  |
| running | none of these                                      | running                  | positions last         |
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from operator import lt
from typing import NamedTuple

from cdc.apply.progress import RunState
from cdc.control.floors import Floors
from cdc.control.registrations import Registration
from cdc.errors import CdcError, Fenced
from cdc.model.outcome import Advance
from cdc.model.position import Position, Reach, ViewCheckpoint, distance
from cdc.model.table import Table
from cdc.postgres.table_definition import Definition
from cdc.sink.remedy import exhausted

HOLD_S = 5.0
"""Seconds that a live view waits for a promotion. No longer, because the command that promotes may
be dead.
"""
Ends = Mapping[str, tuple[int, ...]]
"""By topic: an offset of each partition."""


class ControlState(NamedTuple):
    """The contents of the control topics. `version` changes whenever something was written
    there.
    """

    version: int = 0
    floors: Floors = Floors()
    definitions: tuple[Definition, ...] = ()
    registration: Registration = Registration()


@dataclass(frozen=True)
class ResumePlan:
    """Where a run resumes. `tables` go on; positions and generations are by topic, facts of waiting
    tables by name.
    """

    control: ControlState = field(default_factory=ControlState)
    tables: tuple[Table, ...] = ()
    positions: Mapping[str, Position | None] = field(default_factory=dict)
    """Where reading resumes: the older position of the live view and its standby; None: offset
    zero.
    """
    live: Mapping[str, Position | None] = field(default_factory=dict)
    """Positions of the live views."""
    generations: Mapping[str, str] = field(default_factory=dict)
    """Generations of the live views, as far as they have one."""
    shapes: Mapping[str, Position] = field(default_factory=dict)
    """Ids, partitions and ends of topics."""
    blocked: Mapping[str, list[str]] = field(default_factory=dict)
    """Tables that wait for a command: the problem, and the hint."""
    refused: tuple[CdcError, ...] = ()
    """The errors of views that have to be rebuilt."""
    waiting: tuple[Table, ...] = ()
    """Tables that can go on once their topic or their view has changed."""
    unheld: frozenset[str] = frozenset()
    """Tables that can go on once their columns have changed."""
    standby: Mapping[str, str] = field(default_factory=dict)
    """The generations to keep as standby, by table name."""
    shadow: bool = False
    """Readers don't see these views."""
    sure_until: float = float("inf")
    """Until when the log can certainly continue these views, in Unix seconds."""

    def floor(self, table: Table) -> int:
        """The floor that a view of the table has to be made after."""
        return self.control.floors.number(table.qualified)

    def steps(self, ends: Ends) -> list[Advance]:
        """The steps of a batch that ends at `ends`, for the views that lack some of its records.

        A batch may begin before a view's position, because another view is further behind, and may
        end before it, too.
        """
        steps = []
        starts = self.starts()
        for table in self.tables:
            topic = table.topic
            if topic in ends:
                last = tuple(map(max, starts[topic], ends[topic]))
                if last != starts[topic]:
                    end = Position(self.shapes[topic].topic_id, last)
                    steps.append(Advance(table, self.positions[topic], end, self.floor(table)))
        return steps

    def starts(self) -> Ends:
        """Where reading starts, by topic the offset in each partition."""
        return {
            topic: position.offsets if position else (0,) * self.shapes[topic].partition_count
            for topic, position in self.positions.items()
        }

    def find_cut(self, ends: Ends) -> str | None:
        """A table whose topic ends before its position: it is another topic, or its log was cut."""
        starts = self.starts()
        for table in self.tables:
            if any(map(lt, ends[table.topic], starts[table.topic])):
                return table.qualified
        return None

    def behind(self, ends: Ends) -> int:
        """How many offsets the live views lack to `ends`."""
        offsets = 0
        for topic, end in ends.items():
            position = self.live.get(topic)
            start = position.offsets if position else (0,) * len(end)
            offsets += sum(max(0, last - first) for first, last in zip(start, end, strict=True))
        return offsets

    def lsns(self) -> dict[str, int]:
        """By topic: the LSN of the current server below which changes are dead."""
        lsns = self.control.floors.lsns
        return {table.topic: lsn for table in self.tables if (lsn := lsns.get(table.qualified))}

    def first_offsets(self) -> dict[str, tuple[int, ...]]:
        """The first offsets that count, of topics that have dead records: a redrive reads from any
        offset on.
        """
        start = self.control.registration.start
        return {
            topic: first
            for topic, end in self.shapes.items()
            if (first := start(topic, end.topic_id))
        }


class Reason(StrEnum):
    REGISTRATION = "registration"
    TRUNCATE = "truncate"
    SCHEMA = "schema"
    SWITCHED = "switched"
    STANDBY = "standby"
    CONTINUITY = "continuity"
    UNBLOCKED = "unblocked"
    TOPIC = "topic"
    VIEW = "view"
    QUARANTINE = "quarantine"
    DOCUMENTS = "documents"
    FAILURE = "failure"
    ERROR = "error"
    """The stream had ended with an error: `cdc.apply.supervisor`."""
    PAUSED = "paused"


@dataclass(frozen=True)
class Continue:
    """Nothing that the plan depends on has changed."""


@dataclass(frozen=True)
class Restart:
    """Load the plan again and continue from the sink's positions. `table` is the table that
    changed, if the reason is one table.
    """

    reason: Reason
    table: str | None = None

    def __str__(self) -> str:
        return f"{self.reason} ({self.table})" if self.table else str(self.reason)


@dataclass(frozen=True)
class WaitForPromotion:
    """Apply nothing for a moment, so that the generation that is being promoted can catch up."""


@dataclass(frozen=True)
class Stop:
    """The stream ends in this state; with the `error` if it failed."""

    state: RunState
    error: CdcError | None = None


Decision = Continue | Restart | WaitForPromotion | Stop


@dataclass(frozen=True)
class Observed:
    """The facts since the plan was loaded. A fact that wasn't looked up this time is None."""

    control: ControlState
    standby: Mapping[str, str] = field(default_factory=dict)
    """The generations to keep as standby, by table."""
    standby_returns: bool = False
    """A standby that was dropped because it was away may be tried again."""
    paused: bool = False
    """A person has paused the sink."""
    promoting: bool = False
    """A promotion is under way, to a generation that has caught up or catches up by itself."""
    waited_s: float = 0.0
    now: float = 0.0
    """Unix seconds."""
    views: Mapping[str, ViewCheckpoint | None] | None = None
    """By topic: checkpoints of the live views."""
    topics: Mapping[str, Position] | None = None
    """Ends of topics."""
    unheld: str | None = None
    """A table whose view no longer fits it."""
    unblocked: str | None = None
    """A table that waited and can go on."""
    quarantine: bool = False
    """There are requests to redrive entries of the sink."""
    stopping: bool = False
    log_ended: bool = False
    """All records are applied that were there when the stream started."""
    unfinished: bool = False
    """Documents that follow from the records aren't sent yet, and need more of the log."""
    failure: CdcError | None = None
    tolerable: bool = False
    """The failure may pass, and hasn't recurred too often: see `cdc.sink.remedy.Patience`."""
    switching: bool = False
    """A promotion is under way, or has just ended, so another writer may be at the views."""


def decide(plan: ResumePlan, observed: Observed) -> Decision:
    """Decide the next step by the table above, row by row."""
    if observed.failure:
        return _after_failure(observed, observed.failure)
    if observed.stopping:
        return Stop(RunState.STOPPED)
    if observed.log_ended:
        return Restart(Reason.DOCUMENTS) if observed.unfinished else _at_end(plan)
    if observed.control.version != plan.control.version:
        return _after_control(plan.control, observed.control)
    if observed.promoting and observed.waited_s < HOLD_S:
        return WaitForPromotion()
    return _after_look(plan, observed)


def _after_failure(observed: Observed, failure: CdcError) -> Decision:
    if isinstance(failure, Fenced) and observed.switching:
        return Stop(RunState.STOPPED) if observed.stopping else Restart(Reason.SWITCHED)
    if not observed.tolerable:
        return Stop(RunState.FAILED, exhausted(failure))
    return Stop(RunState.STOPPED) if observed.stopping else Restart(Reason.FAILURE)


def _at_end(plan: ResumePlan) -> Stop:
    """A run that ends while views have to be rebuilt has failed."""
    return Stop(RunState.FAILED, plan.refused[0]) if plan.refused else Stop(RunState.CAUGHT_UP)


def _after_control(previous: ControlState, current: ControlState) -> Restart:
    """Restart for anything new in the control topics, before a record that may depend on it is
    applied.
    """
    if current.registration == previous.registration:
        for table, lsn in current.floors.lsns.items():
            if lsn != previous.floors.lsns.get(table):
                return Restart(Reason.TRUNCATE, table)
        if len(current.definitions) != len(previous.definitions) and current.definitions:
            return Restart(Reason.SCHEMA, current.definitions[-1].table)
    return Restart(Reason.REGISTRATION)


def _after_look(plan: ResumePlan, observed: Observed) -> Restart | Continue:
    """Restart for the first reason that applies, with its table."""
    views = observed.views or {}
    standby = observed.standby != plan.standby or observed.standby_returns
    reasons: dict[Reason, str | bool | None] = {
        Reason.PAUSED: observed.paused and not plan.shadow,
        Reason.SWITCHED: find_switched(plan, views),
        Reason.STANDBY: standby and not plan.shadow,
        Reason.CONTINUITY: observed.now > plan.sure_until,
        Reason.UNBLOCKED: observed.unblocked,
        Reason.TOPIC: find_reshaped(plan, observed.topics or {}),
        Reason.VIEW: observed.unheld or find_set_back(plan, views),
        Reason.QUARANTINE: observed.quarantine,
    }
    for reason, holds in reasons.items():
        if holds:
            return Restart(reason, holds if isinstance(holds, str) else None)
    return Continue()


def find_switched(plan: ResumePlan, views: Mapping[str, ViewCheckpoint | None]) -> str | None:
    """Find a table whose live view is of another generation than the plan's."""
    for table in plan.tables:
        generation = plan.generations.get(table.topic)
        stored = views.get(table.topic)
        if generation is not None and stored and stored.generation != generation:
            return table.qualified
    return None


def find_reshaped(plan: ResumePlan, topics: Mapping[str, Position]) -> str | None:
    """Find a table whose topic was recreated, or has partitions that the stream doesn't read."""
    for table in plan.tables:
        if not distance(topics.get(table.topic), plan.shapes[table.topic]).comparable:
            return table.qualified
    return None


def find_set_back(plan: ResumePlan, views: Mapping[str, ViewCheckpoint | None]) -> str | None:
    """Find a table whose view is behind its planned position. A view that is ahead has another
    writer, which the next `apply` reports.
    """
    for table in plan.tables:
        left_at = plan.live.get(table.topic)
        if table.topic not in views or left_at is None:
            continue
        stored = views[table.topic]
        if stored is None or distance(stored, left_at).reach is Reach.BEHIND:
            return table.qualified
    return None
