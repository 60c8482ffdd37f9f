"""Documents of groups: which ones a row counts in, and how they are made of the state's numbers.

What a document shows is in the tallies and lists of its group, or of the panes of its window: numbers of
panes are added up. So a change costs the documents that it is in, however many rows they have.

Only a session is made of its rows: a window that lasts as long as rows follow each other. The state has the
rows of a group in a list by their times, and a session is a run of it. Which sessions there are is stored
nowhere. So a row that comes between two of them makes them one, and one that goes may make one into two.
"""

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Any

from cdc.codec.members import encode
from cdc.codec.table import codec
from cdc.documents.aggregates import Numbers, RowAggregates
from cdc.documents.assemble import Document, Slice, note_due
from cdc.documents.closing import ClosedWindow
from cdc.documents.plan import (
    FINAL,
    WINDOW_END,
    WINDOW_START,
    Grouping,
    Session,
    StatePlan,
    View,
    Window,
    narrowed,
)
from cdc.documents.rows import LISTING, TALLY, Entries, join_text, meeting
from cdc.documents.state import SPAN_PAGE, Pane, Span, State
from cdc.scalar.instants import FIRST, LAST, instant_of, microseconds, order_of, text_of
from cdc.scalar.operators import NOW
from cdc.scalar.type_groups import BOOLEAN, INTEGERS, TIMESTAMPTZ, group

FIRST_PAGE = 20
"""Places that are read of a run at first; each further page is twice as long, up to `SPAN_PAGE`."""
Begin = tuple[str, int]
"""The text of a group's list, and the time of a session's first row, in microseconds since 1970."""
Values = list[Any]
"""What the rows of a document have in common, in the form of documents: the columns of `View.keyed`."""


def documents_of(
    plan: StatePlan, state: State, view: View, versions: Collection[Entries]
) -> Collection[str]:
    """Return the ids of the documents that versions of rows count in, given with their entries."""
    groups = _Groups(view)
    if isinstance(groups.grouping.window, Session):
        begins = set(Sessions(plan, state, view).changed(versions))
        known = [groups.values(text, groups.time(begin)) for text, begin in begins]
        return {groups.id(values) for values in known if values is not None}
    tally = groups.grouping.tally(groups.grouping.where)
    number = plan.tallies[view.root.table.qualified].index(tally)
    texts = {entries.tallies[number] for entries in versions if number in entries.tallies}
    return {document_id for text in texts for document_id in groups.ids(text)}


def assemble_groups(
    plan: StatePlan, state: State, view: View, ids: Collection[str], now: int | None = None
) -> Slice:
    """Return the documents of these ids as they are now, as `assemble` does. An id that no group can
    have is left out: it is of another definition of the view.
    """
    groups = _Groups(view)
    known = {row_id: values for row_id in ids if (values := groups.values(row_id)) is not None}
    closed: dict[str, ClosedWindow] = {}
    due: dict[str, int] = {}
    grouping = groups.grouping
    if isinstance(grouping.window, Session):
        begins = {
            row_id: (_text(values[:-1]), _instant(values[-1])) for row_id, values in known.items()
        }
        sessions = Sessions(plan, state, view).members(list(begins.values()))
        rows = {
            row_id: groups.row(known[row_id], *sessions[begin])
            for row_id, begin in begins.items()
            if begin in sessions
        }
    else:
        panes = {row_id: groups.texts(values) for row_id, values in known.items()}
        numbers = Numbers(plan, state, view.root.table, grouping, panes)
        counts = numbers.counts(grouping.where)
        aggregates = {part.name: numbers.values(part) for part in grouping.aggregates}
        size = grouping.window.size if grouping.window is not None else None
        rows = {
            row_id: groups.row(
                values,
                None if size is None else _instant(values[-1]) + size,
                {name: by_id[row_id] for name, by_id in aggregates.items()},
            )
            for row_id, values in known.items()
            if any(counts.get(text) for text in panes[row_id])
        }
        if grouping.closing is not None:
            closed, due = _close(plan, view, groups, counts, panes, now)
            rows = {row_id: {**row, FINAL: row_id in closed} for row_id, row in rows.items()}
    clock = {} if now is None else {NOW: text_of(now)}
    if view.having is not None:
        shown = {row_id: clock | row for row_id, row in rows.items()}
        opened = {row_id: row for row_id, row in shown.items() if row_id not in closed}
        note_due(view.having, opened, due)
        rows = {row_id: rows[row_id] for row_id in meeting(view.having, shown)}
    documents = [
        Document(
            row_id,
            encode(groups.wire(groups.key(values))),
            encode(groups.wire(rows[row_id])) if row_id in rows else None,
        )
        for row_id, values in known.items()
    ]
    return Slice(documents, due, closed)


