"""Where one sink's views stand, and what reading on from there has to know; taken anew at every start of its query.

In:  the sink, the topics, the control topics, the tables as they are now.
Out: positions, floors, the tables that can go on and those set aside; ConnectorError where the log can't continue.
"""

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

import structlog

from cdc.change import Position, Reach, Stored, Table, distance
from cdc.continuity import Continuity, Discontinued
from cdc.control import Control
from cdc.ddl import Definition
from cdc.decode import Reading
from cdc.errors import CdcError, SinkRejected, SourceError
from cdc.generations import Building, Generations, Registry, Retained
from cdc.kept import Kept
from cdc.names import refused
from cdc.registered import Registration
from cdc.settings import Pipeline
from cdc.sink import Archive, Misfit, Replaced, Sink, positions
from cdc.step import Ends, Steps, advances
from cdc.topics import Topics

AGAIN_S = 10.0
"""How often the sink itself is looked at: a table set aside may fit by now, a view may have been lost or cleared."""
HOLD_S = 5.0
"""How long the live views wait at most while readers are being shown others."""
LATELY_S = 10.0
"""How long after a switch whoever has kept current what readers see now may still be at it."""
log = structlog.get_logger()
Describe = Callable[[Sequence[Definition], Registration], tuple[Sequence[Table], Mapping[str, list[str]]]]
"""From the journal of definitions and what the connector was registered with: the tables as they are now, and what is
the matter with some, by table."""


class Again(Exception):
    """The query has to be started again from where the sink stands; why, in a word or two for the log."""


