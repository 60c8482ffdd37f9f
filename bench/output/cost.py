"""Costs of a measured piece of work: seconds by the clock, CPU seconds and peak memory of every
process by name.
"""

import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import TracebackType

import psutil

EVERY_S = 0.25
"""Looking takes 20 ms of a core."""


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

    Children count for their root. Those of this process are looked for anew: Java among them is
    `spark`, Python that runs `bench.rivals.plain` is `rival`, any other Python is a worker of Spark's.
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
        processes: list[tuple[str, psutil.Process]] = []
        for name, pid in self._roots.items():
            processes += [(name, process) for process in _tree(pid)]
        bench, servers = psutil.Process(), {process.pid for _, process in processes}
        processes.append(("bench", bench))
        # The servers are children of this process as well.
        children = [child for child in bench.children(recursive=True) if child.pid not in servers]
        return processes + [(role, child) for child in children if (role := _role(child))]


def _tree(pid: int) -> list[psutil.Process]:
    try:
        root = psutil.Process(pid)
        return [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def _role(process: psutil.Process) -> str:
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
