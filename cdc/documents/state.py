"""The state that documents are made from, as executors and the engine use it."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol

from cdc.documents.plan import StatePlan
from cdc.documents.rows import Entries, StoredRow
from cdc.errors import SinkRejected
from cdc.model.finding import Finding
from cdc.model.position import ViewCheckpoint
from cdc.model.table import RowEstimate
from cdc.sink.contract import Applier

SPAN_PAGE = 2000
"""Places that are read of a part of a list at once: a parent may have millions of children."""
NEVER_DUE: Mapping[str, int] = {}
NOTHING_SENT: Mapping[str, bytes | None] = {}


class StateTooLarge(SinkRejected):
    """The state of documents won't fit into its server, by far."""

    finding_key = "state-too-large"


class Chunk(NamedTuple):
    """Changed rows of a table, whose documents aren't known yet.

    rows  by id: the entries of the row as it was before the chunk
    """

    number: str
    table: str
    rows: Mapping[str, Entries]


class Place(NamedTuple):
    """A row's place in a list: what it is ordered by, and its id."""

    order: str
    id: str

    @property
    def member(self) -> str:
        """The text that the list is ordered by."""
        return f"{self.order} {self.id}"


class Span(NamedTuple):
    """A part of the list of `text`: the places from `low` up to but not including `high`, which are
    compared with the texts `<order> <id>`, without the first ones of them.
    """

    text: str
    low: str
    high: str
    skipped: int = 0


class Pane(NamedTuple):
    """A list or a tally of a pane's rows: of which table, its name such as `l0` or `c0`, the rows' text."""

    table: str
    name: str
    text: str


class LateChange(NamedTuple):
    """A change of a row that came after a pane had closed.

    id    of the row
    pane  the text of what rows of the pane have in common: their group, and the beginning of the pane
    at    Unix seconds at which it was refused
    """

    id: str
    pane: str
    at: float


class SentDigests(NamedTuple):
    """What a view's topic has, of the documents that are asked for.

    number  counts the transactions of such views; see `State.begin_sending`
    by_id   digests of documents, by root id; those that the topic lacks have none
    """

    number: int
    by_id: Mapping[str, bytes]


class Turn(NamedTuple):
    """A round of an engine's work. The state holds the current one, so the engine notices when
    the state has gone back, with its server.

    number  grows with each turn of any run
    """

    owner: str
    number: int

    @property
    def next(self) -> "Turn":
        """The turn after this one."""
        return self._replace(number=self.number + 1)


class StateSizes(NamedTuple):
    """How much a state holds, and how much is to do.

    rows, bytes  by table; bytes count rows and their entries, without indexes and keys
    dirty        by view: documents that are to be sent, of a large fan-out those that remain
    pending      chunks of changed rows whose documents aren't known yet
    used_bytes   memory of the whole server; None where the user may not ask for it
    limit_bytes  of the server's memory; None also where it has no limit
    applied      by table, up to where its records are in the state; None where none is
    late         by view, changes that came after a window had closed; views without any are left out
    late_since   Unix seconds since which they are counted, when the state began
    """

    rows: Mapping[str, int]
    bytes: Mapping[str, int]
    dirty: Mapping[str, int]
    pending: int
    used_bytes: int | None
    limit_bytes: int | None
    applied: Mapping[str, ViewCheckpoint | None]
    late: Mapping[str, int] = {}
    late_since: float | None = None


