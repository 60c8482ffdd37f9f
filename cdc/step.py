"""One micro-batch as a step of several views: from where each stands to where the batch ends."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from pyspark.sql import DataFrame

from cdc import order
from cdc.change import Advance, Form, Position, Table
from cdc.sink import Batch

Ends = Mapping[str, Mapping[int, int]]
"""Topic, partition: an offset."""
COMPILED = 50_000
"""Records from which expressions are compiled: seconds once, then a third less for each; a small batch would wait."""


def advances(
    tables: Sequence[Table], at: Mapping[str, Position | None], starts: Mapping[str, Position], ends: Ends
) -> list[Advance]:
    """The steps of those tables that have something to apply, without floors; starts give topic ids and shapes."""
    found = []
    for table in tables:
        now, end, shape = at[table.topic], ends.get(table.topic), starts[table.topic]
        if end is None:
            continue
        until = Position(shape.topic_id, tuple(end[partition] for partition in range(shape.partition_count)))
        if until.offsets != (now.offsets if now else (0,) * until.partition_count):
            found.append(Advance(table, now, until))
    return found


def make_batch(
    writer: str, form: Form, steps: Sequence[Advance], decoded: DataFrame, tasks: int, *, plain: bool = False
) -> Batch:
    """The records of a step, decoded in a sink's form, with their fold, plain or in full; lazy."""
    records = sum(step.offsets for step in steps)
    decoded.sparkSession.conf.set("spark.sql.codegen.factoryMode", "FALLBACK" if records > COMPILED else "NO_CODEGEN")
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
