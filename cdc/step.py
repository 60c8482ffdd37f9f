"""One micro-batch as a step of several views: from where each stands to where the batch ends."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from pyspark.sql import DataFrame, SparkSession

from cdc import order
from cdc.change import Advance, Form, Position, Table
from cdc.sink import Batch

Ends = Mapping[str, Mapping[int, int]]
"""Topic, partition: an offset."""
COMPILED = 50_000
"""Records from which expressions are compiled: a third less for each, but a merge of fewer takes twice as long."""


class Steps(NamedTuple):
    """What one batch brings to the views that readers see, and to those kept beside them."""

    seen: list[Advance]
    kept: list[Advance]


def advances(
    tables: Sequence[Table],
    at: Mapping[str, Position | None],
    shapes: Mapping[str, Position],
    ends: Ends,
    floor: Callable[[Table], int],
) -> list[Advance]:
    """The steps of those views of `at` that lack something of a batch; shapes give topic ids and partitions.

    A batch that begins before a view's position, for the sake of another one, may end before it as well.
    """
    found = []
    for table in tables:
        end = ends.get(table.topic)
        if end is None or table.topic not in at:
            continue
        now, shape = at[table.topic], shapes[table.topic]
        since = now.offsets if now else (0,) * shape.partition_count
        until = tuple(max(offset, end[partition]) for partition, offset in enumerate(since))
        if until != since:
            found.append(Advance(table, now, Position(shape.topic_id, until), floor(table)))
    return found


def large(steps: Sequence[Advance]) -> bool:
    """Whether it pays to prepare a batch of so many records at length."""
    return sum(step.offsets for step in steps) > COMPILED


def prepare(spark: SparkSession, steps: Sequence[Advance]) -> None:
    """Have the session compile what a batch of these steps is made with, if it pays."""
    spark.conf.set("spark.sql.codegen.factoryMode", "FALLBACK" if large(steps) else "NO_CODEGEN")


def make_batch(
    writer: str, form: Form, steps: Sequence[Advance], decoded: DataFrame, tasks: int, *, plain: bool = False
) -> Batch:
    """The records of a step, decoded in a sink's form, with their fold, plain or in full; lazy."""
    records = sum(step.offsets for step in steps)
    # Each table's events are picked out of all of them: one task for each picks faster than one for every partition.
    events = decoded.coalesce(1) if form == "events" and records <= order.SMALL else decoded
    return Batch(writer, tuple(steps), events, order.fold(events, form, records, tasks, plain=plain), plain)


def planned_ends(folder: str, batch_id: int) -> dict[str, dict[int, int]]:
    """Where a micro-batch ends, per topic and partition: the offsets that Spark planned it with.

    Read from the query's offset log, whose last line holds the (only) source's end offsets. The records can't tell:
    transaction markers and compaction leave offsets without a record.
    """
    *_, last = Path(folder, "offsets", str(batch_id)).read_text(encoding="utf-8").splitlines()
    return {topic: {int(p): offset for p, offset in offsets.items()} for topic, offsets in json.loads(last).items()}
