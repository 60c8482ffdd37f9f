"""Run the streams of several sinks: start, watch and stop them, and publish their progress.

A stream that fails for good ends alone, and is reported as failed from then on; the others go on.
What follows, such as a start after a pause, is in `cdc.apply.restarts`. Each stream has a thread of
its own, which alone works on it: a sink that never answers doesn't keep other streams from being
reported or stopped.
"""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Protocol

import structlog

from cdc.apply.progress import Progress, RunState
from cdc.apply.restarts import BackOff, Policy, Sequel, end_stream
from cdc.errors import CdcError
from cdc.model.trace import kind, trace
from cdc.sink.remedy import classify

TICK_S = 1.0
STOPPING = b"\nstopping: what is at hand is finished first\n"
log = structlog.get_logger()
Tick = Callable[[list[Progress]], None]


class Feed(Protocol):
    """The stream of one sink, as the supervisor sees it."""

    progress: Progress
    """The newest snapshot; any thread may read it."""

    def run(self, *, until_caught_up: bool = False) -> None:
        """Apply until stopped, in the calling thread. Raises errors that no retry can mend; may be
        called again then.
        """

    def note_restart(self) -> None:
        """Count and publish that `run` is called again after an error; called in its thread."""

    def close(self) -> None:
        """Close what the stream holds, once `run` isn't called any more; called in its thread."""

    def stop(self) -> None:
        """Make `run` end after the batch at hand; any thread may call it, and it returns at
        once.
        """


def supervise(
    feeds: Sequence[Feed],
    stopping: threading.Event,
    *,
    until_caught_up: bool = False,
    is_over: Callable[[], bool] = lambda: False,
    after_error: Policy = end_stream,
    on_tick: Tick = lambda _: None,
) -> list[CdcError]:
    """Run until every stream has ended, `stopping` is set, or the run `is_over`, which is asked every
    second. Batches at hand are finished.

    Returns the errors that have ended streams which haven't started again: first one that ended the
    run, then in the order of the streams.
    """
    watches = [Watch(feed, until_caught_up, after_error) for feed in feeds]
    reporter = _Reporter(on_tick)
    for watch in watches:
        watch.start()
    while any(watch.working for watch in watches):
        if stopping.wait(TICK_S) or is_over() or any(watch.ends_run for watch in watches):
            break
        reporter.publish(watches)
    for watch in watches:
        watch.stop()
    while working := [watch for watch in watches if watch.working]:
        working[0].join(TICK_S)
        reporter.publish(watches)
    watches.sort(key=lambda watch: not watch.ends_run)
    return [watch.failure for watch in watches if watch.failure]


class Watch:
    """One stream at work: the thread that owns it, and the error that ended it."""

    def __init__(self, feed: Feed, until_caught_up: bool, after_error: Policy) -> None:
        self.failure: CdcError | None = None
        self.ends_run = False
        self.feed, self._until_caught_up, self._after_error = feed, until_caught_up, after_error
        self._name = feed.progress.sink
        self._state, self._state_since = feed.progress.state, time.time()
        self._aside_since: dict[str, float] = {}
        self._back_off = BackOff()
        self._restart_at: float | None = None
        self._stopping = threading.Event()
        self._running = threading.Thread(target=self._work, name=self._name, daemon=True)
        self.start, self.join = self._running.start, self._running.join

    def stop(self) -> None:
        self._stopping.set()
        self.feed.stop()

    @property
    def working(self) -> bool:
        return self._running.is_alive()

    def report(self) -> Progress:
        """The published progress, with its age and the times of changes."""
        now = time.time()
        progress = self.feed.progress.aged(now)
        if self.failure:
            error, hint = self.failure.message, self.failure.hint
            progress = replace(
                progress,
                state=RunState.FAILED,
                error=error,
                hint=hint,
                looked_s=0.0,
                restart_at=self._restart_at,
            )
        if progress.state != self._state:
            self._state, self._state_since = progress.state, now
        self._aside_since = {table: self._aside_since.get(table, now) for table in progress.aside}
        return replace(progress, state_since=self._state_since, aside_since=dict(self._aside_since))

    def _work(self) -> None:
        """Run the stream, again after each error from which a start may help."""
        try:
            while self._run() is Sequel.RESTART and self._outwait_pause():
                self._back_off.begin()
                self.feed.note_restart()
                self.failure = None
        finally:
            self._restart_at = None
            self.feed.close()

    def _run(self) -> Sequel:
        """Run the stream to its end; returns what follows."""
        try:
            self.feed.run(until_caught_up=self._until_caught_up)
        except Exception as error:
            return self._note_failure(error)
        return Sequel.NOTHING

    def _note_failure(self, error: Exception) -> Sequel:
        """Log an error and decide what follows it."""
        failure = classify(error, self._name, "the next start")
        sequel = self._after_error(failure)
        pause_s = self._back_off.next_pause_s() if sequel is Sequel.RESTART else None
        cause = error.__cause__ or not isinstance(error, CdcError)
        details = {"exception": trace(error)} if cause else {}
        log.error(
            "sink_failed",
            sink=self._name,
            error=failure.message,
            hint=failure.hint,
            restarts_in_s=pause_s,
            **details,
        )
        self._restart_at = None if pause_s is None else time.time() + pause_s
        self.ends_run = sequel is Sequel.END_OF_RUN
        self.failure = failure
        return sequel

    def _outwait_pause(self) -> bool:
        """Wait until the stream is to start again; False when it is stopped meanwhile."""
        pause_s = max(0.0, (self._restart_at or 0.0) - time.time())
        return not self._stopping.wait(pause_s)


class _Reporter:
    """Passes reports on; an error of the receiver, such as a full disk, must not end the
    streams.
    """

    def __init__(self, on_tick: Tick) -> None:
        self._on_tick, self._failed = on_tick, False

    def publish(self, watches: Sequence[Watch]) -> None:
        try:
            self._on_tick([watch.report() for watch in watches])
            self._failed = False
        except Exception as error:
            if not self._failed:
                log.warning("progress_not_published", error=kind(error), exception=trace(error))
            self._failed = True


@contextmanager
def stop_on_signal() -> Iterator[threading.Event]:
    """An event that SIGINT and SIGTERM set; the first signal is acknowledged at once."""
    stopping = threading.Event()

    def stop(*_: object) -> None:
        repeated = stopping.is_set()
        stopping.set()
        if not repeated:
            # Written to the file descriptor: the signal may have interrupted a write to the stream.
            with suppress(OSError, ValueError):
                os.write(sys.stderr.fileno(), STOPPING)

    restore = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stopping
    finally:
        for number, handler in restore.items():
            signal.signal(number, handler)
