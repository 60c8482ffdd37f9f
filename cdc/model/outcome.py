"""A batch's step of one table, and how many records it applied to the view. Standard library
only.
"""

from dataclasses import dataclass, fields

from cdc.model.position import Position
from cdc.model.table import Table


@dataclass(frozen=True)
class Advance:
    """One table's step in a batch: apply the records in [start, end), then store `end`.

    `start` is None for a view that has no position yet; it then counts as offset 0 of every
    partition.
    """

    table: Table
    start: Position | None
    end: Position
    floor: int = 0
    """LSN of the table's last TRUNCATE, see `ViewCheckpoint.floor`."""

    @property
    def start_offsets(self) -> tuple[int, ...]:
        """The first offset to apply, by partition."""
        return self.start.offsets if self.start else (0,) * self.end.partition_count

    @property
    def is_repair(self) -> bool:
        """Whether the step has no length: its rows are written, and the position stays."""
        return self.start == self.end


@dataclass
class Applied:
    """What one batch did to one view, in records. Each record read is counted in exactly one other
    number.
    """

    read: int = 0
    written: int = 0
    deleted: int = 0
    folded: int = 0
    """Superseded by a newer change of the same row in the same batch."""
    stale: int = 0
    """Without effect: the view had a newer version already, a TRUNCATE came after the change, or it
    deletes an event.
    """
    quarantined: int = 0

    @property
    def rows(self) -> int:
        """Rows of the view that changed."""
        return self.written + self.deleted

    @property
    def accounted(self) -> int:
        """The sum of all that became of records; equals `read` once the batch is done."""
        return self.rows + self.folded + self.stale + self.quarantined

    def add(self, increment: "Applied") -> None:
        """Add the numbers of another count, which may be of a subclass with more fields."""
        for number in fields(Applied):
            total = getattr(self, number.name) + getattr(increment, number.name)
            setattr(self, number.name, total)
