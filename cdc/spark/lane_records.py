"""Run a lane over the records of a batch: ranges of the log, which the tasks read themselves.

In:  a lane. Out: what became of each partition's records. `read_on_executors` takes any other work.

Sinks that are at the same offsets at the same time share a job, and its read, while batches are small
(`SharedJobs`). A job costs some 35 ms of CPU whatever it does, which is most of a small batch's cost.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field
from functools import cache, partial
from typing import TYPE_CHECKING, Any, TypeVar
from uuid import uuid4

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
Reports = list[PartitionOutcome]
T = TypeVar("T")
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
    threads: set[int]
    lanes: list[Lane] = field(default_factory=list)
    is_open: bool = True
    name: str = field(default_factory=lambda: f"shared-{uuid4().hex}")
    reports: Future[list[Reports]] = field(default_factory=Future)


class SharedJobs:
    """Runs lanes of several sinks over the same ranges in one job.

    A lane waits for the sinks that came with its ranges last time, `wait_s` at most. A sink that doesn't
    come in time runs alone, and isn't waited for until it comes with the ranges of another one again.

    No sink depends on another one for long. After a job that failed, was slow or had to be given up, its
    sinks run alone for `apart_s`; so does a sink that comes with the same ranges twice, as a standby and
    its live view do.

    Any thread may use it. A sink always comes from the same one.
    """

    def __init__(
        self,
        run_job: Callable[[Sequence[OffsetRange], Sequence[Lane], str | None], list[Reports]],
        cancel: Callable[[str], object],
        *,
        wait_s: float = 0.03,
        slow_s: float = 1.0,
        held_up_s: float = 5.0,
        apart_s: float = 60.0,
    ) -> None:
        """
        run_job    runs lanes over ranges: what became of the partitions, for each lane. A shared job
                   has a name, by which `cancel` ends it
        wait_s     on the way to its job each sink has asked its server for positions
        held_up_s  how long a sink waits for a job: the server of another one may not answer for a minute
        """
        self._run_job = run_job
        self._cancel = cancel
        self._wait_s = wait_s
        self._slow_s = slow_s
        self._held_up_s = held_up_s
        self._apart_s = apart_s
        self._came = threading.Condition()
        self._last: dict[int, SharedJob] = {}
        """The last job of each thread."""
        self._apart_until: dict[int, float] = {}
        # In threads that no sink waits in: a sink that gives up a job has to go on. Several, because a
        # job may take a while to end then.
        self._threads = ThreadPoolExecutor(4, "shared-job")

    def run(self, ranges: Sequence[OffsetRange], lane: Lane) -> Reports:
        """Run a lane over ranges.

        Raises:
            HeldUp: the job takes too long, or fails; a repeated batch, which runs alone, shows
                whose fault that is.
        """
        job, place = self._join(ranges, lane)
        if place is None or len(job.lanes) == 1:
            return self._run_job(ranges, [lane], None)[0]
        began = time.monotonic()
        try:
            reports = job.reports.result(self._held_up_s)[place]
        except Exception as error:
            self._stay_apart()
            # Nothing of the batch may still be written when it is repeated.
            self._cancel(job.name)
            raise HeldUp(
                "A job for several sinks failed, or another sink doesn't answer.",
                hint="no action needed; each sink goes on by itself",
            ) from error
        if time.monotonic() - began > self._slow_s:
            self._stay_apart()
        return reports

    def _stay_apart(self) -> None:
        self._apart_until[threading.get_ident()] = time.monotonic() + self._apart_s

    def _join(self, ranges: Sequence[OffsetRange], lane: Lane) -> tuple[SharedJob, int | None]:
        """Find the job for these ranges, or make one, which starts once the expected sinks have come.
        Returns the lane's place in it; None if the lane is to run alone.
        """
        thread = threading.get_ident()
        with self._came:
            last = self._last.get(thread)
            if last and last.ranges == ranges:
                self._stay_apart()
            if time.monotonic() < self._apart_until.get(thread, 0.0):
                self._last[thread] = SharedJob(ranges, {thread}, is_open=False)
                return self._last[thread], None
            jobs = [
                job
                for job in self._last.values()
                if job.ranges == ranges and self._may_share(job.threads)
            ]
            job = jobs[0] if jobs else SharedJob(ranges, set())
            expected = last.threads if last else {thread}
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

    def _may_share(self, threads: Iterable[int]) -> bool:
        now = time.monotonic()
        return all(now >= self._apart_until.get(thread, 0.0) for thread in threads)

    def _run_shared(self, job: SharedJob) -> None:
        try:
            job.reports.set_result(self._run_job(job.ranges, job.lanes, job.name))
        except BaseException as error:
            job.reports.set_exception(error)


@cache
def _shared_jobs(spark: SparkSession, bootstrap: str) -> SharedJobs:
    def run_job(
        ranges: Sequence[OffsetRange], lanes: Sequence[Lane], name: str | None
    ) -> list[Reports]:
        if name is None:
            return _run_job(spark, bootstrap, read_records, ranges, lanes)
        context.addJobTag(name)
        try:
            return _run_job(spark, bootstrap, read_records, ranges, lanes)
        finally:
            context.removeJobTag(name)

    context = spark.sparkContext
    return SharedJobs(run_job, context.cancelJobsWithTag)


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
    work: Callable[[Blocks], T],
    read: ReadRanges = read_records,
) -> list[T]:
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

    work: Callable[[Blocks], Any]
    read: Callable[[Sequence[OffsetRange]], Generator[Block]]
    parts: Sequence[Sequence[OffsetRange]]

    def __call__(self, index: int, numbers: Iterable[int]) -> Iterator[Any]:
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


def _tasks_at_most(spark: SparkSession) -> int:
    """As many as the driver's machine has cores; on a cluster as many as that has slots now: executors
    come and go.
    """
    from cdc.spark.session import is_in_process

    context = spark.sparkContext
    return _cores(spark) if is_in_process(context.master) else context.defaultParallelism


@cache
def _cores(spark: SparkSession) -> int:
    from cdc.spark.session import SHUFFLE_PARTITIONS

    return int(spark.conf.get(SHUFFLE_PARTITIONS) or 1)
