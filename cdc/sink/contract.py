"""The contract between the apply loop and a destination.

One contract suite runs these laws over every sink:

- Applying a batch twice equals applying it once.
- An older position never wins.
- Deleting an absent row succeeds.
- A batch that is refused in part raises an error that names places, never values.
- The position never runs ahead of the data.
- A replay from offset zero equals the model.
- A crash between the write and its answer changes nothing.
- A second writer is fenced.
- A value that a change doesn't carry stays what it was.
- A position that can't be read raises an error; it is never taken for none.
- An empty view exists.
- A removed view leaves nothing behind.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from cdc.codec.decode_options import DecodeOptions
from cdc.errors import SinkRejected, SinkUnavailable
from cdc.model.finding import Finding
from cdc.model.outcome import Advance, Applied
from cdc.model.position import ViewCheckpoint
from cdc.model.table import Table
from cdc.sink.lane import BatchRecords, Entries, Lane, Writer
from cdc.sink.rejection import Rejected, Rejection, Stop

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession


class Applier(Protocol):
    """What changes are applied to: a sink, or the state that documents are made from. What holds the rows
    of one table is called its view here, whoever reads it.

    Threads: an instance needs no locks. In `cdc run` the thread that owns the stream makes every call.
    Other verbs use an instance of their own in their main thread, as a rule in another process and
    while `cdc run` writes. So whatever a method compares and then changes, it has to compare and
    change in one step at the destination.

    Errors: every method but `refusals` and `close` may raise SinkUnavailable (trying again can help:
    the caller pauses and repeats the call) or SinkRejected (it can't help: the caller stops). So
    every method may be repeated. Fenced, SchemaMismatch, PositionLost and RowsRejected are raised
    where a method names them. `cdc.sink.remedy` decides what is done about each.
    """

    name: str
    """Name of the sink in the pipeline file; used in messages, logs and metrics."""

    def refusals(self, table: Table) -> list[str]:
        """Say why no view of a table can be made here: a sentence for each column concerned; empty
        when it can.

        Called by `cdc plan`, `register`, `rebuild` and `run` once per table, before anything is made. The
        names are those that the view would have.
        Pure: asks no server, raises nothing. Any thread.
        """

    def prepare(self, table: Table) -> None:
        """Create what holds the view of a table, empty, so that readers find it; does nothing when
        it is there.

        Called for each table whenever a stream loads its plan (at its start and at each restart),
        before the table's first `apply`; by `cdc rebuild` for the new generation; and every few
        seconds while a table waits for a person, to see whether it fits by now.

        Raises:
            SchemaMismatch: this table can't be held, or can't be continued; others can.
        """

    def position(self, table: Table) -> ViewCheckpoint | None:
        """Read the view's checkpoint; None when nothing has been applied yet. Needs no Spark.

        Called for each table whenever a stream loads its plan; by `status`, `rollback`, `rebuild`,
        `audit`; and by `cdc.client` many times a second while an application waits for its own
        write. Cheap: one read.
        """

    def apply(self, batch: Batch) -> Outcome:
        """Make one batch durable and store its positions. A repeated batch changes nothing.

        Called once per batch, one batch at a time, several a second under load; repeated with the
        same batch after SinkUnavailable. Runs on the driver; rows travel through a `Writer` on the
        executors. A batch of no length (start = end) writes its rows all the same: it repairs
        single rows, and moves no position.

        Raises:
            RowsRejected, DecodeError, ValueNotRepresentable: a record can't be applied, and the
                batch's `rejection`
                is to stop. The positions are where that record can still be read from.
            Fenced: a stored position is neither the batch's start nor of this writer's own making.
            PositionLost: the destination has lost what this writer had stored; read the position
                again.
        """

    def clear(self, table: Table) -> None:
        """Make the view empty and forget its position, so that it is made again from offset zero.

        Called when the plan is loaded and the stored position can't be continued: after a TRUNCATE,
        after the topic was recreated, or when a standby starts again. `prepare` follows.
        """

    def remains(self, tables: Sequence[Table]) -> list[str]:
        """List what exists of these views, in any generation, and of the pipeline itself: one line
        for each index, folder or group of keys. Changes nothing, needs no Spark.
        """

    def remove(self, tables: Sequence[Table]) -> None:
        """Remove all that `remains` lists, once nobody writes any more."""

    def close(self) -> None:
        """Give connections back; raises nothing."""


@runtime_checkable
class Sink(Applier, Protocol):
    """One destination that people read: all views of a pipeline in one index, cache or warehouse.

    A view has one generation that readers see, and at most one beside it: a build in progress, or
    the standby. `for_generation` gives a sink for that one; all its methods mean those views.
    """

    promotes_all_tables: bool
    """Whether `promote` can only switch all views of the pipeline at once. Constant."""

    def scan(
        self, table: Table, spark: SparkSession, ids: Sequence[str] | None = None
    ) -> DataFrame:
        """Read the view: id string, document string (JSON), in any order; a row may come twice
        while others write. With ids only their rows, each as often as the view holds it.

        The frame is lazy, and is evaluated before the next scan of the same view.
        """

    def for_generation(self, names: Mapping[str, str]) -> Sink:
        """Build a sink of the same destination for the generations of these names; by table. Asks no
        server.
        """

    def check_capacity(self, tables: Sequence[Table]) -> None:
        """Check that a second generation of these views has room, and its own place. Best effort:
        others may take the room meanwhile.

        Raises:
            SinkRejected: it has not.
        """

    def promote(self, tables: Sequence[Table], names: Mapping[str, str]) -> Mapping[str, str]:
        """Show readers the generations of these names, each view in one step; returns the names
        that they saw before.

        Called by `rebuild` and `rollback`, while `cdc run` applies to both generations. Waits until
        no view is behind the one that it replaces, so that no view's position goes back. A view
        that is promoted already stays, so the call may be repeated; only views that this call
        switches are in the result.

        Raises:
            SinkUnavailable: a view is behind for 30 s; a writer has to apply to it.
        """

    def generations(self, table: Table) -> list[str]:
        """List the names of all generations that exist, the live one first."""

    def drop_unreferenced(self, tables: Sequence[Table], keep: Mapping[str, str]) -> None:
        """Remove every generation but the live ones, those in `keep` (by table), and what they need."""


# What a destination may offer as well. A caller asks with `isinstance` whether a sink has it.


@runtime_checkable
class PositionReader(Protocol):
    """A sink that can be asked about many views at once; `positions` falls back to one request a view."""

    def positions(self, tables: Sequence[Table]) -> Mapping[str, ViewCheckpoint | None]:
        """Read `Sink.position` of each table, by table name."""


@runtime_checkable
class GroupScanner(Protocol):
    """A sink that can read many small views in one job. Used by `verify`."""

    def scan_group(self, tables: Sequence[Table], spark: SparkSession) -> DataFrame:
        """Read `Sink.scan` of each table: table string (its name), id string, document string.

        A view that can't be read this way, or not to its end, has a row without an id, whatever
        else there is of it. The caller scans it by itself then, which raises the reason. That
        spoils none of the others.
        """


ReadRows = Callable[[Sequence[str]], "Iterator[pa.RecordBatch]"]
"""Reads the rows with these ids, as batches of id string, document string. A row comes as often as the
view holds it. Runs on executors, so it is pickled.
"""


ListIds = Callable[[str | None], tuple[Sequence[str], str | None]]
"""Lists ids of a view from a cursor on, some thousand at a time, and returns where the next call goes on. None: at
the beginning, and after the end. One listing, however long it takes, has every row that was there all the
time and hasn't changed; some come twice. Runs on executors, so it is pickled.
"""


@runtime_checkable
class RowReader(Protocol):
    """A sink whose rows executors can read by id without a frame. `cdc run` compares rows with it."""

    def row_reader(self, table: Table) -> ReadRows:
        """Return a function that reads rows of the view as it is now."""

    def id_lister(self, table: Table) -> ListIds:
        """Return a function that lists the ids of all rows of the view."""


@runtime_checkable
class FitChecker(Protocol):
    """A sink that can say whether a view was made for its table as it is now, and as the file asks for it."""

    def require_fit(self, table: Table) -> None:
        """Raise SchemaMismatch for a view that is there and was made with something else. Changes nothing."""

    def rehearse(self, table: Table) -> list[str]:
        """Say what `prepare` would change of a view that is there, in words. Asks the server by something
        that nobody reads, and that it removes again.

        Raises:
            SchemaMismatch: as `require_fit`, or the server can't make the view.
        """


@runtime_checkable
class Examinable(Protocol):
    """A sink that can say whether its server is fit for the pipeline: version, room, settings."""

    def examine(self, tables: Sequence[Table]) -> list[Finding]:
        """Read facts of the server and judge them; changes nothing, needs no Spark."""


Hold = Callable[[], None]
Fault = Callable[[Hold], None]
"""Breaks something, calls `hold`, and mends it when `hold` returns. A fault that is over at once doesn't call
`hold`.
"""


@runtime_checkable
class Breakable(Protocol):
    """A sink whose server `cdc chaos` can break."""

    def faults(self, tables: Sequence[Table]) -> Mapping[str, Fault]:
        """Return faults by name. One that can't be begun raises a CdcError without a call of `hold`."""


@runtime_checkable
class Expiring(Protocol):
    """A sink whose rows may expire."""

    def lifetime_s(self, table: Table) -> float | None:
        """Return how long a row stays after its last change was committed; None: for ever. Pure."""


@runtime_checkable
class Archive(Protocol):
    """A sink that keeps every change, beside its views."""

    def archived(self, table: Table) -> ViewCheckpoint | None:
        """Read how far its log of a table's changes has got; None when there is none yet."""


def positions(applier: Applier, tables: Sequence[Table]) -> Mapping[str, ViewCheckpoint | None]:
    """Read the checkpoint of each view, by table name, in as few requests as possible."""
    if isinstance(applier, PositionReader):
        return applier.positions(tables)
    return {table.qualified: applier.position(table) for table in tables}


class PositionLost(SinkUnavailable):
    """The view stands before the position that this writer had stored: it lost its last writes."""


Key = tuple[str, str]
"""Topic and row id."""


class RowsRejected(SinkRejected):
    """Single rows that a destination never takes, however often they are sent; other rows may have
    been written.

    rows: the reason by topic and row id.
    """

    def __init__(self, rows: Mapping[Key, str], sink: str) -> None:
        (topic, key), reason = next(iter(rows.items()))
        super().__init__(
            f"{sink} refuses {len(rows)} rows; the first: {topic}, id {key}: {reason}.",
            hint="repair the row at its source, or what refuses it, then start `cdc run` again",
            sink=sink,
        )
        self.rows = dict(rows)


class SchemaMismatch(SinkRejected):
    """A view can't hold the table as it is now; other views can. This table waits until a person
    acts.

    Without a message: the view was made for other columns, and can't be changed to hold the
    current ones. waits: whether the table waits; False if the view goes on as it was made.
    """

    def __init__(
        self,
        table: Table,
        sink: str,
        message: str | None = None,
        hint: str | None = None,
        *,
        waits: bool = True,
    ) -> None:
        super().__init__(
            message
            or f"The view of {table.qualified} in {sink} was made for columns of other types than the table has now.",
            hint=hint or f"cdc -p FILE rebuild {sink} --table {table.qualified}",
            sink=sink,
            table=table.qualified,
        )
        self.waits = waits


def require_known_columns(table: Table, sink: str) -> None:
    """Raise SchemaMismatch if the sink's list names a column that the table hasn't, or leaves out one of
    its key: a column was renamed or dropped, or the list has a mistake.
    """
    if sink in table.misnamed:
        raise SchemaMismatch(table, sink, *table.misnamed[sink])


def require_same_shape(table: Table, sink: str, stored: ViewCheckpoint | None) -> None:
    """Raise SchemaMismatch for a view of other columns, names, rows or form than the file gives the sink now: what
    it has of them would stay, and what it lacks would come row by row. Raises it as `require_known_columns` does,
    too.
    """
    require_known_columns(table, sink)
    if stored is not None and stored.shape != table.shape:
        raise SchemaMismatch(
            table,
            sink,
            f"The view of {table.qualified} in {sink} was made with other columns, names, rows or form than the file"
            " gives it now.",
        )


@dataclass(frozen=True)
class Batch:
    """The changes between two positions, for all tables at once.

    writer      name of this run, for fencing
    advances    a step of each table: from which position to which
    records     the records that the steps lack; nobody has read them yet
    reading     how records are decoded: placeholder, floors
    rejection   what becomes of records that can't be applied
    entries     what the sink has in quarantine
    only        by topic, the ids of rows that the batch is about, where it is about some only
    """

    writer: str
    advances: tuple[Advance, ...]
    records: BatchRecords
    reading: DecodeOptions
    rejection: Rejection = field(default_factory=Stop)
    entries: Entries = field(default_factory=dict)
    only: Mapping[str, frozenset[str]] = field(default_factory=dict)

    def lane(self, writer: Writer, advances: Sequence[Advance] | None = None) -> Lane:
        """Build the lane of these steps, or of all, through a destination's writer."""
        steps = self.advances if advances is None else tuple(advances)
        return Lane(steps, self.reading, writer, self.rejection, self.entries, self.only)


@dataclass(frozen=True)
class Outcome:
    """What became of a batch: counts by table name, rejected records, rows that are cured."""

    applied: dict[str, Applied] = field(default_factory=dict)
    rejected: list[Rejected] = field(default_factory=list)
    cured: dict[Key, int] = field(default_factory=dict)
    """By topic and row id: the offset below which the row's entries in quarantine are void."""
    writer_results: dict[str, list[str]] = field(default_factory=dict)
    """By table name: what `Writer.finish` has handed over on each executor.

    For the sink alone; empty for callers.
    """

    @property
    def complete(self) -> bool:
        """Whether `rejected` names all records that were rejected."""
        return sum(applied.quarantined for applied in self.applied.values()) <= len(self.rejected)
