"""Run a lane on Spark's executors, and collect what became of its batch.

In:  a lane and the records of a batch. Out: `Outcome`; the error of the first failure that an
executor reports.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar

from cdc.errors import CdcError, DecodeError, ValueNotRepresentable
from cdc.model.outcome import Applied
from cdc.sink.contract import Outcome, RowsRejected
from cdc.sink.lane import BatchRecords, Lane, PartitionOutcome
from cdc.sink.rejection import DECODE, UNHOLDABLE, Rejected
from cdc.sink.remedy import REPORTED

if TYPE_CHECKING:
    from pyspark import SparkContext
    from pyspark.core.rdd import RDD

COMMON_HINTS = {
    **dict.fromkeys(("broker", "unread"), "no action needed; retried automatically; is Kafka up?"),
    "topic": "cdc -p FILE topics",
    "unauthorized": "kafka-acls.sh --bootstrap-server ADDRESS --add --allow-principal User:ANONYMOUS"
    " --operation OPERATION --topic TOPIC; an ACL that denies it has to go, too",
    "refused": "look at the broker's log, then: cdc -p FILE topics",
}
"""Hints by kind of a failure that every sink has."""
In = TypeVar("In")
"""Parts of what a task of Spark is handed."""
Out = TypeVar("Out")
"""Parts of what it hands back."""


def run_on_executors(
    lane: Lane, records: BatchRecords, sink: str, hints: Mapping[str, str]
) -> Outcome:
    """Run a lane over a batch's records, one Spark job; returns when all tasks have ended.

    hints: by kind of a failure, what a person can do about it.

    Raises:
        CdcError: of the first failure that is reported, or of a record that ends the batch.
    """
    return collect_outcome(lane, records.run(lane), sink, hints)


def run_in_process(lane: Lane, records: BatchRecords, sink: str) -> Outcome:
    """Run a lane in this process: for the reference sink, whose view is in it."""
    return collect_outcome(lane, records.run_here(lane), sink, {})


def collect_outcome(
    lane: Lane, reports: Iterable[PartitionOutcome], sink: str, hints: Mapping[str, str]
) -> Outcome:
    """Add up what tasks report.

    Raises the first failure, or the error of a record that ends the batch.
    """
    names = {advance.table.topic: advance.table.qualified for advance in lane.advances}
    result = Outcome({name: Applied() for name in names.values()})
    for report in reports:
        if report.failure:
            raise reported_error(
                report.failure,
                report.message,
                {"gone": f"cdc -p FILE rebuild {sink}", **hints},
                topic=report.topic,
                partition=report.partition,
            )
        result.applied[names[report.topic]].add(report.applied)
        result.rejected.extend(report.rejected)
        result.cured.update(((report.topic, key), offset) for key, offset in report.cured.items())
        result.writer_results.setdefault(names[report.topic], []).extend(report.writer_results)
    if lane.rejection.stops and result.rejected:
        raise _rejection_error(result.rejected, sink)
    return result


def _rejection_error(rejected: list[Rejected], sink: str) -> CdcError:
    first = rejected[0]
    place = f"{first.topic} partition {first.partition} offset {first.offset}: {first.reason}"
    if first.kind == DECODE:
        return DecodeError(
            f"A record is not what the connector writes: {place}.",
            hint="look at the record; who else writes to this topic?",
            sink=sink,
        )
    if first.kind == UNHOLDABLE:
        return ValueNotRepresentable(
            f"{sink} has no way to hold a record: {place}.",
            hint="change the row, or leave the column out with `exclude`",
            sink=sink,
        )
    return RowsRejected(
        {(record.topic, record.id or ""): record.reason for record in rejected}, sink
    )


def reported_error(kind: str, message: str, hints: Mapping[str, str], **where: Any) -> CdcError:
    """Build the error for the kind of a failure, with its hint."""
    return REPORTED[kind](
        message, hint={**COMMON_HINTS, **hints}.get(kind, "see the message"), **where
    )


def freeze_gc_after(
    work: Callable[[Iterator[In]], Iterator[Out]],
) -> Callable[[Iterable[In]], Iterator[Out]]:
    """Wrap a task's work so that modules are frozen after the first one.

    A Python worker takes many tasks, and Spark collects garbage after each, over everything that is
    loaded.
    """

    def work_then_freeze(parts: Iterable[In]) -> Iterator[Out]:
        yield from work(iter(parts))
        freeze_gc(getattr(work, "func", work).__qualname__)

    return work_then_freeze


@cache
def freeze_gc(_: str) -> None:
    """Exclude what is loaded from garbage collection, after the first task of each kind."""
    gc.freeze()


@cache
def task_numbers(context: SparkContext, tasks: int) -> RDD[int]:
    """The numbers of a job's tasks. Cached: to make it takes longer than to run a small job."""
    return context.parallelize(range(tasks), tasks)
