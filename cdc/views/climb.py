"""Find the documents that changed rows belong to: up the tree of a view, edge by edge.

Entries of rows as they were and rows as they are now are enough, without older states of anything
else. If a document differs between two states, take a way from its root down to a changed row that
is in one of the states only, or whose row changed, and on it the topmost changed row. All rows above
are unchanged, so their entries are the same in both states. So climbing from the topmost changed
row, in the version in which the way existed, reaches the root.
"""

from collections.abc import Collection, Sequence

from cdc.views.plan import Node, StatePlan, View
from cdc.views.rows import value_reader
from cdc.views.state import Chunk, State, find_rows


def climb(
    plan: StatePlan, views: Sequence[View], state: State, chunk: Chunk
) -> dict[str, set[str]]:
    """Return the ids of root rows, by view, whose documents a chunk's rows may have changed.

    Those of a row that is a root itself are dirty already.
    """
    if not views:
        return {}
    current = state.rows(chunk.table, list(chunk.rows))
    versions = [*chunk.rows.items(), *((row_id, row.entries) for row_id, row in current.items())]
    marks: dict[str, set[str]] = {}
    for view in views:
        for path in view.root.paths():
            node = path[-1]
            if node.join is None or node.table.qualified != chunk.table:
                continue
            value = value_reader(plan, node.table, node.join.child)
            texts = {
                text for row_id, entries in versions if (text := value(row_id, entries)) is not None
            }
            marks.setdefault(view.name, set()).update(_roots(plan, state, path, texts))
    return marks


def _roots(
    plan: StatePlan, state: State, path: tuple[Node, ...], texts: Collection[str]
) -> Collection[str]:
    """Climb from the values of a path's last node to the ids of its root."""
    for parent, child in zip(path[-2::-1], path[:0:-1], strict=True):
        if not texts or child.join is None:
            return ()
        ids_by_text = find_rows(plan, state, parent.table, child.join.parent, texts)
        ids = set().union(*ids_by_text.values())
        if parent.join is None:
            return ids
        texts = _texts(plan, state, parent, ids)
    return ()


def _texts(plan: StatePlan, state: State, node: Node, ids: Collection[str]) -> set[str]:
    assert node.join is not None
    value = value_reader(plan, node.table, node.join.child)
    rows = state.rows(node.table.qualified, ids)
    texts = (value(row_id, row.entries) for row_id, row in rows.items())
    return {text for text in texts if text is not None}
