"""Measure a stream's lag and rate from offsets that it has seen. No server is asked."""

from collections import deque
from dataclasses import replace
from typing import Any

from cdc.apply.plan import Ends, ResumePlan
from cdc.apply.progress import Progress
from cdc.apply.stream_options import Clock
from cdc.model.outcome import Applied

STALE_S = 30.0
"""How long a lag of 0 stays valid after the last look at the topics' ends."""
WINDOW_S = 5.0
"""The window of the rate; it covers the last batch at least."""
RESOLUTION = 0.05
"""How exactly it is known how long something has waited, as a share of the longest wait: a catch-up
of a day keeps 200 ends, each with an offset for every partition of every table.
"""


class Lag:
    """The lag of one stream; used by the thread that owns it."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._ends: Ends = {}
        self._looked_at = 0.0
        self._unreached: deque[tuple[float, Ends]] = deque()
        """What was seen of the ends and isn't applied, and when, the oldest first: a stream under a
        steady load never has all, though each change is soon applied.
        """
        self._rows: deque[tuple[float, int]] = deque()

    def begin(self, ends: Ends) -> None:
        """Begin from a plan that has just been loaded; the topics end at `ends`. The longest wait so far
        still counts. Earlier ends don't, because a topic may have been recreated.
        """
        self._ends = ends
        self._looked_at = self._clock.time()
        since = self._unreached[0][0] if self._unreached else self._looked_at
        self._unreached = deque([(since, ends)])

    def see(self, ends: Ends, seen_at: float) -> None:
        """See that the topics ended there at `seen_at`, in Unix seconds."""
        self._note(ends, seen_at)
        self._ends = ends
        self._looked_at = seen_at

    def _note(self, ends: Ends, seen_at: float) -> None:
        """Note that the topics end there. Ends that are seen soon after others take their place,
        and count as seen with them: a wait is never told too short.
        """
        if self._unreached:
            (first_at, _), (last_at, last_ends) = self._unreached[0], self._unreached[-1]
            if ends == last_ends:
                return
            # Never those that have waited longest: they would never be reached under a steady load.
            if first_at < last_at and seen_at - last_at < RESOLUTION * (last_at - first_at):
                self._unreached.pop()
                seen_at = last_at
        self._unreached.append((seen_at, ends))

    def progress(self, last: Progress, plan: ResumePlan, applied: Applied, **news: Any) -> Progress:
        """The next snapshot. `lag_records` is 0 only if the views had reached the ends seen
        last; `lag_seconds` goes by when the oldest end was seen that they haven't reached.
        """
        now = self._clock.time()
        remaining = self._remaining(plan, now)
        while self._unreached and not plan.behind(self._unreached[0][1]):
            self._unreached.popleft()
        waiting_s = now - self._unreached[0][0] if self._unreached else 0.0
        measured = {
            "lag_records": remaining,
            "lag_seconds": None if remaining is None else waiting_s,
            "rows_per_s": self._rate(now, applied.rows),
            "applied": replace(applied),
            "aside": dict(plan.blocked),
            "published_at": now,
        }
        return replace(last, **{**measured, **news})

    def _remaining(self, plan: ResumePlan, now: float) -> int | None:
        """Offsets to the ends seen last. There may be more by now, so that 0 is valid for a while
        only.
        """
        offsets = plan.behind(self._ends)
        return offsets if offsets or now - self._looked_at < STALE_S else None

    def _rate(self, now: float, rows: int) -> float:
        self._rows.append((now, rows))
        while len(self._rows) > 2 and self._rows[1][0] < now - WINDOW_S:
            self._rows.popleft()
        (start, first_count), (end, last_count) = self._rows[0], self._rows[-1]
        return (last_count - first_count) / (end - start) if end > start else 0.0
