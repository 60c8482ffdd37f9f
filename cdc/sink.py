"""The contract between the apply loop and a destination.

The laws, run as one contract suite over every sink: applying twice equals once; an older position never wins;
deleting what is absent succeeds; a partly refused batch raises and names keys, never values; the position never
runs ahead of the data; replay from zero equals the model; a crash between write and answer changes nothing;
a second writer is fenced.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

from cdc.change import Advance, Applied, Form, Position, Stored, Table
from cdc.errors import CdcError, Fenced, SinkRejected, SinkUnavailable

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession


class Sink(Protocol):
    """One destination. Every method may raise SinkUnavailable (try again) or SinkRejected (don't)."""

    name: str
    form: Form

    def prepare(self, table: Table) -> None:
        """Create what holds the view of a table; does nothing when it is there."""

    def position(self, table: Table) -> Stored | None:
        """How far the view has got; None when nothing has been applied yet. Needs no Spark."""

    def apply(self, batch: Batch) -> Mapping[str, Applied]:
        """Make one batch durable and store its positions, by table name. A repeated batch changes nothing.

        Raises:
            Fenced: a stored position is neither the batch's start nor of this writer's own making.
            Rewound: the destination has lost what this writer had stored; read the position again.
        """

    def scan(self, table: Table, spark: SparkSession) -> DataFrame:
        """The whole view: id string, document string (JSON), in any order."""

    def close(self) -> None:
        """Give connections back."""


class Rewound(SinkUnavailable):
    """The destination stands before the position this writer had stored there: it lost its last writes."""


@dataclass(frozen=True)
class Batch:
    """The changes between two positions, for all tables at once.

    events: every record, in the sink's form (`decode.decoded`); changes: folded, one row per key (`order.fold`).
    Both are lazy; a sink reads what it needs. writer names this run, for the fence.
    """

    writer: str
    advances: tuple[Advance, ...]
    events: DataFrame
    changes: DataFrame


def check(advance: Advance, stored: Stored | None, writer: str) -> bool:
    """Compare a stored position with the one a batch starts from; False when the batch is already applied.

    Raises:
        Fenced, Rewound: see `Sink.apply`.
    """
    found = stored.position if stored else None
    if found == advance.start:
        return True
    if stored and stored.writer == writer and found == advance.until:
        return False
    raise mismatch(advance.table, advance.start, found, ours=stored is None or stored.writer == writer)


def mismatch(table: Table, expected: Position | None, found: Position | None, *, ours: bool) -> CdcError:
    """The error for a position that isn't where this writer left it."""
    behind = found is None or (expected is not None and found.topic_id == expected.topic_id and found.lag(expected) > 0)
    if ours and behind:
        return Rewound(
            f"The view of {table.qualified} stands before the position written to it: it lost its last writes.",
            hint="nothing to do: its changes are applied again from where it stands",
            table=table.qualified,
        )
    return Fenced(
        f"Another writer has moved the position of the view of {table.qualified}; this one stops.",
        hint="run one `cdc run` per sink; start this one again when the other has ended",
        table=table.qualified,
    )


def stored_after(advance: Advance, before: Stored | None, applied: Applied, writer: str) -> Stored:
    """What to store once `advance` is applied."""
    base = before or Stored(advance.until)
    return replace(base, position=advance.until, writer=writer, rows=base.rows + applied.rows, at=round(time.time(), 3))


REPORT = "topic string, partition int, written long, deleted long, stale long, failure string, message string"
"""What an executor says of its part of a batch. Failures travel as data: an exception would lose its class."""

FAILURES: dict[str, type[CdcError]] = {
    "unavailable": SinkUnavailable,
    "rejected": SinkRejected,
    "fenced": Fenced,
    "rewound": Rewound,
}


@dataclass
class Report:
    """One row of `REPORT`."""

    topic: str
    partition: int
    written: int = 0
    deleted: int = 0
    stale: int = 0
    failure: str | None = None
    message: str | None = None


def send(frame: DataFrame, sender: Any, hints: Mapping[str, str]) -> dict[str, Applied]:
    """Run `sender` on the executors over a frame's Arrow batches and add up what they report, by topic.

    Raises:
        the error of the first failure reported, with the hint for its kind.
    """
    rows = frame.mapInArrow(sender, REPORT).collect()
    for row in rows:
        if row["failure"]:
            hint = hints.get(row["failure"], "see the message")
            raise FAILURES[row["failure"]](row["message"], hint=hint, topic=row["topic"], partition=row["partition"])
    applied: dict[str, Applied] = {}
    for row in rows:
        part = Applied(row["written"], row["deleted"], row["stale"])
        applied.setdefault(row["topic"], Applied()).add(part)
    return applied


def report(rows: Iterable[Report]) -> pa.RecordBatch:
    import pyarrow as pa

    listed = list(rows)
    schema = pa.schema(
        [("topic", pa.string()), ("partition", pa.int32())]
        + [(name, pa.int64()) for name in ("written", "deleted", "stale")]
        + [("failure", pa.string()), ("message", pa.string())]
    )
    return pa.RecordBatch.from_pylist([vars(row) for row in listed], schema=schema)


def partitions(batches: Iterator[pa.RecordBatch]) -> Iterator[tuple[str, int, Iterator[pa.RecordBatch]]]:
    """Split sorted Arrow batches by Kafka partition: topic, partition, its rows in offset order.

    Each inner iterator must be used up before the next is asked for.
    """
    import itertools

    runs = (run for batch in batches for run in _runs(batch))
    for (topic, partition), group in itertools.groupby(runs, key=lambda run: run[0]):
        yield topic, partition, (rows for _, rows in group)


def _runs(batch: pa.RecordBatch) -> Iterator[tuple[tuple[str, int], pa.RecordBatch]]:
    topics, numbers = batch.column("topic").to_pylist(), batch.column("partition").to_pylist()
    start = 0
    for at in range(1, len(topics) + 1):
        if at == len(topics) or topics[at] != topics[start] or numbers[at] != numbers[start]:
            yield (topics[start], numbers[start]), batch.slice(start, at - start)
            start = at
