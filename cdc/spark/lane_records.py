"""Run a lane over the records of a batch: ranges of the log, which the tasks read themselves.

In:  a lane. Out: what became of each partition's records. `read_on_executors` takes any other work.

Sinks that are at the same offsets at the same time share a job, and its read, while batches are small
(`SharedJobs`). A job costs some 35 ms of CPU whatever it does, which is most of a small batch's cost.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field
from functools import cache, partial
from typing import TYPE_CHECKING

import msgspec

from cdc.errors import HeldUp
from cdc.kafka.log_reader import Block, OffsetRange, ReadRanges, read_records
from cdc.sink.lane import Lane, PartitionOutcome
from cdc.sink.lane_run import freeze_gc, task_numbers
from cdc.sink.lane_task import Blocks, run_task

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

SPLIT = 1000
"""The least offsets per task: fewer don't pay for another one."""
SHARED_WAIT_S = 0.03
"""How long a batch waits for the sinks that had the same one last time. Each asks its server for
positions before its job.
"""
HELD_UP_S = 5.0
"""How long a sink waits for a job that it shares: another one's server may not answer for a minute."""
Reports = list[PartitionOutcome]
_decode_reports = msgspec.json.Decoder(list[Reports]).decode
_encode = msgspec.json.Encoder().encode


@dataclass(frozen=True)
class LoggedRecords:
    """Records of the log: of these ranges; without `ranges`, of the lane's steps. The job reads them with
    `read`, which is pickled.
    """

    spark: SparkSession
    bootstrap: str
    ranges: tuple[OffsetRange, ...] | None = None
    read: ReadRanges = read_records

    def begin(self, sink: str) -> None:
        """Choose a scheduler pool of the calling thread for each sink, so that a long job of the
        warehouse doesn't delay the cache.
        """
        self.spark.sparkContext.setLocalProperty("spark.scheduler.pool", sink)

    def run(self, lane: Lane) -> Reports:
        ranges = self._ranges(lane)
        if self.ranges is None and sum(asked.size for asked in ranges) <= SPLIT:
            return _shared_jobs(self.spark, self.bootstrap).run(ranges, lane)
        return _run_job(self.spark, self.bootstrap, self.read, ranges, [lane])[0]

    def run_here(self, lane: Lane) -> Reports:
        with closing(self.read(self.bootstrap, self._ranges(lane))) as blocks:
            return run_task([lane], blocks)[0]

    def _ranges(self, lane: Lane) -> Sequence[OffsetRange]:
        """The ranges that were asked for; else from the start to the end of each of the lane's
        steps.
        """
        if self.ranges is not None:
            return self.ranges
        return [
            OffsetRange(step.table.topic, partition, start, end, step.end.topic_id)
            for step in lane.advances
            for partition, (start, end) in enumerate(
                zip(step.start_offsets, step.end.offsets, strict=True)
            )
            if start < end
        ]


@dataclass(eq=False)
class SharedJob:
    """A job that sinks may share. `threads`: whose lanes it has, and those that came too late for it."""

    ranges: Sequence[OffsetRange]
    lanes: list[Lane] = field(default_factory=list)
    threads: set[int] = field(default_factory=set)
    is_open: bool = True
    reports: Future[list[Reports]] = field(default_factory=Future)


