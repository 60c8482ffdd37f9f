"""What a stream resumes from: load the plan of one sink's views, advance it with each batch, and notice
what has changed since it was loaded.

In:  the sink, the topics, the control topics, the tables as they are now.
Out: `ResumePlan`; ConnectorError if the log can't continue a view; a `Decision` at each look.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import structlog

from cdc.apply.machine import (
    Continue,
    ControlState,
    Decision,
    Ends,
    Observed,
    ResumePlan,
    decide,
    find_switched,
)
from cdc.apply.schema_follower import DescribeTables
from cdc.codec.decode_options import DecodeOptions
from cdc.config.settings import Pipeline
from cdc.control.control_topics import Control
from cdc.errors import CdcError, SinkRejected, SourceError
from cdc.generations.registry import GenerationBuild, Generations, Pause, Registry, RetainedView
from cdc.generations.standby import StandbySink
from cdc.kafka.log_continuity import Continuity
from cdc.kafka.log_ends import LogEnds
from cdc.kafka.log_refusals import Discontinued
from cdc.kafka.topics import Topics
from cdc.model.clock import Clock
from cdc.model.column_names import refusal_error
from cdc.model.outcome import Advance
from cdc.model.position import Position, ViewCheckpoint
from cdc.model.table import Table
from cdc.sink.contract import (
    Applier,
    Archive,
    SchemaMismatch,
    Sink,
    positions,
    require_known_columns,
    require_same_shape,
)
from cdc.sink.promotion import GenerationReplaced

TOPICS_S = 5.0
"""Seconds between checks that control topics are still the same topics: one that was created again
may have as many records.
"""
RECHECK_S = 10.0
"""Seconds between checks of the sink itself: a waiting table may fit by now, a view may be lost or
cleared.
"""
SETTLING_S = 10.0
"""How long after a promotion the former writer of the promoted generation may still be at work."""
log = structlog.get_logger()


class SinkViews:
    """The views of one sink. `plan` is as of the last `load`; `sink` takes the batches. One thread
    uses it.
    """

    def __init__(
        self,
        sink: Applier,
        pipeline: Pipeline,
        kafka: Topics,
        describe: DescribeTables,
        placeholder: str,
        names: Mapping[str, str] | None = None,
        clock: Clock | None = None,
    ) -> None:
        """`names`: the generation of the views, by table, if they aren't the live ones."""
        self._clock = clock or Clock()
        self.now = self._clock.time
        self.sink = StandbySink(sink, self._clock)
        self.plan = ResumePlan(shadow=names is not None)
        self.kafka = kafka
        self.pipeline = pipeline
        self._names = names
        self._describe = describe
        self.registry = Registry(pipeline, kafka, self._clock)
        self.control = ControlState()
        self.reading = DecodeOptions(placeholder)
        self._control = Control(pipeline, kafka, self._clock)
        self._continuity = Continuity(pipeline, kafka, self.now)
        self._control_topics = [*self._control.topics, self.registry.topic]
        self._control_ends: Ends = {}
        """Where the control topics ended when they were read last, at `_control_read_at`."""
        self._control_read_at = 0.0
        self._looked_at = 0.0
        self._changed_at = -1
        self._retained: Mapping[str, RetainedView] = {}

    @property
    def sink_generations(self) -> Generations:
        """The sink's generations other than the live one, as of the last read of the registry."""
        return self.registry.for_sink(self.sink.name)

    def read_control(self, ends: Mapping[str, Position] | None = None) -> ControlState:
        """The state of the control topics; `ends`: their ends, if just asked for. Raises
        ConnectorError.
        """
        if ends is None or self._control.has_changed(ends):
            self._control.read()
            topics = self._control
            version = self.control.version + 1
            self.control = ControlState(
                version, topics.floors, topics.definitions, topics.registration
            )
        return self.control

    def read_pause(self) -> Pause | None:
        """Read whether the sink is paused; views that readers don't see never are. Raises
        ConnectorError.
        """
        self.registry.read()
        return None if self._names is not None else self.sink_generations.pause

    def load(self) -> ResumePlan:
        """Load positions from the sink, and make sure that the log can continue each view.

        Raises:
            CdcError: what sink and broker raise; GenerationReplaced when the generation isn't to be
                kept current
                any more.
        """
        control = self.read_control()
        self.registry.read()
        self._refuse_replaced()
        # Read once: what expires from now on is retired by the next plan. Between two answers it would
        # be neither retired nor kept current.
        standby_names = self.sink_generations.standby_names if self._names is None else {}
        tables, troubled = self._describe(control.definitions, control.registration)
        self._retire(tables, standby_names)
        existing = self.kafka.existing(table.topic for table in tables)
        logs = self._continuity.read(
            [table.topic for table in tables if table.topic in existing]
        ).logs
        views, blocked = self._sort(tables, troubled, existing)
        standby = self._follow_standby(views, standby_names)
        self._record_holes(list(views))
        self._withdraw_proofs(views)
        self.plan = replace(
            blocked,
            control=control,
            standby=standby,
            shadow=self._names is not None,
            tables=tuple(views),
            positions=self.sink.oldest_positions(),
            live=dict(self.sink.live_at),
            generations={
                table.topic: stored.generation for table, stored in views.items() if stored
            },
            shapes={table.topic: logs[table.topic].end for table in views},
            sure_until=self._continuity.sure_until,
        )
        self.reading = replace(
            self.reading, floors=self.plan.lsns(), first_offsets=self.plan.first_offsets()
        )
        self._looked_at = self._clock.monotonic()
        self._changed_at = self.sink_generations.changed_at
        self._retained = dict(self.sink_generations.retained)
        return self.plan

    def advance(self, steps: Sequence[Advance]) -> None:
        """Advance the plan by a batch that is in the sink."""
        plan = self.plan
        generations = dict(plan.generations)
        for step in steps:
            topic = step.table.topic
            if topic not in generations and (stored := self.sink.live.position(step.table)):
                generations[topic] = stored.generation
        self.plan = replace(
            plan,
            positions={**plan.positions, **{step.table.topic: step.end for step in steps}},
            live=dict(self.sink.live_at),
            generations=generations,
        )

    def _sort(
        self, tables: Sequence[Table], troubled: Mapping[str, list[str]], existing: Collection[str]
    ) -> tuple[dict[Table, ViewCheckpoint | None], ResumePlan]:
        """The tables that can go on, with their checkpoints; a plan with the facts about the
        others.
        """
        blocked = dict(troubled)
        unheld = set(troubled)
        waiting = list[Table]()
        described = {table.qualified for table in tables}
        refusals: list[CdcError] = [
            SourceError(problem, hint=hint, table=name)
            for name, (problem, hint) in sorted(troubled.items())
            if name not in described
        ]
        fine = list[Table]()
        for table in tables:
            if table.topic not in existing:
                waiting.append(table)
                blocked[table.qualified] = [
                    f"there is no topic {table.topic} yet",
                    "cdc -p FILE register",
                ]
            elif error := refusal_error(table, self.sink.live.refusals, self.sink.name):
                unheld.add(table.qualified)
                refusals.append(error)
                blocked[table.qualified] = [error.message, error.hint]
            else:
                fine.append(table)
        views: dict[Table, ViewCheckpoint | None] = {}
        standing = self._standing(fine)
        for table in fine:
            try:
                views[table] = self._prepared(table, standing)
            except (SinkRejected, Discontinued) as refusal:
                # The table's problem, or the sink's own if all tables have it: see below.
                blocked[table.qualified] = [refusal.message, refusal.hint]
                refusals.append(refusal)
                waiting.append(table)
        waiting_plan = ResumePlan(
            blocked=blocked,
            refused=tuple(refusals),
            waiting=tuple(waiting),
            unheld=frozenset(unheld),
        )
        if blocked and not views:
            if refusals:
                raise refusals[0]
            message, hint = next(iter(blocked.values()))
            raise SinkRejected(message, hint=hint, sink=self.sink.name)
        return views, waiting_plan

    def _standing(self, tables: Sequence[Table]) -> Mapping[str, ViewCheckpoint | None]:
        """The checkpoints, in as few requests as possible; empty if tables have to be asked one by
        one.
        """
        try:
            standing = positions(self.sink.live, tables)
        except SinkRejected:
            return {}
        self._continuity.load_next_records((table, standing[table.qualified]) for table in tables)
        return standing

    def _prepared(
        self, table: Table, standing: Mapping[str, ViewCheckpoint | None]
    ) -> ViewCheckpoint | None:
        """The checkpoint of the live view, once it is ready to go on."""
        name = table.qualified
        sink = self.sink.live
        stored = standing[name] if name in standing else sink.position(table)

        refuse = partial(self._continuity.refuse, sink.name, table)
        self.refuse_unfilled(self._continuity, table, stored)
        stored = prepare(sink, table, stored, self._floor(table), refuse)
        if self._continuity.resume(sink.name, table, stored) == stored:
            return stored
        log.info("table_read_again", sink=sink.name, table=name)
        return prepare(sink, table, None, self._floor(table), refuse)

    def refuse_unfilled(
        self, continuity: Continuity, table: Table, stored: ViewCheckpoint | None
    ) -> None:
        is_before_floor = stored is not None and stored.floor < self._floor(table)
        floor_lsn = self.control.floors.lsn(table.qualified) if is_before_floor else None
        continuity.refuse_unfilled(self.sink.name, table, stored, floor_lsn)

    def _floor(self, table: Table) -> int:
        return self.control.floors.number(table.qualified)

    def _follow_standby(
        self, views: Mapping[Table, ViewCheckpoint | None], standby: Mapping[str, str]
    ) -> Mapping[str, str]:
        """Follow the standby of these views. Returns its generations, by table name.

        A standby that the log can't continue is removed: a rollback would show wrong rows.
        """
        refuse = partial(self._continuity.refuse, self.sink.name, complete=True)
        try:
            self.sink.resume(standby, views, self._floor, refuse)
        except Discontinued as error:
            log.warning("generation_removed", sink=self.sink.name, error=error.message)
            self._remove([table for table in views if table.qualified in standby])
            return {}
        return standby

    def _record_holes(self, tables: Sequence[Table]) -> None:
        """Record the changes that a log of changes misses, before its position moves past them."""
        archive = self.sink.live
        if self._names is None and isinstance(archive, Archive):
            self._continuity.record_holes(
                self.sink.name, [(table, archive.archived(table)) for table in tables]
            )

    def _withdraw_proofs(self, views: Mapping[Table, ViewCheckpoint | None]) -> None:
        """Withdraw the proofs of views that no longer hold: see `Proof.holds`."""
        if self._names is not None:
            return
        withdrawn = [
            (("proof", self.sink.name, table.qualified), None)
            for table, stored in views.items()
            if (proof := self.sink_generations.proofs.get(table.qualified))
            and proof.is_of(stored)
            and not proof.holds(stored)
        ]
        if withdrawn:
            self.registry.write(*withdrawn)
            self.registry.read()

    def _refuse_replaced(self) -> None:
        """Raise GenerationReplaced if the generation was removed: preparing it again would leave it behind
        unused.
        """
        work = self.sink_generations.work
        if self._names and not (isinstance(work, GenerationBuild) and work.names == self._names):
            raise GenerationReplaced(*next(iter(self._names.items())), self.sink.name)

    def _retire(self, tables: Sequence[Table], standby_names: Mapping[str, str]) -> None:
        """Remove generations whose retention is over: those that are retained and no standby. Also of
        tables that the sink no longer lists.
        """
        retained = self.sink_generations.retained if self._names is None else {}
        overdue = retained.keys() - standby_names.keys()
        known = {table.qualified: table for table in tables}
        expired = [known.get(name) or self._by_name_only(name) for name in sorted(overdue)]
        if expired:
            log.info("generation_removed", sink=self.sink.name)
            self._remove(expired)

    def _by_name_only(self, name: str) -> Table:
        schema, table = name.split(".")
        return Table(schema, table, (), (), self.pipeline.topic(name))

    def _remove(self, tables: Sequence[Table]) -> None:
        """Remove generations, first from the registry: after a failure their files are leftovers,
        not a rollback. What a rebuild is making stays, and what is retained of other tables: they may
        lie in the same place.
        """
        self.registry.forget_retained(self.sink.name, [table.qualified for table in tables])
        self.registry.read()
        if isinstance(self.sink.live, Sink):
            self.sink.live.drop_unreferenced(tables, self.sink_generations.needed_names())

    def look(
        self, ends: LogEnds, *, waited_s: float = 0.0, redrive_requested: bool = False
    ) -> Decision:
        """Observe what has changed since the plan was loaded, and decide. That takes one request; the
        sink is asked after a command, and every 10 s.

        Raises:
            CdcError: from the broker and, if they are asked, from the sink and Postgres.
        """
        control_ends = ends.read(dict.fromkeys(self._control_topics, 1), is_committed=False)
        if (
            control_ends != self._control_ends
            or self._clock.monotonic() - self._control_read_at >= TOPICS_S
        ):
            self._reread_control()
        generations = self.sink_generations
        sink = self.sink
        level = isinstance(generations.work, GenerationBuild) or sink.is_caught_up
        observed = Observed(
            self.control,
            standby=generations.standby_names,
            standby_returns=sink.may_retry,
            paused=generations.pause is not None,
            promoting=not self.plan.shadow and generations.promotion_in_progress and level,
            waited_s=waited_s,
            now=self.now(),
        )
        decision = decide(self.plan, observed)
        if not isinstance(decision, Continue):
            return decision
        facts = self._check_sink(waited_s)
        return decide(self.plan, replace(observed, quarantine=redrive_requested, **facts))

    def _reread_control(self) -> None:
        began = self._clock.monotonic()
        ends = self.kafka.log_ends(self._control_topics)
        self.read_control(ends)
        if self.registry.has_changed(ends):
            self.registry.read()
        self._control_ends = {topic: end.offsets for topic, end in ends.items()}
        self._control_read_at = began

    def _check_sink(self, waited_s: float) -> dict[str, Any]:
        """The facts that cost requests to the sink, if they are due."""
        changed_at = self.sink_generations.changed_at
        overdue = self._clock.monotonic() - self._looked_at >= RECHECK_S
        if not (overdue or waited_s or changed_at != self._changed_at):
            return {}
        facts: dict[str, Any] = {"unblocked": self._unblocked()}
        try:
            facts["views"] = self._live_checkpoints()
        except SchemaMismatch as error:
            # Set aside when the plan is loaded again.
            facts["unheld"] = str(error.details["table"])
        if overdue:
            facts["unblocked"] = facts["unblocked"] or self._redescribed()
            facts["topics"] = self.kafka.ends(list(self.plan.shapes))
            self._looked_at = self._clock.monotonic()
        self._changed_at = changed_at
        return facts

    def _live_checkpoints(self) -> dict[str, ViewCheckpoint | None]:
        standing = positions(self.sink.live, self.plan.tables)
        return {table.topic: standing[table.qualified] for table in self.plan.tables}

    def is_switching(self) -> bool:
        """Whether a promotion may explain another writer at the views: it is under way, or has just
        been.
        """
        self.registry.read()
        generations = self.sink_generations
        lately = any(
            self.now() - retained.at < SETTLING_S for retained in generations.retained.values()
        )
        if lately or generations.promotion_in_progress or self._retained != generations.retained:
            return True
        return find_switched(self.plan, self._live_checkpoints()) is not None

    def _unblocked(self) -> str | None:
        """A table that waited for its topic or its view and can go on now."""
        waiting = self.plan.waiting
        if not waiting:
            return None
        existing = self.kafka.existing(table.topic for table in waiting)
        present = [table for table in waiting if table.topic in existing]
        continuity = Continuity(self.pipeline, self.kafka, self.now)
        continuity.read([table.topic for table in present])
        return next(
            (table.qualified for table in present if self._can_resume(table, continuity)), None
        )

    def _can_resume(self, table: Table, continuity: Continuity) -> bool:
        sink = self.sink.live
        try:
            stored = sink.position(table)
            self.refuse_unfilled(continuity, table, stored)
            continuity.resume(sink.name, table, stored)
            if stored and stored.floor >= self._floor(table):
                require_same_shape(table, sink.name, stored)
            sink.prepare(table)
        except (SinkRejected, Discontinued):
            return False
        return True

    def _redescribed(self) -> str | None:
        """A table that was refused for its columns and can go on, since they were renamed or
        excluded; or one that has other columns than the plan has.
        """
        plan = self.plan
        if not plan.unheld:
            return None
        tables, troubled = self._describe(self.control.definitions, self.control.registration)
        # What describes tables may have turned to them: nothing is applied by the plan before.
        if changed := sorted(table.qualified for table in {*plan.tables} - {*tables}):
            return changed[0]
        candidates = [table for table in tables if table.qualified in plan.unheld - troubled.keys()]
        return next(
            (table.qualified for table in candidates if not self.sink.live.refusals(table)), None
        )


def prepare(
    sink: Applier,
    table: Table,
    stored: ViewCheckpoint | None,
    floor: int,
    refuse: Callable[[ViewCheckpoint | None], object],
) -> ViewCheckpoint | None:
    """Prepare a live view to continue from its checkpoint `stored`.

    Returns the checkpoint, or None if the view starts from the beginning.

    A view without a position, or from before `floor`, the number of its table's last floor, is
    cleared. Its rows would stay for ever otherwise: no record removes a row that is dead, or whose
    tombstone was compacted away. `refuse` raises if the log can't make the view again, and is
    called before the view is cleared. Raises SchemaMismatch as `require_same_shape` does.
    """
    require_known_columns(table, sink.name)
    if stored is None or stored.floor < floor:
        refuse(None)
        sink.clear(table)
        stored = None
    require_same_shape(table, sink.name, stored)
    sink.prepare(table)
    return stored
