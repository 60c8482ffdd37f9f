"""Assemble documents from the rows that the state holds now, by splicing texts.

A level of the tree is read at once, for all documents of a slice. The root's own members stay as
the connector writes them. What is nested has the form of documents (docs/use/types.md) and travels
as a text, as the connector sends json columns; so the view's topic reads as any table's.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

from cdc.codec.members import encode, joined, members
from cdc.codec.table import codec
from cdc.documents.aggregates import Numbers, RowAggregates
from cdc.documents.closing import ClosedWindow
from cdc.documents.having import shown_values
from cdc.documents.plan import Listing, Node, StatePlan, View, is_key, narrowed
from cdc.documents.rows import (
    Entries,
    StoredRow,
    document_values,
    meeting,
    place_text,
    value_reader,
)
from cdc.documents.scalar.instants import text_of
from cdc.documents.scalar.operators import NOW, Term, next_change
from cdc.documents.scalar.ordering import code_points
from cdc.documents.state import State, scan_spans
from cdc.documents.time_joins import children_span, is_last, list_place
from cdc.model.table import Table

NO_CLOCK: Mapping[str, str] = {}
Member = tuple[str, bytes]
"""A name, and a value as JSON."""


class Document(NamedTuple):
    """A document for the view's topic. id: of its root row. row: the connector's JSON; None where there
    is none now.
    """

    id: str
    key: bytes
    row: bytes | None


class Slice(NamedTuple):
    """Documents of a view. due: by root id, when the clock may change a document again, in
    microseconds since 1970. closed: by id, what is left of windows that are closed.
    """

    documents: list[Document]
    due: dict[str, int]
    closed: Mapping[str, ClosedWindow] = {}


def assemble(
    plan: StatePlan, state: State, view: View, ids: Collection[str], now: int | None = None
) -> Slice:
    """Return the documents of these root ids as they are now. `now`: the view's clock, in
    microseconds since 1970.

    An id of which nothing is known is left out: it has had no document.
    """
    root = view.root
    stored = state.rows(root.table.qualified, ids)
    clock = {} if now is None else {NOW: text_of(now)}
    due: dict[str, int] = {}
    rows = _matching(root.table, root.where, stored, clock, due)
    steps = _steps(plan, state, root, rows)
    rows = {row_id: rows[row_id] for row_id in steps}
    nested = _members(plan, state, root, rows)
    for row_id, parts in steps.items():
        nested[row_id] += parts
    member_values = _own_members(plan, root)
    if view.having is not None:
        condition = view.having
        values = {
            row_id: clock | shown_values(root, condition.columns, row.row, dict(nested[row_id]))
            for row_id, row in rows.items()
        }
        rows = {row_id: rows[row_id] for row_id in meeting(condition, values)}
        note_due(condition, values, due)
    documents = [
        Document(row_id, row.key, _spliced(member_values(row.row), nested[row_id]))
        for row_id, row in rows.items()
    ]
    hidden = [
        Document(row_id, row.key, None) for row_id, row in stored.items() if row_id not in rows
    ]
    absent = [row_id for row_id in ids if row_id not in stored]
    deleted = state.deleted_keys(view.name, absent) if absent else {}
    removed = [Document(row_id, key, None) for row_id, key in deleted.items()]
    return Slice([*documents, *hidden, *removed], due)


def _steps(
    plan: StatePlan, state: State, root: Node, rows: Mapping[str, StoredRow]
) -> dict[str, list[Member]]:
    """Return the members of the rows before the last one of a pattern, by the last row's id. Rows that
    complete none are left out.

    The nearest row is the latest, so if it is too early for `within`, all others are.
    """
    chains = {row_id: [(row_id, row)] for row_id, row in rows.items()}
    earliest: dict[str, str] = {}
    parent = root
    for node in root.earlier:
        spans = {}
        for row_id, chain in chains.items():
            last_id, last = chain[-1]
            place = list_place(plan, parent, node.parent_listing, last.entries)
            if place is not None:
                span = children_span(parent, node, place, last_id)
                # It bounds what lies between the first and the last row, not between neighbours.
                spans[row_id] = span._replace(low=earliest.setdefault(row_id, span.low))
        name = node.table.qualified
        number = plan.listings[name].index(node.listing)
        places = state.ranged(name, number, list(spans.values()), 1, last_first=True)
        ids = {row_id: near[0].id for row_id, near in zip(spans, places, strict=True) if near}
        found = _matching(node.table, node.meets, state.rows(name, set(ids.values())))
        chains = {
            row_id: [*chains[row_id], (earlier_id, found[earlier_id])]
            for row_id, earlier_id in ids.items()
            if earlier_id in found
        }
        parent = node
    if root.absent is not None:
        entries = {row_id: rows[row_id].entries for row_id in chains}
        later = _find_timed(plan, state, root, root.absent, entries)
        chains = {row_id: chain for row_id, chain in chains.items() if not later.get(row_id)}
    if not root.steps:
        return {row_id: [] for row_id in chains}
    document = codec(narrowed(root.table, root.earlier[0].columns)).document
    completed: dict[str, list[Member]] = {}
    for row_id, (_, *chain) in chains.items():
        texts = [document(row.row) for _, row in chain]
        completed[row_id] = [
            (step, _as_text(_listed([texts[place] for place in places], many=len(places) > 1)))
            for step, places in root.steps.items()
        ]
    return completed


def _matching(
    table: Table,
    condition: Term | None,
    rows: Mapping[str, StoredRow],
    clock: Mapping[str, str] = NO_CLOCK,
    due: dict[str, int] | None = None,
) -> dict[str, StoredRow]:
    """Select the rows that meet the condition; one that is NULL isn't met."""
    if condition is None:
        return dict(rows)
    table = narrowed(table, condition.columns)
    values = {row_id: {**clock, **document_values(row.row, table)} for row_id, row in rows.items()}
    if due is not None:
        note_due(condition, values, due)
    return {row_id: rows[row_id] for row_id in meeting(condition, values)}