def _close(
    plan: StatePlan,
    view: View,
    groups: "_Groups",
    counts: Mapping[str, int],
    panes: Mapping[str, list[str]],
    now: int | None,
) -> tuple[dict[str, ClosedWindow], dict[str, int]]:
    """Say which windows are closed, see `cdc.documents.closing`, given with the texts of their panes; and when
    to look at a document again: when its window closes, or when the last of its panes does.
    """
    grouping = groups.grouping
    assert grouping.closing is not None
    assert isinstance(grouping.window, Window)
    table = view.root.table.qualified
    names = {
        *(f"{TALLY}{plan.tallies[table].index(tally)}" for tally in grouping.tallies),
        *(f"{LISTING}{plan.listings[table].index(listing)}" for listing in grouping.listings),
    }
    closed: dict[str, ClosedWindow] = {}
    due: dict[str, int] = {}
    for row_id, texts in panes.items():
        values = groups.values(row_id)
        if values is None or not texts:
            continue
        closes = _instant(values[-1]) + grouping.closing.after
        if now is None or closes > now:
            if any(counts.get(text) for text in texts):
                due[row_id] = closes
            continue
        last_closes = closes + grouping.window.size - grouping.window.every
        is_over = last_closes <= now and not any(counts.get(text) for text in texts[1:])
        dropped = [Pane(table, name, texts[0]) for name in names]
        closed[row_id] = ClosedWindow(dropped, is_over)
        if not is_over:
            due[row_id] = last_closes
    return closed, due


TYPES = {INTEGERS: int, BOOLEAN: bool}
"""The type of a value in Python, by the group of its type; others are texts."""


class _Groups:
    """The names of a view's groups: ids of documents, and texts of tallies and lists."""

    def __init__(self, view: View) -> None:
        assert view.grouping is not None
        self.grouping: Grouping = view.grouping
        self._columns = view.keyed.columns
        self._groups = [group(column.type) for column in self._columns]

    def ids(self, text: str) -> list[str]:
        """Return the ids of the documents that rows with a text count in; none for a text of another definition."""
        values = self.values(text)
        if values is None:
            return []
        window = self.grouping.window
        if not isinstance(window, Window):
            return [self.id(values)]
        return [
            self.id([*values[:-1], self.time(begin)])
            for begin in window.begins(_instant(values[-1]))
            if begin >= FIRST and begin + window.size <= LAST
        ]

    def id(self, values: Values) -> str:
        return encode(values).decode() if len(values) > 1 else _text(values)

    def values(self, text: str, *begin: str) -> Values | None:
        """Return what rows have in common, from the id of a document or the text that rows count for, in
        which integers and booleans may be texts; `begin`: of a session, whose text lacks it. None for one
        of another definition of the view.
        """
        try:
            parts = json.loads(text) if len(self._columns) - len(begin) != 1 else [text]
            if not isinstance(parts, list):
                return None
            values = [
                json.loads(part) if kind in TYPES and isinstance(part, str) else part
                for part, kind in zip([*parts, *begin], self._groups, strict=True)
            ]
        except ValueError:
            return None
        if any(
            type(value) is not TYPES.get(kind, str)
            for value, kind in zip(values, self._groups, strict=True)
        ):
            return None
        if self.grouping.window is not None and microseconds(values[-1]) is None:
            return None
        return values

    def texts(self, values: Values) -> list[str]:
        """Return the texts that the rows of a document count for, one for each pane."""
        window = self.grouping.window
        if not isinstance(window, Window):
            return [_text(values)]
        begin = _instant(values[-1])
        if begin + window.size > LAST:
            # The topic has it from windows that were shorter: beyond the year 9999 there are none.
            return []
        return [_text([*values[:-1], self.time(pane)]) for pane in window.panes(begin)]

    def key(self, values: Values) -> dict[str, Any]:
        return {column.name: value for column, value in zip(self._columns, values, strict=True)}

    def row(self, values: Values, end: int | None, aggregates: Mapping[str, Any]) -> dict[str, Any]:
        """Return the members of a document. end: of its window"""
        times = {} if end is None else {WINDOW_END: self.time(end)}
        return {**self.key(values), **times, **aggregates}

    def wire(self, members: dict[str, Any]) -> dict[str, Any]:
        """Return members as the connector writes them: a time stamp without a zone is a number."""
        if self.grouping.window is None or self._has_zone:
            return members
        times = {WINDOW_START, WINDOW_END}
        return {
            name: microseconds(value) if name in times else value for name, value in members.items()
        }

    @cached_property
    def _has_zone(self) -> bool:
        return self._groups[-1] == TIMESTAMPTZ

    def time(self, instant: int) -> str:
        return text_of(instant, has_zone=self._has_zone)


def _instant(time: str) -> int:
    instant = microseconds(time)
    assert instant is not None
    return instant


def _text(values: Values) -> str:
    text = join_text(values)
    assert text is not None
    return text


@dataclass
class _Run:
    """The rows of a session, in their order, and the time of the last one."""

    end: int
    ids: list[str] = field(default_factory=list)


class Sessions:
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
                    start[0], f"{self._order(earlier.get(start, FIRST) - self._session.gap)} ", high
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
        values = {row_id: codec(table).row_values(row.row) for row_id, row in stored.items()}
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
