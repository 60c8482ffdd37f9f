"""Verbs of `cdc views`: the views of several tables that the file declares."""

from typing import Annotated

import typer

from cdc.cli.console import Json, out, print_json
from cdc.postgres import table_survey

app = typer.Typer(help="Show the views of several tables.", rich_markup_mode=None)
ViewName = Annotated[str, typer.Argument(help="A view of the pipeline file.")]


@app.command("list")
def list_views(context: typer.Context, as_json: Json = False) -> None:
    """List the views, once they are checked against Postgres.

    Shows the tables that each is made of, its topic, and the sinks that hold it.
    """
    from cdc.cli.screens.listings import draw_views

    rows = [
        {
            "view": table.name,
            "tables": [name for name, _ in table.derivation.tables],
            "topic": table.topic,
            "sinks": list(table.derivation.sinks),
        }
        for table in context.obj.views
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
    typer.echo(f"{view.derivation.query};")
