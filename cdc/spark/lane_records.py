"""Run a lane over the records of a batch: ranges of the log, which the tasks read themselves.

In:  a lane. Out: what became of each partition's records. `read_on_executors` takes any other work.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import cache, partial
from typing import TYPE_CHECKING

import msgspec

from cdc.kafka.log_reader import Block, OffsetRange, ReadRanges, read_records
from cdc.sink.lane import Lane, PartitionOutcome
from cdc.sink.lane_run import freeze_gc, task_numbers
from cdc.sink.lane_task import Blocks, run_task

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

SPLIT = 1000
"""The least offsets per task: fewer don't pay for another one."""
_decode_reports = msgspec.json.Decoder(list[PartitionOutcome]).decode
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

    def run(self, lane: Lane) -> list[PartitionOutcome]:
        work = partial(_run_blocks, lane)
        answers = read_on_executors(self.spark, self.bootstrap, self._ranges(lane), work, self.read)
        return [report for answer in answers for report in _decode_reports(answer)]

    def run_here(self, lane: Lane) -> list[PartitionOutcome]:
        with closing(self.read(self.bootstrap, self._ranges(lane))) as blocks:
            return run_task(lane, blocks)

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


def _run_blocks(lane: Lane, blocks: Blocks) -> bytes:
    return _encode(run_task(lane, blocks))


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
