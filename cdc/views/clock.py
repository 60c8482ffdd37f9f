"""The clocks of documents: up to when every commit is in the state.

    commit      the commit time of the connector's newest heartbeat, which comes also while no table
                changes
    a column    the latest time that any row had there, but never later than `commit`

Both count in two phases: take the times, and then the ends of the tables' topics. Once the state has
got to these ends, it has whatever was committed before. So neither an idle table nor a partition that
is read more slowly makes a clock wrong.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from cdc.config.settings import Pipeline
from cdc.control.heartbeat import last_heartbeat
from cdc.kafka.topics import Topics
from cdc.model.position import Position, distance
from cdc.views.plan import View
from cdc.views.scalar.instants import FIRST

TAKE_S = 1.0
"""Seconds between two looks at the heartbeat."""


class _Taken(NamedTuple):
    """Times that count once the state has got to some ends.

    committed  of the heartbeat
    seen       of columns, by view
    """

    committed: int
    seen: Mapping[str, int]
    ends: Mapping[str, Position]


class ViewClocks:
    """The clocks of views; used by the thread that owns the stream of their state.

    see     reads the latest times that rows had, as `State.times_seen` does
    """

    def __init__(
        self,
        kafka: Topics,
        pipeline: Pipeline,
        see: Callable[[], Mapping[str, int]],
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._kafka = kafka
        self._pipeline = pipeline
        self._see = see
        self._monotonic = monotonic
        self._taken: _Taken | None = None
        self._taken_at = float("-inf")
        self._current: _Taken | None = None

    def read(
        self,
        views: Sequence[View],
        topics: Sequence[str],
        positions: Mapping[str, Position | None],
    ) -> Mapping[str, int] | None:
        """Return the times of views in microseconds since 1970, by name; None while none counts yet.
        While no row had a time, it is the first one of the year 1.

        `positions`: how far the state has got with the tables' topics.

        Raises:
            ConnectorError: from the broker. Failure: from the state.
        """
        if self._taken is None and self._monotonic() - self._taken_at >= TAKE_S:
            # The times first: what was committed before the heartbeat is in front of the ends, and so
            # are the rows that had these times.
            beat = last_heartbeat(self._kafka, self._pipeline)
            if beat is not None:
                seen = self._see() if any(view.clock for view in views) else {}
                self._taken = _Taken(beat.committed_ms * 1000, seen, self._kafka.ends(topics))
            self._taken_at = self._monotonic()
        # Also of what was taken just now: while nobody writes, the state has all of it already.
        if self._taken is not None:
            ends = self._taken.ends.items()
            if all(distance(positions.get(topic), end).reached for topic, end in ends):
                self._current = self._taken
                self._taken = None
        if self._current is None:
            return None
        committed, seen, _ = self._current
        return {
            view.name: committed
            if view.clock is None
            else min(seen.get(view.name, FIRST), committed)
            for view in views
        }
