"""Documents of groups: which ones a row counts in, and how they are made of the state's numbers.

What a document shows is in the tallies and lists of its group, or of the panes of its window: numbers of
panes are added up. So a change costs the documents that it is in, however many rows they have. Only a
session is made of its rows (`cdc.views.sessions`).
"""

import json
from collections.abc import Callable, Collection, Mapping
from functools import cached_property
from typing import Any

from cdc.codec.members import encode
from cdc.views.aggregates import extreme, tallied
from cdc.views.assemble import Document, Slice, note_due
from cdc.views.plan import (
    EXTREMES,
    WINDOW_END,
    WINDOW_START,
    GroupedAggregate,
    Grouping,
    Session,
    StatePlan,
    Tally,
    View,
    Window,
)
from cdc.views.rows import Entries, document_values, join_text, narrowed
from cdc.views.scalar.instants import FIRST, LAST, microseconds, text_of
from cdc.views.scalar.operators import NOW
from cdc.views.scalar.ordering import sort_key
from cdc.views.scalar.terms import BOOLEAN, INTEGERS, TIMESTAMPTZ, group
from cdc.views.sessions import Sessions
from cdc.views.state import State

Values = list[Any]
"""What the rows of a document have in common, in the form of documents: the columns of `View.keyed`."""


def documents_of(
    plan: StatePlan, state: State, view: View, versions: Collection[Entries]
) -> Collection[str]:
    """Return the ids of the documents that versions of rows count in, given with their entries."""
    groups = _Groups(view)
    if isinstance(groups.grouping.window, Session):
        begins = set(Sessions(plan, state, view).changed(versions))
        ids = (groups.session_id(text, time) for text, time in begins)
        return {document_id for document_id in ids if document_id is not None}
    tally = groups.grouping.tally(groups.grouping.counted)
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
    if isinstance(groups.grouping.window, Session):
        rows = _read_sessions(plan, state, view, groups, known)
    else:
        rows = _read_panes(plan, state, view, groups, known)
    clock = {} if now is None else {NOW: text_of(now)}
    due: dict[str, int] = {}
    if view.having is not None:
        shown = {row_id: clock | row for row_id, row in rows.items()}
        note_due(view.having, shown, due)
        rows = {
            row_id: row
            for row_id, row in rows.items()
            if view.having.evaluate(shown[row_id]) is True
        }
    documents = [
        Document(
            row_id,
            encode(groups.wire(groups.key(values))),
            encode(groups.wire(rows[row_id])) if row_id in rows else None,
        )
        for row_id, values in known.items()
    ]
    return Slice(documents, due)


def _read_panes(
    plan: StatePlan, state: State, view: View, groups: "_Groups", known: Mapping[str, Values]
) -> dict[str, dict[str, Any]]:
    """Return the members of the documents that have rows, by id, for what these have in common."""
    panes = {row_id: groups.texts(values) for row_id, values in known.items()}
    numbers = _Numbers(plan, state, view, {text for texts in panes.values() for text in texts})
    rows = {}
    for row_id, values in known.items():
        if not numbers.count(panes[row_id]):
            continue
        row = groups.key(values)
        window = groups.grouping.window
        if isinstance(window, Window):
            row[WINDOW_END] = groups.time(_instant(values[-1]) + window.size)
        for name, over in numbers.members.items():
            row[name] = over(panes[row_id])
        rows[row_id] = row
    return rows


