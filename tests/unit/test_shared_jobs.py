"""Sinks that come with the same batch at the same time share its job, and hold each other up once."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from cdc.errors import HeldUp, SinkRejected
from cdc.kafka.log_reader import OffsetRange
from cdc.spark.lane_records import SharedJobs

LONG_S = 60.0
"""Longer than any of these tests takes."""


def batch(number: int) -> list[OffsetRange]:
    """The ranges of a batch, a new list for each sink."""
    return [OffsetRange("t", 0, number, number + 1, "id")]


class Jobs:
    """Runs jobs without Spark. Notes the lanes of each; `hold` keeps those of several from ending."""

    def __init__(self) -> None:
        self.lanes: list[set[str]] = []
        self.failure: Exception | None = None
        self.hold = False
        self.released = threading.Event()

    def __call__(self, ranges: Sequence[OffsetRange], lanes: Sequence[Any]) -> Any:
        self.lanes.append(set(lanes))
        if self.failure and len(lanes) > 1:
            raise self.failure
        if self.hold and len(lanes) > 1:
            self.released.wait(LONG_S)
        return [f"{lane} {ranges[0].start}" for lane in lanes]


class Sinks:
    """Sinks with a thread each."""

    def __init__(self, jobs: Jobs, **options: float) -> None:
        self.shared = SharedJobs(jobs, **options)
        self._threads: dict[str, ThreadPoolExecutor] = {}

    def start(self, sink: str, number: int) -> "Future[Any]":
        lane: Any = sink
        if sink not in self._threads:
            self._threads[sink] = ThreadPoolExecutor(1)
        return self._threads[sink].submit(self.shared.run, batch(number), lane)

    def run(self, sink: str, number: int) -> Any:
        return self.start(sink, number).result(LONG_S)

    def close(self) -> None:
        for thread in self._threads.values():
            thread.shutdown()


@pytest.fixture
def jobs() -> Iterator[Jobs]:
    jobs = Jobs()
    yield jobs
    jobs.released.set()


@pytest.fixture
def sinks_of(jobs: Jobs) -> Iterator[Callable[..., Sinks]]:
    made: list[Sinks] = []

    def make(**options: float) -> Sinks:
        made.append(Sinks(jobs, **options))
        return made[-1]

    yield make
    jobs.released.set()
    for sinks in made:
        sinks.close()


def pair(sinks: Sinks) -> None:
    """Bring the cache and the index together: the index comes too late for the cache's job."""
    assert sinks.run("cache", 0) == "cache 0"
    assert sinks.run("index", 0) == "index 0"


def test_sinks_that_came_with_the_same_batch_share_the_next(
    jobs: Jobs, sinks_of: Callable[..., Sinks]
) -> None:
    sinks = sinks_of(wait_s=LONG_S)
    pair(sinks)
    for number in (1, 2):
        cache = sinks.start("cache", number)
        assert sinks.run("index", number) == f"index {number}"
        assert cache.result(LONG_S) == f"cache {number}"
    assert jobs.lanes == [{"cache"}, {"index"}, {"cache", "index"}, {"cache", "index"}]


def test_a_sink_with_other_offsets_has_a_job_of_its_own(
    jobs: Jobs, sinks_of: Callable[..., Sinks]
) -> None:
    sinks = sinks_of(wait_s=0.01)
    pair(sinks)
    cache = sinks.start("cache", 1)
    assert sinks.run("index", 2) == "index 2"
    assert cache.result(LONG_S) == "cache 1"
    assert jobs.lanes[2:] in ([{"cache"}, {"index"}], [{"index"}, {"cache"}])


def test_a_sink_that_does_not_come_is_waited_for_once(
    jobs: Jobs, sinks_of: Callable[..., Sinks]
) -> None:
    sinks = sinks_of(wait_s=2.0)
    pair(sinks)
    began = time.monotonic()
    assert sinks.run("cache", 1) == "cache 1"
    waited_s = time.monotonic() - began
    assert waited_s >= 2.0
    began = time.monotonic()
    assert sinks.run("cache", 2) == "cache 2"
    assert time.monotonic() - began < waited_s / 2
    # It comes back by coming with the same batch.
    assert sinks.run("index", 2) == "index 2"
    cache = sinks.start("cache", 3)
    assert sinks.run("index", 3) == "index 3"
    assert cache.result(LONG_S) == "cache 3"
    assert jobs.lanes[-1] == {"cache", "index"}


def test_a_job_that_another_sink_holds_up_is_given_up(
    jobs: Jobs, sinks_of: Callable[..., Sinks]
) -> None:
    sinks = sinks_of(wait_s=LONG_S, held_up_s=0.1)
    pair(sinks)
    jobs.hold = True
    both = [sinks.start("cache", 1), sinks.start("index", 1)]
    for sink in both:
        with pytest.raises(HeldUp, match="another sink doesn't answer"):
            sink.result(LONG_S)
    assert jobs.lanes[-1] == {"cache", "index"}


def test_a_job_that_hangs_does_not_hold_up_the_next(
    jobs: Jobs, sinks_of: Callable[..., Sinks]
) -> None:
    sinks = sinks_of(wait_s=0.01, held_up_s=0.1)
    pair(sinks)
    jobs.hold = True
    both = [sinks.start("cache", 1), sinks.start("index", 1)]
    assert any(isinstance(sink.exception(LONG_S), HeldUp) for sink in both)
    assert sinks.run("cache", 1) == "cache 1"
    assert sinks.run("cache", 2) == "cache 2"


def test_a_failure_of_the_job_is_raised_for_each_sink(
    jobs: Jobs, sinks_of: Callable[..., Sinks]
) -> None:
    sinks = sinks_of(wait_s=LONG_S)
    pair(sinks)
    jobs.failure = SinkRejected("refused", hint="")
    both = [sinks.start("cache", 1), sinks.start("index", 1)]
    assert [sink.exception(LONG_S) for sink in both] == [jobs.failure, jobs.failure]


def test_the_second_batch_of_one_sink_waits_for_no_other(
    jobs: Jobs, sinks_of: Callable[..., Sinks]
) -> None:
    """A standby and its live view take the same batch one after the other, in one thread."""
    sinks = sinks_of(wait_s=LONG_S)
    assert sinks.run("cache", 0) == "cache 0"
    assert sinks.run("cache", 0) == "cache 0"
    assert sinks.run("cache", 1) == "cache 1"
    assert jobs.lanes == [{"cache"}] * 3
