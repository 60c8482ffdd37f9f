"""What executors are given of a batch, and what they say of it: folded rows in, counts and failures out."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

from cdc.change import Applied
from cdc.errors import CdcError
from cdc.failures import REPORTED
from cdc.patch import completed
from cdc.sink import Refused

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame

    Work = Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]
    """What is done with the Arrow batches of a task."""

COUNTS = ("read", "written", "deleted", "folded", "stale", "quarantined")
REPORT = (
    "topic string, partition int, " + ", ".join(f"{name} long" for name in COUNTS) + ", failure string, message string,"
    " refused array<struct<id string, reason string>>"
)
"""What an executor says of its part of a batch. Failures travel as data: an exception would lose its class."""

REFUSED_ROWS = 1000
"""Named at a time and partition; the rest is met again when the batch is tried without them."""


@dataclass
class Report(Applied):
    """One row of `REPORT`: what became of one partition's records."""

    topic: str = ""
    partition: int = 0
    failure: str | None = None
    message: str | None = None
    refused: list[tuple[str, str]] = field(default_factory=list)
    """Id and reason of rows that can't be written, however often one tries."""

    @property
    def applied(self) -> Applied:
        """The numbers alone."""
        return Applied(*(getattr(self, name) for name in COUNTS))

    def meet(self, records: int, dead: int, quarantined: int) -> None:
        """Book the records that a row stands for, all but the one that is written, if one is."""
        living = records - dead - quarantined
        self.read += records
        self.quarantined += quarantined
        self.stale += dead
        self.folded += max(0, living - 1)


def send(frame: DataFrame, sender: Work, sink: str, hints: Mapping[str, str]) -> dict[str, Applied]:
    """Run `sender` on the executors over a frame's Arrow batches and add up what they report, by topic.

    Raises:
        Refused, or the error of the first failure reported, with the hint for its kind.
    """
    rows = frame.mapInArrow(lasting(sender), REPORT).collect()
    for row in rows:
        if row["failure"]:
            raise raised(row["failure"], row["message"], hints, topic=row["topic"], partition=row["partition"])
    refused = {(row["topic"], one["id"]): one["reason"] for row in rows for one in row["refused"]}
    if refused:
        raise Refused(refused, sink)
    applied: dict[str, Applied] = {}
    for row in rows:
        applied.setdefault(row["topic"], Applied()).add(Applied(*(row[name] for name in COUNTS)))
    return applied


def raised(kind: str, message: str, hints: Mapping[str, str], **where: object) -> CdcError:
    """The error of a failure that is told by a word, with the hint for its kind."""
    return REPORTED[kind](message, hint=hints.get(kind, "see the message"), **where)


def lasting(work: Work) -> Work:
    """The same for a worker that takes many tasks: Spark collects garbage after each, over all that is loaded."""

    def worked(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        yield from work(batches)
        _freeze(work.__qualname__)

    return worked


@cache
def _freeze(_: str) -> None:
    """Leave what is loaded out of it, after the first task of each kind."""
    gc.freeze()


def report(rows: Iterable[Report]) -> pa.RecordBatch:
    import pyarrow as pa

    refused = pa.list_(pa.struct([("id", pa.string()), ("reason", pa.string())]))
    schema = pa.schema(
        [("topic", pa.string()), ("partition", pa.int32())]
        + [(name, pa.int64()) for name in COUNTS]
        + [("failure", pa.string()), ("message", pa.string()), ("refused", refused)]
    )
    listed = [
        {**vars(row), "refused": [{"id": key, "reason": why} for key, why in row.refused[:REFUSED_ROWS]]}
        for row in rows
    ]
    return pa.RecordBatch.from_pylist(listed, schema=schema)


COMPLETING = ("document", "kept", "older", "places")
"""Fields of a row that only those need that aren't whole, once the document is part of what is sent."""


class Row(NamedTuple):
    """A folded change as an executor gets it, see `order.fold`; older holds {row, kept}, places their offsets.

    What isn't handed on is null: a plain fold has neither `kept` nor `older`.
    """

    id: str
    offset: int | None
    first: int | None
    document: str | None
    kept: list[str] | None
    older: list[dict[str, Any]] | None
    records: int
    dead: int
    quarantined: int
    places: list[int] | None = None

    def book(self, said: Report) -> bool:
        """Count the row's records, but for the newest living one; whether there is one, and it has to be written."""
        said.meet(self.records, self.dead, self.quarantined)
        return self.offset is not None

    @property
    def asks_view(self) -> bool:
        """Whether a value may be missing that only the view has."""
        return self.kept is not None and not (self.older and self.older[-1]["kept"] is None)

    def complete(self, viewed: str | None) -> str | None:
        """The whole document, with `viewed` as what the view holds; None when a value is unknown."""
        older = [(one["row"], one["kept"]) for one in self.older or ()]
        return completed(self.document or "{}", self.kept or (), [*older, (viewed, None)])


def rows(batch: pa.RecordBatch) -> Iterator[Row]:
    there = set(batch.schema.names)
    columns = [batch.column(name).to_pylist() if name in there else [None] * batch.num_rows for name in Row._fields]
    return map(Row._make, zip(*columns, strict=True))


def partitions(batches: Iterator[pa.RecordBatch]) -> Iterator[tuple[str, int, Iterator[pa.RecordBatch]]]:
    """Split sorted Arrow batches by Kafka partition: topic, partition, its rows in offset order.

    Each inner iterator must be used up before the next is asked for.
    """
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
