"""What a lane is made of: a batch's way into a view, as executors are given it, and what a destination does there.

    records -> decoded -> folded, the newest of each row -> filled -> written, with the position

A chunk is as many records, in the order of offsets, as hold no more than so many rows and bytes: memory is bounded by
it, whatever a partition or a batch has. It may be of several Kafka partitions, a `Part` for each. `cdc.sink.lane_task`
does the work, in plain Python over bytes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import msgspec

from cdc.codec.forms import Form
from cdc.codec.record import Change
from cdc.model.outcome import Advance, Applied
from cdc.sink.rejection import Rejected, Rejection, Source

if TYPE_CHECKING:
    from cdc.codec.decode_options import Reading

COLUMNS = ("key", "value", "topic", "partition", "offset")
"""Of the records that a lane takes, as Spark's Kafka source has them."""
Entries = Mapping[tuple[str, int], Mapping[int, str | None]]
"""What a sink has in quarantine: by topic and partition, by offset, the id of the record's row if its key tells."""
REPORT = "report binary"
TAINTED = "its row is in quarantine"
UNKNOWN = "a value that the log doesn't carry isn't known here either"
REPORTED_ROWS = 1000
"""Rejected records that a report names at most; all are counted."""


class Superseded:
    """The view has a newer version of a row than the one that would have to be filled from it."""


SUPERSEDED = Superseded()


class Row(msgspec.Struct, gc=False):
    """The newest of a row in a part; value: None where it is deleted; sources: the records that it is made from."""

    id: str
    offset: int
    value: Any
    missing: tuple[str, ...]
    sources: list[Source]


class Report(msgspec.Struct):
    """What became of one partition's records. Failures travel as data."""

    topic: str
    partition: int
    applied: Applied = msgspec.field(default_factory=Applied)
    rejected: list[Rejected] = []
    cured: dict[str, int] = {}
    """By id of a row with entries in quarantine: below which offset they are void, for all its values are known."""
    failure: str | None = None
    """Why the task ended early: one of `failures.REPORTED`."""
    message: str = ""
    told: list[str] = []
    """What the sink's writer has to tell its driver."""


class Limits(NamedTuple):
    """Of a chunk; one row may be larger."""

    rows: int
    bytes: int


class Failure(Exception):
    """The destination can't go on: kind is one of `failures.REPORTED`. Messages name no values."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind, self.message = kind, message


@dataclass(eq=False)
class Part:
    """What a chunk has of one Kafka partition: rows as of `reach`, in a view that has all below `at`."""

    advance: Advance
    partition: int
    at: int
    report: Report
    reach: int = 0
    rows: dict[str, Row] = field(default_factory=dict)

    @property
    def topic(self) -> str:
        return self.advance.table.topic


class Verdicts(NamedTuple):
    """What a destination says to a part that it has been given: ids of rows that it won't take, with the reason."""

    refused: Mapping[str, str] = {}
    stale: frozenset[str] = frozenset()
    """Those of which it has a newer version."""


class Writer(Protocol):
    """A destination, on an executor: can be pickled. Every method may raise Failure."""

    @property
    def form(self) -> Form:
        """What it takes rows as."""

    @property
    def limits(self) -> Limits:
        """How large a chunk may get."""

    @property
    def archives(self) -> bool:
        """Whether it takes changes from before a TRUNCATE, too: they have no effect on rows."""

    def at(self, advance: Advance, partition: int) -> int:
        """Where the view stands; further than the step's start when an earlier try has got part of the way."""

    def held(self, part: Part, rows: Sequence[Row]) -> Mapping[str, Any]:
        """What the view has of rows: by id a value of the form, or SUPERSEDED; nothing of those it hasn't."""

    def write(self, parts: Sequence[Part]) -> Sequence[Verdicts]:
        """Write all rows, none of which misses a value, and move each partition to the part's `reach`."""

    def take(self, part: Part, change: Change, source: Source, value: Any) -> int:
        """Look at a change before it is folded; the bytes of memory that it keeps of it."""

    def end(self) -> Mapping[str, Sequence[str]]:
        """After the last chunk: what to tell the driver, by topic."""


@dataclass(frozen=True)
class Lane:
    """One batch's way into a view, as executors are given it.

    `only`: ids by topic, of a lane that looks at no other rows.
    """

    advances: tuple[Advance, ...]
    reading: Reading
    writer: Writer
    rejection: Rejection
    entries: Entries = field(default_factory=dict)
    only: Mapping[str, frozenset[str]] = field(default_factory=dict)