def note_due(condition: Term, values: Mapping[str, Mapping[str, Any]], due: dict[str, int]) -> None:
    """Note for each row when a condition on it may change by the clock, if that is earlier."""
    if not condition.reads_clock:
        return
    first_after = next_change(condition)
    for row_id, row_values in values.items():
        if (moment := first_after(row_values)) is not None:
            due[row_id] = min(moment, due.get(row_id, moment))


def _members(
    plan: StatePlan, state: State, node: Node, rows: Mapping[str, StoredRow]
) -> dict[str, list[Member]]:
    """Return what each row has beside its columns: aggregates, then nested members, of the root as texts."""
    numbers: dict[str, list[Member]] = {row_id: [] for row_id in rows}
    nested: dict[str, list[Member]] = {row_id: [] for row_id in rows}
    stored: dict[str, dict[str, StoredRow]] = {}
    entries = {row_id: row.entries for row_id, row in rows.items()} if node.children else {}
    for child in node.children:
        if child.presence is not None:
            continue
        assert child.join is not None
        if child.time is not None:
            # Each row has other children: they are looked up by its id.
            ids_by_text: Mapping[str, Collection[str]] = _find_timed(
                plan, state, node, child, entries
            )
            texts: dict[str, str | None] = {
                row_id: row_id if row_id in ids_by_text else None for row_id in entries
            }
            present = set(ids_by_text)
        else:
            text_of = value_reader(plan, node.table, child.join.parent)
            texts = {
                row_id: text_of(row_id, row_entries) for row_id, row_entries in entries.items()
            }
            present = {text for text in texts.values() if text is not None}
            ids_by_text = _find_children(plan, state, child, present)
            if child.totals is not None:
                panes = {row_id: [] if text is None else [text] for row_id, text in texts.items()}
                totals = Numbers(plan, state, child.table, child.totals, panes)
                for part in child.aggregates:
                    for row_id, value in totals.values(part).items():
                        numbers[row_id].append((part.name, encode(value)))
        child_ids = {child_id for ids in ids_by_text.values() for child_id in ids}
        # Several members may be of the same rows: each is read once.
        rows_read = stored.setdefault(child.table.qualified, {})
        rows_read |= state.rows(child.table.qualified, child_ids - rows_read.keys())
        children = _Children(
            child, {row_id: rows_read[row_id] for row_id in child_ids & rows_read.keys()}
        )
        if child.time is not None:
            children.sort(ids_by_text)
            children.add_numbers(ids_by_text, numbers)
        # Parents with one text have the same children; NULL equals nothing.
        matching: dict[str | None, list[str]] = {
            text: [child_id for child_id in ids_by_text.get(text, ()) if child_id in children.rows]
            for text in present
        }
        matching[None] = []
        chosen = {text: children.choose(ids) for text, ids in matching.items() if child.shows}
        # Of a long list only those are written, and what they include is read, that stay in it.
        documents = children.write(plan, state, set().union(*chosen.values()))
        shown = {
            text: _listed([documents[child_id] for child_id in ids], many=child.many)
            for text, ids in chosen.items()
        }
        if node.join is None:
            shown = {text: _as_text(value) for text, value in shown.items()}
        if child.shows:
            for row_id, text in texts.items():
                nested[row_id].append((child.field, shown[text]))
    return {row_id: [*numbers[row_id], *nested[row_id]] for row_id in rows}


def _find_timed(
    plan: StatePlan, state: State, parent: Node, node: Node, entries: Mapping[str, Entries]
) -> dict[str, list[str]]:
    """Return the ids of the rows of a join in time by the parent's id, in the order of their times.

    Parents that are in no list, because a value or the time is NULL, are left out.
    """
    name = node.table.qualified
    number = plan.listings[name].index(node.listing)
    spans = {
        row_id: children_span(parent, node, place, row_id)
        for row_id, row_entries in entries.items()
        if (place := list_place(plan, parent, node.parent_listing, row_entries)) is not None
    }
    if node.many:
        ids: dict[str, list[str]] = {row_id: [] for row_id in spans}
        parent_ids = list(spans)
        for number_of_span, page in scan_spans(state, name, number, list(spans.values())):
            ids[parent_ids[number_of_span]] += [child.id for child in page]
        return ids
    nearest = state.ranged(name, number, list(spans.values()), 1, last_first=is_last(node))
    return {
        row_id: [child.id for child in places]
        for row_id, places in zip(spans, nearest, strict=True)
    }


