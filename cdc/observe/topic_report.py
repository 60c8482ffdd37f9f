"""What the topics show: the heartbeat, how far each view and the state of documents is behind,
settings that are lowered.

In:  the topics, the positions of sinks. Out: `TopicReport`.
Invariant: reads only.
"""

import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from cdc.apply.progress import WORKING
from cdc.config.settings import Pipeline
from cdc.config.view_settings import SCHEMA, STATE, tables_of
from cdc.control.heartbeat import first_heartbeat_since, last_heartbeat
from cdc.kafka.log_continuity import Continuity, pending_records
from cdc.kafka.log_refusals import Discontinued
from cdc.kafka.topics import TopicsPool
from cdc.model.finding import Finding, find
from cdc.model.generation import generation_time
from cdc.model.position import Position, ViewCheckpoint, distance
from cdc.model.table import Table
from cdc.model.wording import UNKNOWN, duration
from cdc.observe.forecast import WINDOW_S, wal_pace
from cdc.observe.status import (
    ClockStatus,
    DocumentsStatus,
    HeartbeatStatus,
    SinkStatus,
    ViewStatus,
)
from cdc.postgres import table_survey
from cdc.quarantine.log import QuarantineLog
from cdc.scalar.instants import FIRST
from cdc.sink.contract import SchemaMismatch, require_same_shape

AT_RISK_SHARE = 0.75
"""The share of the time that tombstones are kept at which a view that is so far behind is at risk."""


class TopicReport(NamedTuple):
    """What `read_topics` returns: the heartbeat, the views of each sink, how many records the topics of
    tables have had, markers of transactions among them, and the ends of all topics.
    """

    heartbeat: HeartbeatStatus | None = None
    views: Mapping[str, tuple[ViewStatus, ...]] = {}
    records: int = 0
    ends: Mapping[str, Position] = {}


def tables_of_sink(pipeline: Pipeline, sink: str, waiting: Collection[str]) -> tuple[Table, ...]:
    """The tables that a sink has views of, by name only; for the state of documents, those that
    documents are made of. `waiting`: views whose documents aren't made.
    """
    captured = table_survey.tables_by_name_only(pipeline)
    views = table_survey.views_by_name_only(pipeline)
    if sink == STATE:
        used = {
            table
            for name, view in pipeline.views.items()
            if f"{SCHEMA}.{name}" not in waiting
            for table in tables_of(view)
        }
        return tuple(table for table in captured if table.qualified in used)
    return table_survey.tables_in([sink], (*captured, *views))


def read_topics(
    pipeline: Pipeline,
    tables: Mapping[str, Sequence[Table]],
    read_positions: Callable[[], Mapping[str, Mapping[str, ViewCheckpoint | None]]],
    pool: TopicsPool,
) -> TopicReport:
    """Read the heartbeat, measure each sink's views against the topics, inspect the topics. Raises
    ConnectorError.
    """
    with pool.borrowed(pipeline.kafka) as topics:
        names = {table.topic: None for of_sink in tables.values() for table in of_sink}
        continuity = Continuity(pipeline, topics).read(list(names))
        ends = {topic: topic_log.end for topic, topic_log in continuity.logs.items()}
        # The time of what was read: a broker that hangs from here on makes no heartbeat older.
        beat = last_heartbeat(topics, pipeline)
        looked_at = time.time()
        earlier = first_heartbeat_since(topics, pipeline, looked_at - WINDOW_S) if beat else None
        quarantined = Counter(
            (record.entry.sink, record.entry.topic)
            for record in QuarantineLog(topics, pipeline).read()
            if not record.entry.redrive
        )
        stored_by_sink = read_positions()
        oldest = topics.write_times(
            place
            for name, stored in stored_by_sink.items()
            for table in tables[name]
            for place in pending_records(table.topic, stored[table.topic], ends[table.topic])
        )
        continuity.load_next_records(
            (table, stored[table.topic])
            for name, stored in stored_by_sink.items()
            for table in tables[name]
        )
        views = {
            name: tuple(
                replace(
                    _inspect_view(continuity, name, table, stored[table.topic], oldest),
                    quarantined=quarantined[name, table.topic],
                )
                for table in tables[name]
            )
            for name, stored in stored_by_sink.items()
        }
    heartbeat = None
    if beat:
        age = max(0.0, looked_at - beat.arrived_ms / 1000)
        pace = wal_pace(earlier, beat) if earlier else None
        heartbeat = HeartbeatStatus(
            round(age, 3),
            beat.delay_s,
            pipeline.source.heartbeat_s,
            pace,
            beat.committed_ms / 1000,
        )
    captured = {pipeline.topic(entry.table) for entry in pipeline.source.tables}
    records = sum(sum(ends[topic].offsets) for topic in ends.keys() & captured)
    return TopicReport(heartbeat, views, records, ends)


