"""Wires what others see of a run: its port, and what it posts."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from typing import TYPE_CHECKING

from cdc.cli.console import call, say
from cdc.cli.observation.health import checking_health
from cdc.runtime.context import Context

if TYPE_CHECKING:
    from cdc.apply.progress import Progress
    from cdc.observe.http_server import Listener
    from cdc.observe.status import Status

    Publish = Callable[[Sequence[Progress]], None]


@contextmanager
def observed(
    context: Context, listener: "Listener | None", spark_lives: Callable[[], bool]
) -> Iterator["Publish"]:
    """Look at the pipeline while the block runs, where it is served or `notify` has an address: a
    function that takes the progress of the run for that server.
    """
    pipeline = context.load()
    if listener is None and not pipeline.notify:
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
        if listener is None:
            yield lambda _: None
            return
        from cdc.observe.run_endpoint import RunEndpoint

        endpoint = stack.enter_context(closing(RunEndpoint(listener, looks, spark_lives)))
        say(f"serving {endpoint.url}/metrics, /livez and /readyz")
        yield endpoint.publish
