"""Everything that the pages show, as it was last seen. A request asks no server."""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from cdc.observe.sampler import SILENT_S, Sample, Sampler
from cdc.observe.status import Status
from cdc.serve.looks.control_state import ControlState
from cdc.serve.looks.lag_history import LagHistory, LagSample, sample_of

END_S = 8.0
"""Seconds that looks have to end: longer than one takes while a server hangs."""


@dataclass(frozen=True)
class Collectors:
    """The functions that look at the servers; each is called in a thread of its own, repeatedly."""

    status: Callable[[], Status]
    """Collects and diagnoses the state of every hop."""
    control: Callable[[], ControlState]
    """Reads quarantine and generations."""


class Dashboard:
    """The last samples, and the lag of the last day. Any thread may read it."""

    def __init__(
        self,
        pipeline: str,
        collectors: Collectors,
        complete: Callable[[str], str] = lambda text: text,
    ) -> None:
        """`complete` completes the commands in a text, so that they can be pasted."""
        self.pipeline = pipeline
        self.complete = complete
        self.history = LagHistory()
        self.status: Sampler[Status] = Sampler("the servers", collectors.status, self._note)
        self.control: Sampler[ControlState] = Sampler(
            "the control topics", collectors.control, self._note_stored
        )
        self.closing = threading.Event()
        """Set when the server ends: streams of events end then."""

    def start(self) -> None:
        """Begin to look."""
        self.status.start()
        self.control.start()

    def close(self) -> None:
        """Look no more."""
        self.closing.set()
        self.status.close()
        self.control.close()
        deadline = time.monotonic() + END_S
        for sampler in (self.status, self.control):
            sampler.join(deadline - time.monotonic())

    @property
    def number(self) -> int:
        """A number that is greater whenever there is something new to show."""
        return self.status.number + self.control.number

    def live(self) -> tuple[bool, str]:
        """Say whether rounds of questions to the servers still end: /livez."""
        silent_s = self.status.silent_s
        return silent_s < SILENT_S, f"last look ended {silent_s:.0f} s ago"

    def ready(self) -> tuple[bool, str]:
        """Say whether there is something to show: /readyz. Servers that are away are shown, too."""
        is_ready = self.status.sample is not None
        return is_ready, "there is a first look" if is_ready else "the first look is under way"

    def _note(self, sample: Sample[Status]) -> None:
        self.history.add(sample_of(sample.value, sample.taken_at))

    def _note_stored(self, sample: Sample[ControlState]) -> None:
        """Take over what runs measured before this page began."""
        for sink, lags in sample.value.lags.items():
            for stored in lags:
                self.history.add(LagSample(stored.at, {f"Kafka -> {sink}": stored.lag_seconds}))