def _find_children(
    plan: StatePlan, state: State, node: Node, texts: Collection[str]
) -> Mapping[str, Collection[str]]:
    """Return the ids of a node's rows by the parents' text, of a list in its order; none of a list that isn't shown."""
    name = node.table.qualified
    if node.listing is not None:
        return state.listed(name, plan.listings[name].index(node.listing), texts, node.limit)
    if node.many or node.join is None:
        return {}
    if is_key(node.table, node.join.child):
        # An id may be of no row.
        return {text: (text,) for text in texts}
    return state.members(name, plan.slots[name].index(node.join.child), texts)


class _Children:
    """The rows of a node, for all parents of a slice: each is read and written once."""

    def __init__(self, node: Node, stored: Mapping[str, StoredRow]) -> None:
        self._node = node
        # The rows of a list meet its condition.
        self.rows = stored
        if not node.many and node.time is None:
            self.rows = _matching(node.table, node.where, stored)

    def sort(self, ids_by_parent: Mapping[str, Collection[str]]) -> None:
        """Order the rows of each parent by the columns of `order_by`, equal ones by their ids; without
        `order_by` they stay in the order of their times.
        """
        node = self._node
        if not node.order_by:
            return
        listing = Listing((), None, node.order_by)
        table = narrowed(node.table, [order.column for order in node.order_by])
        places = {
            row_id: f"{place_text(listing, table, document_values(row.row, table))} {row_id}".encode()
            for row_id, row in self.rows.items()
        }
        for ids in ids_by_parent.values():
            assert isinstance(ids, list)
            ids.sort(key=lambda row_id: places.get(row_id, b""))

    def add_numbers(
        self, ids_by_parent: Mapping[str, Collection[str]], numbers: Mapping[str, list[Member]]
    ) -> None:
        node = self._node
        if not node.aggregates:
            return
        columns = {part.argument for part in node.aggregates if part.argument}
        columns |= {name for part in node.aggregates if part.filter for name in part.filter.columns}
        table = narrowed(node.table, columns)
        values = {row_id: document_values(row.row, table) for row_id, row in self.rows.items()}
        aggregates = RowAggregates(node.aggregates, node.table, values)
        for parent_id, parent_numbers in numbers.items():
            totals = aggregates.over(ids_by_parent.get(parent_id, ()))
            parent_numbers += [(name, encode(value)) for name, value in totals.items()]

    def write(self, plan: StatePlan, state: State, ids: Collection[str]) -> dict[str, bytes]:
        """Return the documents of these rows, or what stands for them, by id."""
        node = self._node
        rows = {row_id: self.rows[row_id] for row_id in ids}
        nested = _members(plan, state, node, rows)
        if node.flatten is not None and node.flatten not in node.columns:
            return {
                row_id: dict(parts).get(node.flatten, b"null") for row_id, parts in nested.items()
            }
        # With `flatten`, a column alone.
        document = codec(narrowed(node.table, node.columns)).document
        if node.flatten is not None:
            return {
                row_id: bytes(members(document(row.row))[node.flatten])
                for row_id, row in rows.items()
            }
        return {row_id: _spliced(document(row.row), nested[row_id]) for row_id, row in rows.items()}

    def choose(self, ids: Sequence[str]) -> Sequence[str]:
        """Return the ids that a parent shows, in their order."""
        if self._node.many:
            return ids[: self._node.limit]
        return [min(ids, key=code_points)] if ids else []


def _listed(documents: Sequence[bytes], *, many: bool) -> bytes:
    """Write the member of a parent: a list, or an object or null."""
    if many:
        return b"[" + b",".join(documents) + b"]"
    return documents[0] if documents else b"null"


def _own_members(plan: StatePlan, root: Node) -> Callable[[bytes], bytes]:
    """Return the function from a root's row in the state to what its document shows of it."""
    shown = [column.name for column in root.shown]
    stored = next(table for table in plan.tables if table.qualified == root.table.qualified)
    if [column.name for column in stored.columns] == shown:
        return lambda row: row

    def select(row: bytes) -> bytes:
        values = members(row)
        return joined({name: values[name] for name in shown})

    return select


def _spliced(document: bytes, parts: Sequence[Member]) -> bytes:
    """Add members to an object without reading it."""
    if not parts:
        return document
    added = b",".join([b"%b:%b" % (encode(name), value) for name, value in parts])
    return b"{" + added + b"}" if document == b"{}" else document[:-1] + b"," + added + b"}"


def _as_text(value: bytes) -> bytes:
    """Write JSON as the JSON of a text; null stays null, as of a json column without a value."""
    return value if value == b"null" else encode(value.decode())