class Stand:
    """`tables` go on from `at`, with `kept` beside them; `aside` wait for a person: what is the matter, what to do."""

    def __init__(
        self,
        sink: Sink,
        pipeline: Pipeline,
        kafka: Topics,
        describe: Describe,
        placeholder: str,
        names: Mapping[str, str] | None = None,
    ) -> None:
        """`names`: the generations that the views are of, by table, as long as they are to be kept current."""
        self._sink, self._kafka, self._describe, self._names = sink, kafka, describe, names
        self._pipeline = pipeline
        self._control = Control(pipeline, kafka)
        self._registry = Registry(pipeline, kafka)
        self._generations: dict[str, str] = {}
        self._taken_at = 0.0
        self._retained: dict[str, Retained] = {}
        self._changed_at = -1
        self.kept = Kept(sink)
        self.reading = Reading(placeholder)
        self.tables: tuple[Table, ...] = ()
        self.at: dict[str, Position | None] = {}
        self.shapes: dict[str, Position] = {}
        self.aside: dict[str, list[str]] = {}
        self.refused: list[CdcError] = []
        """Why views of the sink can't go on that somebody has to make again."""
        self._continuity = Continuity(pipeline, kafka)
        self._waiting: list[Table] = []
        self._unheld: set[str] = set()

    def take(self) -> None:
        """Ask the sink where it stands, and make sure that the log still reaches back to there.

        Raises:
            CdcError: what sink and broker raise; Replaced when the generation isn't to be kept current any more.
        """
        self._control.read()
        self._registry.read()
        self._refuse_replaced()
        tables, troubled = self._describe(self._control.definitions, self._control.registration)
        self._retire(tables)
        self._retained, self._changed_at = dict(self._beside.retained), self._beside.changed_at
        self.kept.begin(self._beside.due if self._names is None else {})
        existing = self._kafka.existing(table.topic for table in tables)
        topics = [table.topic for table in tables if table.topic in existing]
        logs = self._continuity.read(topics).logs
        seen: dict[str, Stored | None] = {}
        aside, self._waiting, self._unheld = dict(troubled), [], set(troubled)
        self.refused = list(_unread(tables, troubled))
        for table in tables:
            if trouble := self._trouble(table, existing):
                aside[table.qualified] = trouble
                continue
            try:
                seen[table.topic] = self._found(table)
            except (SinkRejected, Discontinued) as error:
                # This table's trouble, or, where every table has it, the sink's own: see below.
                aside[table.qualified] = [error.message, error.hint]
                self.refused.append(error)
                self._waiting.append(table)
        self._drop_kept(tables)
        if aside and not seen:
            raise self._nothing_left(aside)
        self.tables = tuple(table for table in tables if table.topic in seen)
        self._look_for_holes()
        self.at = {topic: stored.position if stored else None for topic, stored in seen.items()}
        self._generations = {topic: stored.generation for topic, stored in seen.items() if stored}
        self.aside, self._taken_at = aside, time.monotonic()
        self.shapes = {topic: logs[topic].end for topic in seen}
        self.reading = replace(self.reading, floors=self._lsns(), since=self._since())

    def _look_for_holes(self) -> None:
        """Take down what a log of changes misses from now on, before its position moves past that."""
        if self._names is None and isinstance(self._sink, Archive):
            self._continuity.holes(self._sink.name, [(table, self._sink.archived(table)) for table in self.tables])

    def _nothing_left(self, aside: Mapping[str, list[str]]) -> CdcError:
        """Why no table can go on."""
        if self.refused:
            return self.refused[0]
        message, hint = next(iter(aside.values()))
        return SinkRejected(message, hint=hint, sink=self._sink.name)

    @property
    def sure_until(self) -> float:
        """Until when it is sure that the log continues these views, in Unix seconds: then it has to be taken again."""
        return self._continuity.sure_until

    def _trouble(self, table: Table, existing: Collection[str]) -> list[str] | None:
        """Why a table can't go on, whatever its view is; None when it can."""
        if table.topic not in existing:
            self._waiting.append(table)
            return [f"there is no topic {table.topic} yet", "cdc -p FILE register"]
        if why := refused(table, self._sink.refusals, self._sink.name):
            self._unheld.add(table.qualified)
            self.refused.append(why)
            return [why.message, why.hint]
        return None

    @property
    def _beside(self) -> Generations:
        """What there is beside this sink's live views, as the registry was read last."""
        return self._registry.of(self._sink.name)

    def _refuse_replaced(self) -> None:
        """To make ready what has just been removed would leave it lying about."""
        work = self._beside.work
        if self._names and not (isinstance(work, Building) and work.names == self._names):
            raise Replaced(*next(iter(self._names.items())), self._sink.name)

    def moved(self) -> bool:
        """Whether it has to be taken again. Raises ConnectorError."""
        # Before every batch, so in one request.
        ends = self._kafka.ends([*self._control.topics, self._registry.topic], decided=False)
        if self._control.moved(ends):
            return True
        # A rebuild may also have made a view for the columns that a table has by now.
        if self._changed(ends) and (self.switched() or self._some_fit()):
            return True
        if self._names is None and self.kept.outdated(self._beside.due):
            return True
        if time.time() > self.sure_until:
            return True
        if time.monotonic() - self._taken_at < AGAIN_S:
            return False
        self._taken_at = time.monotonic()
        fits = self._some_fit() or (bool(self._unheld) and self._carried())
        return fits or self._reshaped() or self._lost()

    def _changed(self, ends: Mapping[str, Position]) -> bool:
        """Whether a command has begun or ended something since this was asked last."""
        if self._registry.moved(ends):
            self._registry.read()
        before, self._changed_at = self._changed_at, self._beside.changed_at
        return self._changed_at != before

    def _some_fit(self) -> bool:
        """Whether a table that was set aside can go on by now."""
        if not self._waiting:
            return False
        existing = self._kafka.existing(table.topic for table in self._waiting)
        there = [table for table in self._waiting if table.topic in existing]
        now = Continuity(self._pipeline, self._kafka).read([table.topic for table in there])
        return any(self._fits(table, now) for table in there)

    def _fits(self, table: Table, now: Continuity) -> bool:
        try:
            now.refuse(self._sink.name, table, self._sink.position(table))
            self._sink.prepare(table)
        except (SinkRejected, Discontinued):
            return False
        return True

    def _carried(self) -> bool:
        """Whether a table that was refused for its columns can go on: they have other names by now, or are left out."""
        tables, troubled = self._describe(self._control.definitions, self._control.registration)
        mine = [table for table in tables if table.qualified in self._unheld - troubled.keys()]
        return any(not self._sink.refusals(table) for table in mine)

    def steps(self, ends: Ends) -> Steps:
        """What a batch that ends there brings to the views."""
        seen, kept = (advances(self.tables, at, self.shapes, ends, self.floor) for at in (self.at, self.kept.at))
        return Steps(seen, kept)

    def advance(self, steps: Steps) -> None:
        """Take note that a batch is in the sink."""
        self.kept.advance(steps.kept)
        for step in steps.seen:
            topic = step.table.topic
            self.at[topic] = step.until
            if topic not in self._generations and (stored := self._sink.position(step.table)):
                self._generations[topic] = stored.generation

    def switched(self) -> bool:
        """Whether readers see another generation of a view than the one that is applied to."""
        known = [table for table in self.tables if table.topic in self._generations]
        there = positions(self._sink, known)
        seen = ((there[table.qualified], self._generations[table.topic]) for table in known)
        return any(stored and stored.generation != generation for stored, generation in seen)

    def switching(self) -> bool:
        """Whether another writer may have been at the views because readers are being shown another generation."""
        beside = self._registry.read().of(self._sink.name)
        lately = any(time.time() - one.at < LATELY_S for one in beside.retained.values())
        return lately or self.switched() or beside.showing or self._retained != beside.retained

    def outrun(self) -> bool:
        """Wait while readers are being shown another generation, which couldn't catch up otherwise; whether they are.

        No longer than 5 s: whoever switches may have been killed. Not for a kept one that needs the next batch itself.
        """
        until = time.monotonic() + HOLD_S
        waited = False
        while self._yields() and time.monotonic() < until:
            waited = True
            time.sleep(HOLD_S / 100)
            self._registry.read()
        return waited and self.switched()

    def _yields(self) -> bool:
        beside = self._beside
        return beside.showing and (isinstance(beside.work, Building) or self.kept.level(self.at))

    def _retire(self, tables: Sequence[Table]) -> None:
        """Remove what has been retained long enough."""
        overdue = self._beside.overdue if self._names is None else []
        if due := [table for table in tables if table.qualified in overdue]:
            log.info("generation_removed", sink=self._sink.name)
            self._remove(due)

    def _remove(self, tables: Sequence[Table]) -> None:
        """Forgotten first, so that what is left of it when this fails is a leftover and no way back."""
        self._registry.retire(self._sink.name, [table.qualified for table in tables])
        self._sink.sweep(tables, {})
        self._registry.read()
        self._retained, self._changed_at = dict(self._beside.retained), self._beside.changed_at

    def _reshaped(self) -> bool:
        """Whether a topic is another one by now, or has partitions that nobody reads."""
        ends = self._kafka.ends(list(self.shapes))
        return any(
            (ends[topic].topic_id, ends[topic].partition_count) != (shape.topic_id, shape.partition_count)
            for topic, shape in self.shapes.items()
        )

    def _lost(self) -> bool:
        """Whether a view stands before where it was left. Beyond it another writer is at work: `apply` tells."""
        try:
            there = positions(self._sink, self.tables)
        except Misfit:
            # Set aside when it is taken again.
            return True
        pairs = ((self.at[table.topic], there[table.qualified]) for table in self.tables)
        return any(at and (stored is None or distance(stored, at).reach is Reach.BEHIND) for at, stored in pairs)

    def floor(self, table: Table) -> int:
        """What a view of the table has to be made after."""
        return self._control.floors.number(table.qualified)

    def _lsns(self) -> dict[str, int]:
        """By topic, below which LSN of the current server changes are dead."""
        return {table.topic: lsn for table in self.tables if (lsn := self._control.floors.lsn(table.qualified))}

    def _since(self) -> dict[str, tuple[int, ...]]:
        """Where the records that count begin, of topics that are read from before there."""
        found = {}
        for topic, starts in self.offsets().items():
            first = self._control.registration.start(topic, self.shapes[topic].topic_id)
            if any(starts[str(p)] < offset for p, offset in enumerate(first)):
                found[topic] = first
        return found

    def offsets(self) -> dict[str, dict[str, int]]:
        """Where reading starts, per topic and partition."""
        starts = {}
        for topic, at in self.at.items():
            nowhere = (0,) * self.shapes[topic].partition_count
            both = (one.offsets if one else nowhere for one in (at, self.kept.at.get(topic, at)))
            starts[topic] = {str(p): offset for p, offset in enumerate(map(min, *both))}
        return starts

    def behind(self, topic: str, end: Mapping[int, int]) -> int:
        """Offsets from where the view stands to `end`."""
        at = self.at.get(topic)
        return sum(max(0, offset - (at.offsets[partition] if at else 0)) for partition, offset in end.items())

    def look(self, *, careful: bool) -> None:
        self.reading = replace(self.reading, careful=careful)

    def _found(self, table: Table) -> Stored | None:
        """Where the live view stands, once it and what is kept beside it are ready to go on."""
        refuse = partial(self._continuity.refuse, self._sink.name, table)
        stored = prepare(self._sink, table, self.floor(table), refuse)
        refuse(stored)
        self.kept.find(table, stored, self.floor(table), partial(refuse, complete=True))
        return stored

    def _drop_kept(self, tables: Sequence[Table]) -> None:
        """Remove a kept generation that the log can't continue: going back to it would show what is wrong."""
        if self.kept.lost:
            log.warning("generation_removed", sink=self._sink.name, error=self.kept.lost.message)
            self._remove([table for table in tables if table.qualified in self._beside.due])
            self.kept.begin({})


def prepare(sink: Sink, table: Table, floor: int, refuse: Callable[[Stored | None], object]) -> Stored | None:
    """Make a live view ready to go on, and say where it stands; None when it begins from nothing.

    A view without a position, or from before `floor`, the number of its table's last floor, is made anew. What it held
    would stay for ever otherwise: no record of the log removes a row that is dead, or whose delete has been compacted
    away. `refuse` raises when the log can't make the view again, and is asked before what readers see goes.
    """
    stored = sink.position(table)
    if stored is None or stored.floor < floor:
        refuse(None)
        sink.clear(table)
        stored = None
    sink.prepare(table)
    return stored


def _unread(tables: Sequence[Table], troubled: Mapping[str, list[str]]) -> Iterator[CdcError]:
    """What is the matter with the tables that can't be described."""
    for name in sorted(troubled.keys() - {table.qualified for table in tables}):
        what, hint = troubled[name]
        yield SourceError(what, hint=hint, table=name)
