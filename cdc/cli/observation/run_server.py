"""Wires what others see of a run: its port, and whom it tells of trouble."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from cdc.cli.console import say
from cdc.cli.observation.health import checking_health
from cdc.cli.observation.notification import notifying
from cdc.runtime.context import Context

if TYPE_CHECKING:
    from cdc.apply.progress import Progress
    from cdc.observe.http_server import Listener

    Publish = Callable[[Sequence[Progress]], None]


@contextmanager
def observed(
    context: Context, listener: "Listener | None", spark_lives: Callable[[], bool]
) -> Iterator["Publish"]:
    """Look at the pipeline while the block runs, where it is served or there is somebody to tell: a function
    that takes the progress of the run for that server.
    """
    with notifying(context) as tell:
        if listener is None and tell is None:
            yield lambda _: None
            return
        with checking_health(context, tell or (lambda _: None)) as looks:
            if listener is None:
                yield lambda _: None
                return
            from cdc.observe.run_endpoint import RunEndpoint

            endpoint = RunEndpoint(listener, looks, spark_lives)
            say(f"serving {endpoint.url}/metrics, /livez and /readyz")
            try:
                yield endpoint.publish
            finally:
                endpoint.close()
