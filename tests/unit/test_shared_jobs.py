"""Sinks that come with the same batch at the same time share its job, and hold each other up once."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from cdc.errors import HeldUp, SinkRejected, WorkerLost
from cdc.kafka.log_reader import OffsetRange
from cdc.spark.lane_records import SharedJobs

LONG_S = 60.0
"""Longer than any of these tests takes."""


def batch(number: int) -> list[OffsetRange]:
    """The ranges of a batch, a new list for each sink."""
    return [OffsetRange("t", 0, number, number + 1, "id")]


class Jobs:
    """Runs jobs without Spark. Notes the lanes of each. `broken` is a sink whose lane fails, `hangs` one
    whose lane doesn't end until its job is cancelled.
    """

    def __init__(self) -> None:
        self.lanes: list[set[str]] = []
        self.broken = ""
        self.hangs = ""
        self.hanging = threading.Event()
        self.cancelled = threading.Event()

    def run(self, ranges: Sequence[OffsetRange], lanes: Sequence[Any], _: str | None) -> Any:
        self.lanes.append(set(lanes))
        if self.broken in lanes:
            raise SinkRejected(f"{self.broken} is broken", hint="")
        if self.hangs in lanes:
            self.hanging.set()
            self.cancelled.wait(LONG_S)
            raise WorkerLost("cancelled", hint="")
        return [f"{lane} {ranges[0].start}" for lane in lanes]

    def cancel(self, _: str) -> None:
        self.cancelled.set()


class Sinks:
    """Sinks with a thread each."""

    def __init__(self, jobs: Jobs, **options: float) -> None:
        # However slow the machine is, a job is neither slow nor given up unless the test says so.
        patient = {"slow_s": LONG_S, "held_up_s": LONG_S, **options}
        self.shared = SharedJobs(jobs.run, jobs.cancel, **patient)
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
    jobs.cancelled.set()


@pytest.fixture
def sinks_of(jobs: Jobs) -> Iterator[Callable[..., Sinks]]:
    made: list[Sinks] = []

    def make(**options: float) -> Sinks:
        made.append(Sinks(jobs, **options))
        return made[-1]

    yield make
    jobs.cancelled.set()
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


def test_a_job_that_another_sink_holds_up_is_given_up_and_ended(
    jobs: Jobs, sinks_of: Callable[..., Sinks]
) -> None:
    """Nothing of it may be written when the batch is repeated; each does that by itself."""
    sinks = sinks_of(wait_s=LONG_S, held_up_s=0.1)
    pair(sinks)
    jobs.hangs = "index"
    both = [sinks.start("cache", 1), sinks.start("index", 1)]
    assert all(isinstance(sink.exception(LONG_S), HeldUp) for sink in both)
    assert jobs.cancelled.is_set()
    jobs.cancelled.clear()
    jobs.hanging.clear()
    hung = sinks.start("index", 1)
    assert jobs.hanging.wait(LONG_S)
    assert [sinks.run("cache", number) for number in (1, 2)] == ["cache 1", "cache 2"]
    assert not hung.done()
    assert jobs.lanes[2] == {"cache", "index"}
    assert sorted(map(sorted, jobs.lanes[3:])) == [["cache"], ["cache"], ["index"]]


def test_a_sink_whose_lane_fails_fails_alone(jobs: Jobs, sinks_of: Callable[..., Sinks]) -> None:
    sinks = sinks_of(wait_s=LONG_S)
    pair(sinks)
    jobs.broken = "index"
    both = [sinks.start("cache", 1), sinks.start("index", 1)]
    assert all(isinstance(sink.exception(LONG_S), HeldUp) for sink in both)
    for number in (1, 2):
        broken = sinks.start("index", 1)
        assert sinks.run("cache", number) == f"cache {number}"
        with pytest.raises(SinkRejected, match="index is broken"):
            broken.result(LONG_S)


@pytest.mark.parametrize("apart_s", [0.0, LONG_S])
def test_sinks_of_a_slow_job_have_their_own_for_a_while(
    jobs: Jobs, sinks_of: Callable[..., Sinks], apart_s: float
) -> None:
    sinks = sinks_of(wait_s=LONG_S, slow_s=0.0, apart_s=apart_s)
    pair(sinks)
    for number in (1, 2):
        both = [sinks.start("cache", number), sinks.start("index", number)]
        assert [sink.result(LONG_S) for sink in both] == [f"cache {number}", f"index {number}"]
    assert (jobs.lanes[2], len(jobs.lanes)) == ({"cache", "index"}, 5 if apart_s else 4)


def test_a_sink_that_comes_twice_with_a_batch_has_jobs_of_its_own(
    jobs: Jobs, sinks_of: Callable[..., Sinks]
) -> None:
    """A standby and its live view take the same batch one after the other, in one thread."""
    sinks = sinks_of(wait_s=LONG_S)
    pair(sinks)
    assert [sinks.run("cache", number) for number in (0, 1, 1, 2)] == [
        f"cache {number}" for number in (0, 1, 1, 2)
    ]
    assert jobs.lanes[2:] == [{"cache"}] * 4
