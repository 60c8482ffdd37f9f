"""Verb `cdc plan`: compare the servers with the pipeline file and print what it would change.
Writes nothing.
"""

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import typer

from cdc.cli.console import Json, answer, call

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence

    from cdc.config.settings import Pipeline
    from cdc.control.change_plan import CurrentState, Plan, Refusal, RequestedState
    from cdc.errors import CdcError
    from cdc.kafka.topics import Topics
    from cdc.model.table import Table
    from cdc.postgres.source import Connection
    from cdc.runtime.context import Context
    from cdc.sink.contract import Sink

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
    answer(as_json, change_plan, call.complete_commands("\n".join(lines(change_plan))))


def lines(change_plan: "Plan") -> "Iterator[str]":
    """Format a plan for people, one line for each change, refusal or note."""
    for refusal in change_plan.refused:
        yield f"refused   {refusal.what}"
        yield f"          {refusal.hint}"
    for verb in ("migrate", "register", "run"):
        for change in getattr(change_plan, verb):
            yield f"{verb:<9} {change}"
    for name in change_plan.idle:
        yield f"note      nobody reads the slot of pipeline {name}, and Postgres keeps its log for it. If that was this"
        yield f"          one's name: delete its connector, then SELECT pg_drop_replication_slot('{name}')"
    for table, why in change_plan.left_out.items():
        yield f"left out  {table}: {why}"
    if change_plan.empty:
        yield "nothing to do"


def _make_plan(context: "Context") -> "Plan":
    from cdc.connectors.client import Connect
    from cdc.control.change_plan import plan as compare
    from cdc.kafka.topics import Topics
    from cdc.postgres import source, table_survey
    from cdc.views.source_checks import examine_views

    pipeline = context.pipeline
    with (
        source.connect(pipeline.source.dsn) as conn,
        Topics(pipeline.kafka) as kafka,
        Connect(pipeline.connect) as connect,
    ):
        survey = table_survey.survey(conn, pipeline, context.refusals)
        views = examine_views(conn, pipeline, survey)
        troubles: list[CdcError] = [*survey.refused.values(), *views.refused.values()]
        tables = (*survey.tables, *views.tables)
        troubles += _room_troubles(pipeline, kafka, survey.tables, views.refused)
        state_before = _state_before(
            context, conn, kafka, connect.config(pipeline.pipeline), tables, troubles
        )
        return compare(state_before, _state_after(pipeline, conn, kafka, tables, troubles))


def _room_troubles(
    pipeline: "Pipeline",
    kafka: "Topics",
    captured: "Sequence[Table]",
    refused: "Collection[str]",
) -> "Iterator[CdcError]":
    """Find out whether the state of documents has room for what the next run reads. A server that
    can't be asked leaves that open.
    """
    from cdc.errors import SinkError
    from cdc.sink.factory import build_state
    from cdc.views.needs import examine_room
    from cdc.views.state import StateTooLarge

    if pipeline.views:
        try:
            examine_room(pipeline, build_state(pipeline), kafka, captured, refused)
        except StateTooLarge as error:
            yield error
        except SinkError:
            return


def _captured(tables: "Sequence[Table]") -> "list[Table]":
    """Select the captured tables among these, which may be views of several as well."""
    return [table for table in tables if table.derivation is None]


def _state_before(
    context: "Context",
    conn: "Connection",
    kafka: "Topics",
    config: "Mapping[str, str] | None",
    tables: "Sequence[Table]",
    troubles: "list[CdcError]",
) -> "CurrentState":
    from cdc.control import registrations
    from cdc.control.change_plan import CurrentState
    from cdc.errors import CdcError
    from cdc.postgres import source

    pipeline = context.pipeline
    registration = registrations.read(kafka, pipeline)
    for refuse in (registrations.refuse_another, registrations.refuse_promoted):
        try:
            refuse(registration, source.server(conn), pipeline)
        except CdcError as error:
            troubles.append(error)
    existing = kafka.existing(table.topic for table in tables)
    present = [table for table in tables if table.topic in existing]
    settings = kafka.overrides([table.topic for table in present])
    return CurrentState(
        _unprepared(context, conn, _captured(tables), troubles),
        registration,
        config,
        {table.qualified: settings[table.topic] for table in present},
        _views(context.sinks(None), pipeline, kafka, tables, existing),
        _idle(conn, pipeline.pipeline),
    )


