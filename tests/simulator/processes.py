"""Processes in one thread, on one clock: what waits gives its turn to whoever is due next."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from heapq import heappop, heappush
from threading import Event

from greenlet import GreenletExit, getcurrent, greenlet

from cdc.model.clock import Clock


class Process:
    """What is killed at once: its first thread, and those that it has started."""

    def __init__(self) -> None:
        self.threads: list[greenlet] = []
        self.is_killed = False
        self.frozen_until = 0.0

    @property
    def is_running(self) -> bool:
        return not self.is_killed and not all(thread.dead for thread in self.threads)


class Processes(Clock):
    """A clock for processes, and who waits for it. The caller's own thread is none of them: it starts,
    kills and lets time pass.
    """

    def __init__(self) -> None:
        # Years ahead of the computer's clock, so that nothing works that takes its time from that one.
        self.now = 4_000_000_000.0
        self.turns = 0
        self._waiting: list[tuple[float, int, greenlet, Process]] = []
        self._running: Process | None = None
        self._killed: list[greenlet] = []
        """A killed thread that nobody refers to would be unwound, and clean up."""

    def time(self) -> float:
        return self.now

    def monotonic(self) -> float:
        return self.now

    def wait(self, event: Event, seconds: float) -> bool:
        if not event.is_set():
            self.sleep(seconds)
        return event.is_set()

    def sleep(self, seconds: float) -> None:
        process = self._running
        if process is None:
            self.now += seconds
            return
        if process.is_killed:
            raise GreenletExit
        self._wake(seconds, getcurrent(), process)
        main.switch()

    def start(self, work: Callable[[], object]) -> Callable[[], None]:
        """Start a thread of the process that runs."""
        assert self._running
        thread = self._thread(work, self._running)

        def join() -> None:
            while not thread.dead:
                self.sleep(0.01)

        return join

    def spawn(self, work: Callable[[], object]) -> Process:
        """Start a process."""
        process = Process()
        self._thread(work, process)
        return process

    def _thread(self, work: Callable[[], object], process: Process) -> greenlet:
        thread = greenlet(work, parent=main)
        process.threads.append(thread)
        self._wake(0.0, thread, process)
        return thread

    def _wake(self, seconds: float, thread: greenlet, process: Process) -> None:
        self.turns += 1
        heappush(self._waiting, (self.now + seconds, self.turns, thread, process))

    def kill(self, process: Process) -> None:
        """Kill it as `kill -9` does: wherever it is, without a chance to clean up."""
        process.is_killed = True
        self._killed += [thread for thread in process.threads if not thread.dead]

    def pass_time(self, seconds: float) -> None:
        """Let processes run for so long. An error that one of them doesn't catch is raised here."""
        until = self.now + seconds
        while self._waiting and self._waiting[0][0] <= until:
            due, turn, thread, process = heappop(self._waiting)
            if process.is_killed or thread.dead:
                continue
            if process.frozen_until > due:
                heappush(self._waiting, (process.frozen_until, turn, thread, process))
                continue
            self.now = max(self.now, due)
            self._running = process
            try:
                thread.switch()
            finally:
                self._running = None
        self.now = until

    def close(self) -> None:
        """Unwind all threads, killed ones too: suspended, they keep the memory of their history."""
        self._running = Process()
        self._running.is_killed = True
        for thread in [*self._killed, *(thread for _, _, thread, _ in self._waiting)]:
            # What cleans up meets a killed process, and may say so.
            with suppress(Exception):
                thread.throw()


main = getcurrent()
