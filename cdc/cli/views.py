"""Verbs of `cdc views`: the views of several tables that the file declares."""

from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Group, RenderableType
from rich.text import Text
from rich.tree import Tree

from cdc.cli.console import Json, answer
from cdc.cli.screen import Grid, age
from cdc.config.view_settings import TIME_KINDS
from cdc.errors import SettingsError
from cdc.postgres import table_survey

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from cdc.documents.state import LateChange

app = typer.Typer(help="Show the views of several tables.", rich_markup_mode=None)
ViewName = Annotated[str, typer.Argument(help="A view of the pipeline file.")]


@app.command("list")
def list_views(context: typer.Context, as_json: Json = False) -> None:
    """List the views, once they are checked against Postgres.

    Shows the tables that each is made of, its topic, and the sinks that hold it; and which ones
    wait, since they don't fit their tables.
    """
    refused = context.obj.resolution.refused
    rows: list[dict[str, Any]] = [
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
    grid = Grid("view", "made of", "in")
    for row in rows:
        sinks = ", ".join(row["sinks"]) or "its topic only"
        for number, table_name in enumerate(row["tables"]):
            grid.add_row(*((row["view"], table_name, sinks) if number == 0 else ("", table_name)))
    waiting = [Text(f"{row['view']} waits: {row['waits']}") for row in rows if row["waits"]]
    screen = Group(grid, *waiting) if rows else Text("the pipeline file has no views")
    answer(as_json, {"views": rows}, screen)


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
    from cdc.documents.plan import StatePlan, outline, state_outline

    table_survey.table_named(context.obj.views, f"view.{name}")
    plan = StatePlan(context.obj.resolution.views)
    (view,) = [view for view in plan.views if view.name == name]
    names = [node.table.qualified for node in view.root.walk()]
    described = {
        **outline(view, context.obj.pipeline.views[name]),
        "state": state_outline(plan, names),
    }
    answer(as_json, described, draw_view(described))


@app.command()
def late(context: typer.Context, name: ViewName, as_json: Json = False) -> None:
    """List the latest changes of rows that came after the windows of a view had closed, 1,000 at most.

    Shows the row's key, what the rows of its windows have in common with the beginning of their latest
    part, and when the change came. `cdc status` counts all of them.
    """
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
    document = {"changes": [change._asdict() for change in changes]}
    answer(
        as_json, document, draw_late(changes) if changes else f"no change of {name} came too late"
    )


@app.command()
def plan(context: typer.Context, as_json: Json = False) -> None:
    """Show what the next `cdc run` makes again, where the file differs from what the state was made
    for.
    """
    from cdc.documents.needs import all_needs, rebuilds, topic_ids
    from cdc.documents.plan import StatePlan
    from cdc.kafka.topics import Topics
    from cdc.sink.factory import build_state

    pipeline = context.obj.pipeline
    rows: dict[str, dict[str, Any]] = {"tables": {}, "views": {}, "waiting": {}}
    if pipeline.views:
        resolution = context.obj.resolution
        rows["waiting"] = {name: error.message for name, error in resolution.refused.items()}
        state = build_state(pipeline)
        state.plan = StatePlan(resolution.views)
        with Topics(pipeline.kafka) as kafka:
            ends = kafka.ends(list(kafka.existing(table.topic for table in state.plan.tables)))
            ids = topic_ids(pipeline, state.plan, kafka)
        empty = {topic for topic, end in ends.items() if not any(end.offsets)}
        rows["tables"], rows["views"] = rebuilds(state, all_needs(state.plan, ids), empty)
    grid = Grid("", "", "by the next cdc run")
    for name, is_remade in rows["views"].items():
        grid.add_row("view", name, "all documents are made again" if is_remade else "goes on")
    for name, is_remade in rows["tables"].items():
        grid.add_row("table", name, "read again from its topic" if is_remade else "goes on")
    waiting = [Text(f"view {name} waits: {reason}") for name, reason in rows["waiting"].items()]
    screen = Group(grid, *waiting) if pipeline.views else Text("the pipeline file has no views")
    answer(as_json, rows, screen)


def draw_view(described: "Mapping[str, Any]") -> RenderableType:
    """Draw a view as a tree of its tables, and what the state keeps of their rows."""
    tree = Tree(Text(_place(described["view"], described)))
    _add_places(tree, described)
    state = Grid("table in the state", "columns", "indexed by")
    for table in described["state"]:
        indexes = "; ".join(", ".join(index) for index in table["indexes"])
        state.add_row(table["table"], ", ".join(table["columns"]), indexes or "its key only")
    return Group(tree, Text(), state)


def _add_places(tree: Tree, described: "Mapping[str, Any]") -> None:
    for name, place in described.get("include", {}).items():
        _add_places(tree.add(Text(_place(name, place))), place)


def _place(name: str, place: "Mapping[str, Any]") -> str:
    """Say what a member is made of, on one line."""
    parts = [f"{name}: {'list of ' if place.get('many') else ''}{place['table']}"]
    pairs = place.get("on", {}).items()
    parts += [f"on {' and '.join(f'{left} = {right}' for left, right in pairs)}"] if pairs else []
    parts += _times(place)
    parts += [f"where {place['where']}"] if "where" in place else []
    parts += _pattern(place["pattern"]) if "pattern" in place else []
    order = place.get("order_by", [])
    columns = [order] if isinstance(order, str) else order
    parts += [f"by {', '.join(columns)}"] if columns else []
    parts += [f"{place['limit']:,} at most"] if "limit" in place else []
    shown = [place["flatten"]] if "flatten" in place else place.get("columns", [])
    parts += [f"({', '.join(shown)})"] if shown else []
    window = place.get("window", {}).items()
    parts += [f"{'by' if name == 'time' else name} {text}" for name, text in window]
    groups = place.get("group_by", {}).items()
    named = (name if name == text else f"{name} = {text}" for name, text in groups)
    parts += [f"grouped by {' and '.join(named)}"] if groups else []
    numbers = {**place.get("aggregates", {}), **place.get("select", {})}
    parts += [f"{member} = {call_.strip()}" for member, call_ in numbers.items()]
    parts += [f"having {place['having']}"] if "having" in place else []
    parts += [f"now() is the latest {place['clock']}"] if "clock" in place else []
    parts += ["each change sent once"] if "alerts" in place else []
    return ", ".join(parts)


def _pattern(pattern: "Mapping[str, Any]") -> list[str]:
    """Say which rows complete a pattern."""
    between = "rows" if pattern.get("rows") == "any" else "rows in succession"
    parts = [f"{between} of the same {', '.join(pattern['by'])} by {pattern['order_by']}"]
    for name, step in pattern["steps"].items():
        times = f", {step['times']} times" if "times" in step else ""
        parts.append(f"{name}: {step['where']}{times}")
    parts.append(f"within {pattern['within']}")
    parts += [f"unless {pattern['unless']}"] if "unless" in pattern else []
    return parts


def _times(place: "Mapping[str, Any]") -> list[str]:
    """Say which of the joined rows a join in time chooses."""
    parts = []
    for kind in TIME_KINDS:
        for left, right in place.get(kind, {}).items():
            parts.append(f"{kind} {left}: {right}")
    parts += [f"{name} {place[name]}" for name in ("within", "before", "after") if name in place]
    return parts


def draw_late(changes: "Sequence[LateChange]") -> RenderableType:
    """Draw changes that came after windows had closed."""
    grid = Grid("row", "of", "came")
    for change in changes:
        grid.add_row(Text(change.id), Text(change.pane), age(change.at))
    return grid