class State(Protocol):
    """Rows by their id and by what joins compare; what is pending and what is dirty.

    Rows get in through the lane of a `StateSink`, which notes in the same step
    what they make pending and dirty. Any thread may use a state. Every method may raise Failure of
    `cdc.sink.lane`, and may be repeated. One that takes a turn raises as `require_turn` does, and changes
    nothing, unless it is that turn. Times are in microseconds since 1970.
    """

    def take(self, owner: str) -> Turn:
        """Name the run whose tasks may send documents, before any does. Returns its turn, later than any before."""

    def begin_turn(self, turn: Turn) -> None:
        """Go on to this turn, in one step, if it is the turn before."""

    def require_turn(self, turn: Turn) -> None:
        """Raise Failure unless it is this turn: of the kind `fenced` when another run has been named
        since, `rewound` when the state has gone back to before the turn.
        """

    def pending(self) -> Iterable[Chunk]:
        """Read the chunks that haven't been climbed from, in their order."""

    def mark_rows(self, view: str, ids: Collection[str]) -> None:
        """Mark root ids as dirty."""

    def climbed(self, chunk: Chunk, marks: Mapping[str, Collection[str]]) -> None:
        """Mark root ids, by view, as dirty and forget the chunk, in one step; nothing if it is forgotten already."""

    def rows(self, table: str, ids: Collection[str]) -> dict[str, StoredRow]:
        """Read rows by their ids; absent ones are left out."""

    def members(self, table: str, slot: int, texts: Collection[str]) -> dict[str, set[str]]:
        """Read the ids of the rows that have these entries in a slot, by entry."""

    def scan_members(
        self, table: str, slot: int, texts: Collection[str]
    ) -> Iterable[Collection[str]]:
        """Read what `members` reads in pages of some thousands, however many rows have an entry. An
        id may come twice; one that gets or loses the entry meanwhile may come or not.
        """

    def listed(
        self, table: str, number: int, texts: Collection[str], limit: int
    ) -> dict[str, list[str]]:
        """Read the ids of the first rows of a listing's lists, in their order, by text."""

    def ranged(
        self,
        table: str,
        number: int,
        spans: Sequence[Span],
        limit: int,
        *,
        last_first: bool = False,
    ) -> list[list[Place]]:
        """Read the first places of each of these parts of a listing's lists, at most `limit` of
        each, in their order; with `last_first` the last ones, from the last one on.
        """

    def tallied(self, table: str, number: int, texts: Collection[str]) -> dict[str, dict[str, int]]:
        """Read a tally's numbers, by text. `n` counts rows, `c0` counts values of its first column
        that aren't NULL, and `s0` is their sum. Bigints and numerics have `s0:<name>` instead, the
        sum of each amount (`cdc.documents.scalar.amounts`). `c1` is of the second column, and so on.
        What is 0 is left out.
        """

    def dirty(self, view: str, limit: int) -> dict[str, str]:
        """Read ids of root rows whose document may be old, with their marks.

        One half are the longest dirty ones, so that none waits for ever; the other half the newest,
        so that a change isn't delayed by a large fan-out before it.
        """

    def dirty_among(self, view: str, ids: Collection[str]) -> set[str]:
        """Return the root ids whose document may be old."""

    def deleted_keys(self, view: str, ids: Collection[str]) -> dict[str, bytes]:
        """Read the connector's keys of root rows that were deleted, by id."""

    def is_unsent(self, view: str) -> bool:
        """Say whether no mark of a view was forgotten since its root's table had no rows: then all
        of its root rows are dirty. False may be said of one of which nothing was sent, too.
        """

    def digests(self, view: str, ids: Collection[str]) -> SentDigests:
        """Read the digests of these documents, of a view whose changes are sent once each.

        Raises:
            Failure: of the kind `rewound`, if a transaction of such a view was begun and not noted as
                sent: only the topic knows whether it has these documents.
        """

    def begin_sending(self, turn: Turn, number: int) -> None:
        """Note that a transaction begins; raise as `digests` does unless it is still this number. So a task
        that is run twice sends nothing twice.
        """

    def note_digests(self, turn: Turn, view: str, digests: Mapping[str, bytes | None]) -> None:
        """Store what the view's topic has; None: no such document."""

    def forget_digests(self, turn: Turn, view: str) -> None:
        """Take the view's topic for empty."""

    def note_closed(self, turn: Turn, view: str, closed: int) -> None:
        """Note when a window closed whose last document the topic has. No clock of the view begins before it."""

    def late(self, view: str) -> list[LateChange]:
        """Read the latest changes that came after a window had closed, the last one first."""

    def sent(
        self,
        turn: Turn,
        view: str,
        marks: Mapping[str, str],
        due: Mapping[str, int] = NEVER_DUE,
        digests: Mapping[str, bytes | None] = NOTHING_SENT,
        dropped: Collection[Pane] = (),
    ) -> None:
        """Forget that ids are dirty whose mark is still the one that was read. In the same step, remember
        when these documents are due next; those without a time never are. And store the digests of what
        was sent, which ends what `begin_sending` began; and drop panes.
        """

    def times_seen(self) -> Mapping[str, int]:
        """Read the latest time that rows had in the column that is a view's clock, by view. It may be of
        rows that are only about to be applied.
        """

    def clocks(self) -> Mapping[str, int]:
        """Read the clock of each view that has one."""

    def advance(self, turn: Turn, clocks: Mapping[str, int]) -> None:
        """Set clocks forward, by view. None goes back, nor begins before what `note_closed` noted. From
        then on changes to panes that close by then are refused.
        """

    def ripen(self, turn: Turn, view: str, now: int) -> None:
        """Mark as dirty the documents that are due by then."""

    def is_due(self, view: str, now: int) -> bool:
        """Say whether a document is due by then."""

    def mark(self, view: str, keys: Mapping[str, bytes], *, send_again: bool = False) -> None:
        """Mark root ids as dirty, given with the connector's keys, whether there are such rows or
        not. With `send_again` their documents are sent even if the topic has them as they are, unless
        they are final.
        """

    def is_clean(self) -> bool:
        """Say whether nothing is pending and nothing dirty."""

    def sizes(self, tables: Collection[str], views: Collection[str]) -> StateSizes:
        """Read how much there is of these tables, and to do for these views."""

    def note_current(
        self,
        turn: Turn,
        reached: Mapping[str, Mapping[str, ViewCheckpoint | None]],
        clocks: Mapping[str, int],
    ) -> None:
        """Store by view up to where its documents have been sent. Other views' notes stay.

        `clocks`: of the views that have one, the time that its documents are as of

        `reached`: by topic of the view's tables, the position and the floor that its documents are as
        of; and of its own topic an end, such that all before it was made of the state before this
        call.
        """

    def current(self) -> Mapping[str, Mapping[str, ViewCheckpoint]]:
        """Read what `note_current` stored, by view and topic: position and floor."""

    def noted_clocks(self) -> Mapping[str, int]:
        """Read the times that `note_current` stored, by view."""

    def waiting(self) -> Mapping[str, list[str]]:
        """Read which views wait, as last passed to `StateSink.adopt`."""


