"""Wires one look at every hop: `cdc status` shows it, `cdc run` and `cdc serve` repeat it."""

import time
from functools import partial
from typing import TYPE_CHECKING

from cdc.config.view_settings import STATE
from cdc.runtime.context import Context

if TYPE_CHECKING:
    from cdc.observe.status import Status


def check_health(context: Context) -> "Status":
    """Collect and diagnose the state of every hop."""
    from cdc.observe.collection import Positions, collect
    from cdc.observe.diagnosis import diagnose
    from cdc.sink.contract import positions
    from cdc.sink.factory import documents_reader, sizes_reader

    started, pipeline = time.monotonic(), context.pipeline_to_show
    sinks = context.sinks(None)
    readers: Positions = {sink.name: partial(positions, sink) for sink in sinks}
    if pipeline.views:
        readers = {**readers, STATE: documents_reader(pipeline)}
    try:
        collected = collect(
            pipeline,
            positions=readers,
            sizes=sizes_reader(pipeline) if pipeline.views else None,
            started=started,
        )
    finally:
        for sink in sinks:
            sink.close()
    return diagnose(collected)
