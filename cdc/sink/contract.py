"""The contract between the apply loop and a destination.

The laws, run as one contract suite over every sink: applying twice equals once; an older position never wins;
deleting what is absent succeeds; a partly refused batch raises and names places, never values; the position never
runs ahead of the data; replay from zero equals the model; a crash between write and answer changes nothing;
a second writer is fenced; a value that a change doesn't carry stays what it was; what is empty exists.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from cdc.codec.decode_options import Reading
from cdc.errors import CdcError, Fenced, SinkRejected, SinkUnavailable
from cdc.model.outcome import Advance, Applied
from cdc.model.position import Position, Reach, ViewCheckpoint, distance
from cdc.model.table import Form, Table
from cdc.sink.lane import Entries, Lane, Writer
from cdc.sink.rejection import Rejected, Rejection, Stop

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


class Sink(Protocol):
    """One destination. Every method may raise SinkUnavailable (try again) or SinkRejected (don't).

    A view has one generation that readers see, and at most one beside it: a build that is on its way, or what readers
    saw before. `beside` gives a sink of that one; all methods of it mean the views beside.
    """

    name: str
    form: Form
    whole: bool
    """Whether `promote` can only switch all views of the pipeline at once."""

    def refusals(self, table: Table) -> list[str]:
        """Why no view of it can be made here, a sentence for each column concerned. Pure: asks no server."""

    def prepare(self, table: Table) -> None:
        """Create what holds the view of a table, so that its readers find it, empty; nothing when it is there.

        Raises:
            Misfit: this table can't be held, or can't be gone on with; others can.
        """

    def position(self, table: Table) -> ViewCheckpoint | None:
        """How far the view has got; None when nothing has been applied yet. Needs no Spark."""

    def apply(self, batch: Batch) -> Outcome:
        """Make one batch durable and store its positions. A repeated batch changes nothing.

        A batch of no length (start = until) writes its rows all the same: it repairs single rows.

        Raises:
            Refused, DecodeError, ValueNotRepresentable: a record can't be applied, and the batch's `rejection`
            is to stop; the positions are where it can still be read from.
            Fenced: a stored position is neither the batch's start nor of this writer's own making.
            Rewound: the destination has lost what this writer had stored; read the position again.
        """

    def clear(self, table: Table) -> None:
        """Make the view empty and forget its position, so that it is made again from offset zero."""

    def scan(self, table: Table, spark: SparkSession, ids: Sequence[str] | None = None) -> DataFrame:
        """The whole view: id string, document string (JSON), in any order; a row may come twice while others write.

        With ids only their rows, as far as there are any, each as often as the view holds it.
        """

    def close(self) -> None:
        """Give connections back."""

    def beside(self, names: Mapping[str, str]) -> Sink:
        """The same destination with the generations of these names instead of the live ones; by table."""

    def require_room(self, tables: Sequence[Table]) -> None:
        """Raise SinkRejected when a second generation of these views has no room, or no place of its own."""

    def promote(self, tables: Sequence[Table], names: Mapping[str, str]) -> Mapping[str, str]:
        """Show readers the generations of these names, each view in one step, and name what they saw until then.

        Waits until none is behind what it replaces, so that no view's position goes back. What is promoted already
        stays, so this may be repeated.

        Raises:
            SinkUnavailable: one is behind for 30 s; somebody has to apply to it.
        """

    def generations(self, table: Table) -> list[str]:
        """The names of all that exist, the live one first."""

    def sweep(self, tables: Sequence[Table], keep: Mapping[str, str]) -> None:
        """Remove every generation but the live ones, those of `keep`, by table, and what these need."""


@runtime_checkable
class Overseen(Protocol):
    """A sink that can be asked about many views at once."""

    def positions(self, tables: Sequence[Table]) -> Mapping[str, ViewCheckpoint | None]:
        """`Sink.position` of each, by table name."""


def positions(sink: Sink, tables: Sequence[Table]) -> Mapping[str, ViewCheckpoint | None]:
    """How far each view has got, by table name; in as few requests as the sink can do with."""
    if isinstance(sink, Overseen):
        return sink.positions(tables)
    return {table.qualified: sink.position(table) for table in tables}


@runtime_checkable
class Grouped(Protocol):
    """A sink that can read many small views in one job."""

    def scan_group(self, tables: Sequence[Table], spark: SparkSession) -> DataFrame:
        """`Sink.scan` of each: table string (its name), id string, document string.

        A view that can't be read so, or not to its end, has a row without an id, whatever else there is of it: it has
        to be scanned by itself, which tells why. That spoils none of the others.
        """


@runtime_checkable
class Fitted(Protocol):
    """A sink that can tell whether a view was made for its table as it is now, without changing anything."""

    def require_fit(self, table: Table) -> None:
        """Raise Misfit as `prepare` would, of a view that is there."""


@runtime_checkable
class Archive(Protocol):
    """A sink that keeps every change, beside its views."""

    def archived(self, table: Table) -> ViewCheckpoint | None:
        """How far its log of a table's changes has got; None when there is none yet."""


SWITCH_S = 30.0
POLL_S = 0.02


def level(live: Sink, beside: Sink, tables: Sequence[Table]) -> bool:
    """Whether no view beside is behind the one that readers see."""
    old, new = positions(live, tables), positions(beside, tables)
    pairs = [(stored, new[name]) for name, stored in old.items() if stored]
    return all(other and not behind(other, stored) for stored, other in pairs)


def behind(new: ViewCheckpoint, old: ViewCheckpoint) -> bool:
    """Whether readers who are shown `new` instead of `old` would go back in time."""
    there = distance(new, old.position, old.floor)
    return there.comparable and not there.reached


def wait_for(level: Callable[[], bool], sink: str) -> None:
    """Raise SinkUnavailable if it isn't so within 30 s."""
    deadline = time.monotonic() + SWITCH_S
    while not level():
        if time.monotonic() > deadline:
            raise SinkUnavailable(
                f"The other generation in {sink} has been behind the one that readers see for {SWITCH_S:.0f} s.",
                hint="readers see what they saw; is `cdc run` at work? then the same command goes on",
                sink=sink,
            )
        time.sleep(POLL_S)


def require(needed: int, free: int, where: str, sink: str) -> None:
    """Refuse a second generation that leaves no reserve. Sizes in bytes."""
    if needed * ROOM > free:
        raise SinkRejected(
            f"A second generation of {needed >> 20} MiB needs {int(needed * ROOM) >> 20} MiB free in {where}; there are"
            f" {free >> 20} MiB.",
            hint=f"make room, or build one view at a time: cdc -p FILE rebuild {sink} --table TABLE",
            sink=sink,
        )


ROOM = 1.2
"""Free space for a second generation, of what the first takes."""


class Rewound(SinkUnavailable):
    """The destination stands before the position this writer had stored there: it lost its last writes."""


class Replaced(Fenced):
    """What lies beside the live view is another generation by now: readers see this one, or a newer build began."""

    def __init__(self, table: str, generation: str, sink: str) -> None:
        super().__init__(
            f"Generation {generation} of {table} isn't beside the live one in {sink} any more.",
            hint="nothing to do: cdc -p FILE generations lists what there is",
            sink=sink,
        )


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
    """A view can't hold the table as it is now, the others can: this one waits for a person.

    Said as a whole when it isn't that it was made for other columns, and can't be changed to hold those of today.
    """

    def __init__(self, table: Table, sink: str, message: str | None = None, hint: str | None = None) -> None:
        super().__init__(
            message
            or f"The view of {table.qualified} in {sink} was made for columns of other types than the table has now.",
            hint=hint or f"cdc -p FILE rebuild {sink} --table {table.qualified}",
            sink=sink,
        )


@dataclass(frozen=True)
class Batch:
    """The changes between two positions, for all tables at once.

    records: as Spark's Kafka source has them, each of its partitions in one task and in the order of offsets; lazy.
    writer names this run, for the fence; only: ids by topic, where no other rows are looked at.
    """

    writer: str
    advances: tuple[Advance, ...]
    records: DataFrame
    reading: Reading
    rejection: Rejection = field(default_factory=Stop)
    entries: Entries = field(default_factory=dict)
    only: Mapping[str, frozenset[str]] = field(default_factory=dict)

    def lane(self, writer: Writer, advances: Sequence[Advance] | None = None) -> Lane:
        """The way of these steps, or all, through a destination's writer."""
        steps = self.advances if advances is None else tuple(advances)
        return Lane(steps, self.reading, writer, self.rejection, self.entries, self.only)


@dataclass(frozen=True)
class Outcome:
    """What became of a batch: numbers by table name, rejected records, and rows that are cured of older ones.

    told: what executors tell a sink's driver, by table name.
    """

    applied: dict[str, Applied] = field(default_factory=dict)
    rejected: list[Rejected] = field(default_factory=list)
    cured: dict[Key, int] = field(default_factory=dict)
    """Below which offset the row's entries are void, since all its values are known."""
    told: dict[str, list[str]] = field(default_factory=dict)

    @property
    def complete(self) -> bool:
        """Whether it names all records that were rejected."""
        return sum(applied.quarantined for applied in self.applied.values()) <= len(self.rejected)


def check(advance: Advance, stored: ViewCheckpoint | None, writer: str) -> bool:
    """Compare a stored position with the one a batch starts from; False when the batch is already applied.

    Raises:
        Fenced, Rewound: see `Sink.apply`.
    """
    found = stored.position if stored else None
    if found == advance.start:
        return True
    if stored and stored.writer == writer and found == advance.end:
        return False
    raise mismatch(advance.table, advance.start, found, ours=stored is None or stored.writer == writer)


def mismatch(table: Table, expected: Position | None, found: Position | None, *, ours: bool) -> CdcError:
    """The error for a position that isn't where this writer left it."""
    lost = found is None or (expected is not None and distance(found, expected).reach is Reach.BEHIND)
    if ours and lost:
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


def stored_after(
    advance: Advance, before: ViewCheckpoint | None, applied: Applied, writer: str, generation: str | None = None
) -> ViewCheckpoint:
    """What to store once `advance` is applied."""
    base = before or ViewCheckpoint(advance.end)
    return replace(
        base,
        position=advance.end,
        writer=writer,
        rows=base.rows + applied.rows,
        changed_at=round(time.time(), 3),
        floor=advance.floor,
        generation=base.generation if generation is None else generation,
    )
