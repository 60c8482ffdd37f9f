"""Assemble documents from the rows that the state holds now, by splicing texts.

A level of the tree is read at once, for all documents of a slice. The root's own members stay as
the connector writes them. What is nested has the form of documents (docs/use/types.md) and travels
as a text, as the connector sends json columns; so the view's topic reads as any table's.
"""

import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from decimal import Decimal
from typing import Any, NamedTuple

from cdc.codec.members import encode, joined, members
from cdc.codec.table import codec
from cdc.documents.aggregates import Numbers, RowAggregates
from cdc.documents.closing import ClosedWindow
from cdc.documents.plan import Listing, Node, StatePlan, View, is_key, narrowed
from cdc.documents.rows import (
    Entries,
    StoredRow,
    meeting,
    place_text,
    value_reader,
)
from cdc.documents.state import Place, Span, State, scan_spans
from cdc.model.table import Table
from cdc.scalar.instants import FIRST, LAST, instant_of, order_of, text_of
from cdc.scalar.operators import NOW, Term, next_change
from cdc.scalar.ordering import code_points

NO_CLOCK: Mapping[str, str] = {}
Member = tuple[str, bytes]
"""A name, and a value as JSON."""
ListPlace = tuple[str, str]
"""The text of a list, and what a row is ordered by there."""


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


def shown_values(
    root: Node, names: tuple[str, ...], row: bytes, nested: Mapping[str, bytes]
) -> dict[str, Any]:
    """Return the values of these names in a document, in the form of documents.

    row: of the root, as the connector writes it. nested: its other members, as JSON
    """
    # A member may have the name of a column that isn't shown.
    own = {column.name for column in root.shown}.intersection(names)
    document = codec(narrowed(root.table, own)).document
    values: dict[str, Any] = _decoded(document(row)) if own else {}
    for name in names:
        if name in own:
            continue
        # An aggregate may have a name with a dot.
        member = name if name in nested else name.partition(".")[0]
        inner = name.removeprefix(member).removeprefix(".")
        value = _decoded(nested[member])
        # A nested member travels as the text of its JSON.
        is_nested = member in root.steps or any(
            child.field == member and child.shows for child in root.children
        )
        if is_nested and isinstance(value, str):
            value = _decoded(value.encode())
        values[name] = value.get(inner) if inner and value is not None else value
    return values


def _decoded(text: bytes) -> Any:
    return json.loads(text, parse_float=Decimal)


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
    if condition is None:
        return dict(rows)
    table = narrowed(table, condition.columns)
    values = {row_id: {**clock, **codec(table).row_values(row.row)} for row_id, row in rows.items()}
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
        ids_by_text: Mapping[str, Collection[str]]
        texts: dict[str, str | None]
        if child.time is not None:
            # Each row has other children: they are looked up by its id.
            ids_by_text = _find_timed(plan, state, node, child, entries)
            texts = {row_id: row_id if row_id in ids_by_text else None for row_id in entries}
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
        children = {row_id: rows_read[row_id] for row_id in child_ids & rows_read.keys()}
        # The rows of a list meet its condition.
        if not child.many and child.time is None:
            children = _matching(child.table, child.where, children)
        # Parents with one text have the same children; NULL equals nothing.
        matching: dict[str | None, list[str]] = {
            text: []
            if text is None
            else [child_id for child_id in ids_by_text.get(text, ()) if child_id in children]
            for text in set(texts.values())
        }
        if child.time is not None:
            _sort(child, children, matching)
            _add_numbers(child, children, matching, numbers)
        if not child.shows:
            continue
        chosen = {
            text: ids[: child.limit] if child.many else sorted(ids, key=code_points)[:1]
            for text, ids in matching.items()
        }
        # Of a long list only those are written, and what they include is read, that stay in it.
        shown_ids = {child_id for ids in chosen.values() for child_id in ids}
        documents = _written(plan, state, child, {row_id: children[row_id] for row_id in shown_ids})
        shown = {
            text: _listed([documents[child_id] for child_id in ids], many=child.many)
            for text, ids in chosen.items()
        }
        if node.is_root:
            shown = {text: _as_text(value) for text, value in shown.items()}
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
        spans = [Span(text) for text in texts]
        pages = state.ranged(name, plan.listings[name].index(node.listing), spans, node.limit)
        return {
            text: [child.id for child in places] for text, places in zip(texts, pages, strict=True)
        }
    if node.many:
        return {}
    if is_key(node.table, node.join.child):
        # An id may be of no row.
        return {text: (text,) for text in texts}
    return state.members(name, plan.slots[name].index(node.join.child), texts)


def _sort(
    node: Node, rows: Mapping[str, StoredRow], ids_by_parent: Mapping[str | None, list[str]]
) -> None:
    """Order the rows of each parent by the columns of `order_by`, equal ones by their ids; without
    `order_by` they stay in the order of their times.
    """
    if not node.order_by:
        return
    listing = Listing((), None, node.order_by)
    table = narrowed(node.table, [order.column for order in node.order_by])
    places = {
        row_id: f"{place_text(listing, table, codec(table).row_values(row.row))} {row_id}".encode()
        for row_id, row in rows.items()
    }
    for ids in ids_by_parent.values():
        ids.sort(key=places.__getitem__)


