"""Costs of a measured piece of work: seconds by the clock, CPU seconds and peak memory of every
process by name.
"""

import os
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from types import TracebackType

import psutil

EVERY_S = 1.0
"""The CPU of a process that ends is known as of the last look at it."""


@dataclass
class Cost:
    """The costs of one piece of work. cpu_s and peak_mb are by process: a server's name, spark,
    python, rival.
    """

    seconds: float = 0.0
    cpu_s: dict[str, float] = field(default_factory=dict)
    peak_mb: dict[str, float] = field(default_factory=dict)


class Meter:
    """Use as a context manager; what it found is in `cost` afterwards. `roots` are process ids by
    name.

    Children count for their root. Of this process' own children Java is `spark`, Python that runs
    `bench.rivals.plain` is `rival`, and any other Python is a worker of Spark's.
    """

    def __init__(self, roots: Mapping[str, int]) -> None:
        self.cost = Cost()
        self._roots = dict(roots)
        self._first: dict[psutil.Process, float] = {}
        self._last: dict[psutil.Process, tuple[str, float]] = {}
        self._stopping = threading.Event()

    def __enter__(self) -> "Meter":
        self._sample(first=True)
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._began = time.monotonic()
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.cost.seconds = time.monotonic() - self._began
        self._stopping.set()
        self._thread.join()
        self._sample()
        for process, (name, used) in self._last.items():
            self.cost.cpu_s[name] = (
                self.cost.cpu_s.get(name, 0.0) + used - self._first.get(process, 0.0)
            )

    def _watch(self) -> None:
        while not self._stopping.wait(EVERY_S):
            self._sample()

    def _sample(self, *, first: bool = False) -> None:
        memory: dict[str, float] = {}
        for name, process in self._processes():
            try:
                times = process.cpu_times()
                memory[name] = memory.get(name, 0.0) + process.memory_info().rss / 2**20
            except psutil.NoSuchProcess:
                continue
            used = times.user + times.system
            if first:
                self._first[process] = used
            self._last[process] = name, used
        for name, now in memory.items():
            self.cost.peak_mb[name] = max(now, self.cost.peak_mb.get(name, 0.0))

    def _processes(self) -> list[tuple[str, psutil.Process]]:
        children = _children()
        processes: list[tuple[str, psutil.Process]] = []
        for name, pid in self._roots.items():
            processes += [(name, process) for process in _tree(pid, children)]
        # The servers are children of this process as well.
        servers = {process for _, process in processes}
        for process in _tree(os.getpid(), children):
            if process not in servers and (role := _role(process)):
                processes.append((role, process))
        return processes


def _children() -> dict[int, list[psutil.Process]]:
    """The children of every process: `psutil.Process.children` reads all of /proc for each root."""
    children: dict[int, list[psutil.Process]] = {}
    for process in psutil.process_iter():
        with suppress(psutil.NoSuchProcess):
            children.setdefault(process.ppid(), []).append(process)
    return children


def _tree(pid: int, children: Mapping[int, Sequence[psutil.Process]]) -> list[psutil.Process]:
    try:
        tree = [psutil.Process(pid)]
    except psutil.NoSuchProcess:
        return []
    for process in tree:
        tree += children.get(process.pid, [])
    return tree


def _role(process: psutil.Process) -> str:
    if process.pid == os.getpid():
        return "bench"
    try:
        words = process.cmdline()
    except (psutil.NoSuchProcess, psutil.ZombieProcess):
        return ""
    if not words:
        return ""
    if words[0].endswith("java"):
        return "spark"
    if "bench.rivals.plain" in words:
        return "rival"
    return "python" if "python" in words[0] else ""
