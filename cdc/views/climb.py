"""Find the documents that changed rows belong to: up the tree of a view, edge by edge.

Entries of rows as they were and rows as they are now are enough, without older states of anything
else. If a document differs between two states, take a way from its root down to a changed row that
is in one of the states only, or whose row changed, and on it the topmost changed row. All rows above
are unchanged, so their entries are the same in both states. So climbing from the topmost changed
row, in the version in which the way existed, reaches the root.
"""

from collections.abc import Collection, Iterator, Sequence
from itertools import islice
from typing import TypeVar

from cdc.views.plan import Node, StatePlan, View
from cdc.views.rows import value_reader
from cdc.views.state import Chunk, State, scan_rows

PAGE = 2000
"""Rows that are climbed from at once: a parent may have millions of children."""
REMEMBERED = 100_000
"""Values that are remembered of each edge as climbed from. Where there are more, some are climbed
from again, which finds the same documents.
"""
Item = TypeVar("Item")


def climb(
    plan: StatePlan, views: Sequence[View], state: State, chunk: Chunk
) -> Iterator[tuple[str, Collection[str]]]:
    """Find the ids of root rows whose documents a chunk's rows may have changed: of which view, and
    a page of ids; one may come several times.

    Those of a row that is a root itself are dirty already.
    """
    if not views:
        return
    current = state.rows(chunk.table, list(chunk.rows))
    versions = [*chunk.rows.items(), *((row_id, row.entries) for row_id, row in current.items())]
    for view in views:
        for path in view.root.paths():
            node = path[-1]
            if node.join is None or node.table.qualified != chunk.table:
                continue
            value = value_reader(plan, node.table, node.join.child)
            texts = {
                text for row_id, entries in versions if (text := value(row_id, entries)) is not None
            }
            for ids in _roots(plan, state, path, texts):
                yield view.name, ids


def _roots(
    plan: StatePlan, state: State, path: tuple[Node, ...], texts: Collection[str]
) -> Iterator[Collection[str]]:
    """Climb from the values of a path's last node to the ids of its root, page by page."""
    parent, child = path[-2:]
    if child.join is None:
        return
    climbed = set[str]()
    for ids in scan_rows(plan, state, parent.table, child.join.parent, texts):
        if parent.join is None:
            yield ids
            continue
        for page in _pages(ids):
            unmet = _texts(plan, state, parent, page) - climbed
            if unmet:
                yield from _roots(plan, state, path[:-1], unmet)
            climbed |= unmet
            if len(climbed) > REMEMBERED:
                climbed.clear()


def _texts(plan: StatePlan, state: State, node: Node, ids: Collection[str]) -> set[str]:
    assert node.join is not None
    value = value_reader(plan, node.table, node.join.child)
    rows = state.rows(node.table.qualified, ids)
    texts = (value(row_id, row.entries) for row_id, row in rows.items())
    return {text for text in texts if text is not None}


def _pages(items: Collection[Item]) -> Iterator[list[Item]]:
    remaining = iter(items)
    while page := list(islice(remaining, PAGE)):
        yield page
