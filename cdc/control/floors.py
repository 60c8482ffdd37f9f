"""Floors: what of a table's log is dead, and which views are from before that.

In:  the TRUNCATEs of the current server, the number of servers so far. Out: numbers that can be compared, LSNs.
Invariant: a view's number is at least its table's floor exactly when it was made after it, on whichever server: the
positions of a server that was made anew begin low again.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

EPOCH = 1 << 64
"""More than any LSN."""


@dataclass(frozen=True)
class Floors:
    """`lsns` are of the current server's log, by table; `epoch` counts the servers before it."""

    epoch: int = 0
    lsns: Mapping[str, int] = field(default_factory=dict)

    def number(self, table: str) -> int:
        """What a view of a table (schema.table) has to be made after, see `ViewCheckpoint.floor`."""
        return self.epoch * EPOCH + self.lsn(table)

    def lsn(self, table: str) -> int:
        """Below it changes of the table are dead, if they are of the current server; 0 when none is."""
        return self.lsns.get(table, 0)
