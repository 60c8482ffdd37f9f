"""Load the plan by which a run resumes the views of one sink, and advance it with each batch.

In:  the sink, the topics, the control topics, the tables as they are now.
Out: `ResumePlan`; ConnectorError if the log can't continue a view.
"""

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace

import structlog

from cdc.apply.plan import ControlState, ResumePlan
from cdc.apply.schema_follower import DescribeTables, description_errors
from cdc.codec.decode_options import DecodeOptions
from cdc.config.settings import Pipeline
from cdc.control.control_topics import Control
from cdc.errors import SinkRejected
from cdc.generations.registry import GenerationBuild, Generations, Pause, Registry
from cdc.generations.standby import StandbySink
from cdc.kafka.log_continuity import Continuity
from cdc.kafka.log_refusals import Discontinued
from cdc.kafka.topics import Topics
from cdc.model.column_names import refusal_error
from cdc.model.outcome import Advance
from cdc.model.position import Position, ViewCheckpoint
from cdc.model.table import Table
from cdc.sink.capabilities import Archive
from cdc.sink.contract import Sink, positions
from cdc.sink.promotion import GenerationReplaced

log = structlog.get_logger()


class Views:
    """The views of one sink. `plan` is as of the last `load`; `sink` takes the batches. One thread
    uses it.
    """

    def __init__(
        self,
        sink: Sink,
        pipeline: Pipeline,
        kafka: Topics,
        describe: DescribeTables,
        placeholder: str,
        names: Mapping[str, str] | None = None,
        now: Callable[[], float] = time.time,
    ) -> None:
        """`names`: the generation of the views, by table, if they aren't the live ones. `now`
        returns Unix seconds.
        """
        self.sink, self.plan = StandbySink(sink), ResumePlan(shadow=names is not None)
        self.kafka, self.pipeline, self.names, self.describe = kafka, pipeline, names, describe
        self.now = now
        self.registry = Registry(pipeline, kafka, now)
        self.control = ControlState()
        self.reading = DecodeOptions(placeholder)
        self._control = Control(pipeline, kafka, now)
        self._continuity = Continuity(pipeline, kafka, now)

    @property
    def control_topics(self) -> list[str]:
        """The topics that `read_control` reads."""
        return self._control.topics

    @property
    def sink_generations(self) -> Generations:
        """The sink's generations besides the live one, as of the last read of the registry."""
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
        return None if self.names is not None else self.sink_generations.pause

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
        standby_names = self.sink_generations.standby_names if self.names is None else {}
        tables, troubled = self.describe(control.definitions, control.registration)
        self._retire(tables, standby_names)
        existing = self.kafka.existing(table.topic for table in tables)
        logs = self._continuity.read(
            [table.topic for table in tables if table.topic in existing]
        ).logs
        views, blocked = self._sort(tables, troubled, existing)
        standby = self._follow_standby(views, standby_names)
        self._record_holes(list(views))
        self.plan = replace(
            blocked,
            control=control,
            standby=standby,
            shadow=self.names is not None,
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
        return self.plan

    def advance(self, steps: Sequence[Advance]) -> None:
        """Advance the plan by a batch that is in the sink."""
        self.plan = self.plan.advanced(steps, self.sink.live_at)
        unnamed = [step.table for step in steps if step.table.topic not in self.plan.generations]
        generations = {
            table.topic: stored.generation
            for table in unnamed
            if (stored := self.sink.live.position(table))
        }
        if generations:
            self.plan = replace(self.plan, generations={**self.plan.generations, **generations})

    def standing(self, tables: Sequence[Table]) -> Mapping[str, ViewCheckpoint | None]:
        """The checkpoints of the live views of these tables, by table name."""
        return positions(self.sink.live, tables)

    def _sort(
        self, tables: Sequence[Table], troubled: Mapping[str, list[str]], existing: Collection[str]
    ) -> tuple[dict[Table, ViewCheckpoint | None], ResumePlan]:
        """The tables that can go on, with their checkpoints; a plan with the facts about the
        others.
        """
        blocked, unheld, waiting = dict(troubled), set(troubled), list[Table]()
        refusals, fine = list(description_errors(tables, troubled)), list[Table]()
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
            raise waiting_plan.no_table_error(self.sink.name)
        return views, waiting_plan

    def _standing(self, tables: Sequence[Table]) -> Mapping[str, ViewCheckpoint | None]:
        """The checkpoints, in as few requests as possible; empty if tables have to be asked one by
        one.
        """
        try:
            standing = self.standing(tables)
        except SinkRejected:
            return {}
        self._continuity.load_next_records((table, standing[table.qualified]) for table in tables)
        return standing

    def _prepared(
        self, table: Table, standing: Mapping[str, ViewCheckpoint | None]
    ) -> ViewCheckpoint | None:
        """The checkpoint of the live view, once it is ready to go on."""
        name, sink = table.qualified, self.sink.live
        stored = standing[name] if name in standing else sink.position(table)

        def refuse(view: ViewCheckpoint | None) -> None:
            self._continuity.refuse(sink.name, table, view)

        self.refuse_unfilled(self._continuity, table, stored)
        stored = prepare(sink, table, stored, self._floor(table), refuse)
        if self._continuity.resume(sink.name, table, stored) == stored:
            return stored
        log.info("table_read_again", sink=sink.name, table=name)
        return prepare(sink, table, None, self._floor(table), refuse)

    def refuse_unfilled(
        self, continuity: Continuity, table: Table, stored: ViewCheckpoint | None
    ) -> None:
        """See `Continuity.refuse_unfilled`."""
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

        def refuse(table: Table, view: ViewCheckpoint | None) -> None:
            self._continuity.refuse(self.sink.name, table, view, complete=True)

        self.sink.resume(standby, views, self._floor, refuse)
        if self.sink.discontinued:
            log.warning(
                "generation_removed", sink=self.sink.name, error=self.sink.discontinued.message
            )
            self._remove([table for table in views if table.qualified in standby])
            standby = {}
            self.sink.resume(standby, views, self._floor, refuse)
        return standby

    def _record_holes(self, tables: Sequence[Table]) -> None:
        """Record the changes that a log of changes misses, before its position moves past them."""
        archive = self.sink.live
        if self.names is None and isinstance(archive, Archive):
            self._continuity.record_holes(
                self.sink.name, [(table, archive.archived(table)) for table in tables]
            )

    def _refuse_replaced(self) -> None:
        """Raise Replaced if the generation was removed: preparing it again would leave it behind
        unused.
        """
        work = self.sink_generations.work
        if self.names and not (isinstance(work, GenerationBuild) and work.names == self.names):
            raise GenerationReplaced(*next(iter(self.names.items())), self.sink.name)

    def _retire(self, tables: Sequence[Table], standby_names: Mapping[str, str]) -> None:
        """Remove generations whose retention is over: those that are retained and no standby."""
        retained = self.sink_generations.retained if self.names is None else {}
        overdue = retained.keys() - standby_names.keys()
        if expired := [table for table in tables if table.qualified in overdue]:
            log.info("generation_removed", sink=self.sink.name)
            self._remove(expired)

    def _remove(self, tables: Sequence[Table]) -> None:
        """Remove a generation, first from the registry: after a failure its files are leftovers,
        not a rollback.
        """
        self.registry.forget_retained(self.sink.name, [table.qualified for table in tables])
        self.sink.live.drop_unreferenced(tables, {})
        self.registry.read()


def prepare(
    sink: Sink,
    table: Table,
    stored: ViewCheckpoint | None,
    floor: int,
    refuse: Callable[[ViewCheckpoint | None], object],
) -> ViewCheckpoint | None:
    """Make a live view ready to go on from its checkpoint `stored`. Returns the checkpoint; None if
    it starts anew.

    A view without a position, or from before `floor`, the number of its table's last floor, is
    cleared. Its rows would stay for ever otherwise: no record removes a row that is dead, or whose
    tombstone was compacted away. `refuse` raises if the log can't make the view again, and is
    called before the view is cleared.
    """
    if stored is None or stored.floor < floor:
        refuse(None)
        sink.clear(table)
        stored = None
    sink.prepare(table)
    return stored
