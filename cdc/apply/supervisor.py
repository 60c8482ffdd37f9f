"""Run the streams of several sinks: start, watch and stop them, and publish their progress.

A stream that fails for good ends alone, and is reported as failed from then on; the others go on.
Failures that pass by trying again at once never end a stream: see `cdc.apply.stream`. Each stream has
its thread, which alone works on it: a sink that never answers doesn't keep other streams
from being reported or stopped.
"""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from enum import StrEnum
from typing import TYPE_CHECKING

import structlog

from cdc.apply.progress import Progress, RunState
from cdc.errors import CdcError, Fenced, Interrupted, SettingsError
from cdc.model.trace import kind, trace
from cdc.sink.remedy import classify

if TYPE_CHECKING:
    from cdc.apply.stream import Stream

FIRST_PAUSE_S = 10.0
"""The first pause before a stream starts again. The next ones double."""
LONGEST_PAUSE_S = 600.0
"""The longest such pause. A stream that has worked for longer begins with the first pause again."""
FINAL = (SettingsError, Fenced, Interrupted)
"""Errors after which a start would change nothing until a person has acted, or would do harm: two
writers would end each other for ever.
"""
TICK_S = 1.0
STOPPING = b"\nstopping: what is at hand is finished first\n"
log = structlog.get_logger()
Tick = Callable[[list[Progress]], None]


class AfterError(StrEnum):
    """What follows the error that has ended a stream. The end of Spark ends the run whatever this is."""

    END_STREAM = "end stream"
    """The stream stays ended; the others go on. For runs that end by themselves."""
    END_RUN = "end run"
    """All streams end: whatever has started the run knows what to do."""
    RESTART = "restart"
    """The stream starts again after a pause, if that may help. For runs that go on until they are
    stopped.
    """


def supervise(
    streams: "Sequence[Stream]",
    stopping: threading.Event,
    *,
    until_caught_up: bool = False,
    is_over: Callable[[], bool] = lambda: False,
    after_error: AfterError = AfterError.END_STREAM,
    on_tick: Tick = lambda _: None,
) -> list[CdcError]:
    """Run until every stream has ended, `stopping` is set, or the run `is_over`, which is asked every
    second. Batches at hand are finished.

    Returns the errors that have ended streams which haven't started again: first one that ended the
    run, then in the order of the streams.
    """
    watches = [Watch(stream, until_caught_up, after_error) for stream in streams]
    is_published = True

    def publish() -> None:
        """Pass the reports on. An error of the receiver, such as a full disk, must not end the streams."""
        nonlocal is_published
        try:
            on_tick([watch.report() for watch in watches])
            is_published = True
        except Exception as error:
            if is_published:
                log.warning("progress_not_published", error=kind(error), exception=trace(error))
            is_published = False

    for watch in watches:
        watch.start()
    while any(watch.working for watch in watches):
        if stopping.wait(TICK_S) or is_over() or any(watch.ends_run for watch in watches):
            break
        publish()
    for watch in watches:
        watch.stop()
    while working := [watch for watch in watches if watch.working]:
        working[0].join(TICK_S)
        publish()
    watches.sort(key=lambda watch: not watch.ends_run)
    return [watch.failure for watch in watches if watch.failure]


class Watch:
    """One stream at work: the thread that owns it, and the error that ended it."""

    def __init__(self, stream: "Stream", until_caught_up: bool, after_error: AfterError) -> None:
        self.failure: CdcError | None = None
        self.ends_run = False
        self.stream = stream
        self._until_caught_up = until_caught_up
        self._after_error = after_error
        self._name = stream.progress.sink
        self._state = stream.progress.state
        self._state_since = time.time()
        self._aside_since: dict[str, float] = {}
        self._back_off = BackOff()
        self._restart_at: float | None = None
        self._stopping = threading.Event()
        self._running = threading.Thread(target=self._work, name=self._name, daemon=True)
        self.start = self._running.start
        self.join = self._running.join

    def stop(self) -> None:
        self._stopping.set()
        self.stream.stop()

    @property
    def working(self) -> bool:
        return self._running.is_alive()

    def report(self) -> Progress:
        """The published progress, with its age and the times of changes."""
        now = time.time()
        progress = self.stream.progress.aged(now)
        if self.failure:
            error = self.failure.message
            hint = self.failure.hint
            progress = replace(
                progress,
                state=RunState.FAILED,
                error=error,
                hint=hint,
                looked_s=0.0,
                restart_at=self._restart_at,
            )
        if progress.state != self._state:
            self._state = progress.state
            self._state_since = now
        self._aside_since = {table: self._aside_since.get(table, now) for table in progress.aside}
        return replace(progress, state_since=self._state_since, aside_since=dict(self._aside_since))

    def _work(self) -> None:
        """Run the stream, again after each error from which a start may help."""
        try:
            while not self._run() and self._outwait_pause():
                self._back_off.begin()
                self.stream.note_restart()
                self.failure = None
                self._restart_at = None
        finally:
            self._restart_at = None
            self.stream.close()

    def _run(self) -> bool:
        try:
            self.stream.run(until_caught_up=self._until_caught_up)
        except Exception as error:
            self._note_failure(error)
        return self._restart_at is None

    def _note_failure(self, error: Exception) -> None:
        """Log an error and decide what follows it."""
        failure = classify(error, self._name, "the next start")
        starts_again = self._after_error is AfterError.RESTART and not isinstance(failure, FINAL)
        pause_s = self._back_off.next_pause_s() if starts_again else None
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
        self.ends_run = self._after_error is AfterError.END_RUN
        self.failure = failure

    def _outwait_pause(self) -> bool:
        """Wait until the stream is to start again; False when it is stopped meanwhile."""
        pause_s = max(0.0, (self._restart_at or 0.0) - time.time())
        return not self._stopping.wait(pause_s)


class BackOff:
    """The pauses between the starts of one stream. One thread uses it."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._pause_s = FIRST_PAUSE_S
        self._began = clock()

    def begin(self) -> None:
        self._began = self._clock()

    def next_pause_s(self) -> float:
        """Seconds to wait now that the stream has ended; the next time twice as long."""
        if self._clock() - self._began > LONGEST_PAUSE_S:
            self._pause_s = FIRST_PAUSE_S
        pause_s = self._pause_s
        self._pause_s = min(LONGEST_PAUSE_S, 2 * pause_s)
        return pause_s


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
