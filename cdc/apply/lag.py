"""How far behind a stream is and how fast it goes, from what it has seen; asks nobody."""

import time
from collections import deque
from dataclasses import replace
from typing import Any

from cdc.apply.plan import Ends, ResumePlan
from cdc.apply.progress import Progress
from cdc.model.outcome import Applied

STALE_S = 30.0
"""How long it holds that nothing was left: an idle query reports every ten seconds that it has looked."""
WINDOW_S = 5.0
"""Over how long a rate is measured, and at least over the last batch."""


class Lag:
    """Of one stream; used by the thread that owns it."""

    def __init__(self) -> None:
        self._ends: Ends = {}
        self._planned: Ends = {}
        self._looked_at = 0.0
        self._caught_up_at = time.time()
        self._rows: deque[tuple[float, int]] = deque()

    def begin(self, ends: Ends) -> None:
        """A plan has been loaded: topics end there now."""
        self._ends, self._planned, self._looked_at = ends, {}, time.time()

    def take(self, ends: Ends, looked_at: float) -> None:
        """Somebody saw the topics end there at that time, in Unix seconds."""
        if looked_at > self._looked_at:
            self._ends, self._looked_at = ends, looked_at

    def plan(self, ends: Ends) -> None:
        """A batch is at hand that ends there."""
        self._planned = ends

    def progress(self, last: Progress, plan: ResumePlan, applied: Applied, **news: Any) -> Progress:
        """The next snapshot; lag_records is 0 only when nothing was left at the last look."""
        now = time.time()
        remaining = self._remaining(plan, now)
        if remaining == 0:
            self._caught_up_at = now
        measured = {
            "lag_records": remaining,
            "lag_seconds": None if remaining is None else now - self._caught_up_at,
            "rows_per_s": self._rate(now, applied.rows),
            "applied": replace(applied),
            "aside": dict(plan.blocked),
            "published_at": now,
        }
        return replace(last, **{**measured, **news})

    def _remaining(self, plan: ResumePlan, now: float) -> int | None:
        """Offsets to what was seen last: there may be more by now, so that nothing left holds for a while only."""
        offsets = max(plan.behind(self._ends), plan.behind(self._planned))
        return offsets if offsets or now - self._looked_at < STALE_S else None

    def _rate(self, now: float, rows: int) -> float:
        self._rows.append((now, rows))
        while len(self._rows) > 2 and self._rows[1][0] < now - WINDOW_S:
            self._rows.popleft()
        (first, before), (last, after) = self._rows[0], self._rows[-1]
        return (after - before) / (last - first) if last > first else 0.0