class StateSink(Applier, Protocol):
    """A state as the destination of a stream.

    plan   which tables the state has, and what it keeps of their rows
    needs  by table, a text that changes with what the rows are stored for: rows that were stored
           for something else are as none
    """

    plan: StatePlan
    needs: Mapping[str, str]

    def adopt(
        self,
        plan: StatePlan,
        needs: Mapping[str, str],
        waiting: Mapping[str, list[str]],
    ) -> None:
        """Take a plan for what the file's views need now, before rows are undone or applied for it.

        `waiting`: views that the plan lacks, see `cdc.documents.tables.Waiting`. Documents count as
        current no more whose view isn't in the plan, or whose tables' rows are stored for something
        else: some may be of rows that the state never meets again. May raise Failure of
        `cdc.sink.lane`.
        """

    def require_room(
        self, plan: StatePlan, again: Collection[str], estimates: Mapping[str, RowEstimate]
    ) -> Finding | None:
        """Compare what the state of a plan will take with the memory of its server, before anything is
        changed. Called where the rows of some tables, `again`, are to be read from the topics' start.

        `estimates`: of those tables that Postgres knows; others count for nothing. Returns a warning
        where the rows may not fit. May raise Failure of `cdc.sink.lane`.

        Raises:
            StateTooLarge: the state would be larger than all of the memory, also if the estimate were
                much too high.
        """

    def open_state(self) -> Callable[[], State]:
        """Return what opens the state of the plan in any process; can be pickled."""


def scan_spans(
    state: State, table: str, number: int, spans: Sequence[Span]
) -> Iterator[tuple[int, list[Place]]]:
    """Read all places of parts of lists, by page: the number of a part, and places of it in their order."""
    remaining = dict(enumerate(spans))
    while remaining:
        pages = state.ranged(table, number, list(remaining.values()), SPAN_PAGE)
        for place, page in zip(list(remaining), pages, strict=True):
            if page:
                yield place, page
            if len(page) < SPAN_PAGE:
                del remaining[place]
            else:
                # A text follows another directly with a NUL after it.
                remaining[place] = remaining[place]._replace(low=f"{page[-1].member}\0", skipped=0)
