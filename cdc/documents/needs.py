"""What the rows of a state are stored for, what a changed file makes again, and whether there is
room for it.

In:  a plan. Out: a text for each table, which changes with what its rows are stored for.
Invariant: a state whose tables have the needs of a plan can make all documents of it.
"""

import hashlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

import psycopg
import structlog

from cdc.config.settings import Pipeline
from cdc.documents import room
from cdc.documents.plan import Node, StatePlan, narrowed
from cdc.documents.resolve import resolve
from cdc.documents.state import StateSink
from cdc.errors import CdcError
from cdc.kafka.topics import Topics
from cdc.model.finding import Finding
from cdc.model.table import IndexOptions, RowEstimate, Table
from cdc.postgres import source
from cdc.postgres.column_facts import estimate_rows
from cdc.sink.contract import positions
from cdc.sink.lane import Failure
from cdc.sink.lane_run import reported_error
from cdc.sink.remedy import classify

ESTIMATE_S = 10.0
"""Seconds that a start waits for Postgres' statistics."""
log = structlog.get_logger()


def all_needs(plan: StatePlan, topic_ids: Mapping[str, str]) -> dict[str, str]:
    """Return a text for each table, by name, that changes with what its rows are stored for.

    That is their columns and indexes; of a root also the whole view and its topic, of the id in `topic_ids`,
    by view: when these change, all documents are made again, and reading the root's rows again marks them all.
    """
    needs = {}
    for table in plan.tables:
        name = table.qualified
        parts = [
            repr((table.columns, table.key)),
            repr((plan.slots[name], plan.listings[name], plan.tallies[name])),
        ]
        parts += (
            repr(
                (
                    *(_in_use(view.root), view.grouping),
                    *(view.having, view.clock, view.alerts, topic_ids[view.name]),
                )
            )
            for view in plan.views
            if view.root.table.qualified == name
        )
        needs[name] = hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]
    return needs


def _in_use(node: Node) -> Node:
    """The tree without what documents don't depend on: other columns of tables, and their indexes' settings."""
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


def topic_ids(pipeline: Pipeline, plan: StatePlan, kafka: Topics) -> dict[str, str]:
    """Read the ids of the views' topics, by view; "" where there is none yet."""
    topics = {view.name: pipeline.view_topic(view.name) for view in plan.views}
    ends = kafka.ends(list(kafka.existing(topics.values())))
    return {name: ends[topic].topic_id if topic in ends else "" for name, topic in topics.items()}


def examine_room(
    pipeline: Pipeline,
    sink: StateSink,
    kafka: Topics,
    captured: Sequence[Table],
    refused: Collection[str],
) -> Finding | None:
    """Say the same as `require_room` of what a run would read now, for the captured tables, without
    the views that are refused. Raises CdcError alone.
    """
    views = resolve(pipeline, captured).views
    plan = StatePlan(tuple(view for view in views if view.name not in refused))
    if not plan.views:
        return None
    try:
        return require_room(pipeline, sink, plan, all_needs(plan, topic_ids(pipeline, plan, kafka)))
    except Failure as failure:
        raise reported_error(failure.kind, failure.message, {}, sink=sink.name) from None


def require_room(
    pipeline: Pipeline, sink: StateSink, plan: StatePlan, needs: Mapping[str, str]
) -> Finding | None:
    """Say whether the state has room for what the next run reads from the topics' start. Changes
    nothing.

    `needs`: by table of the plan. Returns a warning where there may be too little; None also where
    Postgres can't be asked for its statistics.

    Raises:
        StateTooLarge: the state would be larger than all of the memory, also if the estimate were much
            too high. CdcError, Failure: it can't be reached.
    """
    sink.needs = needs
    stored = positions(sink, plan.tables)
    again = [table for table in plan.tables if stored[table.qualified] is None]
    estimates = _estimates(pipeline, again) if again else {}
    if not estimates:
        return None
    state = sink.open_state()
    sizes = state.sizes([table.qualified for table in plan.tables], ())
    names = [table.qualified for table in again]
    expected = room.forecast(plan, state.prefix, sizes, names, estimates)
    return room.require_room(state.url, expected, sizes)


def _estimates(pipeline: Pipeline, tables: Sequence[Table]) -> Mapping[str, RowEstimate]:
    """Estimate tables; none where Postgres can't answer, since a run goes on without estimates."""
    try:
        with source.connect(pipeline.source.dsn) as conn, source.within(conn, ESTIMATE_S):
            return estimate_rows(conn, tables)
    except (CdcError, psycopg.Error) as error:
        log.warning("rows_not_estimated", error=classify(error, "postgres").message)
        return {}