def find_tombstones_at_risk(
    pipeline: Pipeline, sinks: Sequence[SinkStatus], now: float
) -> Iterator[Finding]:
    """Find sinks that are nearly as far behind as tombstones are kept: they would miss deletes. A
    view misses none that is younger than the start of its first reading, whatever it reads.
    """
    kept_s = pipeline.delete_retention_hours * 3600
    for sink in sinks:
        behind_s, table = max(
            (
                (min(view.lag_seconds or 0.0, now - generation_time(view.generation)), view.table)
                for view in sink.views
                if view.generation is not None and not view.problem
            ),
            default=(0.0, ""),
        )
        if behind_s >= AT_RISK_SHARE * kept_s:
            message = (
                f"{table} in {sink.name} has had records to apply for {duration(behind_s)}; Kafka keeps"
                f" tombstones for {duration(kept_s)}, so it has {duration(max(0.0, kept_s - behind_s))} left."
            )
            fix = _continuation(sink)
            yield find("tombstones-at-risk", table, message, fix, table=table, sink=sink.name)


def _continuation(sink: SinkStatus) -> str:
    """Choose the command after which a sink catches up. Beside a run that is at work, perhaps unseen,
    another one would fence it.
    """
    if sink.paused_by:
        return f"cdc -p FILE resume {sink.name}"
    if sink.state in (*WORKING, UNKNOWN) or sink.restart_at:
        return "cdc -p FILE status --watch"
    return f"cdc -p FILE run --sink {sink.name}"


def _inspect_view(
    continuity: Continuity,
    sink: str,
    table: Table,
    stored: ViewCheckpoint | None,
    oldest: Mapping[tuple[str, int, int], int],
) -> ViewStatus:
    """Measure a view, and say where it can't be continued."""
    end = continuity.logs[table.topic].end
    holes = continuity.ledger.holes(sink, table.topic)
    view = replace(
        measure(table, stored, end, oldest, time.time()),
        holes=tuple(str(hole) for hole in holes if hole.end.topic_id == end.topic_id),
    )
    try:
        continuity.resume(sink, table, stored)
        require_same_shape(table, sink, stored)
    except (Discontinued, SchemaMismatch) as error:
        return replace(view, problem=error.message, hint=error.hint)
    return view


def measure(
    table: Table,
    stored: ViewCheckpoint | None,
    end: Position,
    oldest: Mapping[tuple[str, int, int], int],
    now: float,
) -> ViewStatus:
    """Measure a view against the end of its topic. `oldest`: Unix milliseconds of the records that
    `waiting` names.
    """
    view = _unmeasured_view(table, stored)
    gap = distance(stored, end)
    if not gap.comparable:
        return view
    places = pending_records(table.topic, stored, end)
    times = [oldest[place] for place in places if place in oldest]
    lag = max(0.0, now - min(times) / 1000) if times else 0.0
    # The remaining offsets may be transaction markers alone: then there is nothing to apply.
    return replace(view, lag_records=gap.offsets, lag_seconds=round(lag, 3))


def unmeasured_views(
    tables: Sequence[Table], stored: Mapping[str, ViewCheckpoint | None] | None
) -> tuple[ViewStatus, ...]:
    """Describe views that couldn't be measured: with what the sink itself holds, without lag."""
    if stored is None:
        return tuple(ViewStatus(table.qualified) for table in tables)
    return tuple(_unmeasured_view(table, stored[table.topic]) for table in tables)


def _unmeasured_view(table: Table, stored: ViewCheckpoint | None) -> ViewStatus:
    if stored is None:
        return ViewStatus(table.qualified, changes=0)
    return ViewStatus(
        table.qualified,
        changes=stored.rows,
        at=stored.changed_at,
        generation=stored.generation,
    )


def describe_documents(
    sizes: Mapping[str, Any],
    tables: Sequence[Table],
    ends: Mapping[str, Position],
    sent_per_s: float | None,
    clock_columns: Mapping[str, str],
) -> DocumentsStatus:
    """Add to the sizes how many records of these tables are applied, and how many wait.

    sizes: what `sizes_reader` reads; ends: by topic, empty where they couldn't be read; clock_columns:
    by view, of those whose clock is a column.
    """
    stored = {name: checkpoint for name, checkpoint in sizes["applied"].items() if checkpoint}
    applied = {name: sum(checkpoint.position.offsets) for name, checkpoint in stored.items()}
    waiting = {}
    for table in tables:
        if end := ends.get(table.topic):
            gap = distance(stored.get(table.qualified), end)
            # All records wait where the view is of another topic.
            waiting[table.qualified] = gap.offsets if gap.comparable else sum(end.offsets)
    clocks = {
        view: ClockStatus(now / 1_000_000, clock_columns.get(view))
        for view, now in sizes["clocks"].items()
        if now > FIRST
    }
    return DocumentsStatus(
        **{**sizes, "applied": applied, "clocks": clocks},
        sent_per_s=sent_per_s,
        waiting=waiting if ends else None,
    )
