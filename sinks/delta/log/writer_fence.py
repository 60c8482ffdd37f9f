"""The writer fence: a sink remembers its own commits and so notices those of a second writer."""

from collections.abc import Callable, Mapping
from dataclasses import replace

from cdc.model.outcome import Advance, Applied
from cdc.model.position import Position, ViewCheckpoint
from cdc.sink.fencing import checkpoint_after, mismatch
from cdc.sinks.delta.log import positions


class WriterFence:
    """Remembers where one writer has brought the parts of its views; a part is named by its folder.
    Used by the thread that commits.
    """

    def __init__(self) -> None:
        self._checkpoints: dict[str, ViewCheckpoint | None] = {}
        self._steps: dict[str, tuple[str, Position | None, Position]] = {}

    def record(self, folder: str, checkpoint: ViewCheckpoint | None) -> None:
        """Remember a part's position."""
        self._checkpoints[folder] = checkpoint

    def forget(self, folder: str) -> None:
        """Drop what is remembered of a part, because the sink is about to empty it."""
        self._checkpoints.pop(folder, None)

    def begin_step(
        self, writer: str, advance: Advance, folders: Mapping[str, str], load: Callable[[], object]
    ) -> None:
        """Remember a step from where the parts stand.

        The same step may begin again: one of the parts may have moved on by the first attempt.

        folders: by kind; load: records where the parts stand, called when that isn't known yet.

        Raises:
            Fenced, PositionLost: see `Sink.apply`.
        """
        step = (writer, advance.start, advance.end)
        if any(folder not in self._checkpoints for folder in folders.values()):
            load()
        elif self._steps.get(advance.table.topic) == step:
            return
        parts = {kind: self._checkpoints[folder] for kind, folder in folders.items()}
        start = position_of(positions.oldest_of(parts))
        if start != advance.start:
            raise mismatch(advance.table, advance.start, start, ours=False)
        self._steps[advance.table.topic] = step

    def gains(
        self, writer: str, advance: Advance, folder: str, checkpoint: ViewCheckpoint | None
    ) -> bool:
        """Tell whether a part of the view gains something by a step.

        checkpoint: of the part, by its log.

        Raises:
            Fenced, PositionLost: see `Sink.apply`.
        """
        next_position = positions.advance(checkpoint, advance.end)
        gains = advance.is_repair or next_position != position_of(checkpoint)
        if not gains and checkpoint and checkpoint.writer == writer:
            # Perhaps the commit of this very step, whose answer was lost.
            self._checkpoints[folder] = checkpoint
        expected = self._checkpoints[folder]
        if not _is_same(checkpoint, expected):
            ours = checkpoint is None or checkpoint.writer == writer
            raise mismatch(advance.table, position_of(expected), position_of(checkpoint), ours=ours)
        return gains


def _is_same(checkpoint: ViewCheckpoint | None, expected: ViewCheckpoint | None) -> bool:
    """Whether a part's checkpoint is the one that is remembered. One that only a checkpoint of the log has
    kept has lost its writer (`positions.from_transactions`).
    """
    if checkpoint and expected and not checkpoint.writer:
        return checkpoint == replace(expected, writer="", changed_at=checkpoint.changed_at)
    return checkpoint == expected


def next_checkpoint(
    writer: str,
    advance: Advance,
    previous: ViewCheckpoint | None,
    applied: Applied,
    generation: str | None,
) -> ViewCheckpoint:
    """Make the checkpoint that a part of a view stores with a step."""
    if advance.is_repair and previous:
        # A repair doesn't change the position: the stream that owns it goes on undisturbed.
        return previous
    step = replace(advance, end=positions.advance(previous, advance.end))
    return checkpoint_after(step, previous, applied, writer, generation)


def position_of(checkpoint: ViewCheckpoint | None) -> Position | None:
    """Return a checkpoint's position; None where there is no checkpoint."""
    return checkpoint.position if checkpoint else None
