"""Rows of topics as of a position, folded as every view folds them: by a lane, into a dictionary.

Runs on the executors. A task has the rows of its partitions in memory.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING

from cdc.codec.record import Change
from cdc.model.outcome import Advance
from cdc.sink.lane import ChunkLimits, FoldedRow, Lane, Part, Verdicts
from cdc.sink.lane_task import Blocks, LaneRun
from cdc.sink.rejection import Source
from cdc.views.entries import entry_maker
from cdc.views.plan import StatePlan
from cdc.views.rows import ConnectorRows

if TYPE_CHECKING:
    import pyarrow as pa

COLUMNS = ("key", "value", "topic", "partition", "offset")
"""Columns of a frame of records, named as in Spark's Kafka source."""
ROWS = "table string, id string, key binary, head string, row binary"
"""A row's table, id and key, its entries (see `cdc.views.rows`), and the row."""
SLICE = 5000
"""Rows of an Arrow batch."""


class RowCollector:
    """A lane's writer that keeps rows as the state of documents does: by topic, then by id, the
    connector's key and the row.
    """

    form = ConnectorRows()
    limits = ChunkLimits(rows=2000, bytes=8_000_000)
    archives = False

    def __init__(self) -> None:
        self.rows: dict[str, dict[str, tuple[bytes, bytes]]] = {}

    def start_offset(self, advance: Advance, partition: int) -> int:
        """Return the step's start."""
        return advance.start_offsets[partition]

    def read_stored(self, part: Part, rows: Sequence[FoldedRow]) -> Mapping[str, bytes]:
        """Look rows up."""
        collected = self.rows.get(part.topic, {})
        return {row.id: collected[row.id][1] for row in rows if row.id in collected}

    def observe(self, part: Part, change: Change, source: Source, value: object) -> int:  # noqa: ARG002
        """Keep nothing."""
        return 0

    def write(self, parts: Sequence[Part]) -> Sequence[Verdicts]:
        """Put rows into the dictionary."""
        for part in parts:
            collected = self.rows.setdefault(part.topic, {})
            for row in part.rows.values():
                if row.value is None:
                    collected.pop(row.id, None)
                else:
                    collected[row.id] = row.sources[-1].key or b"", row.value
        return [Verdicts()] * len(parts)

    def finish(self) -> Mapping[str, Sequence[str]]:
        """Hand over nothing."""
        return {}


def fold(
    lane: Lane, plan: StatePlan, batches: "Iterator[pa.RecordBatch]"
) -> "Iterator[pa.RecordBatch]":
    """Run as a task of Spark over records of whole partitions: ROWS out.

    The lane's writer is a `RowCollector`. Tables that the plan lacks have rows without entries.
    """
    import pyarrow as pa

    run, collector = LaneRun(lane), lane.writer
    assert isinstance(collector, RowCollector)
    for batch in batches:
        for topic, partition, records in split_by_partition(batch):
            run.fold(topic, partition, records)
    run.finish()
    planned = {table.qualified for table in plan.tables}
    for advance in lane.advances:
        table, rows = advance.table, collector.rows.get(advance.table.topic, {})
        make: Callable[[bytes], str] = (
            entry_maker(plan, table) if table.qualified in planned else lambda _: ""
        )
        items = list(rows.items())
        for start in range(0, len(items), SLICE):
            part = items[start : start + SLICE]
            columns = [
                pa.array([table.qualified] * len(part), pa.string()),
                pa.array([row_id for row_id, _ in part], pa.string()),
                pa.array([key for _, (key, _) in part], pa.binary()),
                pa.array([make(row) for _, (_, row) in part], pa.string()),
                pa.array([row for _, (_, row) in part], pa.binary()),
            ]
            yield pa.RecordBatch.from_arrays(columns, ["table", "id", "key", "head", "row"])


def split_by_partition(batch: "pa.RecordBatch") -> Blocks:
    """Split a batch by Kafka partition: topic, partition, records in the order of offsets."""
    topics, partitions, *records = (
        batch.column(name).to_pylist() for name in ("topic", "partition", "key", "value", "offset")
    )
    start = 0
    for (topic, partition), rows in groupby(zip(topics, partitions, strict=True)):
        end = start + sum(1 for _ in rows)
        yield topic, partition, zip(*(column[start:end] for column in records), strict=True)
        start = end
