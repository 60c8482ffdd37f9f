"""Find the documents that changed rows belong to: up the tree of a view, edge by edge.

Entries of rows as they were and rows as they are now are enough, without older states of anything
else. If a document differs between two states, take a way from its root down to a changed row that
is in one of the states only, or whose row changed, and on it the topmost changed row. All rows above
are unchanged, so their entries are the same in both states. So climbing from the topmost changed
row, in the version in which the way existed, reaches the root.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from itertools import chain, islice
from typing import Any, TypeVar

from cdc.views.groups import documents_of
from cdc.views.plan import Node, StatePlan, View, is_key
from cdc.views.rows import Entries, value_reader
from cdc.views.state import Chunk, State
from cdc.views.time_joins import list_place, parents

PAGE = 2000
"""Rows that are climbed from at once: a parent may have millions of children."""
REMEMBERED = 100_000
"""Values that are remembered of each edge as climbed from. Where there are more, some are climbed
from again, which finds the same documents.
"""
Item = TypeVar("Item")
Joined = Any
"""What a row is joined by: the text of its values, of a join in time also its time."""


def climb(
    plan: StatePlan, views: Sequence[View], state: State, chunk: Chunk
) -> Iterator[tuple[str, Collection[str]]]:
    """Find the ids of documents that a chunk's rows may have changed: of which view, and a page of ids;
    one may come several times.

    The document of a row that is itself a root is dirty already.
    """
    if not views:
        return
    current = state.rows(chunk.table, list(chunk.rows))
    versions = [*chunk.rows.items(), *((row_id, row.entries) for row_id, row in current.items())]
    for view in views:
        if view.grouping is not None and view.root.table.qualified == chunk.table:
            yield view.name, documents_of(plan, state, view, [entries for _, entries in versions])
        for path in view.root.paths():
            node = path[-1]
            if node.join is None or node.table.qualified != chunk.table:
                continue
            joined_by = _joined_reader(plan, node)
            values = {
                value
                for row_id, entries in versions
                if (value := joined_by(row_id, entries)) is not None
            }
            for ids in _roots(plan, state, path, values):
                yield view.name, ids


def _roots(
    plan: StatePlan, state: State, path: tuple[Node, ...], values: Collection[Joined]
) -> Iterator[Collection[str]]:
    """Climb from what rows of a path's last node are joined by to the ids of its root, page by
    page.
    """
    parent, child = path[-2:]
    if child.join is None:
        return
    climbed = set[Joined]()
    # A join in time finds a page for each row, of one parent or a few: these are asked for at once.
    for page in _pages(chain.from_iterable(_parents(plan, state, parent, child, values))):
        if parent.join is None:
            yield page
            continue
        unmet = _joined(plan, state, parent, page) - climbed
        if unmet:
            yield from _roots(plan, state, path[:-1], unmet)
        climbed |= unmet
        if len(climbed) > REMEMBERED:
            climbed.clear()


def _parents(
    plan: StatePlan, state: State, parent: Node, child: Node, values: Collection[Joined]
) -> Iterable[Collection[str]]:
    assert child.join is not None
    if child.time is not None:
        return parents(plan, state, parent, child, values)
    if is_key(parent.table, child.join.parent):
        return (values,)
    name = parent.table.qualified
    return state.scan_members(name, plan.slots[name].index(child.join.parent), values)


def _joined(plan: StatePlan, state: State, node: Node, ids: Collection[str]) -> set[Joined]:
    joined_by = _joined_reader(plan, node)
    rows = state.rows(node.table.qualified, ids)
    values = (joined_by(row_id, row.entries) for row_id, row in rows.items())
    return {value for value in values if value is not None}


def _joined_reader(plan: StatePlan, node: Node) -> Callable[[str, Entries], Joined | None]:
    """Return the function from a row's id and entries to what it is joined by."""
    assert node.join is not None
    if node.time is None:
        return value_reader(plan, node.table, node.join.child)
    return lambda _, entries: list_place(plan, node, node.listing, entries)


def _pages(items: Iterable[Item]) -> Iterator[list[Item]]:
    remaining = iter(items)
    while page := list(islice(remaining, PAGE)):
        yield page
