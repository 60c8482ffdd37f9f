"""Sessions: windows that last as long as rows follow each other.

The state has the rows of a group in a list by their times, and a session is a run of it. Which sessions
there are is stored nowhere. So a row that comes between two of them makes them one, and one that goes
may make one into two.
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from cdc.views.aggregates import over_rows
from cdc.views.plan import Grouping, Session, StatePlan, View
from cdc.views.rows import Entries, document_values, narrowed
from cdc.views.scalar.instants import FIRST, LAST, instant_of, order_of
from cdc.views.scalar.terms import TIMESTAMPTZ, group
from cdc.views.state import SPAN_PAGE, Span, State

FIRST_PAGE = 20
"""Places that are read of a run at first; each further page is twice as long, up to `SPAN_PAGE`."""
Begin = tuple[str, int]
"""The text of a group's list, and the time of a session's first row, in microseconds since 1970."""


@dataclass
class _Run:
    """The rows of a session, in their order, and the time of the last one."""

    ids: list[str] = field(default_factory=list)
    end: int | None = None


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
        times_by_text: dict[str, set[int]] = {}
        for entries in versions:
            text, order = entries.places.get(self._number, ("", ""))
            instant = instant_of(order)
            if instant is not None:
                times_by_text.setdefault(text, set()).add(instant)
        for text, times in times_by_text.items():
            reached = LAST + 1
            for time in sorted(times, reverse=True):
                yield text, time
                if time < reached:
                    # Else it is in the run that was followed from a later one.
                    reached = self._begin_of_run(text, time)
                    yield text, reached
            later = [Span(text, f"{self._order(time)}!", f"{self._order(LAST)}!") for time in times]
            for places in self._state.ranged(self._name, self._number, later, 1):
                for place in places:
                    instant = instant_of(place.order)
                    if instant is not None:
                        yield text, instant

    def _begin_of_run(self, text: str, time: int) -> int:
        """Return the time of the first row of the run that has a time, or ends within the gap before it;
        the time itself where there is none.
        """
        high = f"{self._order(time)}!"
        limit = FIRST_PAGE
        while True:
            span = Span(text, f"{self._order(FIRST)} ", high)
            (page,) = self._state.ranged(self._name, self._number, [span], limit, last_first=True)
            for place in page:
                instant = instant_of(place.order)
                if instant is None or time - instant > self._session.gap:
                    return time
                time = instant
            if len(page) < limit:
                return time
            high = page[-1].member
            limit = min(2 * limit, SPAN_PAGE)

    def members(self, begins: Collection[Begin]) -> dict[Begin, tuple[int, dict[str, Any]]]:
        """Return the sessions that begin there now: the time of the last row, and the aggregates by name,
        in the form of documents.
        """
        runs = self._runs(begins)
        columns = self._grouping.columns_in_use
        ids = {row_id for run in runs.values() for row_id in run.ids}
        stored = self._state.rows(self._name, ids)
        table = narrowed(self._table, columns)
        values = {row_id: document_values(row.row, table) for row_id, row in stored.items()}
        members: dict[Begin, tuple[int, dict[str, Any]]] = {}
        for begin, run in runs.items():
            assert run.end is not None
            rows = [values[row_id] for row_id in run.ids if row_id in values]
            members[begin] = (run.end, self._aggregates(rows))
        return members

    def _aggregates(self, rows: Collection[Mapping[str, Any]]) -> dict[str, Any]:
        members = {}
        for part in self._grouping.aggregates:
            met = [row for row in rows if part.filter is None or part.filter.evaluate(row) is True]
            tally = self._grouping.tally(part)
            (members[part.aggregate.name],) = over_rows([part.aggregate], self._table, tally, met)
        return members

    def _runs(self, begins: Collection[Begin]) -> dict[Begin, _Run]:
        """Read the runs that begin there: no row is within the gap before."""
        before = [
            Span(text, f"{self._order(time - self._session.gap)} ", f"{self._order(time)} ")
            for text, time in begins
        ]
        earlier = self._state.ranged(self._name, self._number, before, 1, last_first=True)
        runs = {begin: _Run() for begin, places in zip(begins, earlier, strict=True) if not places}
        lows = {(text, time): f"{self._order(time)} " for text, time in runs}
        limit = FIRST_PAGE
        while lows:
            spans = [Span(text, low, f"{self._order(LAST)}!") for (text, _), low in lows.items()]
            pages = self._state.ranged(self._name, self._number, spans, limit)
            for begin, page in zip(list(lows), pages, strict=True):
                run = runs[begin]
                for place in page:
                    instant = instant_of(place.order)
                    expected = begin[1] if run.end is None else run.end + self._session.gap
                    if instant is None or instant > expected:
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
