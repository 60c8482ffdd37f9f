"""Run a lane over the records of a batch: ranges of the log, which the tasks read themselves, or a
frame, for a redrive.

In:  a lane. Out: what became of each partition's records. `read_on_executors` takes any other work.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import cache, partial
from itertools import chain, groupby
from typing import TYPE_CHECKING, Any

import msgspec

from cdc.kafka.log_reader import OffsetRange, read_records
from cdc.sink.lane import Lane, PartitionOutcome
from cdc.sink.lane_run import freeze_gc, freeze_gc_after
from cdc.sink.lane_task import Blocks, run_task

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark import SparkContext
    from pyspark.core.rdd import RDD
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import StructType

REPORT = "report"
"""Name of the column that a task returns for a frame: one `PartitionOutcome` as JSON a row."""
SPLIT = 1000
"""The least offsets per task: fewer don't pay for another one."""
_decode_report = msgspec.json.Decoder(PartitionOutcome).decode
_decode_reports = msgspec.json.Decoder(list[PartitionOutcome]).decode
_encode = msgspec.json.Encoder().encode


@dataclass(frozen=True)
class LoggedRecords:
    """Records of the log. Without `ranges`, the records of the lane's steps."""

    spark: SparkSession
    bootstrap: str
    ranges: tuple[OffsetRange, ...] | None = None

    def run(self, lane: Lane) -> list[PartitionOutcome]:
        """See `cdc.sink.lane.BatchRecords`."""
        answers = read_on_executors(
            self.spark, self.bootstrap, self._ranges(lane), partial(_run_blocks, lane)
        )
        return [report for answer in answers for report in _decode_reports(answer)]

    def run_here(self, lane: Lane) -> list[PartitionOutcome]:
        """See `cdc.sink.lane.BatchRecords`."""
        with closing(read_records(self.bootstrap, self._ranges(lane))) as blocks:
            return run_task(lane, blocks)

    def _ranges(self, lane: Lane) -> Sequence[OffsetRange]:
        return ranges_of(lane) if self.ranges is None else self.ranges


def _run_blocks(lane: Lane, blocks: Blocks) -> bytes:
    return _encode(run_task(lane, blocks))


def read_on_executors(
    spark: SparkSession,
    bootstrap: str,
    ranges: Sequence[OffsetRange],
    work: Callable[[Blocks], bytes],
) -> list[bytes]:
    """Read ranges of the log in the tasks of one job, each of which calls `work` with its records.
    Returns what the tasks return; empty without ranges.

    `work` is pickled. It may stop before it has read all records. Reading raises ConnectorError in
    it.
    """
    parts = balanced(ranges, _tasks_at_most(spark))
    if not parts:
        return []
    task = _Task(work, bootstrap, parts)
    return _numbers(spark.sparkContext, len(parts)).mapPartitionsWithIndex(task).collect()


class _Task:
    """A task: works on the ranges with its index."""

    def __init__(
        self,
        work: Callable[[Blocks], bytes],
        bootstrap: str,
        parts: Sequence[Sequence[OffsetRange]],
    ) -> None:
        self._work = work
        self._bootstrap = bootstrap
        self._parts = parts

    def __call__(self, index: int, numbers: Iterable[int]) -> Iterator[bytes]:
        for _ in numbers:
            # Spark discards a Python worker that hasn't read all of its input.
            pass
        with closing(read_records(self._bootstrap, self._parts[index])) as blocks:
            yield self._work(blocks)
        freeze_gc(getattr(self._work, "func", self._work).__qualname__)


def ranges_of(lane: Lane) -> list[OffsetRange]:
    """The ranges from the start to the end of each of a lane's steps."""
    return [
        OffsetRange(step.table.topic, partition, start, end)
        for step in lane.advances
        for partition, (start, end) in enumerate(
            zip(step.start_offsets, step.end.offsets, strict=True)
        )
        if start < end
    ]


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


@cache
def _numbers(context: SparkContext, tasks: int) -> RDD[int]:
    """The input of a job with so many tasks. Cached: to make it takes longer than to run a small
    job.
    """
    return context.parallelize(range(tasks), tasks)


@dataclass(frozen=True)
class FramedRecords:
    """Records of a frame with the columns `cdc.sink.lane.COLUMNS`. All records of a Kafka partition
    must be in one partition of the frame, in the order of offsets.
    """

    frame: DataFrame

    def run(self, lane: Lane) -> list[PartitionOutcome]:
        """See `cdc.sink.lane.BatchRecords`."""
        task = freeze_gc_after(partial(_run_framed, lane))
        rows = self.frame.mapInArrow(task, _report_schema()).collect()
        return [_decode_report(row[REPORT]) for row in rows]

    def run_here(self, lane: Lane) -> list[PartitionOutcome]:
        """See `cdc.sink.lane.BatchRecords`."""
        rows = self.frame.collect()
        rows.sort(key=lambda row: (row["topic"], row["partition"], row["offset"]))
        return run_task(lane, map(_block, rows))


def _block(row: Any) -> tuple[str, int, list[tuple[bytes | None, bytes | None, int]]]:
    key = None if row["key"] is None else bytes(row["key"])
    value = None if row["value"] is None else bytes(row["value"])
    return row["topic"], row["partition"], [(key, value, row["offset"])]


@cache
def _report_schema() -> StructType:
    """Build the schema once. Spark would parse its text form for every batch, which takes 11 ms."""
    from pyspark.sql.types import BinaryType, StructField, StructType

    return StructType([StructField(REPORT, BinaryType())])


def _run_framed(lane: Lane, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Run a lane over the records of one task: COLUMNS in, REPORT out."""
    import pyarrow as pa

    batches = iter(batches)
    outcomes = run_task(lane, chain.from_iterable(map(split_by_partition, batches)))
    for _ in batches:
        # Spark throws a worker away that hasn't read all that it was sent.
        pass
    reports = [_encode(outcome) for outcome in outcomes]
    yield pa.RecordBatch.from_arrays([pa.array(reports, pa.binary())], [REPORT])


def split_by_partition(batch: pa.RecordBatch) -> Blocks:
    """Split a batch by Kafka partition: topic, partition, records in the order of offsets."""
    topics, partitions, *records = (
        batch.column(name).to_pylist() for name in ("topic", "partition", "key", "value", "offset")
    )
    start = 0
    for (topic, partition), rows in groupby(zip(topics, partitions, strict=True)):
        end = start + sum(1 for _ in rows)
        yield topic, partition, zip(*(column[start:end] for column in records), strict=True)
        start = end
