"""Wait until views hold everything that was committed before now, while nothing else writes."""

import time
from collections.abc import Callable, Sequence

from cdc import source
from cdc.change import Position, Table
from cdc.control import Control
from cdc.errors import ConnectorError
from cdc.heartbeat import last_beat
from cdc.settings import Pipeline
from cdc.sink import Sink
from cdc.topics import Topics

POLL_S = 0.25


def settle(
    pipeline: Pipeline,
    tables: Sequence[Table],
    sinks: Sequence[Sink],
    *,
    timeout_s: float,
    still: Callable[[], object] = lambda: None,
) -> float:
    """Wait for the views; the seconds it took. `still` is called again and again and may raise to end the waiting.

    The connector sends changes in commit order, so a heartbeat made after this call proves that all before it is in
    the topics; what the topics end at then is what the views must reach.

    Raises:
        ConnectorError: not within timeout_s; names the hop that is behind.
    """
    began = time.monotonic()
    with Topics(pipeline.kafka) as kafka:
        _until(_beaten(pipeline, kafka), began + timeout_s, still)
        ends = kafka.ends([table.topic for table in tables])
        control = Control(pipeline, kafka)
        control.read()

    waiting = [(sink, table) for sink in sinks for table in tables]

    def behind() -> list[str]:
        # Views that have been seen there aren't asked again: with many tables asking is what takes the time.
        found = [(view, _late(*view, ends[view[1].topic], control)) for view in waiting]
        waiting[:] = [view for view, late in found if late]
        return [late for _, late in found if late]

    _until(behind, began + timeout_s, still)
    return time.monotonic() - began


def _late(sink: Sink, table: Table, end: Position, control: Control) -> str | None:
    stored = sink.position(table)
    if stored and stored.floor < control.floors.get(table.qualified, 0):
        return f"{table.qualified} in {sink.name} holds rows from before a TRUNCATE"
    if left := stored.position.lag(end) if stored else sum(end.offsets):
        return f"{table.qualified} in {sink.name} is {left} offsets behind"
    return None


def _beaten(pipeline: Pipeline, kafka: Topics) -> Callable[[], list[str]]:
    """Whether a heartbeat has arrived that was made after now: by the clock of Postgres, as its own time is."""
    with source.connect(pipeline.source.dsn) as connection:
        (now_ms,) = connection.execute("SELECT extract(epoch FROM clock_timestamp()) * 1000").fetchone() or (0,)

    def missing() -> list[str]:
        beat = last_beat(kafka, pipeline)
        if beat and beat.committed_ms > now_ms:
            return []
        return [f"no new heartbeat in {pipeline.heartbeat_topic}: is the connector running?"]

    return missing


def _until(problems: Callable[[], list[str]], deadline: float, still: Callable[[], object]) -> None:
    while found := problems():
        still()
        if time.monotonic() > deadline:
            raise ConnectorError(
                f"Waited in vain: {found[0]}.", hint="cdc status names the slow hop", more=len(found) - 1
            )
        time.sleep(POLL_S)
