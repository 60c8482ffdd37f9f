"""What a turn of the continuous proof says of one view: pure decisions, see `cdc.verify.prover`.

A turn compares the rows that have a record in a range of the log, and the suspects: rows that differed
at the last turn. Its mark is placed after the end of the last turn, and its range ends there. So the
range has the record of any change that the last turn can have seen on one side alone. A suspect that
has no record in it, and still differs, is wrong.

A suspect that has a record, and differs again, may change all the time. Or the view takes none of its
changes: then its row stays as it was, and the view is proved no further.

A sweep adds a slice of all rows to a turn. So a row of a slice that differs is a suspect like any other.
"""

from collections.abc import Mapping, Set
from dataclasses import dataclass, field, replace

from cdc.generations.registry import Proof, Sweep
from cdc.model.position import Position

NO_ROWS: frozenset[str] = frozenset()
Differing = Mapping[str, int]
"""By the id of a row that differs: the hash of the view's row, see `ChangedAnswer.differing`."""


@dataclass(frozen=True)
class Moment:
    """A time in Unix seconds, by Postgres' clock. What was committed before it is below `position`.

    complete_at  every row has been compared since
    sweep        where the next slice of the sweep begins; None: no sweep is at work
    """

    at: float
    position: Position
    complete_at: float
    sweep: Sweep | None = None


@dataclass(frozen=True)
class ProvedView:
    """How far a view is proved.

    proof       in the registry, when the first turn began, or as a turn has written it
    proved      the view equals its source through this moment
    last        the mark of the last turn
    reached     where the next range begins
    compared    the mark of the last complete turn, if that has left suspects
    suspects    rows that differed at the last turn
    """

    proof: Proof
    proved: Moment
    last: Moment
    reached: Position
    compared: Moment | None = None
    suspects: Differing = field(default_factory=dict)


def begin(proof: Proof) -> ProvedView:
    position = Position(proof.topic_id, tuple(proof.offsets))
    proved = Moment(proof.through, position, proof.complete_at, proof.sweep)
    return ProvedView(proof, proved, proved, position)


def next_slice(view: ProvedView, now: float, period_s: float) -> Sweep | None:
    """Return where the next slice of a sweep begins. None: all rows were compared within the period."""
    if view.last.sweep:
        return view.last.sweep
    return Sweep(now) if now - view.last.complete_at >= period_s else None


def mark_of(view: ProvedView, at: float, position: Position, after: Sweep | None) -> Moment:
    """Make the mark of a turn. after: where its slice ended; None: it has compared none."""
    if after is None:
        return Moment(at, position, view.last.complete_at, view.last.sweep)
    if after.side == "end":
        return Moment(at, position, after.since)
    return Moment(at, position, view.last.complete_at, after)


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
    view: ProvedView, mark: Moment, end: Position, differing: Differing, explained: Set[str]
) -> tuple[ProvedView, frozenset[str]]:
    """Return how far the view is proved after a turn, and the ids of rows that are wrong.

    end         of the range: the mark's position, or before it if that was too far
    differing   of the changed rows, the suspects and the slice
    explained   suspects that have a record in the range
    """
    if end != mark.position:
        # The record that explains a difference may come after the range.
        return replace(view, last=mark, reached=end, suspects=differing), NO_ROWS
    again = view.suspects.keys() & differing.keys()
    wrong = frozenset(again - explained)
    suspects = {row_id: seen for row_id, seen in differing.items() if row_id not in wrong}
    if not suspects:
        return ProvedView(view.proof, mark, mark, end), wrong
    is_stuck = any(view.suspects[row_id] == differing[row_id] for row_id in again & explained)
    # The other suspects of the last turn are equal, or have changed since.
    proved = view.proved if is_stuck else view.compared or view.proved
    return ProvedView(view.proof, proved, mark, end, mark, suspects), wrong
