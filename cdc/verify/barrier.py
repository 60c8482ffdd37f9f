"""Wait until views hold everything that was committed before a moment, while others go on writing."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from cdc.config.settings import Pipeline
from cdc.control.control_topics import Truncations
from cdc.control.floors import Floors
from cdc.control.heartbeat import last_beat
from cdc.errors import ConnectorError, SinkUnavailable
from cdc.kafka.log_continuity import refuse_other
from cdc.kafka.topics import Topics
from cdc.model.position import Position, Reach, distance
from cdc.model.table import Table
from cdc.model.wording import full_stopped
from cdc.postgres import source
from cdc.sink.contract import Sink, positions

POLL_S = 0.25
SILENT_S = 4.0
"""How long is waited without a word: then, and that often from then on, it is told what for."""
AWAY_S = 10.0
"""How long a sink may be away while it is waited for: a server that starts, or a shard just made, is there by then."""


@dataclass(frozen=True)
class Fence:
    """By topic, the end that a view must have reached; what it must have been made after."""

    ends: Mapping[str, Position]
    floors: Floors

    def problem(self, sink: Sink, table: Table) -> str | None:
        """What a view lacks that this fence asks for; None when it has got past it.

        Raises:
            Discontinued: it never will.
        """
        return self.problems(sink, [table]).get(table)

    def problems(self, sink: Sink, tables: Sequence[Table]) -> dict[Table, str]:
        """`problem` of each view that has one, asked for in as few requests as the sink can do with."""
        stored, lacking = positions(sink, tables), {}
        for table in tables:
            there = distance(stored[table.qualified], self.ends[table.topic], self.floors.number(table.qualified))
            refuse_other(sink.name, table, there)
            if not there.reached:
                what = f"is {there.offsets} offsets behind" if there.reach is Reach.BEHIND else there.reach
                lacking[table] = f"{table.qualified} in {sink.name} {what}"
        return lacking


def settle(
    pipeline: Pipeline,
    tables: Sequence[Table],
    sinks: Sequence[Sink],
    *,
    timeout_s: float,
    still: Callable[[], object] = lambda: None,
    tell: Callable[[str], object] = lambda _: None,
) -> float:
    """Wait for the views to hold what is committed by now; the seconds it took. `still`, `tell`: see `pass_fence`.

    Raises:
        ConnectorError: not within timeout_s; names the hop that is behind.
    """
    began = time.monotonic()
    with source.connect(pipeline.source.dsn) as connection:
        (now_ms,) = connection.execute("SELECT extract(epoch FROM clock_timestamp())::float8 * 1000").fetchone() or (0,)
    with Topics(pipeline.kafka) as kafka:
        fence = raise_fence(pipeline, kafka, tables, now_ms, timeout_s=timeout_s, still=still, tell=tell)
    pass_fence(fence, tables, sinks, timeout_s=began + timeout_s - time.monotonic(), still=still, tell=tell)
    return time.monotonic() - began


def raise_fence(
    pipeline: Pipeline,
    kafka: Topics,
    tables: Sequence[Table],
    now_ms: float,
    *,
    timeout_s: float,
    still: Callable[[], object] = lambda: None,
    tell: Callable[[str], object] = lambda _: None,
) -> Fence:
    """The fence behind all that was committed before now_ms, by the clock of Postgres. Raises ConnectorError.

    The connector sends changes in commit order, so a heartbeat made after that moment proves that all before it is in
    the topics. Their ends are those of what is written, decided or not: the heartbeat's transaction may hold changes
    as well, and reaches the topics one by one.
    """

    def missing() -> list[str]:
        beat = last_beat(kafka, pipeline)
        if beat and beat.committed_ms > now_ms:
            return []
        return [f"no new heartbeat in {pipeline.heartbeat_topic}: is the connector running?"]

    _until(missing, timeout_s, still, tell)
    ends = kafka.ends([table.topic for table in tables], decided=False)
    truncations = Truncations(pipeline, kafka)
    truncations.read()
    return Fence(ends, truncations.floors)


def pass_fence(
    fence: Fence,
    tables: Sequence[Table],
    sinks: Sequence[Sink],
    *,
    timeout_s: float,
    still: Callable[[], object] = lambda: None,
    tell: Callable[[str], object] = lambda _: None,
) -> None:
    """Wait for views to get past a fence.

    `still` is called again and again and may raise to end the waiting; `tell` gets every few seconds what it waits for.

    Raises:
        ConnectorError: not within timeout_s; names the hop that is behind.
        SinkUnavailable: a sink has been away for 10 s.
    """
    waiting = [(sink, list(tables)) for sink in sinks]
    answered_at = time.monotonic()

    def behind() -> list[str]:
        nonlocal answered_at
        # Views that have been seen there aren't asked again: with many tables asking is what takes the time.
        try:
            problems = [(sink, fence.problems(sink, some)) for sink, some in waiting if some]
        except SinkUnavailable as error:
            if time.monotonic() - answered_at > AWAY_S:
                raise
            return [error.message]
        answered_at = time.monotonic()
        waiting[:] = [(sink, list(late)) for sink, late in problems]
        return [problem for _, late in problems for problem in late.values()]

    _until(behind, timeout_s, still, tell)


def _until(
    problems: Callable[[], list[str]], timeout_s: float, still: Callable[[], object], tell: Callable[[str], object]
) -> None:
    told_at = began = time.monotonic()
    while waiting := problems():
        still()
        now = time.monotonic()
        more = f" (and {len(waiting) - 1} more)" if len(waiting) > 1 else ""
        if now > began + timeout_s:
            message = full_stopped(f"Waited in vain: {waiting[0]}{more}")
            raise ConnectorError(message, hint="cdc -p FILE status names the slow hop", more=len(waiting) - 1)
        if now >= told_at + SILENT_S:
            told_at = now
            tell(f"waiting, {now - began:.0f} s of {timeout_s:.0f} s at most: {waiting[0]}{more}")
        time.sleep(POLL_S)
