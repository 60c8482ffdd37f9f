"""Positions of the parts of a warehouse's view: the log of changes and the mirror have one each.

Reading starts where neither part misses anything. So a batch may bring one of them events that it
has already: that part's position stays where it is.

A commit has its checkpoint as text, and as numbers in `txn` actions. The text ends with the commit's file;
the numbers are in every checkpoint of the log.
"""

from collections.abc import Mapping
from dataclasses import replace

from cdc.model.outcome import Advance
from cdc.model.position import Position, Reach, ViewCheckpoint, distance
from cdc.sink.fencing import mismatch

APPLICATION = "cdc"
"""The name in `txn` actions under which each of our commits has its version. Others begin with it."""
FLOOR_BITS = 62
"""Of a floor in its lower number: a floor's epochs begin at 2**64 (`cdc.control.floors`), and a number of `txn` is
below 2**63.
"""


def to_transactions(checkpoint: ViewCheckpoint, version: int) -> dict[str, int]:
    """Return the numbers of a commit's `txn` actions by their names; see `from_transactions`."""
    position = checkpoint.position
    offsets = {
        f"{APPLICATION}/offset/{position.topic_id}/{partition}": offset
        for partition, offset in enumerate(position.offsets)
    }
    return {
        APPLICATION: version,
        f"{APPLICATION}/topic/{position.topic_id}": version,
        f"{APPLICATION}/generation/{checkpoint.generation}": version,
        f"{APPLICATION}/shape/{checkpoint.shape}": version,
        f"{APPLICATION}/floor/high": checkpoint.floor >> FLOOR_BITS,
        f"{APPLICATION}/floor": checkpoint.floor % 2**FLOOR_BITS,
        f"{APPLICATION}/rows": checkpoint.rows,
        f"{APPLICATION}/changed_at": int(checkpoint.changed_at * 1000),
        **offsets,
    }


def from_transactions(transactions: Mapping[str, int]) -> ViewCheckpoint | None:
    """Return the checkpoint of our last commit by the `txn` of a table, without its writer; None where
    there is none. Of the topics, generations and shapes that are named the last one counts.
    """
    if f"{APPLICATION}/rows" not in transactions:
        return None
    topic_id = _newest_name(transactions, f"{APPLICATION}/topic/")
    offsets: list[int] = []
    while (name := f"{APPLICATION}/offset/{topic_id}/{len(offsets)}") in transactions:
        offsets.append(transactions[name])
    return ViewCheckpoint(
        Position(topic_id, tuple(offsets)),
        rows=transactions[f"{APPLICATION}/rows"],
        changed_at=transactions[f"{APPLICATION}/changed_at"] / 1000,
        floor=(transactions[f"{APPLICATION}/floor/high"] << FLOOR_BITS)
        + transactions[f"{APPLICATION}/floor"],
        generation=_newest_name(transactions, f"{APPLICATION}/generation/"),
        shape=_newest_name(transactions, f"{APPLICATION}/shape/"),
    )


def _newest_name(transactions: Mapping[str, int], start: str) -> str:
    names = [name for name in transactions if name.startswith(start)]
    return max(names, key=transactions.__getitem__, default=start).removeprefix(start)


def known_offsets(checkpoint: ViewCheckpoint | None, topic: Position) -> tuple[int, ...]:
    """Return by partition the offset below which a part has all records of a topic.

    topic: of which the id and the number of partitions matter. A part has no records of another topic
    of the same name. Partitions that were added since change nothing for the records of the others.
    """
    if checkpoint is None or distance(checkpoint, topic).reach is Reach.OTHER_TOPIC:
        return (0,) * topic.partition_count
    offsets = checkpoint.position.offsets
    return (offsets + (0,) * topic.partition_count)[: topic.partition_count]


def next_position(checkpoint: ViewCheckpoint | None, end: Position) -> Position:
    """Return a part's position after a batch that ends at `end`: never before where it was."""
    return Position(end.topic_id, tuple(map(max, known_offsets(checkpoint, end), end.offsets)))


def oldest(parts: Mapping[str, ViewCheckpoint | None]) -> ViewCheckpoint | None:
    """Return where reading has to start so that no part misses anything.

    parts: by kind those that exist: a standby is a mirror alone. None while there is no mirror.
    """
    mirror = parts["mirror"]
    if mirror is None or "changes" not in parts:
        return mirror
    logged = known_offsets(parts["changes"], mirror.position)
    offsets = tuple(map(min, logged, mirror.position.offsets))
    return replace(mirror, position=Position(mirror.position.topic_id, offsets))


class WriterFence:
    """Remembers where one writer has brought the parts of its views; a part is named by its folder.
    Used by the thread that commits.
    """

    def __init__(self) -> None:
        self._checkpoints: dict[str, ViewCheckpoint | None] = {}
        self._steps: dict[str, tuple[str, Position | None, Position]] = {}

    def record(self, folder: str, checkpoint: ViewCheckpoint | None) -> None:
        self._checkpoints[folder] = checkpoint

    def forget(self, folder: str) -> None:
        """Drop what is remembered of a part, because the sink is about to empty it."""
        self._checkpoints.pop(folder, None)

    def begin_step(
        self,
        writer: str,
        advance: Advance,
        folders: Mapping[str, str],
        checkpoints: Mapping[str, ViewCheckpoint | None],
    ) -> dict[str, ViewCheckpoint | None]:
        """Remember a step from where the parts stand; return the checkpoints of those that gain something.

        The same step may begin again: one of the parts may have moved on by the first attempt.

        folders, checkpoints: of the parts by kind; the latter by their logs. They count where one of the
        parts isn't remembered yet.

        Raises:
            Fenced, PositionLost: see `Sink.apply`.
        """
        step = (writer, advance.start, advance.end)
        is_known = all(folder in self._checkpoints for folder in folders.values())
        if not is_known:
            for kind, folder in folders.items():
                self.record(folder, checkpoints[kind])
        if not is_known or self._steps.get(advance.table.topic) != step:
            start = oldest({kind: self._checkpoints[folder] for kind, folder in folders.items()})
            if position_of(start) != advance.start:
                raise mismatch(advance.table, advance.start, position_of(start), ours=False)
            self._steps[advance.table.topic] = step
        return {
            kind: checkpoints[kind]
            for kind, folder in folders.items()
            if self._gains(writer, advance, folder, checkpoints[kind])
        }

    def _gains(
        self, writer: str, advance: Advance, folder: str, checkpoint: ViewCheckpoint | None
    ) -> bool:
        end = next_position(checkpoint, advance.end)
        gains = advance.is_repair or end != position_of(checkpoint)
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


def position_of(checkpoint: ViewCheckpoint | None) -> Position | None:
    return checkpoint.position if checkpoint else None
