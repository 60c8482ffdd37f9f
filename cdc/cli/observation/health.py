"""Wires one look at every hop: `cdc status` shows it, `cdc run` and `cdc serve` repeat it."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from cdc.config.view_settings import STATE
from cdc.runtime.context import Context

if TYPE_CHECKING:
    from cdc.observe.activity import LookConnections
    from cdc.observe.sampler import Sampler
    from cdc.observe.status import Status

END_S = 8.0
"""Seconds that a look has to end: longer than one takes while a server hangs."""


def check_health(context: Context, connections: "LookConnections | None" = None) -> "Status":
    """Collect and diagnose the state of every hop. `connections`: those of looks that are repeated."""
    from cdc.observe.collection import Positions, collect
    from cdc.observe.diagnosis import diagnose
    from cdc.sink.contract import positions
    from cdc.sink.factory import documents_reader, sizes_reader

    started, pipeline = time.monotonic(), context.pipeline_to_show
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
    context: Context, tell: "Callable[[Status], object]"
) -> Iterator["Sampler[Status]"]:
    """Look again and again while the block runs, and tell each status."""
    from cdc.observe.activity import LookConnections
    from cdc.observe.sampler import Sampler

    connections = LookConnections()
    # A context of its own for each look: tables come and go.
    looks = Sampler(
        "the servers",
        lambda: check_health(replace(context), connections),
        lambda sample: tell(sample.value),
    )
    looks.start()
    try:
        yield looks
    finally:
        looks.close()
        looks.join(END_S)
        connections.close()
