"""Floors of tables: which changes are dead, and which views are older than the floor.

In:  the TRUNCATEs of the current server, the number of servers so far. Out: numbers that can be
compared, LSNs.
Invariant: a view's number is at least its table's floor if and only if the view was made after it,
on any server: the LSNs of a new server begin low again.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

EPOCH = 1 << 64
"""A number above any LSN."""


@dataclass(frozen=True)
class Floors:
    """`lsns` are of the current server's log, by table; `epoch` counts the servers before it."""

    epoch: int = 0
    lsns: Mapping[str, int] = field(default_factory=dict)

    def number(self, table: str) -> int:
        """What a view of a table (schema.table) has to be made after, see
        `ViewCheckpoint.floor`.
        """
        return self.epoch * EPOCH + self.lsn(table)

    def lsn(self, table: str) -> int:
        """The LSN below which changes of the table on the current server are dead; 0 if there is
        none.
        """
        return self.lsns.get(table, 0)