def _read_sessions(
    plan: StatePlan, state: State, view: View, groups: "_Groups", known: Mapping[str, Values]
) -> dict[str, dict[str, Any]]:
    """Return the members of the sessions that there are, as `_read_panes` does."""
    begins = {
        row_id: (_text(values[:-1]), _instant(values[-1])) for row_id, values in known.items()
    }
    sessions = Sessions(plan, state, view).members(list(begins.values()))
    rows = {}
    for row_id, values in known.items():
        if begins[row_id] in sessions:
            end, members = sessions[begins[row_id]]
            rows[row_id] = {**groups.key(values), WINDOW_END: groups.time(end), **members}
    return rows


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
        """Return the ids of the documents that the rows with a text count in; none for a text of
        another definition of the view.
        """
        values = self.values(text)
        if values is None:
            return []
        window = self.grouping.window
        if not isinstance(window, Window):
            return [self._id(values)]
        return [
            self._id([*values[:-1], self.time(begin)])
            for begin in window.begins(_instant(values[-1]))
            if begin >= FIRST and begin + window.size <= LAST
        ]

    def session_id(self, text: str, begin: int) -> str | None:
        """Return the id of the session of a list's rows that begins at a time; None for a text of
        another definition of the view.
        """
        try:
            parts = json.loads(text) if len(self._columns) != 2 else [text]
        except ValueError:
            return None
        values = self._checked([*parts, self.time(begin)]) if isinstance(parts, list) else None
        return None if values is None else self._id(values)

    def _id(self, values: Values) -> str:
        if len(values) > 1:
            return encode(values).decode()
        return values[0] if isinstance(values[0], str) else encode(values[0]).decode()

    def values(self, text: str) -> Values | None:
        """Return what rows have in common, from the id of a document or the text that rows count for.
        None for one of another definition of the view.
        """
        try:
            return self._checked(json.loads(text) if len(self._columns) > 1 else [text])
        except ValueError:
            return None

    def _checked(self, parts: Any) -> Values | None:
        """Return the values of a group, of which integers and booleans may be texts; None where they
        can't be a group's.
        """
        if not isinstance(parts, list) or len(parts) != len(self._columns):
            return None
        try:
            values = [
                json.loads(part) if kind in TYPES and isinstance(part, str) else part
                for part, kind in zip(parts, self._groups, strict=True)
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
        """Return the members of a document's key."""
        return {column.name: value for column, value in zip(self._columns, values, strict=True)}

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
        """Write a time as documents have it."""
        return text_of(instant, has_zone=self._has_zone)


def _instant(time: str) -> int:
    instant = microseconds(time)
    assert instant is not None
    return instant


def _text(values: Values) -> str:
    text = join_text(values)
    assert text is not None
    return text


class _Numbers:
    """What the state has for some texts: each tally and list is read once."""

    def __init__(self, plan: StatePlan, state: State, view: View, texts: Collection[str]) -> None:
        assert view.grouping is not None
        self._plan = plan
        self._state = state
        self._table = view.root.table
        self._texts = texts
        self._tallies: dict[Tally, Mapping[str, Mapping[str, int]]] = {}
        self.count = self._reader(view.grouping, view.grouping.counted)
        """Takes texts, and counts the rows that count for any of them."""
        self.members = {
            part.aggregate.name: self._reader(view.grouping, part)
            for part in view.grouping.aggregates
        }
        """By name of an aggregate: takes texts, and returns it over the rows that count for any of them,
        in the form of documents.
        """

    def _reader(
        self, grouping: Grouping, part: GroupedAggregate
    ) -> Callable[[Collection[str]], Any]:
        if part.aggregate.function in EXTREMES:
            return self._extreme_reader(grouping, part)
        tally = grouping.tally(part)
        if tally not in self._tallies:
            number = self._plan.tallies[self._table.qualified].index(tally)
            read = self._state.tallied(self._table.qualified, number, self._texts)
            self._tallies[tally] = read
        numbers_by_text = self._tallies[tally]

        def over(texts: Collection[str]) -> Any:
            totals: dict[str, int] = {}
            for text in texts:
                for name, number in numbers_by_text.get(text, {}).items():
                    totals[name] = totals.get(name, 0) + number
            present = {name: number for name, number in totals.items() if number}
            return tallied(part.aggregate, self._table, tally, present)

        return over

    def _extreme_reader(
        self, grouping: Grouping, part: GroupedAggregate
    ) -> Callable[[Collection[str]], Any]:
        column = part.aggregate.argument
        assert column is not None
        name = self._table.qualified
        number = self._plan.listings[name].index(grouping.listing(part))
        first_ids = self._state.listed(name, number, self._texts, 1)
        rows = self._state.rows(name, {row_id for ids in first_ids.values() for row_id in ids})
        table = narrowed(self._table, frozenset([column]))
        first_values = {
            text: document_values(rows[row_id].row, table)[column]
            for text, ids in first_ids.items()
            for row_id in ids
            if row_id in rows
        }
        type_ = self._table.column(column).type
        key = sort_key(type_)
        choose = max if part.aggregate.function == "max" else min

        def over(texts: Collection[str]) -> Any:
            values = [first_values.get(text) for text in texts]
            present = [value for value in values if value is not None]
            return extreme(type_, choose(present, key=key)) if present else None

        return over
