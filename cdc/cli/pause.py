"""Verbs `cdc pause`, `cdc resume`: have `cdc run` apply nothing to a sink for a while."""

from typing import Annotated

import typer

from cdc.cli.console import Json, out, print_json
from cdc.cli.operations import recorded
from cdc.model.wording import clock

SinkName = Annotated[str, typer.Argument(help="A sink of the pipeline file.")]


def add_to(app: typer.Typer) -> None:
    """Add the verbs to the command line."""
    for verb in (pause, resume):
        app.command()(recorded(verb.__name__)(verb))


def pause(context: typer.Context, sink: SinkName, as_json: Json = False) -> None:
    """Apply nothing to a sink until `resume`; other sinks go on.

    It takes effect within seconds, after the batch at hand, and holds for every host and through
    restarts.
    """
    from cdc.control.operations import current_operator
    from cdc.generations import pause as pauses
    from cdc.kafka.topics import Topics

    pipeline = context.obj.pipeline
    with Topics(pipeline.kafka) as kafka:
        current = pauses.pause(pipeline, kafka, sink, current_operator())
    if as_json:
        return print_json({"sink": sink, "paused_since": current.since, "paused_by": current.by})
    out.print(
        f"{sink} is paused since {clock(current.since)} by {current.by}",
        highlight=False,
        markup=False,
    )
    return None


def resume(context: typer.Context, sink: SinkName, as_json: Json = False) -> None:
    """Let a paused sink go on from where it stopped."""
    from cdc.generations import pause as pauses
    from cdc.kafka.topics import Topics

    pipeline = context.obj.pipeline
    with Topics(pipeline.kafka) as kafka:
        previous = pauses.resume(pipeline, kafka, sink)
    if as_json:
        return print_json({"sink": sink, "resumed": previous is not None})
    outcome = "goes on from where it stopped" if previous else "wasn't paused"
    out.print(f"{sink} {outcome}", highlight=False, markup=False)
    return None
