"""Floors of tables: which changes are dead, and which views are older than the floor.

In:  the TRUNCATEs of the current server, the number of earlier servers. Out: numbers that can be
compared, LSNs.
Invariant: a view's number is at least its table's floor if and only if the view was made after the
floor. That is also true across servers, though the LSNs of a new server begin low again.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

EPOCH = 1 << 64
"""A number above any LSN."""


@dataclass(frozen=True)
class Floors:
    """`lsns` are LSNs of the current server, by table. `epoch` is the number of earlier servers.
    `events` are tables whose views keep what came from these.
    """

    epoch: int = 0
    lsns: Mapping[str, int] = field(default_factory=dict)
    events: frozenset[str] = frozenset()

    def number(self, table: str) -> int:
        """The number that a view of the table (schema.table) must have reached, see
        `ViewCheckpoint.floor`.
        """
        epoch = 0 if table in self.events else self.epoch
        return epoch * EPOCH + self.lsn(table)

    def lsn(self, table: str) -> int:
        """The LSN below which the table's changes on the current server are dead, or 0."""
        return self.lsns.get(table, 0)
