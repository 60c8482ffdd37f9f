"""The views of one sink as its stream knows them: loads the plan that a run goes by, and keeps it as batches go in.

In:  the sink, the topics, the control topics, the tables as they are now.
Out: `ResumePlan`; ConnectorError where the log can't continue.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace

import structlog

from cdc.apply.plan import ControlState, Ends, ResumePlan
from cdc.codec.decode_options import DecodeOptions
from cdc.config.settings import Pipeline
from cdc.control.control_topics import Control
from cdc.control.registrations import Registration
from cdc.errors import CdcError, SinkRejected, SourceError
from cdc.generations.registry import GenerationBuild, Generations, Registry
from cdc.generations.standby import StandbySink
from cdc.kafka.log_continuity import Continuity, Discontinued
from cdc.kafka.topics import Topics
from cdc.model.column_names import refusal_error
from cdc.model.outcome import Advance
from cdc.model.position import Position, ViewCheckpoint
from cdc.model.table import Table
from cdc.postgres.schema_changes import Definition
from cdc.sink.contract import Archive, GenerationReplaced, Sink, positions

log = structlog.get_logger()
DescribeTables = Callable[[Sequence[Definition], Registration], tuple[Sequence[Table], Mapping[str, list[str]]]]
"""From the journal of definitions and what the connector was registered with: the tables as they are now, and what is
the matter with some, by table."""


class Views:
    """`plan` is what the run goes by since the last `load`; `sink` takes its batches. One thread uses it."""

    def __init__(
        self,
        sink: Sink,
        pipeline: Pipeline,
        kafka: Topics,
        describe: DescribeTables,
        placeholder: str,
        names: Mapping[str, str] | None = None,
    ) -> None:
        """`names`: the generations that the views are of, by table, as long as they are to be kept current."""
        self.sink, self.plan = StandbySink(sink), ResumePlan(shadow=names is not None)
        self.kafka, self.pipeline, self.names, self.describe = kafka, pipeline, names, describe
        self.registry = Registry(pipeline, kafka)
        self.control = ControlState()
        self.reading = DecodeOptions(placeholder)
        self._control = Control(pipeline, kafka)
        self._continuity = Continuity(pipeline, kafka)

    @property
    def control_topics(self) -> list[str]:
        return self._control.topics

    @property
    def sink_generations(self) -> Generations:
        """What there is beside this sink's live views, as the registry was read last."""
        return self.registry.for_sink(self.sink.name)

    def read_control(self, ends: Mapping[str, Position] | None = None) -> ControlState:
        """What the control topics say by now; `ends`: where they end, if that was just asked. Raises ConnectorError."""
        if ends is None or self._control.has_changed(ends):
            self._control.read()
            known = self._control
            self.control = ControlState(self.control.version + 1, known.floors, known.definitions, known.registration)
        return self.control

    def load(self) -> ResumePlan:
        """Ask the sink where it stands, and make sure that the log still reaches back to there.

        Raises:
            CdcError: what sink and broker raise; GenerationReplaced when the generation isn't to be kept current
                any more.
        """
        control = self.read_control()
        self.registry.read()
        self._refuse_replaced()
        tables, troubled = self.describe(control.definitions, control.registration)
        self._retire(tables)
        existing = self.kafka.existing(table.topic for table in tables)
        logs = self._continuity.read([table.topic for table in tables if table.topic in existing]).logs
        views, blocked = self._sort(tables, troubled, existing)
        standby = self._follow_standby(views)
        self._look_for_holes(list(views))
        self.plan = replace(
            blocked,
            control=control,
            standby=standby,
            shadow=self.names is not None,
            tables=tuple(views),
            positions=self.sink.oldest_positions(),
            live=dict(self.sink.live_at),
            generations={table.topic: stored.generation for table, stored in views.items() if stored},
            shapes={table.topic: logs[table.topic].end for table in views},
            sure_until=self._continuity.sure_until,
        )
        self.reading = replace(self.reading, floors=self._lsns(), first_offsets=self._since())
        return self.plan

    def advance(self, steps: Sequence[Advance]) -> None:
        """Take note that a batch is in the sink."""
        self.plan = self.plan.advanced(steps, self.sink.live_at)
        new = [step.table for step in steps if step.table.topic not in self.plan.generations]
        made = {table.topic: stored.generation for table in new if (stored := self.sink.live_position(table))}
        if made:
            self.plan = replace(self.plan, generations={**self.plan.generations, **made})

    def steps(self, ends: Ends) -> list[Advance]:
        return self.plan.steps(ends)

    def standing(self, tables: Sequence[Table]) -> Mapping[str, ViewCheckpoint | None]:
        """Where the live views of these tables stand, by table name."""
        return positions(self.sink.live, tables)

    def _sort(
        self, tables: Sequence[Table], troubled: Mapping[str, list[str]], existing: Collection[str]
    ) -> tuple[dict[Table, ViewCheckpoint | None], ResumePlan]:
        """The tables that can go on, with where their views stand; what a plan says of the others."""
        blocked, unheld, waiting = dict(troubled), set(troubled), list[Table]()
        refusals, fine = list(_unread(tables, troubled)), list[Table]()
        for table in tables:
            if table.topic not in existing:
                waiting.append(table)
                blocked[table.qualified] = [f"there is no topic {table.topic} yet", "cdc -p FILE register"]
            elif why := refusal_error(table, self.sink.refusals, self.sink.name):
                unheld.add(table.qualified)
                refusals.append(why)
                blocked[table.qualified] = [why.message, why.hint]
            else:
                fine.append(table)
        views: dict[Table, ViewCheckpoint | None] = {}
        standing = self._standing(fine)
        for table in fine:
            try:
                views[table] = self._prepared(table, standing)
            except (SinkRejected, Discontinued) as error:
                # This table's trouble, or, where every table has it, the sink's own: see below.
                blocked[table.qualified] = [error.message, error.hint]
                refusals.append(error)
                waiting.append(table)
        if blocked and not views:
            raise _nothing_left(blocked, refusals, self.sink.name)
        others = ResumePlan(blocked=blocked, refused=tuple(refusals), waiting=tuple(waiting), unheld=frozenset(unheld))
        return views, others

    def _standing(self, tables: Sequence[Table]) -> Mapping[str, ViewCheckpoint | None]:
        """In as few requests as the sink and the broker can do with; empty where one table has to be asked alone."""
        try:
            standing = self.standing(tables)
        except SinkRejected:
            return {}
        self._continuity.load_next_records((table, standing[table.qualified]) for table in tables)
        return standing

    def _prepared(self, table: Table, standing: Mapping[str, ViewCheckpoint | None]) -> ViewCheckpoint | None:
        """Where the live view stands, once it is ready to go on."""
        name, sink = table.qualified, self.sink.live
        stored = standing[name] if name in standing else sink.position(table)

        def refuse(view: ViewCheckpoint | None) -> None:
            self._continuity.refuse(sink.name, table, view)

        stored = prepare(sink, table, stored, self._floor(table), refuse)
        refuse(stored)
        return stored

    def _floor(self, table: Table) -> int:
        return self.control.floors.number(table.qualified)

    def _follow_standby(self, views: Mapping[Table, ViewCheckpoint | None]) -> Mapping[str, str]:
        """The generations kept beside these views, by table name.

        One that the log can't continue is removed: going back to it would show what is wrong.
        """

        def refuse(table: Table, view: ViewCheckpoint | None) -> None:
            self._continuity.refuse(self.sink.name, table, view, complete=True)

        due = self.sink_generations.standby_names if self.names is None else {}
        self.sink.resume(due, views, self._floor, refuse)
        if self.sink.discontinued:
            log.warning("generation_removed", sink=self.sink.name, error=self.sink.discontinued.message)
            self._remove([table for table in views if table.qualified in due])
            due = {}
            self.sink.resume(due, views, self._floor, refuse)
        return due

    def _look_for_holes(self, tables: Sequence[Table]) -> None:
        """Take down what a log of changes misses from now on, before its position moves past that."""
        archive = self.sink.live
        if self.names is None and isinstance(archive, Archive):
            self._continuity.record_holes(self.sink.name, [(table, archive.archived(table)) for table in tables])

    def _refuse_replaced(self) -> None:
        """To make ready what has just been removed would leave it lying about."""
        work = self.sink_generations.work
        if self.names and not (isinstance(work, GenerationBuild) and work.names == self.names):
            raise GenerationReplaced(*next(iter(self.names.items())), self.sink.name)

    def _retire(self, tables: Sequence[Table]) -> None:
        """Remove what has been retained long enough."""
        overdue = self.sink_generations.expired_tables if self.names is None else []
        if due := [table for table in tables if table.qualified in overdue]:
            log.info("generation_removed", sink=self.sink.name)
            self._remove(due)

    def _remove(self, tables: Sequence[Table]) -> None:
        """Forgotten first, so that what is left of it when this fails is a leftover and no way back."""
        self.registry.forget_retained(self.sink.name, [table.qualified for table in tables])
        self.sink.drop_unreferenced(tables, {})
        self.registry.read()

    def _lsns(self) -> dict[str, int]:
        """By topic, below which LSN of the current server changes are dead."""
        lsns = self.plan.control.floors.lsns
        return {table.topic: lsn for table in self.plan.tables if (lsn := lsns.get(table.qualified))}

    def _since(self) -> dict[str, tuple[int, ...]]:
        """Where the records that count begin, of topics that are read from before there."""
        since = {}
        for topic, starts in self.plan.offsets().items():
            first = self.plan.control.registration.start(topic, self.plan.shapes[topic].topic_id)
            if any(starts[str(partition)] < offset for partition, offset in enumerate(first)):
                since[topic] = first
        return since


