"""Wires one look at every hop: `cdc status` shows it, `cdc run` and `cdc serve` repeat it. Verb `cdc serve`: a page
and a JSON API about a pipeline.
"""

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cdc.cli.console import call, say
from cdc.config.view_settings import STATE
from cdc.runtime.context import Context

if TYPE_CHECKING:
    from cdc.apply.progress import Progress
    from cdc.observe.activity import LookConnections
    from cdc.observe.sampler import Sampler
    from cdc.observe.status import Status

    Publish = Callable[[Sequence[Progress]], None]

END_S = 8.0
"""Seconds that a look has to end: longer than one takes while a server hangs."""


def check_health(context: Context, connections: "LookConnections | None" = None) -> "Status":
    """Collect and diagnose the state of every hop. Repeated looks share their `connections`."""
    from cdc.observe.collection import Positions, collect
    from cdc.observe.diagnosis import diagnose
    from cdc.sink.contract import positions
    from cdc.sink.factory import documents_reader, sizes_reader

    started = time.monotonic()
    pipeline = context.pipeline_to_show
    sinks = context.sinks(None)
    readers: Positions = {sink.name: partial(positions, sink) for sink in sinks}
    if pipeline.views:
        readers = {**readers, STATE: documents_reader(pipeline)}
    # The sinks aren't closed: connections belong to the process, and a stream of the same process may
    # be waiting for an answer at this moment.
    collected = collect(
        pipeline,
        positions=readers,
        sizes=sizes_reader(pipeline) if pipeline.views else None,
        connections=connections,
        started=started,
    )
    return diagnose(collected)


@contextmanager
def checking_health(
    context: Context, report: "Callable[[Status], object]"
) -> Iterator["Sampler[Status]"]:
    """Look repeatedly while the block runs, and report each status."""
    from cdc.observe.activity import LookConnections
    from cdc.observe.sampler import Sampler

    connections = LookConnections()
    # A new context for each look: tables come and go.
    looks = Sampler(
        "the servers",
        lambda: check_health(replace(context), connections),
        lambda sample: report(sample.value),
    )
    looks.start()
    try:
        yield looks
    finally:
        looks.close()
        looks.join(END_S)
        connections.close()


@contextmanager
def observed(
    context: Context, port: int | None, address: str, spark_lives: Callable[[], bool]
) -> Iterator["Publish"]:
    """Look at the pipeline while the block runs, where it is served or `notify` has an address: a
    function that takes the progress of the run for that server.
    """
    pipeline = context.load()
    if port is None and not pipeline.notify:
        yield lambda _: None
        return
    from cdc.observe.webhook import Webhook

    with ExitStack() as stack:
        webhooks = [
            stack.enter_context(closing(Webhook(entry, pipeline.pipeline, call.complete_commands)))
            for entry in pipeline.notify
        ]

        def post(status: "Status") -> None:
            for webhook in webhooks:
                webhook.take(status.findings, time.time())

        looks = stack.enter_context(checking_health(context, post))
        if port is None:
            yield lambda _: None
            return
        from cdc.observe.run_endpoint import RunEndpoint

        endpoint = stack.enter_context(closing(RunEndpoint(looks, spark_lives, port, address)))
        say(f"serving {endpoint.url}/metrics, /livez and /readyz")
        yield endpoint.publish


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
    from cdc.config import settings
    from cdc.observe.activity import LookConnections
    from cdc.serve.access import read_access
    from cdc.serve.dashboard import ControlReader, Dashboard
    from cdc.serve.server import PageServer

    access = read_access(address, name or [], token_file, os.environ)
    reader = ControlReader(lambda: replace(context.obj).load())
    with closing(LookConnections()) as connections:
        dashboard = Dashboard(
            settings.name_of(context.obj.path),
            # A new context for each look: tables come and go.
            lambda: check_health(replace(context.obj), connections),
            reader.read,
            call.complete_commands,
        )
        server = PageServer(dashboard, access, port)
        say(f"serving {server.url}{'' if access.token is None else ', with the token'}")
        server.run()
