"""What a turn of the continuous proof says of one view: pure decisions, see `cdc.verify.prover`.

A turn compares the rows that have a record in a range of the log, and the suspects: rows that differed
at the last turn. Its mark is placed after the end of the last turn, and its range ends there. So the
range has the record of any change that the last turn can have seen on one side alone. A suspect that
has no record in it, and still differs, is wrong.
"""

from collections.abc import Set
from dataclasses import dataclass, replace

from cdc.model.position import Position

NOBODY: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Moment:
    """A time in Unix seconds, by Postgres' clock. What was committed before it is below `position`."""

    at: float
    position: Position


@dataclass(frozen=True)
class ProvedView:
    """How far a view is proved.

    generation  of the view
    proved      the view equals its source through this moment
    reached     where the next range begins
    compared    the mark of the last complete turn, if that has left suspects
    suspects    ids of rows that differed at the last turn
    """

    generation: str
    proved: Moment
    reached: Position
    compared: Moment | None = None
    suspects: frozenset[str] = NOBODY


def begin(generation: str, proved: Moment) -> ProvedView:
    return ProvedView(generation, proved, proved.position)


def range_end(start: Position, end: Position, limit: int) -> Position:
    """Shorten a range to about `limit` offsets: the same share of each partition."""
    sizes = [last - first for first, last in zip(start.offsets, end.offsets, strict=True)]
    total = sum(sizes)
    if total <= limit:
        return end
    offsets = (
        first + -(-size * limit // total) for first, size in zip(start.offsets, sizes, strict=True)
    )
    return Position(end.topic_id, tuple(offsets))


def judge(
    view: ProvedView, mark: Moment, end: Position, differing: Set[str], explained: Set[str]
) -> tuple[ProvedView, frozenset[str]]:
    """Return how far the view is proved after a turn, and the ids of rows that are wrong.

    end         of the range: the mark's position, or before it if that was too far
    differing   of the changed rows and the suspects
    explained   suspects that have a record in the range
    """
    if end != mark.position:
        # Changes that explain a difference may lie behind the range.
        return replace(view, reached=end, suspects=frozenset(differing)), NOBODY
    wrong = (view.suspects & differing) - explained
    suspects = frozenset(differing) - wrong
    # The suspects of the last turn are equal, or have changed since.
    proved = view.compared or view.proved
    if suspects:
        return replace(
            view, proved=proved, reached=end, compared=mark, suspects=suspects
        ), frozenset(wrong)
    return replace(view, proved=mark, reached=end, compared=None, suspects=NOBODY), frozenset(wrong)
