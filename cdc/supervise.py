"""Run several sinks' streams side by side: start, watch, stop; publish what each of them does.

A stream that fails for good ends alone, and is told as failed from then on; the others go on. Each is measured in a
thread of its own: one whose sink never answers keeps nobody else from being reported or stopped.
"""

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Protocol

import structlog

from cdc.change import Applied, Progress
from cdc.errors import CdcError
from cdc.failures import classify
from cdc.trace import kind, trace

TICK_S = 1.0
LAST_S = 2.0
"""How long the last measurement of a stream that has ended may take."""
STOPPING = b"\nstopping: what is at hand is finished first\n"
WORKING = ("starting", "running", "waiting")
log = structlog.get_logger()
Tick = Callable[[list[Progress]], None]


class Feed(Protocol):
    """What is supervised: the stream of one sink. `progress` may be read at any time."""

    progress: Progress

    def run(self, *, until_caught_up: bool = False) -> None:
        """Apply until stopped; raises what can't be mended by trying again."""

    def measure(self) -> Progress:
        """Bring `progress` up to date; may take as long as the sink takes to answer."""

    def stop(self) -> None:
        """Have `run` end after the batch at hand."""


def supervise(
    feeds: Sequence[Feed],
    stopping: threading.Event,
    *,
    until_caught_up: bool = False,
    for_s: float | None = None,
    on_tick: Tick = lambda _: None,
) -> list[CdcError]:
    """Run until every stream has ended, the time is over or `stopping` is set; the batch at hand is finished.

    Returns the errors that ended streams, in the order of the streams.
    """
    watches = [_Watch(feed, until_caught_up) for feed in feeds]
    end = time.monotonic() + for_s if for_s is not None else float("inf")
    teller = _Teller(on_tick)
    for watch in watches:
        watch.start()
    while any(watch.working for watch in watches):
        if stopping.wait(TICK_S) or time.monotonic() > end:
            break
        teller.tell(watches)
    for watch in watches:
        watch.stop()
    while working := [watch for watch in watches if watch.working]:
        working[0].join(TICK_S)
        teller.tell(watches)
    for watch in watches:
        watch.end()
    teller.tell(watches)
    return [watch.failure for watch in watches if watch.failure]


class _Watch:
    """One stream at work: a thread that runs it, one that measures it, what ended it."""

    def __init__(self, feed: Feed, until_caught_up: bool) -> None:
        self.failure: CdcError | None = None
        self._feed, self._until_caught_up = feed, until_caught_up
        self._name = feed.progress.sink
        self._looked_at = time.monotonic()
        self._state, self._since = feed.progress.state, time.time()
        self._aside_since: dict[str, float] = {}
        self._ended = threading.Event()
        self._running, self._measuring = self._thread(self._run), self._thread(self._measure)

    @property
    def working(self) -> bool:
        return self._running.is_alive()

    def start(self) -> None:
        self._running.start()
        self._measuring.start()

    def stop(self) -> None:
        """Without waiting: what it is busy with may hang."""
        self._thread(self._feed.stop).start()

    def join(self, timeout_s: float) -> None:
        self._running.join(timeout_s)

    def end(self) -> None:
        self._measuring.join(LAST_S)

    def report(self) -> Progress:
        """A copy, with the age of what was measured, and since when it is as it is."""
        looked_s = time.monotonic() - self._looked_at if self.working else 0.0
        progress, now = self._feed.progress, time.time()
        if progress.state != self._state:
            self._state, self._since = progress.state, now
        self._aside_since = {table: self._aside_since.get(table, now) for table in progress.aside}
        return replace(
            progress, looked_s=round(looked_s, 1), state_since=self._since, aside_since=dict(self._aside_since)
        )

    def _thread(self, work: Callable[[], None]) -> threading.Thread:
        return threading.Thread(target=work, name=self._name, daemon=True)

    def _run(self) -> None:
        try:
            self._feed.run(until_caught_up=self._until_caught_up)
        except Exception as error:
            self._fail(error)
        finally:
            self._ended.set()

    def _fail(self, error: Exception) -> None:
        failure = classify(error, self._name, f"cdc -p FILE run --sink {self._name}")
        progress = self._feed.progress
        progress.error, progress.hint, progress.state = failure.message, failure.hint, "failed"
        cause = error.__cause__ or not isinstance(error, CdcError)
        told = {"exception": trace(error)} if cause else {}
        log.error("sink_failed", sink=self._name, error=failure.message, hint=failure.hint, **told)
        self.failure = failure

    def _measure(self) -> None:
        told: str | None = None
        ended = False
        while not ended:
            ended = self._ended.wait(TICK_S)
            try:
                self._feed.measure()
                self._looked_at, told = time.monotonic(), None
            except Exception as error:
                if kind(error) != told:
                    told = kind(error)
                    log.warning("sink_not_measured", sink=self._name, error=told, exception=trace(error))


class _Teller:
    """Hands on the reports; a disk that is full must not end what it is told of."""

    def __init__(self, on_tick: Tick) -> None:
        self._on_tick, self._failed = on_tick, False

    def tell(self, watches: Sequence[_Watch]) -> None:
        try:
            self._on_tick([watch.report() for watch in watches])
            self._failed = False
        except Exception as error:
            if not self._failed:
                log.warning("progress_not_published", error=kind(error), exception=trace(error))
            self._failed = True


@contextmanager
def told_to_stop() -> Iterator[threading.Event]:
    """An event that SIGINT and SIGTERM set; the first of them is answered at once."""
    stopping = threading.Event()

    def stop(*_: object) -> None:
        again = stopping.is_set()
        stopping.set()
        if not again:
            # Not through a stream: the signal may have come in the middle of a line of its.
            with suppress(OSError, ValueError):
                os.write(sys.stderr.fileno(), STOPPING)

    restore = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stopping
    finally:
        for number, handler in restore.items():
            signal.signal(number, handler)


def publish(folder: Path, progress: Sequence[Progress], compared_s: float | None = None) -> None:
    """Leave each sink's progress where `cdc status` on this machine finds it; nothing else depends on it.

    `compared_s`: see `Progress.compared_s`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for one in progress:
        path = folder / f"{one.sink}.json"
        fresh = path.with_suffix(".new")
        record = {**asdict(one), "compared_s": compared_s, "pid": os.getpid(), "at": time.time()}
        fresh.write_text(json.dumps(record), encoding="utf-8")
        fresh.replace(path)


def published(folder: Path) -> dict[str, Progress]:
    """What `publish` left on this machine, if anything; a run that has died since is shown as such."""
    names = {field.name for field in fields(Progress)}
    progress = {}
    for path in sorted(folder.glob("*.json")):
        record = json.loads(path.read_text(encoding="utf-8"))
        pid, written_at = record["pid"], record["at"]
        known = {name: value for name, value in record.items() if name in names}
        sink = Progress(**{**known, "applied": Applied(**record["applied"])})
        if sink.state in WORKING and not _alive(pid, written_at):
            sink.state = "not running"
        progress[sink.sink] = sink
    return progress


def _alive(pid: int, at: float) -> bool:
    """A run writes every second; a pid alone may have been given to somebody else since."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return time.time() - at < 30
