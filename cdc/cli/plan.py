"""Verb `cdc plan`: compare the servers with the pipeline file and print what it would change.
Writes nothing that stays.
"""

from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Group

from cdc.cli.console import Json, answer, call
from cdc.cli.screen import Grid
from cdc.model.table import Projection

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from cdc.config.settings import Pipeline
    from cdc.control.change_plan import Plan, PlannedView, Refusal
    from cdc.kafka.topics import Topics
    from cdc.model.table import Table
    from cdc.postgres.source import Connection
    from cdc.runtime.context import Context
    from cdc.sink.contract import Sink

MOST_ALIKE = 10
"""Views of a sink with the same columns, rows and change that have a row each."""
IDLE = """
SELECT h.pipeline::text FROM cdc.heartbeat h JOIN pg_replication_slots s ON s.slot_name = h.pipeline
WHERE NOT s.active AND s.database = current_database() AND h.pipeline <> %s ORDER BY 1
"""


def plan(context: typer.Context, as_json: Json = False) -> None:
    """Show what the pipeline file would change; change nothing.

    Lists what migrate, register and run would do with the file as it is now, and what they would
    refuse.
    """
    change_plan = _make_plan(context.obj.from_catalog())
    text = call.complete_commands("\n".join(lines(change_plan)))
    if change_plan.listed:
        return answer(as_json, change_plan, Group(text, "", what_goes_where(change_plan.listed)))
    return answer(as_json, change_plan, text)


def what_goes_where(views: "Sequence[PlannedView]") -> Grid:
    """Format the views of sinks that have lists. Many of a sink that are alike share a row."""
    grid = Grid("sink", "table", "columns", "rows", "change")
    alike: dict[tuple[str, ...], list[str]] = {}
    for view in views:
        alike.setdefault((view.sink, view.columns, view.rows, view.effect), []).append(view.table)
    for (sink, *shown), tables in alike.items():
        many = len(tables) > MOST_ALIKE
        for table in [f"{tables[0]} and {len(tables) - 1} more"] if many else tables:
            grid.add_row(sink, table, *shown)
    return grid


def lines(change_plan: "Plan") -> "Iterator[str]":
    """Format a plan for people, one line for each change, refusal or note."""
    for refusal in change_plan.refused:
        yield f"refused   {refusal.what}"
        yield f"          {refusal.hint}"
    for verb in ("migrate", "register", "run"):
        for change in getattr(change_plan, verb):
            yield f"{verb:<9} {change}"
    for view in change_plan.kept:
        yield f"note      {view} is no longer in the file: nobody updates it"
    for name in change_plan.idle:
        yield f"note      nobody reads the slot of pipeline {name}, and Postgres keeps its log for it. If that was this"
        yield f"          one's name: delete its connector, then SELECT pg_drop_replication_slot('{name}')"
    for table, why in change_plan.left_out.items():
        yield f"left out  {table}: {why}"
    if change_plan.empty:
        yield "nothing to do"


def _make_plan(context: "Context") -> "Plan":
    from cdc import migrations
    from cdc.capture.configuration import configuration
    from cdc.connectors.client import Connect
    from cdc.control import registrations
    from cdc.control.change_plan import CurrentState, Refusal, RequestedState
    from cdc.control.change_plan import plan as compare
    from cdc.documents.needs import examine_room
    from cdc.documents.source_checks import examine_views
    from cdc.documents.state import StateTooLarge
    from cdc.errors import CdcError, SinkError, SourceError
    from cdc.kafka.log_refusals import shape_errors
    from cdc.kafka.topic_setup import topic_settings, topic_specs
    from cdc.kafka.topics import Topics
    from cdc.postgres import catalog, source, table_survey
    from cdc.sink.factory import build_state

    pipeline = context.pipeline
    sinks = context.sinks(None)
    troubles = list[CdcError]()

    @contextmanager
    def noting(kind: type[CdcError]) -> "Iterator[None]":
        try:
            yield
        except kind as error:
            troubles.append(error)

    with (
        source.connect_to_read(pipeline.source) as conn,
        Topics(pipeline.kafka) as kafka,
        Connect(pipeline.connect) as connect,
    ):
        survey = table_survey.survey(conn, pipeline)
        views = examine_views(conn, pipeline, survey)
        troubles += [*survey.refused.values(), *views.refused.values()]
        if pipeline.views:
            # A server that can't be asked leaves open whether the state of documents has room.
            with suppress(SinkError), noting(StateTooLarge):
                examine_room(pipeline, build_state(pipeline), kafka, survey.tables, views.refused)
        tables = (*survey.tables, *views.tables)
        present_config = connect.config(pipeline.pipeline)
        registration = registrations.read(kafka, pipeline)
        for refuse in (registrations.refuse_another, registrations.refuse_promoted):
            with noting(CdcError):
                refuse(registration, source.server(conn), pipeline)
        existing = kafka.existing(table.topic for table in tables)
        present = [table for table in tables if table.topic in existing]
        overrides = kafka.overrides([table.topic for table in present])
        requirements = replace(
            table_survey.requirements(pipeline),
            tables=[(table.schema, table.name) for table in survey.tables],
        )
        unprepared = list[str]()
        with noting(SourceError):
            for statement in migrations.plan(conn, requirements):
                unprepared += statement.lines
        views_now, adapted = _views(sinks, pipeline, kafka, tables, existing)
        current = CurrentState(
            unprepared,
            registration,
            present_config,
            {table.qualified: overrides[table.topic] for table in present},
            views_now,
            [view for sink in sinks for view in _kept(sink, tables)],
            _idle(conn, pipeline.pipeline),
            adapted,
        )
        with noting(SourceError):
            catalog.refuse_published(conn, pipeline)
        unpublished = table_survey.unreplicated_columns(conn, pipeline)
        captured = registrations.captured_tables(pipeline, unpublished)
        config = configuration(
            pipeline,
            tables=survey.tables,
            server_version=conn.info.server_version,
            cluster_id=kafka.cluster_id(),
            unpublished=unpublished,
        )
        specs = topic_specs(pipeline)
        shapes = [
            Refusal.of(error)
            for topic, end in kafka.ends(sorted(existing)).items()
            for error in shape_errors(topic, specs[topic], end.partition_count, "compact")
        ]
        settings = topic_settings(pipeline, [table.topic for table in tables])
        requested = RequestedState(
            {table.qualified: captured[table.qualified] for table in survey.tables},
            config,
            {table.qualified: settings[table.topic] for table in tables},
            [*map(Refusal.of, troubles), *shapes],
            catalog.find_tables(conn, pipeline).left_out,
            _listed(pipeline, tables),
        )
        return compare(current, requested)


