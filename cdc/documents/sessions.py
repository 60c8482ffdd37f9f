"""Sessions: windows that last as long as rows follow each other.

The state has the rows of a group in a list by their times, and a session is a run of it. Which sessions
there are is stored nowhere. So a row that comes between two of them makes them one, and one that goes
may make one into two.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from cdc.documents.aggregates import RowAggregates
from cdc.documents.plan import Grouping, Session, StatePlan, View, narrowed
from cdc.documents.rows import Entries, document_values
from cdc.documents.scalar.instants import FIRST, LAST, instant_of, order_of
from cdc.documents.scalar.type_groups import TIMESTAMPTZ, group
from cdc.documents.state import SPAN_PAGE, Span, State

FIRST_PAGE = 20
"""Places that are read of a run at first; each further page is twice as long, up to `SPAN_PAGE`."""
Begin = tuple[str, int]
"""The text of a group's list, and the time of a session's first row, in microseconds since 1970."""


@dataclass
class _Run:
    """The rows of a session, in their order, and the time of the last one."""

    end: int
    ids: list[str] = field(default_factory=list)


class Sessions:
    """The sessions of a view, in a state as it is now."""

    def __init__(self, plan: StatePlan, state: State, view: View) -> None:
        assert view.grouping is not None
        assert isinstance(view.grouping.window, Session)
        self._state = state
        self._grouping: Grouping = view.grouping
        self._session: Session = view.grouping.window
        self._table = view.root.table
        self._name = view.root.table.qualified
        self._number = plan.listings[self._name].index(view.grouping.by_time)
        self._has_zone = group(self._table.column(self._session.time).type) == TIMESTAMPTZ

    def changed(self, versions: Collection[Entries]) -> Iterator[Begin]:
        """Find the sessions that versions of rows may have changed, given with their entries.

        A session that begins at some time differs only if the row there came or went, if a row of it
        did, or one within the gap around it. So these are enough: a session that would begin with the
        version; the one that the version is in now, or follows within the gap; and one that would begin
        with the row after it.
        """
        orders = {entries.places.get(self._number, ("", "")) for entries in versions}
        starts = {
            (text, instant) for text, order in orders if (instant := instant_of(order)) is not None
        }
        yield from starts
        yield from self._first_rows(sorted(starts))
        later = [
            Span(text, f"{self._order(time)}!", f"{self._order(LAST)}!") for text, time in starts
        ]
        pages = self._state.ranged(self._name, self._number, later, 1)
        for (text, _), places in zip(starts, pages, strict=True):
            for place in places:
                instant = instant_of(place.order)
                if instant is not None:
                    yield text, instant

    def _first_rows(self, starts: Sequence[Begin]) -> Iterator[Begin]:
        """Find the first rows of the runs that have a row at these times, or end within the gap before
        them; where there is no such run, the time itself. The times are in their order.

        All runs are followed side by side, each as far as the time before.
        """
        earlier = {later: time for (text, time), later in pairwise(starts) if text == later[0]}
        reached = {start: start[1] for start in starts}
        highs = {(text, time): f"{self._order(time)}!" for text, time in starts}
        limit = FIRST_PAGE
        while highs:
            spans = [
                Span(
                    start[0],
                    f"{self._order(earlier.get(start, FIRST) - self._session.gap)} ",
                    high,
                )
                for start, high in highs.items()
            ]
            pages = self._state.ranged(self._name, self._number, spans, limit, last_first=True)
            for start, page in zip(list(highs), pages, strict=True):
                is_over = len(page) < limit
                for place in page:
                    instant = instant_of(place.order)
                    if instant is None or reached[start] - instant > self._session.gap:
                        is_over = True
                        break
                    reached[start] = instant
                if start in earlier and reached[start] <= earlier[start]:
                    # The same run as of the time before, which finds its first row.
                    del highs[start]
                elif is_over:
                    del highs[start]
                    yield start[0], reached[start]
                else:
                    highs[start] = page[-1].member
            limit = min(2 * limit, SPAN_PAGE)

    def members(self, begins: Collection[Begin]) -> dict[Begin, tuple[int, dict[str, Any]]]:
        """Return the sessions that begin there now: the time of the last row, and the aggregates by name."""
        runs = self._runs(begins)
        columns = self._grouping.columns_in_use
        ids = {row_id for run in runs.values() for row_id in run.ids}
        stored = self._state.rows(self._name, ids)
        table = narrowed(self._table, columns)
        values = {row_id: document_values(row.row, table) for row_id, row in stored.items()}
        aggregates = RowAggregates(self._grouping.aggregates, self._table, values)
        return {begin: (run.end, aggregates.over(run.ids)) for begin, run in runs.items()}

    def _runs(self, begins: Collection[Begin]) -> dict[Begin, _Run]:
        """Read the runs that begin there: no row is within the gap before."""
        before = [
            Span(text, f"{self._order(time - self._session.gap)} ", f"{self._order(time)} ")
            for text, time in begins
        ]
        earlier = self._state.ranged(self._name, self._number, before, 1, last_first=True)
        runs = {
            begin: _Run(begin[1] - self._session.gap)
            for begin, places in zip(begins, earlier, strict=True)
            if not places
        }
        lows = {(text, time): f"{self._order(time)} " for text, time in runs}
        limit = FIRST_PAGE
        while lows:
            spans = [Span(text, low, f"{self._order(LAST)}!") for (text, _), low in lows.items()]
            pages = self._state.ranged(self._name, self._number, spans, limit)
            for begin, page in zip(list(lows), pages, strict=True):
                run = runs[begin]
                for place in page:
                    instant = instant_of(place.order)
                    if instant is None or instant > run.end + self._session.gap:
                        del lows[begin]
                        break
                    run.ids.append(place.id)
                    run.end = instant
                else:
                    if len(page) < limit:
                        del lows[begin]
                    else:
                        # A text follows another directly with a NUL after it.
                        lows[begin] = f"{page[-1].member}\0"
            limit = min(2 * limit, SPAN_PAGE)
        return {begin: run for begin, run in runs.items() if run.ids}

    def _order(self, instant: int) -> str:
        return order_of(instant, has_zone=self._has_zone)
