"""What the rows of a state are stored for, what a changed file makes again, and whether there is
room for it.

In:  a plan. Out: a text for each table, which changes with what its rows are stored for.
Invariant: a state whose tables have the needs of a plan can make all documents of it.

The memory that the state takes is estimated before its rows are read: rows as many and as long as Postgres'
statistics say, and what the server adds to each key and each member. Sizes are in bytes. What the server
adds was measured on Valkey 9.1. For the sample's tables and views the estimate is 0.91 of what is taken
once all documents are sent.
"""

import hashlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import psycopg
import structlog

from cdc.config.settings import Pipeline
from cdc.config.view_settings import STATE
from cdc.documents.plan import Node, StatePlan, Values, narrowed
from cdc.documents.resolve import resolve
from cdc.documents.state import StateSink, StateSizes, StateTooLarge
from cdc.errors import CdcError
from cdc.kafka.topics import Topics
from cdc.model.address import address
from cdc.model.finding import Finding, find
from cdc.model.pg_types import base_type
from cdc.model.table import IndexOptions, RowEstimate, Table
from cdc.postgres import source
from cdc.postgres.column_facts import estimate_rows
from cdc.redis.server import shell_command, view_key
from cdc.sink.contract import positions
from cdc.sink.lane import Failure
from cdc.sink.lane_run import reported_error
from cdc.sink.remedy import classify

ESTIMATE_S = 10.0
"""Seconds that a start waits for Postgres' statistics."""
KEY = 80
"""Bytes that the server takes for a key with its value, in addition to the bytes of both."""
MEMBER = 12
"""Bytes that it takes for a member of an index."""
MARK = 60
"""Bytes of a document's mark. None is sent before all rows are there, so each is marked then."""
TEXTS = {"timestamp with time zone": 29, "timestamp without time zone": 16, "uuid": 38}
"""Lengths of values that are longer in a record than in Postgres, which has them in 8 or 16 bytes."""
EXCESS = 1.5
"""How many times all of the server's memory an estimate has to be for a refusal: statistics may be old,
and count rows that are gone.
"""
RESERVE = 1.5
"""What is recommended: so many times what is missing."""
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
    expected = forecast(plan, state.prefix, sizes, names, estimates)
    return judge_room(state.url, expected, sizes)


def _estimates(pipeline: Pipeline, tables: Sequence[Table]) -> Mapping[str, RowEstimate]:
    """Estimate tables; none where Postgres can't answer, since a run goes on without estimates."""
    try:
        with source.connect_to_read(pipeline.source) as conn, source.within(conn, ESTIMATE_S):
            return estimate_rows(conn, tables)
    except (CdcError, psycopg.Error) as error:
        log.warning("rows_not_estimated", error=classify(error, "postgres").message)
        return {}


class Forecast(NamedTuple):
    """needed: by the whole state, once all is read. growth: what of it isn't there yet."""

    needed: int
    growth: int


def forecast(
    plan: StatePlan,
    prefix: str,
    sizes: StateSizes,
    again: Collection[str],
    estimates: Mapping[str, RowEstimate],
) -> Forecast:
    """Estimate what a state will take. Tables that are read `again` count as Postgres estimates
    them. Other tables, and tables without an estimate, count as they are in the state.
    """
    needed = growth = 0
    for table in plan.tables:
        name = table.qualified
        members = len(plan.slots[name]) + len(plan.listings[name])
        key_bytes = len(view_key(prefix, name)) + KEY + members * MEMBER
        expected = stored = sizes.bytes[name] + sizes.rows[name] * key_bytes
        if name in again and name in estimates:
            estimate = estimates[name]
            row_bytes = key_bytes + _row_bytes(plan, table, estimate)
            expected = estimate.rows * (row_bytes + MARK * len(plan.roots(name)))
            # What is measured lacks the texts of indexes.
            stored = max(stored, sizes.rows[name] * row_bytes)
        needed += expected
        growth += expected - stored
    return Forecast(needed, growth)


def judge_room(url: str, expected: Forecast, sizes: StateSizes) -> Finding | None:
    """Compare a forecast with the memory of the server. A server without `maxmemory`, or one that
    doesn't report it, has room for all.

    Raises:
        StateTooLarge: it is more than `EXCESS` times all of the memory.
    """
    limit = sizes.limit_bytes
    used = sizes.used_bytes
    if limit is None or used is None or used + expected.growth <= limit:
        return None
    recommended = used + round(RESERVE * expected.growth)
    command = f"{shell_command(url)} CONFIG SET maxmemory {recommended}"
    figures = (
        f"by Postgres' statistics its rows take about {expected.needed:,} bytes, of which"
        f" {expected.growth:,} aren't there yet, and {max(0, limit - used):,} of {limit:,} bytes"
        " (maxmemory) are free."
    )
    if expected.needed > EXCESS * limit:
        message = f"The state of documents doesn't fit into the server at {address(url)}: {figures}"
        raise StateTooLarge(message, hint=command, sink=STATE)
    message = f"The state of documents may not fit into the server at {address(url)}: {figures}"
    return find("state-too-large/estimate", STATE, message, command, sink=STATE)


def _row_bytes(plan: StatePlan, table: Table, estimate: RowEstimate) -> int:
    """Estimate a row of the state with its id and what its indexes have of it: see
    `cdc.documents.rows`. Lists and numbers that leave rows out aren't counted.
    """
    name = table.qualified
    lengths = {
        column.name: TEXTS.get(base_type(column.type), estimate.widths.get(column.name, 1))
        for column in table.columns
    }

    def text(columns: Collection[str]) -> int:
        return sum(lengths[column] for column in columns)

    def members(columns: Collection[str]) -> int:
        return 1 + sum(len(column.encode()) + 4 + lengths[column] for column in columns)

    def looked_up(values: Values) -> int:
        return 3 + text([column for value in values for column in value.columns])

    row_id = text(table.key)
    size = row_id + members(table.key) + members(lengths)
    size += sum(looked_up(values) + row_id for values in plan.slots[name])
    for listing in plan.listings[name]:
        if listing.where is None:
            order = text([order.column for order in listing.order_by])
            size += looked_up(listing.values) + 2 * order + row_id
    for tally in plan.tallies[name]:
        size += looked_up(tally.values) if tally.where is None else 0
    return size
