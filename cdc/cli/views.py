"""Verbs of `cdc views`: the views of several tables that the file declares."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from cdc.cli.console import Json, out, print_json
from cdc.errors import SettingsError
from cdc.postgres import table_survey

if TYPE_CHECKING:
    from cdc.runtime.context import Context

app = typer.Typer(help="Show the views of several tables.", rich_markup_mode=None)
ViewName = Annotated[str, typer.Argument(help="A view of the pipeline file.")]


@app.command("list")
def list_views(context: typer.Context, as_json: Json = False) -> None:
    """List the views, once they are checked against Postgres.

    Shows the tables that each is made of, its topic, and the sinks that hold it; and which ones
    wait, since they don't fit their tables.
    """
    from cdc.cli.screens.views import draw_views

    refused = context.obj.resolution.refused
    rows = [
        {
            "view": table.name,
            "tables": [name for name, _ in table.derivation.tables],
            "topic": table.topic,
            "sinks": list(table.derivation.sinks),
            "waits": refused[table.name].message if table.name in refused else None,
        }
        for table in table_survey.views_by_name_only(context.obj.pipeline)
        if table.derivation
    ]
    if as_json:
        return print_json({"views": rows})
    out.print(draw_views(rows) if rows else "the pipeline file has no views")
    return None


@app.command()
def sql(context: typer.Context, name: ViewName) -> None:
    """Print the query that gives the view's documents in Postgres, which `cdc verify` compares
    with.
    """
    view = table_survey.table_named(context.obj.views, f"view.{name}")
    assert view.derivation is not None
    # Not through `out`, which wraps at the width of the terminal.
    if view.derivation.clock is not None:
        typer.echo(
            "-- The time of the view's clock. cdc verify takes the one that the documents are as of."
        )
        typer.echo(f"SELECT set_config('{view.derivation.clock}', now()::text, false);\n")
    typer.echo(f"{view.derivation.query};")


@app.command()
def show(context: typer.Context, name: ViewName, as_json: Json = False) -> None:
    """Show how a view is made: its tables as a tree, and what the state keeps of their rows."""
    from cdc.cli.screens.views import draw_view
    from cdc.views.outline import outline, state_outline
    from cdc.views.plan import StatePlan

    table_survey.table_named(context.obj.views, f"view.{name}")
    plan = StatePlan(context.obj.resolution.views)
    (view,) = [view for view in plan.views if view.name == name]
    names = [node.table.qualified for node in view.root.walk()]
    described = {**outline(view), "state": state_outline(plan, names)}
    if as_json:
        return print_json(described)
    out.print(draw_view(described))
    return None


@app.command()
def late(context: typer.Context, name: ViewName, as_json: Json = False) -> None:
    """List the latest changes of rows that came after the windows of a view had closed, 1,000 at most.

    Shows the row's key, what the rows of its windows have in common with the beginning of their latest
    part, and when the change came. `cdc status` counts all of them.
    """
    from cdc.cli.screens.views import draw_late
    from cdc.config.view_settings import closes
    from cdc.sink.factory import state_reader

    pipeline = context.obj.pipeline_to_show
    table_survey.table_named(table_survey.views_by_name_only(pipeline), f"view.{name}")
    if not closes(pipeline.views[name]):
        raise SettingsError(
            f"The windows of {name} are corrected for ever: no change comes too late.",
            hint="for example: window: {tumbling: 1 hour, time: placed, lateness: 1 hour}",
        )
    changes = state_reader(pipeline, lambda state: state.late(name))()
    if as_json:
        return print_json({"changes": [change._asdict() for change in changes]})
    out.print(draw_late(changes) if changes else f"no change of {name} came too late")
    return None


@app.command()
def plan(context: typer.Context, as_json: Json = False) -> None:
    """Show what the next `cdc run` makes again, where the file differs from what the state was made
    for.
    """
    from cdc.cli.screens.views import draw_views_plan

    pipeline = context.obj.pipeline
    rows: dict[str, dict[str, Any]] = {"tables": {}, "views": {}, "waiting": {}}
    if pipeline.views:
        refused = context.obj.resolution.refused
        rows["waiting"] = {name: error.message for name, error in refused.items()}
        rows["tables"], rows["views"] = _rebuilds(context.obj)
    if as_json:
        return print_json(rows)
    out.print(draw_views_plan(rows) if pipeline.views else "the pipeline file has no views")
    return None


def _rebuilds(context: "Context") -> tuple[dict[str, bool], dict[str, bool]]:
    """Say which tables' topics the next run reads again, and which views it makes again."""
    from cdc.kafka.topics import Topics
    from cdc.sink.factory import build_state
    from cdc.views.needs import all_needs, rebuilds, topic_ids
    from cdc.views.plan import StatePlan

    pipeline, state = context.pipeline, build_state(context.pipeline)
    state.plan = StatePlan(context.resolution.views)
    sources = [table.topic for table in state.plan.tables]
    with Topics(pipeline.kafka) as kafka:
        ends = kafka.ends(list(kafka.existing(sources)))
        ids = topic_ids(pipeline, state.plan, kafka)
    empty = {topic for topic, end in ends.items() if not any(end.offsets)}
    return rebuilds(state, all_needs(state.plan, ids), empty)
