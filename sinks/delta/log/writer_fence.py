"""Who else writes: where one writer has left the parts of its views, and what it means when they stand elsewhere."""

from collections.abc import Callable, Mapping
from dataclasses import replace

from cdc.model.outcome import Advance, Applied
from cdc.model.position import Position, ViewCheckpoint
from cdc.sink.contract import checkpoint_after, mismatch
from sinks.delta.log import positions


class Fence:
    """What a sink remembers of its own steps; a part of a view is named by its folder."""

    def __init__(self) -> None:
        self._left: dict[str, ViewCheckpoint | None] = {}
        self._begun: dict[str, tuple[str, Position | None, Position]] = {}

    def leave(self, folder: str, stored: ViewCheckpoint | None) -> None:
        """Take note of where a part stands."""
        self._left[folder] = stored

    def forget(self, folder: str) -> None:
        self._left.pop(folder, None)

    def begin(self, writer: str, advance: Advance, folders: Mapping[str, str], look: Callable[[], object]) -> None:
        """Take note of a step; it may be tried again when one of the parts has gone further by it.

        folders: by kind; look: takes note of where they stand, when that isn't known yet.

        Raises:
            Fenced, PositionLost: see `Sink.apply`.
        """
        step = (writer, advance.start, advance.end)
        if any(folder not in self._left for folder in folders.values()):
            look()
        elif self._begun.get(advance.table.topic) == step:
            return
        stood = position(positions.oldest_of({kind: self._left[folder] for kind, folder in folders.items()}))
        if stood != advance.start:
            raise mismatch(advance.table, advance.start, stood, ours=False)
        self._begun[advance.table.topic] = step

    def is_due(self, writer: str, advance: Advance, folder: str, stored: ViewCheckpoint | None) -> bool:
        """Whether a part of the view gains something by a step. Raises Fenced, PositionLost: see `Sink.apply`."""
        gains = advance.is_repair or positions.further(stored, advance.end) != position(stored)
        if not gains and stored and stored.writer == writer:
            # Perhaps of this very step, whose answer was lost.
            self._left[folder] = stored
        left = self._left[folder]
        if stored != left:
            ours = stored is None or stored.writer == writer
            raise mismatch(advance.table, position(left), position(stored), ours=ours)
        return gains


def after(
    writer: str, advance: Advance, before: ViewCheckpoint | None, applied: Applied, generation: str | None
) -> ViewCheckpoint:
    """What a part of a view stores with a step."""
    if advance.is_repair and before:
        # A repair leaves no trace in the position: the stream that owns it goes on undisturbed.
        return before
    further = replace(advance, end=positions.further(before, advance.end))
    return checkpoint_after(further, before, applied, writer, generation)


def position(stored: ViewCheckpoint | None) -> Position | None:
    return stored.position if stored else None
