"""A batch's step of one table, and what it did to the view, as plain data. Standard library only."""

from dataclasses import dataclass, fields

from cdc.model.position import Position
from cdc.model.table import Table


@dataclass(frozen=True)
class Advance:
    """One table's step in a batch: apply the records in [start, until), then store `until`.

    `start` is None for a view that has no position yet; it then counts as offset 0 of every partition.
    """

    table: Table
    start: Position | None
    until: Position
    floor: int = 0
    """See `Stored.floor`."""

    @property
    def start_offsets(self) -> tuple[int, ...]:
        return self.start.offsets if self.start else (0,) * self.until.partition_count

    @property
    def repairs(self) -> bool:
        """A step of no length: its rows are written, the position stays."""
        return self.start == self.until

    @property
    def offsets(self) -> int:
        """How many offsets the step covers: an upper bound of its records."""
        return sum(self.until.offsets) - sum(self.start_offsets)


@dataclass
class Applied:
    """What one batch did to one view, in records: every record read is in exactly one of the other numbers."""

    read: int = 0
    written: int = 0
    deleted: int = 0
    folded: int = 0
    """Superseded by a newer change of the same row in the same batch."""
    stale: int = 0
    """Without effect: the view had a newer version already, or the change lies before a TRUNCATE."""
    quarantined: int = 0

    @property
    def rows(self) -> int:
        return self.written + self.deleted

    @property
    def accounted(self) -> int:
        return self.rows + self.folded + self.stale + self.quarantined

    def add(self, other: "Applied") -> None:
        """Add the numbers of another one, or of a report that has more to say."""
        for number in fields(Applied):
            setattr(self, number.name, getattr(self, number.name) + getattr(other, number.name))
