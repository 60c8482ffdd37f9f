"""Pauses: a sink to which `cdc run` applies nothing until a person resumes it.

In:  the registry's topic. Out: entries of it, which survive every restart and hold for every host.
Invariant: a pause and a rebuild or rollback of a sink exclude each other, because each claims it.
"""

import time
from collections.abc import Mapping

from cdc.config.settings import Pipeline
from cdc.config.view_settings import STATE
from cdc.errors import SettingsError, SinkPaused
from cdc.generations.claim import claim
from cdc.generations.registry import Generations, Pause, Registry
from cdc.kafka.topics import Topics
from cdc.model.wording import clock


def pause(pipeline: Pipeline, kafka: Topics, sink: str, by: str) -> Pause:
    """Pause a sink; a paused one stays as it is. Returns the pause, which is durable then.

    `cdc run` goes by it within seconds, after the batch at hand.

    Raises:
        SettingsError: the file has no such sink; a rebuild or rollback is at work on it.
        ConnectorError: from the broker.
    """
    _require_sink(pipeline, sink)
    registry = Registry(pipeline, kafka)
    with claim(registry, sink) as own_claim:
        if current := own_claim.generations.pause:
            return current
        created = Pause(time.time(), by)
        registry.write((("pause", sink), {"since": created.since, "by": created.by}))
    return created


def resume(pipeline: Pipeline, kafka: Topics, sink: str) -> Pause | None:
    """Resume a sink. Returns the pause that ends; None when it wasn't paused.

    Raises:
        SettingsError: the file has no such sink. ConnectorError: from the broker.
    """
    _require_sink(pipeline, sink)
    registry = Registry(pipeline, kafka).read()
    if current := registry.for_sink(sink).pause:
        registry.write((("pause", sink), None))
    return current


def read_pauses(pipeline: Pipeline, kafka: Topics) -> Mapping[str, Pause]:
    """Read which sinks are paused, by name. Raises ConnectorError."""
    registry = Registry(pipeline, kafka).read()
    pauses = {sink: registry.for_sink(sink).pause for sink in pipeline.sinks}
    return {sink: pause for sink, pause in pauses.items() if pause}


def refuse_paused(generations: Generations, sink: str) -> None:
    if generations.pause:
        raise paused_error(generations.pause, sink)


def paused_error(pause: Pause, sink: str) -> SinkPaused:
    """Build the error for what can't be done while a sink is paused."""
    return SinkPaused(
        f"{sink} is paused since {clock(pause.since)} by {pause.by}: nothing is applied to it.",
        hint=f"cdc -p FILE resume {sink}",
        sink=sink,
    )


def _require_sink(pipeline: Pipeline, sink: str) -> None:
    if sink in pipeline.sinks:
        return
    if sink == STATE and pipeline.views:
        raise SettingsError(
            "The state of documents can't be paused: every sink with documents depends on it.",
            hint="pause the sinks themselves: cdc -p FILE pause SINK",
        )
    raise SettingsError(
        f"There is no sink {sink} in the pipeline file.",
        hint=f"one of: {', '.join(pipeline.sinks)}",
    )