def _state_after(
    pipeline: "Pipeline",
    conn: "Connection",
    kafka: "Topics",
    tables: "Sequence[Table]",
    troubles: "list[CdcError]",
) -> "RequestedState":
    from cdc.capture.configuration import configuration
    from cdc.control import registrations
    from cdc.control.change_plan import Refusal, RequestedState
    from cdc.errors import SourceError
    from cdc.kafka.topic_specs import topic_settings
    from cdc.postgres import catalog, table_survey

    try:
        catalog.refuse_published(conn, pipeline)
    except SourceError as error:
        troubles.append(error)
    unpublished = table_survey.unreplicated_columns(conn, pipeline)
    captured = registrations.captured_tables(pipeline, unpublished)
    config = configuration(
        pipeline,
        tables=_captured(tables),
        server_version=conn.info.server_version,
        cluster_id=kafka.cluster_id(),
        unpublished=unpublished,
    )
    settings = topic_settings(pipeline, [table.topic for table in tables])
    return RequestedState(
        {table.qualified: captured[table.qualified] for table in _captured(tables)},
        config,
        {table.qualified: settings[table.topic] for table in tables},
        [*map(Refusal.of, troubles), *_shapes(pipeline, kafka, tables)],
        catalog.find_tables(conn, pipeline).left_out,
    )


def _unprepared(
    context: "Context", conn: "Connection", tables: "Sequence[Table]", troubles: "list[CdcError]"
) -> list[str]:
    from cdc import migrations
    from cdc.errors import SourceError
    from cdc.postgres import table_survey

    requirements = replace(
        table_survey.requirements(context.pipeline),
        tables=[(table.schema, table.name) for table in tables],
    )
    try:
        return [
            line for statement in migrations.plan(conn, requirements) for line in statement.lines
        ]
    except SourceError as error:
        troubles.append(error)
        return []


def _idle(conn: "Connection", name: str) -> list[str]:
    """Find the other pipelines of this database whose slots nobody reads: Postgres keeps its log
    for them.
    """
    if conn.execute("SELECT to_regclass('cdc.heartbeat')").fetchone() == (None,):
        return []
    return [pipeline for (pipeline,) in conn.execute(IDLE, [name])]


def _shapes(
    pipeline: "Pipeline", kafka: "Topics", tables: "Sequence[Table]"
) -> "Iterator[Refusal]":
    """Find topics whose number of partitions differs from the file: a refusal for each."""
    from cdc.control.change_plan import Refusal
    from cdc.kafka.log_refusals import shape_errors
    from cdc.kafka.topic_specs import topic_specs

    partitions = topic_specs(pipeline)
    existing = kafka.existing(table.topic for table in tables)
    for topic, end in kafka.ends(sorted(existing)).items():
        for error in shape_errors(topic, partitions[topic], end.partition_count, "compact"):
            yield Refusal.of(error)


def _views(
    sinks: "Sequence[Sink]",
    pipeline: "Pipeline",
    kafka: "Topics",
    tables: "Sequence[Table]",
    existing: "set[str]",
) -> "dict[str, dict[str, Refusal | bool]]":
    """Inspect every view, by sink and table: a refusal, or whether the view exists."""
    from cdc.control.change_plan import Refusal
    from cdc.errors import CdcError
    from cdc.kafka.log_continuity import Continuity
    from cdc.kafka.log_refusals import Discontinued
    from cdc.sink.contract import FitChecker, SchemaMismatch, positions

    continuity = Continuity(pipeline, kafka).read(sorted(existing))
    views: dict[str, dict[str, Any]] = {}
    for sink in sinks:
        own = [table for table in tables if table.is_in(sink.name)]
        try:
            stored_positions = positions(sink, own)
        except CdcError as error:
            views[sink.name] = {"": Refusal.of(error)}
            continue
        view = views[sink.name] = {}
        for table in own:
            stored = stored_positions[table.qualified]
            view[table.qualified] = stored is not None
            try:
                if table.topic in existing:
                    continuity.refuse(sink.name, table, stored)
                if isinstance(sink, FitChecker):
                    sink.require_fit(table)
            except (Discontinued, SchemaMismatch) as error:
                view[table.qualified] = Refusal.of(error)
    return views
