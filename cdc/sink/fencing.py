"""Fencing: a stored position against the one that a batch starts from. Each sink compares by these
rules.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING

from cdc.errors import CdcError, Fenced
from cdc.model.position import Position, Reach, ViewCheckpoint, distance
from cdc.sink.contract import PositionLost

if TYPE_CHECKING:
    from cdc.model.outcome import Advance, Applied
    from cdc.model.table import Table


def must_apply(advance: Advance, stored: ViewCheckpoint | None, writer: str) -> bool:
    """Compare a stored position with the one that a batch starts from; False when the batch is
    already applied.

    Raises:
        Fenced, PositionLost: see `Sink.apply`.
    """
    require_floor(advance, stored)
    position = stored.position if stored else None
    if position == advance.start:
        return True
    if stored and stored.writer == writer and position == advance.end:
        return False
    raise mismatch(
        advance.table, advance.start, position, ours=stored is None or stored.writer == writer
    )


def require_floor(advance: Advance, stored: ViewCheckpoint | None) -> None:
    """Raise PositionLost for a view from before the floor that a batch is made for. It was cleared then, so its
    server has gone back, and has the dead rows again. The offsets may be the same.
    """
    if stored and stored.floor < advance.floor:
        raise mismatch(advance.table, advance.start, None, ours=True)


def mismatch(
    table: Table, expected: Position | None, stored: Position | None, *, ours: bool
) -> CdcError:
    """Choose the error for a position that isn't where this writer left it.

    ours: whether this writer was the last to move it.
    """
    lost = stored is None or (
        expected is not None and distance(stored, expected).reach is Reach.BEHIND
    )
    if ours and lost:
        return PositionLost(
            f"The view of {table.qualified} stands before the position written to it: it lost its last writes.",
            hint="no action needed: its changes are applied again from where it stands",
            table=table.qualified,
        )
    return Fenced(
        f"Another writer has moved the position of the view of {table.qualified}; this one stops.",
        hint="run one `cdc run` per sink; start this one again when the other has ended",
        table=table.qualified,
    )


def checkpoint_after(
    advance: Advance,
    stored: ViewCheckpoint | None,
    applied: Applied,
    writer: str,
    generation: str | None = None,
) -> ViewCheckpoint:
    base = stored or ViewCheckpoint(advance.end, shape=advance.table.shape)
    return replace(
        base,
        position=advance.end,
        writer=writer,
        rows=base.rows + applied.rows,
        changed_at=round(time.time(), 3),
        floor=advance.floor,
        generation=base.generation if generation is None else generation,
    )
