"""The lane of a batch: its way into a view, as executors are given it, and the writer of a
destination there.

    records -> decoded -> folded, the newest of each row -> filled -> written, with the position

A chunk is a part of a task's records, in the order of offsets, up to a limit of rows and bytes. It
bounds the memory of a task, whatever a partition or a batch holds. A chunk may span several Kafka
partitions, with a `Part` for each. `cdc.sink.lane_task` does the work, in plain Python over bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import msgspec

from cdc.codec.forms import Documents, Form
from cdc.codec.record import Change
from cdc.model.outcome import Advance, Applied
from cdc.sink.rejection import Rejected, Rejection, Source

if TYPE_CHECKING:
    from cdc.codec.decode_options import DecodeOptions

Entries = Mapping[tuple[str, int], Mapping[int, str | None]]
"""What a sink has in quarantine: by topic and partition, then by offset, the id of the record's
row; None where the id can't be read from the key.
"""
TAINTED = "its row is in quarantine"
UNKNOWN = "a value that the log doesn't carry isn't known here either"
REPORTED_ROWS = 1000
"""The most rejected records that an outcome names; all are counted."""


class Superseded:
    """Type of `SUPERSEDED`: the view has a newer version of a row than the change has."""


SUPERSEDED = Superseded()


class FoldedRow(msgspec.Struct, gc=False):
    """The newest state of a row in a part.

    offset   of the newest change that it contains
    value    in the view's form; None where the row is deleted
    missing  the columns whose value is not known yet
    sources  the records that it is made from, for quarantine
    """

    id: str
    offset: int
    value: Any
    missing: tuple[str, ...]
    sources: list[Source]


class PartitionOutcome(msgspec.Struct):
    """What became of one partition's records in one task, sent to the driver.

    Failures travel as data, because an exception would lose its class on the way.
    """

    topic: str
    partition: int
    applied: Applied = msgspec.field(default_factory=Applied)
    rejected: list[Rejected] = []
    cured: dict[str, int] = {}
    """By id of a row whose values are all known: the offset below which its entries are void."""
    failure: str | None = None
    """Why the task ended early: a key of `cdc.sink.remedy.REPORTED`."""
    message: str = ""
    writer_results: list[str] = []
    """What `Writer.finish` hands to the sink on the driver."""


class ChunkLimits(NamedTuple):
    """Size at which a chunk is written: rows, and bytes of memory. One row may be larger."""

    rows: int
    bytes: int


class Failure(Exception):
    """The destination can't go on, and the task ends. Messages name no values.

    kind: a key of `cdc.sink.remedy.REPORTED`, which names the class that the driver raises.
    """

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind
        self.message = message


@dataclass(eq=False)
class Part:
    """The rows of one Kafka partition in a chunk.

    view_offset  the view has all records below it
    end_offset   the rows are as of this offset: the view has all below it once the part is written
    """

    advance: Advance
    partition: int
    view_offset: int
    report: PartitionOutcome
    end_offset: int = 0
    rows: dict[str, FoldedRow] = field(default_factory=dict)

    @property
    def topic(self) -> str:
        return self.advance.table.topic


class Verdicts(NamedTuple):
    """What a destination answers to a part that it was given to write."""

    refused: Mapping[str, str] = {}
    """By id of a row that it will never take: the reason, which names no value."""
    stale: frozenset[str] = frozenset()
    """Ids of rows of which it has a newer version."""


class Writer(Protocol):
    """A destination on an executor.

    The sink makes one writer per batch on the driver; it is pickled, and every task works with a
    copy of its own. One thread, the task's, makes all calls. A task may run twice, also at the same
    time as its lost twin, so writing has to be idempotent and fenced by the position.

    Per task: `start_offset` once for each partition, `observe` for each change, then for each chunk
    `read_stored` and `write`, at last `finish`. After a Failure no further call follows.

    Every method may raise Failure, which ends the task and, on the driver, the batch. The batch is
    repeated from the stored positions if the failure's kind allows that. A single row that can't be
    written is no Failure: `write` names it in `Verdicts.refused`.
    """

    @property
    def form(self) -> Form:
        """What the view holds of a row: documents or column values. Constant."""

    @property
    def limits(self) -> ChunkLimits:
        """How large a chunk may get before it is written. Constant."""

    @property
    def archives(self) -> bool:
        """Whether `observe` gets changes from before a TRUNCATE, too. They have no effect on rows.

        Constant.
        """
        return False

    def start_offset(self, advance: Advance, partition: int) -> int:
        """Return the offset below which the view has all records of a partition.

        Called once per task and partition, before its first record. Further than the step's start
        when an earlier try has got part of the way. Local: asks no server.
        """

    def read_stored(self, part: Part, rows: Sequence[FoldedRow]) -> Mapping[str, Any]:
        """Read what the view holds of rows: by id a value of the form, or SUPERSEDED; absent rows
        are left out.

        Called at most once per part and chunk, just before `write`, for the rows that miss a value.
        SUPERSEDED: the view has a newer version than the row's offset.
        """

    def write(self, parts: Sequence[Part]) -> Sequence[Verdicts]:
        """Write all rows, none of which misses a value, and move each partition's position to the
        part's `end_offset`.

        Called once per chunk; one answer per part, in their order. Durable on return, or staged for
        the sink's commit on the driver. The position moves with the rows or after them, never
        before.
        """

    def observe(self, part: Part, change: Change, source: Source, value: Any) -> int:  # noqa: ARG002
        """Look at a change before it is folded; returns the bytes of memory that the writer keeps
        of it.

        Called for each change that is decoded, in the order of offsets: the hottest call of a lane.
        `value` is the row in the writer's form, None for a delete.
        """
        return 0

    def finish(self) -> Mapping[str, Sequence[str]]:
        """Close what is open; returns by topic what the sink on the driver is to get in
        `Outcome.writer_results`.

        Called once per task, after the last `write`; not after a Failure or a record that ends the
        batch.
        """
        return {}


class PassedWriter(Writer):
    """The writer of a view that has all records of a batch, so that nothing comes to be written. It
    finds the rows that they have cured.
    """

    form = Documents()
    limits = ChunkLimits(1, 1)

    def start_offset(self, advance: Advance, partition: int) -> int:
        return advance.end.offsets[partition]

    def read_stored(self, part: Part, rows: Sequence[FoldedRow]) -> Mapping[str, bytes]:  # noqa: ARG002
        return {}

    def write(self, parts: Sequence[Part]) -> Sequence[Verdicts]:
        return [Verdicts()] * len(parts)


@dataclass(frozen=True)
class Lane:
    """One batch's way into a view, as executors are given it. Can be pickled.

    only: by topic, the ids of rows, where the lane is about some rows only.
    """

    advances: tuple[Advance, ...]
    reading: DecodeOptions
    writer: Writer
    rejection: Rejection
    entries: Entries = field(default_factory=dict)
    only: Mapping[str, frozenset[str]] = field(default_factory=dict)


class BatchRecords(Protocol):
    """The records of a batch. Nobody has read them yet."""

    def run(self, lane: Lane) -> Iterable[PartitionOutcome]:
        """Run a lane on the executors, one Spark job; returns when all tasks have ended."""

    def run_here(self, lane: Lane) -> Iterable[PartitionOutcome]:
        """Run a lane in this process: for the reference sink, whose view is in it."""
