"""Verb `cdc destroy`: remove a pipeline from every server."""

from typing import TYPE_CHECKING, Annotated

import typer

from cdc.cli.console import Json, out, print_json, print_lines, require_consent, say

if TYPE_CHECKING:
    from cdc.removal.destroy import Removal
    from cdc.runtime.context import Context

DryRun = Annotated[
    bool, typer.Option("--dry-run", help="List what would be removed; change nothing.")
]
Yes = Annotated[bool, typer.Option("--yes", help="Don't ask.")]


def destroy(
    context: typer.Context, dry_run: DryRun = False, yes: Yes = False, as_json: Json = False
) -> None:
    """Remove the pipeline from every server, with all of its views.

    Connector, slot, publication, topics, views of all generations, state of documents. The source's
    tables and other pipelines stay. Asks for the pipeline's name first. Run it again when it was
    interrupted.
    """
    removal = prepare(context.obj)
    parts = removal.find()
    if not as_json and not (yes and parts):
        listed = [f"{place}: {line}" for place, lines in parts.items() for line in lines]
        print_lines(listed or ["nothing is there"])
    name = removal.pipeline.pipeline
    removed = list[str]()
    if parts and not dry_run:
        require_consent("All of this will be removed for good", name, yes=yes)
        say(f"removing {name}")

        def report(line: str) -> None:
            removed.append(line)
            if not as_json:
                out.print(line)

        removal.run(report)
    if as_json:
        print_json({"pipeline": name, "parts": parts, "done": removed})


def prepare(context: "Context") -> "Removal":
    """Find out what belongs to the pipeline of a file."""
    from cdc.removal import destroy as removals
    from cdc.sink import factory

    pipeline = context.pipeline_to_show
    sinks = context.sinks(None)
    if pipeline.views:
        sinks = [*sinks, factory.build_state(pipeline)]
    return removals.prepare(pipeline, sinks)
