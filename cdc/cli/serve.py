"""Verb `cdc serve`: a page and a JSON API about a pipeline."""

import os
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cdc.cli.console import call, say
from cdc.cli.health import check_health

if TYPE_CHECKING:
    from cdc.observe.activity import LookConnections
    from cdc.runtime.context import Context
    from cdc.serve.dashboard import Dashboard


def serve(
    context: typer.Context,
    port: Annotated[int, typer.Option(help="The port.", min=0, max=65535)] = 8350,
    address: Annotated[
        str, typer.Option(help="The address to listen on. Any but a loopback one needs a token.")
    ] = "127.0.0.1",
    name: Annotated[
        list[str] | None,
        typer.Option(help="A name by which browsers reach this server. Repeatable."),
    ] = None,
    token_file: Annotated[
        Path | None,
        typer.Option(help="A file with the token. Default: the variable CDC_SERVE_TOKEN."),
    ] = None,
) -> None:
    """Show the pipeline on a page, until stopped.

    The page has what status shows, live, and the lag of the last day. It needs no `cdc run`, and
    shows servers that are away as such.
    """
    from cdc.observe.activity import LookConnections
    from cdc.serve.access import read_access
    from cdc.serve.app import make_app
    from cdc.serve.server import PageServer

    access = read_access(address, name or [], token_file, os.environ)
    with closing(LookConnections()) as connections:
        dashboard = _dashboard(context.obj, connections)
        app = make_app(dashboard, access.token, access.hosts)
        server = PageServer(app, dashboard, access.address, port)
        say(f"serving {server.url}{'' if access.token is None else ', with the token'}")
        server.run()


def _dashboard(context: "Context", connections: "LookConnections") -> "Dashboard":
    from cdc.config import settings
    from cdc.serve.dashboard import Collectors, ControlReader, Dashboard

    reader = ControlReader(lambda: replace(context).load())
    return Dashboard(
        settings.name_of(context.path),
        # A context of its own for each look: tables come and go.
        Collectors(lambda: check_health(replace(context), connections), reader.read),
        call.complete_commands,
    )