def prepare(
    sink: Sink,
    table: Table,
    stored: ViewCheckpoint | None,
    floor: int,
    refuse: Callable[[ViewCheckpoint | None], object],
) -> ViewCheckpoint | None:
    """Make a live view that is `stored` so ready to go on; where it stands then, None when it begins from nothing.

    A view without a position, or from before `floor`, the number of its table's last floor, is made anew. What it held
    would stay for ever otherwise: no record of the log removes a row that is dead, or whose delete has been compacted
    away. `refuse` raises when the log can't make the view again, and is asked before what readers see goes.
    """
    if stored is None or stored.floor < floor:
        refuse(None)
        sink.clear(table)
        stored = None
    sink.prepare(table)
    return stored


def _nothing_left(blocked: Mapping[str, Sequence[str]], refusals: Sequence[CdcError], sink: str) -> CdcError:
    """Why no table can go on."""
    if refusals:
        return refusals[0]
    message, hint = next(iter(blocked.values()))
    return SinkRejected(message, hint=hint, sink=sink)


def _unread(tables: Sequence[Table], troubled: Mapping[str, list[str]]) -> Iterator[CdcError]:
    """What is the matter with the tables that can't be described."""
    for name in sorted(troubled.keys() - {table.qualified for table in tables}):
        what, hint = troubled[name]
        yield SourceError(what, hint=hint, table=name)
