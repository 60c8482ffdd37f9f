"""Everything a run needs to resume one sink: positions, floors, tables that wait. Loaded again at
every restart.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from cdc.control.floors import Floors
from cdc.control.registrations import Registration
from cdc.errors import CdcError, SinkRejected
from cdc.model.outcome import Advance
from cdc.model.position import Position
from cdc.model.table import Table
from cdc.postgres.table_definition import Definition

Ends = Mapping[str, Mapping[int, int]]
"""Topic, partition: an offset."""


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
        for table in self.tables:
            if (end := ends.get(table.topic)) is None:
                continue
            position, shape = self.positions[table.topic], self.shapes[table.topic]
            start = position.offsets if position else (0,) * shape.partition_count
            last = tuple(max(offset, end[partition]) for partition, offset in enumerate(start))
            if last != start:
                steps.append(
                    Advance(table, position, Position(shape.topic_id, last), self.floor(table))
                )
        return steps

    def advanced(
        self, steps: Sequence[Advance], live: Mapping[str, Position | None]
    ) -> "ResumePlan":
        """The plan after a batch of these steps; `live` are the positions of the live views
        then.
        """
        return replace(
            self,
            positions={**self.positions, **{s.table.topic: s.end for s in steps}},
            live=dict(live),
        )

    def starts(self) -> dict[str, tuple[int, ...]]:
        """Where reading starts, by topic the offset in each partition."""
        return {
            topic: position.offsets if position else (0,) * self.shapes[topic].partition_count
            for topic, position in self.positions.items()
        }

    def find_cut(self, ends: Ends) -> str | None:
        """A table whose topic ends before its position: it is another topic, or its log was cut."""
        starts = self.starts()
        for table in self.tables:
            of_topic = ends[table.topic]
            if any(
                of_topic[partition] < start for partition, start in enumerate(starts[table.topic])
            ):
                return table.qualified
        return None

    def behind(self, ends: Ends) -> int:
        """How many offsets the live views lack to `ends`."""
        return sum(
            max(
                0,
                offset - (position.offsets[partition] if (position := self.live.get(topic)) else 0),
            )
            for topic, end in ends.items()
            for partition, offset in end.items()
        )

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

    def no_table_error(self, sink: str) -> CdcError:
        """The error if no table can go on, so that all are blocked."""
        if self.refused:
            return self.refused[0]
        message, hint = next(iter(self.blocked.values()))
        return SinkRejected(message, hint=hint, sink=sink)
