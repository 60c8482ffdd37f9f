"""The lag of each hop over the last hour and day, in memory.

In:  a sample for each look. Out: `Series` for plots.
`LagHistory.add` is the only way in, in any order: samples that runs have stored come after the first
look.
"""

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from cdc.model.finding_codes import CAPTURE
from cdc.observe.status import Status

Lags = Mapping[str, float | None]
"""Seconds of lag by hop; None where it couldn't be measured."""


@dataclass(frozen=True)
class Span:
    """A stretch of time that is plotted, in slots of `slot_s` seconds: the worst of each."""

    name: str
    length_s: int
    slot_s: int

    @property
    def slots(self) -> int:
        """How many slots it has."""
        return self.length_s // self.slot_s


SPANS = {span.name: span for span in (Span("hour", 3600, 20), Span("day", 86_400, 240))}


@dataclass(frozen=True)
class Series:
    """The lag of a hop by slot, the oldest first, up to `until` (Unix seconds); None: unmeasured."""

    hop: str
    span: Span
    until: float
    values: Sequence[float | None]

    @property
    def worst(self) -> float | None:
        """The greatest lag; None when none was measured."""
        return max((value for value in self.values if value is not None), default=None)


def lags_of(status: Status) -> Lags:
    """Take the lag of each hop from a status."""
    beat = status.heartbeat
    captured = None if beat is None else beat.age_s if beat.late else beat.delay_s
    by_sink = {f"Kafka -> {sink.name}": sink.lag_seconds for sink in status.sinks}
    return {CAPTURE: captured, **by_sink}


class LagHistory:
    """The samples of the last day, the worst lag of each slot. Any thread may call it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._slots: dict[str, dict[int, dict[str, float | None]]] = {name: {} for name in SPANS}

    def add(self, at: float, lags: Lags) -> None:
        """Add the lags at a moment, in Unix seconds, and drop those that are too old to be plotted."""
        with self._lock:
            for name, span in SPANS.items():
                slots = self._slots[name]
                number = int(at // span.slot_s)
                slot = slots.setdefault(number, {})
                for hop, lag in lags.items():
                    measured = [value for value in (slot.get(hop), lag) if value is not None]
                    slot[hop] = max(measured, default=None)
                oldest = number - span.slots
                for old_number in [key for key in slots if key <= oldest]:
                    del slots[old_number]

    def series(self, span: Span, now: float) -> list[Series]:
        """Return the series of all hops that were ever measured within a span."""
        last = int(now // span.slot_s)
        numbers = range(last - span.slots + 1, last + 1)
        with self._lock:
            slots = {number: dict(self._slots[span.name].get(number, {})) for number in numbers}
        hops = {hop: None for slot in slots.values() for hop in slot}
        until = (last + 1) * span.slot_s
        return [
            Series(hop, span, until, [slots[number].get(hop) for number in numbers]) for hop in hops
        ]