def _idle(conn: "Connection", name: str) -> list[str]:
    """Find the other pipelines of this database whose slots nobody reads: Postgres keeps its log
    for them.
    """
    if conn.execute("SELECT to_regclass('cdc.heartbeat')").fetchone() == (None,):
        return []
    return [pipeline for (pipeline,) in conn.execute(IDLE, [name])]


def _kept(sink: "Sink", tables: "Sequence[Table]") -> "Iterator[str]":
    """Find the views that a sink has and the file doesn't give it any more."""
    from cdc.errors import CdcError
    from cdc.sink.contract import SchemaMismatch

    # A sink that can't be asked is one refusal, whatever its tables are.
    with suppress(CdcError):
        for table in tables:
            if table.is_in(sink.name):
                continue
            try:
                is_there = sink.position(table) is not None
            except SchemaMismatch:
                is_there = True
            if is_there:
                yield f"{table.qualified} in {sink.name}"


def _listed(pipeline: "Pipeline", tables: "Sequence[Table]") -> "list[PlannedView]":
    """What the sinks that have a list have of each table."""
    from cdc.control.change_plan import PlannedView

    views = []
    for sink, settings in pipeline.sinks.items():
        for table in [] if settings.tables is None else tables:
            if table.is_in(sink):
                projection = table.projections.get(sink) or Projection()
                columns = _columns(table.for_sink(sink), projection)
                rows = projection.where or "all"
                views.append(PlannedView(sink, table.qualified, columns, rows))
    return views


def _columns(table: "Table", projection: Projection) -> str:
    """Name the columns of a sink's table: id, amount as total; or all but note, amount as total."""
    names = {
        column.source_name: f"{column.renamed_from} as {column.name}"
        if column.renamed_from
        else column.name
        for column in table.columns
    }
    if projection.columns is not None:
        return ", ".join(names.values())
    kept = f"all but {', '.join(projection.exclude)}" if projection.exclude else "all"
    return ", ".join([kept, *(names.get(name, name) for name in projection.rename)])


def _views(
    sinks: "Sequence[Sink]",
    pipeline: "Pipeline",
    kafka: "Topics",
    tables: "Sequence[Table]",
    existing: "set[str]",
) -> "tuple[dict[str, dict[str, Refusal | bool]], list[str]]":
    """Inspect every view, by sink and table: a refusal, or whether the view exists. Also list what a run
    would change of views that exist.
    """
    from cdc.control.change_plan import Refusal
    from cdc.errors import CdcError
    from cdc.kafka.log_continuity import Continuity
    from cdc.model.column_names import refusal_error
    from cdc.postgres.table_survey import tables_in
    from cdc.sink.contract import FitChecker, positions, require_same_shape

    continuity = Continuity(pipeline, kafka).read(sorted(existing))
    views: dict[str, dict[str, Any]] = {}
    adapted: list[str] = []
    for sink in sinks:
        own = tables_in([sink.name], tables)
        try:
            stored_positions = positions(sink, own)
        except CdcError as error:
            views[sink.name] = {"": Refusal.of(error)}
            continue
        view = views[sink.name] = {}
        for table in own:
            stored = stored_positions[table.qualified]
            view[table.qualified] = stored is not None
            if unheld := refusal_error(table, sink.refusals, sink.name):
                view[table.qualified] = Refusal.of(unheld)
                continue
            try:
                if table.topic in existing:
                    continuity.refuse(sink.name, table, stored)
                require_same_shape(table, sink.name, stored)
                changes = sink.rehearse(table) if isinstance(sink, FitChecker) else []
            except CdcError as error:
                view[table.qualified] = Refusal.of(error)
                continue
            if changes:
                adapted.append(
                    f"change {table.qualified} in {sink.name}, in place: {', '.join(changes)}"
                )
    return views, adapted
