"""Observe something again and again in a thread of its own, and keep the last observation.

In:  a function that observes, once a call: a look. It may take as long as it likes, and fail.
Out: the last `Sample` and the last failure, for any thread, at once.
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Generic, TypeVar

import structlog

from cdc.errors import CdcError
from cdc.model.trace import kind, trace

T = TypeVar("T")
PAUSE_S = 1.0
"""The least seconds between two looks while somebody watches. A look that takes longer is followed
by as long a pause. A server that hangs costs a look 4 s, so that within 10 s everybody who shows a
trouble shows the same.
"""
IDLE_PAUSE_S = 4.0
"""The same while nobody watches."""
LATE_S = 20.0
"""Seconds without an end of a look after which what was seen is called old."""
SILENT_S = 30.0
"""Seconds without an end of a look after which the thread counts as hung."""
log = structlog.get_logger()


@dataclass(frozen=True)
class Sample(Generic[T]):
    """What a look has seen, when it ended (Unix seconds), and how long it took."""

    value: T
    taken_at: float
    took_s: float


@dataclass(frozen=True)
class Failure:
    """Why looks have failed, since the first of them in a row (Unix seconds)."""

    message: str
    hint: str
    since: float


class Sampler(Generic[T]):
    """A thread that looks until `close`. Its properties may be read by any thread."""

    def __init__(
        self,
        name: str,
        observe: Callable[[], T],
        take: Callable[[Sample[T]], object] = lambda _: None,
    ) -> None:
        """`observe` is called for each look. `take` gets each sample before anybody else sees it. Both
        are called in this sampler's thread.
        """
        self.name = name
        self._observe = observe
        self._take = take
        self._watchers = 0
        self._wakes = threading.Event()
        self.sample: Sample[T] | None = None
        self.failure: Failure | None = None
        self.number = 0
        """How many looks have ended, whichever way."""
        self._ended_at = time.monotonic()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._work, name=f"look-{name}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Look no more. A look that is under way ends by itself, with the program at the latest."""
        self._closed.set()
        self._wakes.set()

    def join(self, timeout_s: float) -> None:
        """Wait for the look that is under way after `close`: a program that ends while a client's
        native code is at work may crash.
        """
        if self._thread.is_alive():
            self._thread.join(max(0.0, timeout_s))

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Look often, beginning now. Entered and left by one thread, the event loop's."""
        self._watchers += 1
        self._wakes.set()
        try:
            yield
        finally:
            self._watchers -= 1

    @property
    def silent_s(self) -> float:
        """Seconds since a look ended."""
        return time.monotonic() - self._ended_at

    @property
    def trouble(self) -> Failure | None:
        """Why what was last seen can't be trusted to be current; None while it can."""
        if self.failure or self.silent_s < LATE_S:
            return self.failure
        message = f"The look at {self.name} hasn't ended for {self.silent_s:.0f} s."
        return Failure(message, "restart this program", time.time() - self.silent_s)

    def _work(self) -> None:
        while not self._closed.is_set():
            began = time.monotonic()
            try:
                sample = Sample(self._observe(), time.time(), time.monotonic() - began)
                self._take(sample)
                self.sample = sample
                self.failure = None
            except Exception as error:
                self.failure = self._failure(error)
            self._ended_at = time.monotonic()
            self.number += 1
            self._pause(self._ended_at - began)

    def _pause(self, took_s: float) -> None:
        """Wait until the next look; a watcher who comes meanwhile shortens it."""
        pause_s = max(PAUSE_S, took_s)
        self._closed.wait(pause_s)
        if not self._watchers:
            self._wakes.clear()
            if not self._watchers:
                self._wakes.wait(max(0.0, IDLE_PAUSE_S - pause_s))

    def _failure(self, error: Exception) -> Failure:
        """Describe an error; without a class of its own only its kind is shown, its trace is
        logged once.
        """
        since = self.failure.since if self.failure else time.time()
        if isinstance(error, CdcError):
            return Failure(error.message, error.hint, since)
        if self.failure is None:
            log.error("look_failed", part=self.name, error=kind(error), exception=trace(error))
        message = f"The look at {self.name} has failed: {kind(error)}."
        return Failure(message, "look for look_failed in the log of this program", since)
