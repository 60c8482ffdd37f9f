"""What the rows of a state are stored for, and what a changed file makes again.

In:  a plan. Out: a text for each table, which changes with what its rows are stored for.
Invariant: a state whose tables have the needs of a plan can make all documents of it.
"""

import hashlib
from collections.abc import Collection, Mapping
from dataclasses import replace

from cdc.model.table import IndexOptions, Table
from cdc.sink.contract import positions
from cdc.views.plan import Node, StatePlan
from cdc.views.rows import narrowed
from cdc.views.state import StateSink


def all_needs(plan: StatePlan, topic_ids: Mapping[str, str]) -> dict[str, str]:
    """Return the needs of all tables, by name, for the ids of the views' topics, by view."""
    return {table.qualified: needs(plan, table, topic_ids) for table in plan.tables}


def needs(plan: StatePlan, table: Table, topic_ids: Mapping[str, str]) -> str:
    """Return a text that changes with what the rows of a table are stored for.

    That is their columns and indexes; of a root also the whole view and its topic: when these
    change, all documents are made again, and reading the root's rows again marks them all.
    """
    views = [view for view in plan.views if view.root.table.qualified == table.qualified]
    parts = [
        repr((table.columns, table.key)),
        repr(
            (
                plan.slots[table.qualified],
                plan.listings[table.qualified],
                plan.tallies[table.qualified],
            )
        ),
        *(repr((_in_use(view.root), topic_ids[view.name])) for view in views),
    ]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def _in_use(node: Node) -> Node:
    """The tree without what documents don't depend on: columns that only the tables have, and
    settings of their indexes.
    """
    table = replace(narrowed(node.table, node.columns_in_use), index=IndexOptions())
    return replace(node, table=table, children=tuple(map(_in_use, node.children)))


def rebuilds(
    sink: StateSink, needs: Mapping[str, str], empty: Collection[str]
) -> tuple[dict[str, bool], dict[str, bool]]:
    """Say what the next run makes again: by table, whether its topic is read again from its start;
    by view, whether all its documents are made again. Else only changed ones are.

    `needs`: by table of the sink's plan, see `all_needs`. `empty`: topics that never had a record.
    They give no batch and so no position, and nothing in them can be read again.
    """
    sink.needs = needs
    stored = positions(sink, sink.plan.tables)
    tables = {
        table.qualified: stored[table.qualified] is None and table.topic not in empty
        for table in sink.plan.tables
    }
    return tables, {
        view.name: any(tables[name] for name in view.topics) for view in sink.plan.views
    }
