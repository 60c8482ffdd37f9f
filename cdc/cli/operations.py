"""Verb `cdc operations`, and what has the other verbs write to the operation log."""

from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any

import typer

from cdc.cli.console import Json, answer
from cdc.cli.screen import Grid
from cdc.model.wording import clock, duration

UNRECORDED = ("context", "as_json", "master")
"""Parameters of verbs that say nothing of what is changed."""


def operations(context: typer.Context, as_json: Json = False) -> None:
    """List who ran which changing command, when, with what result."""
    from cdc.control.operations import read
    from cdc.kafka.topics import Topics

    pipeline = context.obj.load()
    with Topics(pipeline.kafka) as kafka:
        entries = read(pipeline, kafka)
    grid = Grid("when", "who", "command", ">took", "result")
    for entry in entries:
        words = [f"{name}={value}" for name, value in entry.arguments.items()]
        grid.add_row(
            clock(entry.at),
            entry.by,
            " ".join([entry.verb, *words]),
            duration(entry.took_s),
            entry.result,
        )
    answer(as_json, {"operations": entries}, grid if entries else "nothing is recorded")


def recorded(
    name: str, changes: Callable[[Mapping[str, Any]], bool] = lambda _: True
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Have a verb write its outcome to the operation log. `changes` says of its arguments whether it
    changes anything.
    """

    def decorate(verb: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(verb)
        def run(**arguments: Any) -> Any:
            if not changes(arguments):
                return verb(**arguments)
            from cdc.control.operations import current_operator, recording

            options = {
                key: value
                for key, value in arguments.items()
                if key not in UNRECORDED and value not in (None, False)
            }
            with recording(arguments["context"].obj.load(), name, options, current_operator()):
                return verb(**arguments)

        run.is_recorded = True  # type: ignore[attr-defined]
        return run

    return decorate
