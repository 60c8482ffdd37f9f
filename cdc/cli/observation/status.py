"""Verb `cdc status`: what is wrong, and the state of each hop, once or again and again."""

import time
from typing import TYPE_CHECKING, Annotated

import typer

from cdc.cli.console import Json, out, print_json
from cdc.cli.observation.health import check_health, checking_health
from cdc.errors import SettingsError

if TYPE_CHECKING:
    from cdc.runtime.context import Context

POLL_S = 0.1
"""Seconds between two questions whether a look has ended."""


def add_to(app: typer.Typer) -> None:
    """Add the verb to the command line."""
    app.command()(status)


def status(
    context: typer.Context,
    watch: Annotated[
        bool, typer.Option("--watch", help="Look again every few seconds, until Ctrl-C.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Show what is wrong, and the state of each hop.

    Each finding comes with the command to run next. Answers within five seconds, even when a server
    hangs. Exit 0 when all is well, otherwise the exit code of the worst finding's class; with
    --watch 0.
    """
    from cdc.model.finding import exit_code
    from cdc.observe.diagnosis import document, slow_hop

    if watch and as_json:
        raise SettingsError(
            "--json prints one document, and --watch looks until it is ended.",
            hint="cdc -p FILE serve: /api/status is the document of the last look",
        )
    if watch:
        return _watch(context.obj)
    health = check_health(context.obj)
    if as_json:
        print_json(document(health))
    else:
        from cdc.cli.screens.status import draw_status

        out.print(draw_status(health, slow_hop(health)))
    raise typer.Exit(exit_code(health.findings))


def _watch(context: "Context") -> None:
    """Show each look until Ctrl-C. One that fails is told, and the last one stays."""
    from cdc.cli.screens.watch import draw_look, show_looks

    context.load()
    number = 0
    try:
        with checking_health(context, lambda _: None) as looks, show_looks(out) as show:
            while True:
                if looks.number != number:
                    number = looks.number
                    show(draw_look(looks.sample, looks.trouble))
                time.sleep(POLL_S)
    except KeyboardInterrupt:
        return
