"""Assemble documents from the rows that the state holds now, by splicing texts.

A level of the tree is read at once, for all documents of a slice. The root's own members stay as
the connector writes them. What is nested has the form of documents (docs/use/types.md) and travels
as a text, as the connector sends json columns; so the view's topic reads as any table's.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

from cdc.codec.members import encode, joined, members
from cdc.codec.table import codec
from cdc.views.aggregates import extreme, tallied
from cdc.views.plan import Aggregate, Node, StatePlan, View
from cdc.views.rows import StoredRow, document_values, narrowed, value_reader
from cdc.views.scalar.ordering import code_points
from cdc.views.state import State, find_rows

Member = tuple[str, bytes]
"""A name, and a value as JSON."""


class Document(NamedTuple):
    """A document for the view's topic. row: the connector's JSON; None where there is none now."""

    key: bytes
    row: bytes | None


def assemble(plan: StatePlan, state: State, view: View, ids: Collection[str]) -> list[Document]:
    """Return the documents of these root ids as they are now.

    An id of which nothing is known is left out: it has had no document.
    """
    root = view.root
    stored = state.rows(root.table.qualified, ids)
    rows = _matching(root, stored)
    nested = _members(plan, state, root, rows, encode_nested=True)
    member_values = _own_members(plan, root)
    documents = [
        Document(row.key, _spliced(member_values(row.row), nested[row_id]))
        for row_id, row in rows.items()
    ]
    hidden = [Document(row.key, None) for row_id, row in stored.items() if row_id not in rows]
    absent = [row_id for row_id in ids if row_id not in stored]
    deleted = state.deleted_keys(view.name, absent) if absent else {}
    return [*documents, *hidden, *(Document(key, None) for key in deleted.values())]


def _matching(node: Node, rows: Mapping[str, StoredRow]) -> dict[str, StoredRow]:
    """Select the rows that meet the node's condition; one that is NULL isn't met."""
    condition = node.where
    if condition is None:
        return dict(rows)
    table = narrowed(node.table, frozenset(condition.columns))
    return {
        row_id: row
        for row_id, row in rows.items()
        if condition.evaluate(document_values(row.row, table)) is True
    }


def _members(
    plan: StatePlan,
    state: State,
    node: Node,
    rows: Mapping[str, StoredRow],
    *,
    encode_nested: bool = False,
) -> dict[str, list[Member]]:
    """Return what each row gets besides its own columns: aggregates, then nested members."""
    numbers: dict[str, list[Member]] = {row_id: [] for row_id in rows}
    nested: dict[str, list[Member]] = {row_id: [] for row_id in rows}
    stored: dict[str, dict[str, StoredRow]] = {}
    entries = {row_id: row.entries for row_id, row in rows.items()} if node.children else {}
    for child in node.children:
        assert child.join is not None
        text_of = value_reader(plan, node.table, child.join.parent)
        texts = {row_id: text_of(row_id, row_entries) for row_id, row_entries in entries.items()}
        present = {text for text in texts.values() if text is not None}
        _add_numbers(plan, state, child, texts, numbers)
        ids_by_text = _find_children(plan, state, child, present)
        child_ids = {child_id for ids in ids_by_text.values() for child_id in ids}
        # Several members may be of the same rows: each is read once.
        rows_read = stored.setdefault(child.table.qualified, {})
        rows_read |= state.rows(child.table.qualified, child_ids - rows_read.keys())
        children = _Children(
            child, {row_id: rows_read[row_id] for row_id in child_ids & rows_read.keys()}
        )
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
            text: _value(child, [documents[child_id] for child_id in ids])
            for text, ids in chosen.items()
        }
        if encode_nested:
            shown = {text: _as_text(value) for text, value in shown.items()}
        if child.shows:
            for row_id, text in texts.items():
                nested[row_id].append((child.field, shown[text]))
    return {row_id: [*numbers[row_id], *nested[row_id]] for row_id in rows}


def _find_children(
    plan: StatePlan, state: State, node: Node, texts: Collection[str]
) -> Mapping[str, Collection[str]]:
    """Return the ids of a node's rows by the text that parents have: of a list in its order, and
    those that are read alone.
    """
    name = node.table.qualified
    if node.listing is not None:
        return state.listed(name, plan.listings[name].index(node.listing), texts, node.limit)
    if node.many or node.join is None:
        return {}
    return find_rows(plan, state, node.table, node.join.child, texts)


def _add_numbers(
    plan: StatePlan,
    state: State,
    node: Node,
    texts: Mapping[str, str | None],
    numbers: Mapping[str, list[Member]],
) -> None:
    """Add what a node's aggregates are to each parent's numbers; of its rows only the first of a
    list are read.
    """
    if not node.aggregates:
        return
    name, present = node.table.qualified, {text for text in texts.values() if text is not None}
    tallies: Mapping[str, Mapping[str, int]] = {}
    if node.tally is not None:
        tallies = state.tallied(name, plan.tallies[name].index(node.tally), present)
    extremes = {part: _extremes(plan, state, node, part, present) for part in node.extremes}
    for row_id, text in texts.items():
        for part in node.aggregates:
            if part in extremes:
                value = extremes[part].get(text) if text is not None else None
            else:
                assert node.tally is not None
                tally = tallies.get(text, {}) if text is not None else {}
                value = tallied(part, node.table, node.tally, tally)
            numbers[row_id].append((part.name, encode(value)))


def _extremes(
    plan: StatePlan, state: State, node: Node, part: Aggregate, texts: Collection[str]
) -> dict[str, Any]:
    """Read the value of the first row of each list that is ordered by it."""
    assert part.argument is not None
    name, listing = node.table.qualified, node.extremes[part]
    first_ids = state.listed(name, plan.listings[name].index(listing), texts, 1)
    rows = state.rows(name, {row_id for ids in first_ids.values() for row_id in ids})
    table = narrowed(node.table, frozenset([part.argument]))
    type_ = node.table.column(part.argument).type
    return {
        text: extreme(type_, document_values(rows[row_id].row, table)[part.argument])
        for text, ids in first_ids.items()
        for row_id in ids
        if row_id in rows
    }


class _Children:
    """The rows of a node, for all parents of a slice: each is read and written once."""

    def __init__(self, node: Node, stored: Mapping[str, StoredRow]) -> None:
        # The rows of a list meet its condition.
        self._node, self.rows = node, stored if node.many else _matching(node, stored)

    def write(self, plan: StatePlan, state: State, ids: Collection[str]) -> dict[str, bytes]:
        """Return the documents of these rows, or what stands for them, by id."""
        node = self._node
        rows = {row_id: self.rows[row_id] for row_id in ids}
        nested = _members(plan, state, node, rows)
        if node.flatten is not None and node.flatten not in node.columns:
            return {
                row_id: dict(parts).get(node.flatten, b"null") for row_id, parts in nested.items()
            }
        if node.flatten is not None:
            document = codec(narrowed(node.table, frozenset([node.flatten]))).document
            return {
                row_id: bytes(members(document(row.row))[node.flatten])
                for row_id, row in rows.items()
            }
        document = codec(narrowed(node.table, frozenset(_shown(node)))).document
        return {row_id: _spliced(document(row.row), nested[row_id]) for row_id, row in rows.items()}

    def choose(self, ids: Sequence[str]) -> Sequence[str]:
        """Return the ids of the children that a parent with these shows, in their order."""
        if self._node.many:
            return ids[: self._node.limit]
        return [min(ids, key=code_points)] if ids else []


def _value(node: Node, documents: Sequence[bytes]) -> bytes:
    """Write the member of a parent: a list, or an object or null."""
    if node.many:
        return b"[" + b",".join(documents) + b"]"
    return documents[0] if documents else b"null"


def _shown(node: Node) -> list[str]:
    """Name the columns of a document, in the table's order; a root always has its key."""
    names = {*node.columns, *(node.table.key if node.join is None else ())}
    return [column.name for column in node.table.columns if column.name in names]


def _own_members(plan: StatePlan, root: Node) -> Callable[[bytes], bytes]:
    """Return the function from a root's row in the state to what its document shows of it."""
    shown, name = _shown(root), root.table.qualified
    stored = next(table for table in plan.tables if table.qualified == name)
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
