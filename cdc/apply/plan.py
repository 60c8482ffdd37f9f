"""Everything that a run goes by until its query is started again: where views stand, floors, tables that wait."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from cdc.control.floors import Floors
from cdc.control.registrations import Registration
from cdc.errors import CdcError
from cdc.model.outcome import Advance
from cdc.model.position import Position
from cdc.model.table import Table
from cdc.postgres.schema_changes import Definition

Ends = Mapping[str, Mapping[int, int]]
"""Topic, partition: an offset."""


class ControlState(NamedTuple):
    """What the control topics say. `version` is another one whenever something has been written there."""

    version: int = 0
    floors: Floors = Floors()
    definitions: tuple[Definition, ...] = ()
    registration: Registration = Registration()


@dataclass(frozen=True)
class ResumePlan:
    """`tables` go on; maps of positions and generations are by topic, those of what waits by table name."""

    control: ControlState = field(default_factory=ControlState)
    tables: tuple[Table, ...] = ()
    positions: Mapping[str, Position | None] = field(default_factory=dict)
    """Where reading goes on: the older of a view and of what is kept beside it; None: from the beginning."""
    live: Mapping[str, Position | None] = field(default_factory=dict)
    """Where the views stand that readers see."""
    generations: Mapping[str, str] = field(default_factory=dict)
    """Of these views, as far as they have one."""
    shapes: Mapping[str, Position] = field(default_factory=dict)
    """Ids and partitions of topics, and where they ended."""
    blocked: Mapping[str, list[str]] = field(default_factory=dict)
    """Tables that wait for a person: what is the matter, what to do."""
    refused: tuple[CdcError, ...] = ()
    """Why views can't go on that somebody has to make again."""
    waiting: tuple[Table, ...] = ()
    """Those that may go on once their topic or their view is another one."""
    unheld: frozenset[str] = frozenset()
    """Those that may go on once they are described otherwise."""
    standby: Mapping[str, str] = field(default_factory=dict)
    """The generations to be kept beside the live ones, by table name."""
    shadow: bool = False
    """Readers don't see these views."""
    sure_until: float = float("inf")
    """Until when it is sure that the log continues these views, in Unix seconds."""

    def floor(self, table: Table) -> int:
        """What a view of the table has to be made after."""
        return self.control.floors.number(table.qualified)

    def steps(self, ends: Ends) -> list[Advance]:
        """What a batch that ends there brings to the views that lack something of it.

        A batch that begins before a view's position, for the sake of another one, may end before it as well.
        """
        steps = []
        for table in self.tables:
            if (end := ends.get(table.topic)) is None:
                continue
            position, shape = self.positions[table.topic], self.shapes[table.topic]
            start = position.offsets if position else (0,) * shape.partition_count
            until = tuple(max(offset, end[partition]) for partition, offset in enumerate(start))
            if until != start:
                steps.append(Advance(table, position, Position(shape.topic_id, until), self.floor(table)))
        return steps

    def advanced(self, steps: Sequence[Advance], live: Mapping[str, Position | None]) -> "ResumePlan":
        """The plan once a batch of these steps is in the sink, whose views stand at `live` then."""
        return replace(self, positions={**self.positions, **{s.table.topic: s.end for s in steps}}, live=dict(live))

    def offsets(self) -> dict[str, dict[str, int]]:
        """Where reading starts, per topic and partition, as Spark takes it."""
        starts = {}
        for topic, position in self.positions.items():
            offsets = position.offsets if position else (0,) * self.shapes[topic].partition_count
            starts[topic] = {str(partition): offset for partition, offset in enumerate(offsets)}
        return starts

    def behind(self, ends: Ends) -> int:
        """Offsets from where the views stand that readers see to `ends`."""
        return sum(
            max(0, offset - (position.offsets[partition] if (position := self.live.get(topic)) else 0))
            for topic, end in ends.items()
            for partition, offset in end.items()
        )
