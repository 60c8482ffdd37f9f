"""Destinations in memory, with what a crash leaves of a batch in each: a warehouse commits all at once, a
cache chunk by chunk with the position, an index row by row before the position.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import Any

from cdc.codec.forms import Documents
from cdc.errors import Fenced, SinkUnavailable
from cdc.model.outcome import Advance, Applied
from cdc.model.position import Position, ViewCheckpoint, distance
from cdc.model.table import Table
from cdc.sink.contract import Batch, Outcome, PositionLost
from cdc.sink.fencing import checkpoint_after, mismatch, must_apply
from cdc.sink.lane import (
    SUPERSEDED,
    ChunkLimits,
    Failure,
    FoldedRow,
    Part,
    Superseded,
    Verdicts,
    Writer,
)
from cdc.sink.lane_run import run_in_process
from cdc.sink.promotion import SWITCH_S, is_caught_up
from cdc.sinks.memory import Memory
from tests.simulator.processes import Processes


class Link:
    """The way to a server: how long it takes, and whether requests and answers get through."""

    def __init__(self, processes: Processes, seed: int) -> None:
        self.processes = processes
        self.away_until = 0.0
        self.lost_answers = 0
        self._random = random.Random(seed)

    def request(self) -> None:
        """Before the server does something."""
        self.processes.sleep(self._random.choice((0.001, 0.002, 0.004, 0.03)))
        if self.processes.now < self.away_until:
            raise _away()

    def answer(self) -> None:
        """After it has."""
        self.processes.sleep(self._random.choice((0.001, 0.002, 0.004, 0.03)))
        if self.lost_answers:
            self.lost_answers -= 1
            raise _away()


def _away() -> SinkUnavailable:
    return SinkUnavailable("The server doesn't answer.", hint="wait")


class Warehouse(Memory):
    """Rows and position of all tables are one commit."""

    def __init__(self, link: Link, generation: str | None = None) -> None:
        super().__init__("cache", generation)
        self.link = link
        self.on_write: Callable[[], object] = lambda: None
        """Called whenever readers may see something else."""

    def position(self, table: Table) -> ViewCheckpoint | None:
        self.link.request()
        return super().position(table)

    def apply(self, batch: Batch) -> Outcome:
        self.link.request()
        outcome = super().apply(batch)
        self._note_time(batch)
        self.on_write()
        self.link.answer()
        return outcome

    def _note_time(self, batch: Batch) -> None:
        for advance in batch.advances:
            name = advance.table.qualified
            self.stored[name] = replace(self.stored[name], changed_at=self.link.processes.now)

    def for_generation(self, names: Mapping[str, str]) -> Warehouse:
        (name,) = set(names.values())
        if name not in self.generations_by_name:
            self.generations_by_name[name] = type(self)(self.link, name)
        made = self.generations_by_name[name]
        assert isinstance(made, Warehouse)
        return made

    def promote(self, tables: Sequence[Table], names: Mapping[str, str]) -> Mapping[str, str]:
        until = self.link.processes.now + SWITCH_S
        while names.keys() and not self.generations_by_name.keys().isdisjoint(names.values()):
            if is_caught_up(self, self.for_generation(names), tables):
                break
            if self.link.processes.now > until:
                raise _away()
            self.link.processes.sleep(0.02)
        previous = super().promote(tables, names)
        self.on_write()
        self.link.answer()
        return previous

    def clear(self, table: Table) -> None:
        self.link.request()
        super().clear(table)
        self.on_write()

KINDS = {"warehouse": Warehouse}
