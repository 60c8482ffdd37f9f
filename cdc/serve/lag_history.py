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
class HopLags:
    """The lag of every hop at a moment, in Unix seconds."""

    at: float
    lags: Lags


@dataclass(frozen=True)
class Span:
    """A stretch of time that is plotted, in slots of `slot_s` seconds: the worst of each."""

    name: str
    length_s: float
    slot_s: float


HOUR = Span("hour", 3600, 20)
DAY = Span("day", 86_400, 240)
SPANS: Mapping[str, Span] = {span.name: span for span in (HOUR, DAY)}


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


def sample_of(status: Status, at: float) -> HopLags:
    """Take the lag of each hop from a status."""
    beat = status.heartbeat
    captured = None if beat is None else beat.age_s if beat.late else beat.delay_s
    by_sink = {f"Kafka -> {sink.name}": sink.lag_seconds for sink in status.sinks}
    return HopLags(at, {CAPTURE: captured, **by_sink})


class LagHistory:
    """The samples of the last day, the worst lag of each slot. Any thread may call it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._slots: dict[str, dict[int, dict[str, float | None]]] = {name: {} for name in SPANS}

    def add(self, sample: HopLags) -> None:
        """Add a sample, and drop those that are too old to be plotted."""
        with self._lock:
            for name, span in SPANS.items():
                slots = self._slots[name]
                number = int(sample.at // span.slot_s)
                slot = slots.setdefault(number, {})
                for hop, lag in sample.lags.items():
                    slot[hop] = _worse(slot.get(hop), lag)
                oldest = number - _count(span)
                for old_number in [key for key in slots if key <= oldest]:
                    del slots[old_number]

    def series(self, span: Span, now: float) -> list[Series]:
        """Return the series of all hops that were ever measured within a span."""
        last = int(now // span.slot_s)
        numbers = range(last - _count(span) + 1, last + 1)
        with self._lock:
            slots = {number: dict(self._slots[span.name].get(number, {})) for number in numbers}
        hops = {hop: None for slot in slots.values() for hop in slot}
        until = (last + 1) * span.slot_s
        return [
            Series(hop, span, until, [slots[number].get(hop) for number in numbers]) for hop in hops
        ]


def _count(span: Span) -> int:
    return int(span.length_s / span.slot_s)


def _worse(first: float | None, second: float | None) -> float | None:
    measured = [value for value in (first, second) if value is not None]
    return max(measured, default=None)
