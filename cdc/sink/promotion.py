"""What all sinks need to hold a second generation and to show it to readers: room, a wait until it is
no longer behind, and an answer to which one is live.
"""

import time
from collections.abc import Callable, Mapping, Sequence

from cdc.errors import Fenced, SinkRejected, SinkUnavailable
from cdc.model.position import ViewCheckpoint, distance
from cdc.model.table import Table
from cdc.sink.contract import Sink, positions

SWITCH_S = 30.0
"""Seconds that `promote` waits for a generation to catch up."""
POLL_S = 0.02
"""Seconds between two looks at the positions while `promote` waits."""
NAMED = 5
"""Tables that are named of those behind; the others are counted."""
FREE_SPACE_FACTOR = 1.2
"""Free space that a second generation needs, as a multiple of what the first takes."""


def are_live(
    checkpoints: Mapping[str, ViewCheckpoint | None], generation_names: Mapping[str, str]
) -> bool:
    """Whether the live views, of these checkpoints, are the generations of these names; both by table name.

    The view of a table without records has no checkpoint in any generation, so it counts as either.
    Where no view has one the answer is no: a promotion of such views may be repeated.
    """
    live_names = {name: stored.generation for name, stored in checkpoints.items() if stored}
    return bool(live_names) and all(
        generation == generation_names[name] for name, generation in live_names.items()
    )


def is_caught_up(live: Sink, standby: Sink, tables: Sequence[Table]) -> bool:
    """Whether no view of the standby is behind the one that readers see."""
    live_checkpoints = positions(live, tables)
    standby_checkpoints = positions(standby, tables)
    pairs = [
        (stored, standby_checkpoints[name]) for name, stored in live_checkpoints.items() if stored
    ]
    return all(candidate and not would_go_back(candidate, stored) for stored, candidate in pairs)


def would_go_back(candidate: ViewCheckpoint | None, live: ViewCheckpoint) -> bool:
    """Whether readers who are shown the candidate instead of the live view go back in time."""
    gap = distance(candidate, live.position, live.floor)
    return gap.comparable and not gap.reached


def wait_until_caught_up(
    is_caught_up: Callable[[], bool], sink: str, lagging: Sequence[Table] = ()
) -> None:
    """Wait until the condition holds; raises SinkUnavailable when it doesn't within `SWITCH_S`.

    lagging: the tables that were behind at the condition's last check, where it names them.
    """
    deadline = time.monotonic() + SWITCH_S
    while not is_caught_up():
        if time.monotonic() > deadline:
            raise _behind_error(sink, [table.qualified for table in lagging])
        time.sleep(POLL_S)


def _behind_error(sink: str, tables: Sequence[str]) -> SinkUnavailable:
    more = f" and {len(tables) - NAMED} more" if tables[NAMED:] else ""
    views = f" of {', '.join(tables[:NAMED])}{more}" if tables else ""
    hint = "readers see what they saw; is `cdc run` at work? then the same command goes on"
    if tables:
        hint += (
            f"; where its log says standby_dropped: cdc -p FILE rebuild {sink} --table {tables[0]}"
        )
    return SinkUnavailable(
        f"The other generation{views} in {sink} has been behind the one that readers see for {SWITCH_S:.0f} s.",
        hint=hint,
        sink=sink,
    )


def require_free_space(needed: int, free: int, where: str, sink: str) -> None:
    """Raise SinkRejected for a second generation that leaves no reserve. Sizes in bytes."""
    if needed * FREE_SPACE_FACTOR > free:
        needed_mib = needed >> 20
        with_reserve_mib = int(needed * FREE_SPACE_FACTOR) >> 20
        raise SinkRejected(
            f"A second generation of {needed_mib} MiB needs {with_reserve_mib} MiB free in {where}; there are"
            f" {free >> 20} MiB.",
            hint=f"make room, or build one view at a time: cdc -p FILE rebuild {sink} --table TABLE",
            sink=sink,
        )


class GenerationReplaced(Fenced):
    """Another generation is beside the live view: it was promoted, or a newer build has begun."""

    def __init__(self, table: str, generation: str, sink: str) -> None:
        super().__init__(
            f"Generation {generation} of {table} isn't beside the live one in {sink} any more.",
            hint="no action needed: cdc -p FILE generations lists what there is",
            sink=sink,
        )