class SharedJobs:
    """Runs lanes of several sinks over the same ranges in one job.

    A lane waits for the sinks that came with its ranges last time, `wait_s` at most. A sink that doesn't
    come in time has a job of its own, and isn't waited for until it comes with the ranges of another one
    again. So a sink that is away or behind holds up the others once.

    Any thread may use it; each sink has one.
    """

    def __init__(
        self,
        run_job: Callable[[Sequence[OffsetRange], Sequence[Lane]], list[Reports]],
        wait_s: float = SHARED_WAIT_S,
        held_up_s: float = HELD_UP_S,
    ) -> None:
        """`run_job` runs lanes over ranges: what became of the partitions, for each lane."""
        self._run_job = run_job
        self._wait_s = wait_s
        self._held_up_s = held_up_s
        self._came = threading.Condition()
        self._last: dict[int, SharedJob] = {}
        """The last job of each thread."""
        # In threads that no sink waits in: a sink that gives up a job has to go on. Several, because
        # the job may take a minute after that.
        self._threads = ThreadPoolExecutor(4, "shared-job")

    def run(self, ranges: Sequence[OffsetRange], lane: Lane) -> Reports:
        """Run a lane over ranges.

        Raises:
            HeldUp: the job takes too long for its other sinks. It may still write.
        """
        job, place = self._join(ranges, lane)
        if place is None or len(job.lanes) == 1:
            return self._run_job(ranges, [lane])[0]
        try:
            return job.reports.result(self._held_up_s)[place]
        except TimeoutError:
            raise HeldUp(
                f"A job for several sinks takes more than {self._held_up_s:.0f} s: another sink doesn't answer.",
                hint="no action needed; each sink goes on by itself",
            ) from None

    def _join(self, ranges: Sequence[OffsetRange], lane: Lane) -> tuple[SharedJob, int | None]:
        """Find the job for these ranges, or make one, which starts once the expected sinks have come.
        Returns the lane's place in it; None if it had started before.
        """
        thread = threading.get_ident()
        with self._came:
            jobs = [
                job
                for job in self._last.values()
                if job.ranges == ranges and thread not in job.threads
            ]
            job = jobs[0] if jobs else SharedJob(ranges)
            expected = self._last[thread].threads if thread in self._last else {thread}
            self._last[thread] = job
            job.threads.add(thread)
            place = len(job.lanes) if job.is_open else None
            if job.is_open:
                job.lanes.append(lane)
            self._came.notify_all()
            if not jobs:
                self._came.wait_for(lambda: job.threads >= expected, self._wait_s)
                job.is_open = False
                if len(job.lanes) > 1:
                    self._threads.submit(self._run_shared, job)
            return job, place

    def _run_shared(self, job: SharedJob) -> None:
        try:
            job.reports.set_result(self._run_job(job.ranges, job.lanes))
        except BaseException as error:
            job.reports.set_exception(error)


@cache
def _shared_jobs(spark: SparkSession, bootstrap: str) -> SharedJobs:
    return SharedJobs(partial(_run_job, spark, bootstrap, read_records))


def _run_job(
    spark: SparkSession,
    bootstrap: str,
    read: ReadRanges,
    ranges: Sequence[OffsetRange],
    lanes: Sequence[Lane],
) -> list[Reports]:
    """Run lanes over ranges in one job: what became of the partitions, for each lane."""
    answers = read_on_executors(spark, bootstrap, ranges, partial(_run_blocks, lanes), read)
    reports: list[Reports] = [[] for _ in lanes]
    for answer in answers:
        for collected, of_task in zip(reports, _decode_reports(answer), strict=True):
            collected.extend(of_task)
    return reports


def _run_blocks(lanes: Sequence[Lane], blocks: Blocks) -> bytes:
    return _encode(run_task(lanes, blocks))


def read_on_executors(
    spark: SparkSession,
    bootstrap: str,
    ranges: Sequence[OffsetRange],
    work: Callable[[Blocks], bytes],
    read: ReadRanges = read_records,
) -> list[bytes]:
    """Read ranges of the log in the tasks of one job, each of which calls `work` with its records.
    Returns what the tasks return; empty without ranges.

    `work` and `read` are pickled. `work` may stop before it has read all records. Reading raises
    ConnectorError in it.
    """
    parts = balanced(ranges, _tasks_at_most(spark))
    if not parts:
        return []
    task = _Task(work, partial(read, bootstrap), parts)
    return task_numbers(spark.sparkContext, len(parts)).mapPartitionsWithIndex(task).collect()


@dataclass(frozen=True)
class _Task:
    """A task: works on the ranges with its index."""

    work: Callable[[Blocks], bytes]
    read: Callable[[Sequence[OffsetRange]], Generator[Block]]
    parts: Sequence[Sequence[OffsetRange]]

    def __call__(self, index: int, numbers: Iterable[int]) -> Iterator[bytes]:
        for _ in numbers:
            # Spark discards a Python worker that hasn't read all of its input.
            pass
        with closing(self.read(self.parts[index])) as blocks:
            yield self.work(blocks)
        freeze_gc(getattr(self.work, "func", self.work).__qualname__)


def balanced(ranges: Sequence[OffsetRange], tasks: int) -> list[list[OffsetRange]]:
    """Divide ranges among at most `tasks` tasks: the largest range first, each to the task with the
    fewest offsets so far. There is a task for each SPLIT offsets at most, because each has a cost.
    """
    total = sum(asked.size for asked in ranges)
    count = min(tasks, len(ranges), -(-total // SPLIT))
    parts: list[list[OffsetRange]] = [[] for _ in range(count)]
    sizes = [0] * count
    for asked in sorted(ranges, key=lambda asked: -asked.size):
        least = sizes.index(min(sizes))
        sizes[least] += asked.size
        parts[least].append(asked)
    return parts


@cache
def _tasks_at_most(spark: SparkSession) -> int:
    return int(spark.conf.get("spark.sql.shuffle.partitions") or 1)