def _add_numbers(
    node: Node,
    rows: Mapping[str, StoredRow],
    ids_by_parent: Mapping[str | None, Collection[str]],
    numbers: Mapping[str, list[Member]],
) -> None:
    if not node.aggregates:
        return
    columns = {part.argument for part in node.aggregates if part.argument}
    columns |= {name for part in node.aggregates if part.filter for name in part.filter.columns}
    table = narrowed(node.table, columns)
    values = {row_id: codec(table).row_values(row.row) for row_id, row in rows.items()}
    aggregates = RowAggregates(node.aggregates, node.table, values)
    for parent_id, parent_numbers in numbers.items():
        totals = aggregates.over(ids_by_parent.get(parent_id, ()))
        parent_numbers += [(name, encode(value)) for name, value in totals.items()]


def _written(
    plan: StatePlan, state: State, node: Node, rows: Mapping[str, StoredRow]
) -> dict[str, bytes]:
    """Return the documents of a node's rows, or what takes their place, by id."""
    nested = _members(plan, state, node, rows)
    if node.flatten is not None and node.flatten not in node.columns:
        return {row_id: dict(parts).get(node.flatten, b"null") for row_id, parts in nested.items()}
    # With `flatten`, a column alone.
    document = codec(narrowed(node.table, node.columns)).document
    if node.flatten is not None:
        return {
            row_id: bytes(members(document(row.row))[node.flatten]) for row_id, row in rows.items()
        }
    return {row_id: _spliced(document(row.row), nested[row_id]) for row_id, row in rows.items()}


def _listed(documents: Sequence[bytes], *, many: bool) -> bytes:
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


# Joins in time: which part of a list a parent shows, and which parents a row belongs to. Both ends of such
# a join have lists that are ordered by their times. So each question is a part of a list.


def list_place(
    plan: StatePlan, node: Node, listing: Listing | None, entries: Entries
) -> ListPlace | None:
    """Return a row's place in a list; None where it has none, or its time is beyond the years 1 to 9999."""
    number = plan.listings[node.table.qualified].index(listing)
    place = entries.places.get(number)
    return place if place is not None and instant_of(place[1]) is not None else None


def children_span(parent: Node, child: Node, place: ListPlace, parent_id: str) -> Span:
    """Return the part of the child's list that has the rows of a parent: of `as_of` and `previous`
    the last of these, of `next` the first, of `during` all.

    place: the parent's, in its own list
    """
    time = child.time_join
    text, order = place
    own_place = Place(order, parent_id).member
    low, high = _bounds(child, order, time.before, time.after)
    if time.kind in ("as_of", "during"):
        return Span(text, low, high)
    if time.kind == "previous":
        return Span(text, low, own_place if child.is_same_time(parent) else f"{order} ")
    return Span(text, f"{own_place}\0" if child.is_same_time(parent) else f"{order}!", high)


def is_last(child: Node) -> bool:
    """Whether the row of a parent is the last one of `children_span`."""
    return child.time_join.kind in ("as_of", "previous")


def parents(
    plan: StatePlan, state: State, parent: Node, child: Node, places: Collection[ListPlace]
) -> Iterator[Collection[str]]:
    """Find the parents that a row at one of these places of the child's lists may belong to, page by
    page, in the state as it is now. The row itself need not be there any more.

    A parent belongs to the nearest row. So those from the row to the next one in the lists are
    enough: if a parent beyond it has another row than before, that one or the next has changed
    itself.
    """
    time = child.time_join
    name = child.table.qualified
    number = plan.listings[name].index(child.listing)
    changed = list(places)
    spans = set()
    if time.kind == "during":
        spans = {
            Span(text, *_bounds(child, order, time.after, time.before)) for text, order in changed
        }
    elif time.kind == "next":
        earlier = [
            Span(text, _bounds(child, order, None, 0)[0], f"{order} ") for text, order in changed
        ]
        neighbours = state.ranged(name, number, earlier, 1, last_first=True)
        for (text, order), near in zip(changed, neighbours, strict=True):
            low, high = _bounds(child, order, time.after, 0)
            spans.add(Span(text, max([low, *(f"{place.order} " for place in near)]), high))
    else:
        later = [
            Span(text, f"{order}!", _bounds(child, order, 0, None)[1]) for text, order in changed
        ]
        neighbours = state.ranged(name, number, later, 1)
        for (text, order), near in zip(changed, neighbours, strict=True):
            low, high = _bounds(child, order, 0, time.before)
            spans.add(Span(text, low, min([high, *(f"{place.order}!" for place in near)])))
    parent_number = plan.listings[parent.table.qualified].index(child.parent_listing)
    for _, page in scan_spans(state, parent.table.qualified, parent_number, list(spans)):
        yield {place.id for place in page}


def _bounds(child: Node, order: str, before: int | None, after: int | None) -> tuple[str, str]:
    """Return the part of a list around a time, both ends included, by microseconds; None: without an end."""
    instant = instant_of(order)
    assert instant is not None
    low = FIRST if before is None else instant - before
    high = LAST if after is None else instant + after
    return (
        f"{order_of(low, has_zone=child.has_zone)} ",
        f"{order_of(high, has_zone=child.has_zone)}!",
    )
