"""How a partition's rows are divided into calls: none too large, and each ends where another run could go on.

A call's position is its last offset + 1. Below it every row is in the view as it was there, and none as it was later;
but for what a newer change of the batch has followed, which comes again when it goes on from there.
A row that is completed from several records of the batch is in the view at each of them, so it may be cut through.
"""

import heapq
import itertools
from collections.abc import Callable, Iterable, Iterator

from cdc.patch import completed
from cdc.report import Row

CHUNK_ROWS = 1000
"""Rows per Lua call: a few milliseconds, in which nobody else is served."""
CHUNK_BYTES = 1_000_000


class Earlier(Row):
    """A row as it was at one of the older changes that it is completed from; stands for no record."""

    depth = 0
    """Which of them."""

    def complete(self, viewed: str | None) -> str | None:
        older = [(one["row"], one["kept"]) for one in itertools.islice(self.older or (), self.depth + 1, None)]
        return completed(self.document or "{}", self.kept or (), [*older, (viewed, None)])


def states(rows: Iterable[Row]) -> Iterator[Row]:
    """All that these rows have been, by offset; `rows` come in the order of `first`.

    From then on `first` says where a call may end: not between that and the offset.
    """
    waiting: list[tuple[int, int, Row]] = []
    numbers = itertools.count()
    since, joined = 0, -1
    for row in rows:
        offset, first = row.offset or 0, row.first or 0
        while waiting and waiting[0][0] < first:
            yield _joined(heapq.heappop(waiting)[2], since, joined)
        if row.kept is None and not waiting and offset > joined:
            yield row
            continue
        if not _divisible(row):
            since, joined = first if first > joined else since, max(joined, offset)
        for state in _of(row):
            heapq.heappush(waiting, (state.offset or 0, next(numbers), state))
    while waiting:
        yield _joined(heapq.heappop(waiting)[2], since, joined)


def _joined(state: Row, since: int, until: int) -> Row:
    if not since <= (state.offset or 0) <= until:
        return state
    joined = state._replace(first=since)
    if isinstance(state, Earlier) and isinstance(joined, Earlier):
        joined.depth = state.depth
    return joined


def ends(row: Row) -> bool:
    """Whether what lies before the row's older changes is void: it was deleted, or is in quarantine."""
    return bool(row.older) and row.older[-1]["row"] is None  # type: ignore[index]


def _divisible(row: Row) -> bool:
    """A delete and what is in quarantine look alike here, so the view isn't made what it was at either of them."""
    return row.kept is None or not row.older or not (ends(row) or row.places is None)


def _of(row: Row) -> Iterator[Row]:
    yield row._replace(first=row.offset)
    if row.kept is None or not _divisible(row):
        return
    for depth, (place, older) in enumerate(zip(row.places or (), row.older or (), strict=True)):
        told = {"offset": place, "first": place, "document": older["row"], "kept": older["kept"]}
        earlier = Earlier(**{**row._asdict(), **told, "records": 0})
        earlier.depth = depth
        yield earlier


def length(row: Row) -> int:
    return len(row.document or "")


def chunks(states: Iterable[Row], size: Callable[[Row], int] = length) -> Iterator[tuple[list[Row], int | None]]:
    """Calls in order, each with the position that it leads to; None for the last."""
    chunk: list[Row] = []
    total = reach = 0
    for state in states:
        added = size(state)
        full = len(chunk) >= CHUNK_ROWS or total + added > CHUNK_BYTES
        if full and chunk and (state.first or 0) >= reach:
            yield chunk, reach
            chunk, total = [], 0
        chunk.append(state)
        total += added
        reach = max(reach, (state.offset or 0) + 1)
    if chunk:
        yield chunk, None
