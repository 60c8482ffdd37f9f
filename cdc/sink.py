"""The contract between the apply loop and a destination.

The laws, run as one contract suite over every sink: applying twice equals once; an older position never wins;
deleting what is absent succeeds; a partly refused batch raises and names places, never values; the position never
runs ahead of the data; replay from zero equals the model; a crash between write and answer changes nothing;
a second writer is fenced; a value that a change doesn't carry stays what it was.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

from cdc.change import Advance, Applied, Form, Position, Stored, Table
from cdc.errors import CdcError, Fenced, SinkRejected, SinkUnavailable

if TYPE_CHECKING:
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

        A batch of no length (start = until) writes its rows all the same: it repairs single rows.

        Raises:
            Refused: some of its rows can't be written; the positions are where they can still be read from.
            Fenced: a stored position is neither the batch's start nor of this writer's own making.
            Rewound: the destination has lost what this writer had stored; read the position again.
        """

    def clear(self, table: Table) -> None:
        """Make the view empty and forget its position, so that it is made again from offset zero."""

    def scan(self, table: Table, spark: SparkSession) -> DataFrame:
        """The whole view: id string, document string (JSON), in any order."""

    def close(self) -> None:
        """Give connections back."""


class Rewound(SinkUnavailable):
    """The destination stands before the position this writer had stored there: it lost its last writes."""


Key = tuple[str, str]
"""Topic and row id."""


class Refused(SinkRejected):
    """Single rows that a destination won't take, however often one tries; others may have been written."""

    def __init__(self, rows: Mapping[Key, str], sink: str) -> None:
        (topic, key), reason = next(iter(rows.items()))
        super().__init__(
            f"{sink} refuses {len(rows)} rows; the first: {topic}, id {key}: {reason}.",
            hint="repair the row at its source, or what refuses it, then start `cdc run` again",
            sink=sink,
        )
        self.rows = dict(rows)


class Misfit(SinkRejected):
    """The view was made for other columns, and can't be changed to hold those that the table has now."""

    def __init__(self, table: Table, sink: str) -> None:
        super().__init__(
            f"The view of {table.qualified} in {sink} was made for columns of other types than the table has now.",
            hint=f"cdc -p FILE rebuild {sink} --table {table.qualified}",
            sink=sink,
        )


UNKNOWN = "a value that the log doesn't carry isn't known here either"
"""Why a row is refused that would have to be completed, and can't be."""


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
    return replace(
        base,
        position=advance.until,
        writer=writer,
        rows=base.rows + applied.rows,
        at=round(time.time(), 3),
        floor=advance.floor,
    )
