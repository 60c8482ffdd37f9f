"""Verbs of `cdc views`: the views of several tables that the file declares."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from cdc.cli.console import Json, Master, out, print_json, say
from cdc.errors import DivergenceError, SettingsError, UndecidedError
from cdc.postgres import table_survey
from cdc.runtime.servers import spark_on

if TYPE_CHECKING:
    from cdc.runtime.context import Context

app = typer.Typer(help="Show and check the views of several tables.", rich_markup_mode=None)
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
    from cdc.sink.factory import late_reader

    pipeline = context.obj.pipeline_to_show
    table_survey.table_named(table_survey.views_by_name_only(pipeline), f"view.{name}")
    if not closes(pipeline.views[name]):
        raise SettingsError(
            f"The windows of {name} are corrected for ever: no change comes too late.",
            hint="for example: window: {tumbling: 1 hour, time: placed, lateness: 1 hour}",
        )
    changes = late_reader(pipeline, name)()
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


@app.command()
def audit(context: typer.Context, master: Master = "local[*]", as_json: Json = False) -> None:
    """Compare the views' topics with documents that joins over the tables' topics make.

    Checks what `cdc run` keeps change by change, as of when it was last done with a view's changes;
    nothing has to stand still. Reads no row of Postgres or of a sink. Exit 8 when a view differs.
    """
    from cdc.audit.documents.comparison import compare_documents
    from cdc.audit.documents.vectors import read_vectors
    from cdc.cli.screens.verify import draw_comparisons
    from cdc.kafka.topics import Topics
    from cdc.sink.factory import open_documents
    from cdc.views.plan import StatePlan

    pipeline = context.obj.pipeline
    views = context.obj.resolution.views if pipeline.views else ()
    # Their documents have rows that no equal value leads to, depend on a clock, or are of groups.
    timed = [
        view.name
        for view in views
        if view.has_clock or view.grouping or any(node.is_timed for node in view.root.walk())
    ]
    plan = StatePlan(tuple(view for view in views if view.name not in timed))
    if timed:
        say(
            f"not compared here, since they are of groups or depend on time: {', '.join(timed)}; cdc verify does"
        )
    if not plan.views:
        raise UndecidedError("There is no view to compare.", hint="cdc -p FILE verify")
    if remade := [name for name, is_remade in _rebuilds(context.obj)[1].items() if is_remade]:
        raise UndecidedError(
            f"The documents of {remade[0]} are to be made again.",
            hint="cdc -p FILE run: it makes them",
        )
    with Topics(pipeline.kafka) as kafka, spark_on(master, [], context.obj.executors([])) as spark:
        current = open_documents(pipeline)()
        vectors = read_vectors(kafka, pipeline, plan, current, context.obj.placeholder)
        results = [
            result for vector in vectors for result in compare_documents(spark, pipeline, vector)
        ]
    if as_json:
        equal = all(result.equal for result in results)
        print_json({"equal": equal, "views": [result.to_dict() for result in results]})
    else:
        out.print(draw_comparisons(results))
    if different := [result for result in results if not result.equal]:
        table = different[0].table
        raise DivergenceError(
            f"{len(different)} of {len(results)} views aren't what their tables' topics make.",
            hint="a bug in the pipeline. To make all documents again end `cdc run`, empty the state's"
            " database, and start it again; until then"
            f" cdc -p FILE verify --table {table} says what readers see",
        )
