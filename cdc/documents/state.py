"""The state that documents are made from, in a database of Redis or Valkey: rows by their id and by what
joins compare; what is pending and what is dirty.

Rows get in through the lane of a `StateSink`, whose script notes in the same step what they make pending
and dirty. All keys have the prefix of a shard: the pipeline's prefix and a hash tag, by which a cluster
keeps them in one slot. A script also reaches keys that aren't among its KEYS: they are in that slot, too.

<prefix>:_cdc:<table>                  hash    the table's position, as in the cache
<prefix>:<table>:<id>                  string  a row, see `cdc.documents.rows`
<prefix>:_x:<table>:<slot> GS <text>   set     ids of the rows with that entry
<prefix>:_x:<table>:l<n> GS <text>     zset    a list: <order> <id> of each row, all with score 0
<prefix>:_x:<table>:c<n> GS <text>     hash    a tally: see `State.tallied`
<prefix>:_pending                      hash    number of a chunk: table, [id, old entries, ...]
<prefix>:_dirty:<view>                 zset    id of a root row: number of what made it dirty
<prefix>:_due:<view>                   zset    id of a root row: when its document is due, in us
<prefix>:_sent:<view>                  hash    id of a root row: digest of the document in the topic
<prefix>:_clocks                       hash    by view, the time of its clock, in us
<prefix>:_seen                         hash    by view, the latest time in the column that is its clock
<prefix>:_closed                       hash    by view, when the last window closed whose final
                                               document was found in its topic, in us
<prefix>:_late                         hash    by view, how many changes came after a window had closed
<prefix>:_late:<view>                  list    the latest of them: a row's id, a pane, a time
<prefix>:_gone:<view>                  hash    id of a deleted root row: the connector's key
<prefix>:_unsent                       set     keys of the dirty sets of which nothing was taken, since their root
                                               had no rows
<prefix>:_number                       string  counts chunks and marks
<prefix>:_documents                    hash    owner, turn, views, views that wait; when it began; sending: twice the
                                               transactions of digests, odd while one is open; and notes
<prefix>:_needs                        hash    by table, what its rows are stored for

A note says what documents are current in. Its field is `<view> <topic>`, its value the JSON of topic id,
offsets and floor; or `<view> now()`, its value the time of the view's clock. No name of a view has a space,
nor have the hash's other fields.
"""

import json
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any, NamedTuple, Protocol, TypeVar

import msgspec
import redis

from cdc.documents import scripts
from cdc.documents.plan import StatePlan
from cdc.documents.rows import (
    GROUP,
    LISTING,
    TALLY,
    Entries,
    StoredRow,
    decode_entries,
    decode_row,
    escape,
    unescape,
)
from cdc.errors import SinkRejected
from cdc.model.address import address
from cdc.model.position import Position, ViewCheckpoint
from cdc.redis.checkpoint import checkpoint_of
from cdc.redis.server import Failure, client, failure, first_word, position_key, view_key
from cdc.sink import lane
from cdc.sink.contract import Applier

SPAN_PAGE = 2000
"""Places that are read of a part of a list at once: a parent may have millions of children."""
PAGE = 2000
"""Keys of one request."""
SCANNED_SETS = 500
"""Index sets that are scanned at once. The server answers with small ones as a whole."""
CLOCK = "now()"
"""No name of a topic has parentheses."""
OF_VIEW = ("dirty", "gone", "due", "sent", "late")
BY_VIEW = ("clocks", "closed", "late", "seen")
"""What there is of a view: keys, and fields of hashes."""
REFUSALS = {
    "fenced": ("fenced", "Another run sends the documents of this pipeline now."),
    "rewound": ("rewound", "The state of documents has lost its last writes."),
    "unsettled": ("rewound", "A transaction of documents was begun, and not noted as sent."),
}
"""The kind and the message of a failure, by what a script answers."""
NOTHING: Mapping[str, Any] = {}
Item = TypeVar("Item")
_unpack = msgspec.msgpack.Decoder(tuple[str, list[str]]).decode
_unpack_late = msgspec.msgpack.Decoder(tuple[str, str, str]).decode


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
    """A part of the list of `text`, or all of it: the places from `low` up to but not including `high`,
    which are compared with the texts `<order> <id>`, without the first ones of them.
    """

    text: str
    low: str = ""
    high: str = "\x7f"
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


def shard_prefix(prefix: str) -> str:
    """Begin the names of the keys of a pipeline's only shard: the `<prefix>` above, and of the functions
    below. Pipelines that share a cluster have slots of their own.
    """
    return f"{prefix}:{{{prefix}.0}}"


def state_key(prefix: str, name: str, view: str = "") -> str:
    """Name what there is once, or once for each view."""
    return f"{prefix}:_{name}:{view}" if view else f"{prefix}:_{name}"


def index_prefix(prefix: str, table: str) -> str:
    """Begin the keys of a table's indexes; an entry follows."""
    return view_key(f"{prefix}:_x", table)


def state_failure(error: redis.exceptions.RedisError, url: str, subject: str) -> Failure:
    """Classify an error of the state's server, as `failure` does but for a lack of memory: a cache may
    soon have room again, and is waited for; a state only grows, so one that doesn't fit ends its stream.
    """
    if first_word(error) != "OOM":
        return failure(error, url, subject)
    used = ""
    with suppress(redis.exceptions.RedisError):
        memory = client(url).info("memory")
        figures = f"{int(memory['used_memory']):,} of {int(memory['maxmemory']):,} bytes"
        used = f": {figures} (maxmemory) are used"
    return Failure(
        "rejected", f"The server at {address(url)} has no room for the state of documents{used}."
    )


@dataclass(frozen=True)
class State:
    """The state under a prefix of a database. Can be pickled; connects where it is used. Any thread may use it.

    Every method may raise Failure of `cdc.sink.lane`, and may be repeated. One that takes a turn raises
    as `require_turn` does, and changes nothing, unless it is that turn. Times are in microseconds since
    1970.
    """

    url: str
    prefix: str
    views: tuple[str, ...] = ()
    """Names of the views whose documents are made."""

    # Rows and what is found by their values: reads that want no turn.

    def rows(self, table: str, ids: Collection[str]) -> dict[str, StoredRow]:
        """Read rows by their ids; absent ones are left out."""
        begin = view_key(self.prefix, table)
        stored = self._values(
            ids, lambda server, page: server.mget([begin + row_id for row_id in page])
        )
        return {row_id: decode_row(value) for row_id, value in stored.items()}

    def members(self, table: str, slot: int, texts: Collection[str]) -> dict[str, set[str]]:
        """Read the ids of the rows that have these entries in a slot, by entry."""
        sets = self._by_text(table, slot, texts, "smembers")
        return {text: {row_id.decode() for row_id in ids} for text, ids in sets.items()}

    def scan_members(
        self, table: str, slot: int, texts: Collection[str]
    ) -> Iterable[Collection[str]]:
        """Read what `members` reads in pages of some thousands, however many rows have an entry. An
        id may come twice; one that gets or loses the entry meanwhile may come or not.
        """
        remaining = iter(texts)
        # The sets of a page of texts are scanned side by side, with an SSCAN each in a round trip.
        while page := list(islice(remaining, SCANNED_SETS)):
            cursors = dict.fromkeys((self._index_key(table, slot, text) for text in page), 0)
            while cursors:
                with self._server() as server:
                    pipeline = server.pipeline(transaction=False)
                    for key, cursor in cursors.items():
                        pipeline.sscan(key, cursor, count=max(10, PAGE // len(cursors)))
                    answers = pipeline.execute()
                cursors = {
                    key: cursor for key, (cursor, _) in zip(cursors, answers, strict=True) if cursor
                }
                yield {row_id.decode() for _, members in answers for row_id in members}

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

        def request(pipeline: Any, span: Span) -> None:
            key = self._index_key(table, f"{LISTING}{number}", span.text)
            low = f"[{span.low}"
            high = f"({span.high}"
            if last_first:
                pipeline.zrevrangebylex(key, high, low, span.skipped, limit)
            else:
                pipeline.zrangebylex(key, low, high, span.skipped, limit)

        # The order has no space; an id may have.
        return [
            [Place._make(member.decode().split(" ", 1)) for member in members]
            for _, members in self._each(spans, request)
        ]

    def tallied(self, table: str, number: int, texts: Collection[str]) -> dict[str, dict[str, int]]:
        """Read a tally's numbers, by text. `n` counts rows, `c0` counts values of its first column
        that aren't NULL, and `s0` is their sum. Bigints and numerics have `s0:<name>` instead, the
        sum of each amount (`cdc.scalar.amounts`). `c1` is of the second column, and so on.
        What is 0 is left out.
        """
        hashes = self._by_text(table, f"{TALLY}{number}", texts, "hgetall")
        return {
            text: {field.decode(): int(value) for field, value in numbers.items()}
            for text, numbers in hashes.items()
        }

    def _by_text(
        self, table: str, slot: int | str, texts: Collection[str], command: str
    ) -> dict[str, Any]:
        """Read what there is of each text, by this command; nothing is left out."""

        def request(pipeline: Any, text: str) -> None:
            getattr(pipeline, command)(self._index_key(table, slot, text))

        return {text: answer for text, answer in self._each(texts, request) if answer}

    def _each(
        self, items: Iterable[Item], request: Callable[[Any, Item], object]
    ) -> Iterator[tuple[Item, Any]]:
        """Ask for each item, a page in a round trip; yields it with its answer."""
        for page in pages(items):
            with self._server() as server:
                pipeline = server.pipeline(transaction=False)
                for item in page:
                    request(pipeline, item)
                answers = pipeline.execute()
            yield from zip(page, answers, strict=True)

    def _values(
        self, ids: Iterable[str], read: Callable[[Any, list[str]], Sequence[Any]]
    ) -> dict[str, Any]:
        """Read the values of ids that there are, a page with one command."""
        values: dict[str, Any] = {}
        for page in pages(ids):
            with self._server() as server:
                answers = read(server, page)
            pairs = zip(page, answers, strict=True)
            values |= {row_id: value for row_id, value in pairs if value is not None}
        return values

    def _fields(self, name: str, view: str, ids: Iterable[str]) -> dict[str, bytes]:
        """Read the fields of a view's hash that there are."""
        key = self._key(name, view)
        return self._values(ids, lambda server, page: server.hmget(key, page))

    # Turns, and what is to be done in one.

    def take(self, owner: str) -> Turn:
        """Name the run whose tasks may send documents, before any does. Returns its turn, later than any before."""
        return Turn(owner, self._call(scripts.TAKE_TURN, [self._key("documents")], [owner]))

    def begin_turn(self, turn: Turn) -> None:
        """Go on to this turn, in one step, if it is the turn before."""
        former = turn._replace(number=turn.number - 1)
        self._in_turn(former, scripts.WHILE_TURN, [], ["turn", turn.number])

    def require_turn(self, turn: Turn) -> None:
        """Raise Failure unless it is this turn: of the kind `fenced` when another run has been named
        since, `rewound` when the state has gone back to before the turn.
        """
        self._in_turn(turn, scripts.WHILE_TURN, [], [])

    def pending(self) -> Iterable[Chunk]:
        """Read the chunks that haven't been climbed from, in their order."""
        with self._server() as server:
            numbers = server.hkeys(self._key("pending"))
        for number in sorted(map(bytes.decode, numbers), key=int):
            with self._server() as server:
                packed = server.hget(self._key("pending"), number)
            if packed is not None:
                table, flat = _unpack(packed)
                entries = (decode_entries(head) for head in flat[1::2])
                yield Chunk(number, table, dict(zip(flat[::2], entries, strict=True)))

    def mark_rows(self, view: str, ids: Collection[str]) -> None:
        for page in pages(ids):
            self._call(scripts.MARK_ROWS, [self._key("dirty", view), self._key("number")], page)

    def climbed(self, chunk: Chunk, marks: Mapping[str, Collection[str]]) -> None:
        """Mark root ids, by view, as dirty and forget the chunk, in one step; nothing if it is forgotten already."""
        flat = [
            part
            for view, ids in marks.items()
            for row_id in ids
            for part in (self._key("dirty", view), row_id)
        ]
        self._call(
            scripts.CLIMBED, [self._key("pending"), self._key("number")], [chunk.number, *flat]
        )

    def dirty(self, view: str, limit: int) -> dict[str, str]:
        """Read ids of root rows whose document may be old, with their marks.

        One half are the longest dirty ones, so that none waits for ever; the other half the newest,
        so that a change isn't delayed by a large fan-out before it.
        """
        key = self._key("dirty", view)
        newest = limit // 2
        with self._server() as server:
            pipeline = server.pipeline(transaction=False)
            pipeline.zrange(key, 0, limit - newest - 1, withscores=True)
            # An end of -1 would select the whole set.
            if newest:
                pipeline.zrange(key, 0, newest - 1, desc=True, withscores=True)
            pairs = chain.from_iterable(pipeline.execute())
        return {row_id.decode(): f"{mark:.0f}" for row_id, mark in pairs}

    def dirty_among(self, view: str, ids: Collection[str]) -> set[str]:
        key = self._key("dirty", view)
        return set(self._values(ids, lambda server, page: server.zmscore(key, page)))

    def deleted_keys(self, view: str, ids: Collection[str]) -> dict[str, bytes]:
        """Read the connector's keys of root rows that were deleted, by id."""
        return {row_id: key for row_id, key in self._fields("gone", view, ids).items() if key}

    def is_unsent(self, view: str) -> bool:
        """Say whether no mark of a view was forgotten since its root's table had no rows: then all
        of its root rows are dirty. False may be said of one of which nothing was sent, too.
        """
        with self._server() as server:
            return bool(server.sismember(self._key("unsent"), self._key("dirty", view)))

    def digests(self, view: str, ids: Collection[str]) -> SentDigests:
        """Read the digests of these documents, of a view whose changes are sent once each.

        Raises:
            Failure: of the kind `rewound`, if a transaction of such a view was begun and not noted as
                sent: only the topic knows whether it has these documents.
        """
        with self._server() as server:
            number = int(server.hget(self._key("documents"), "sending") or 0)
        if number % 2:
            raise lane.Failure(*REFUSALS["unsettled"])
        return SentDigests(number, self._fields("sent", view, ids))

    def begin_sending(self, turn: Turn, number: int) -> None:
        """Note that a transaction begins; raise as `digests` does unless it is still this number. So a task
        that is run twice sends nothing twice.
        """
        self._in_turn(turn, scripts.BEGIN_SENDING, [], [number])

    def note_digests(self, turn: Turn, view: str, digests: Mapping[str, bytes | None]) -> None:
        """Store what the view's topic has; None: no such document."""
        for page in pages(digests.items()):
            flat = [part for row_id, digest in page for part in (row_id, digest or b"")]
            self._in_turn(turn, scripts.NOTE_DIGESTS, [self._key("sent", view)], flat)

    def forget_digests(self, turn: Turn, view: str) -> None:
        """Take the view's topic for empty."""
        self._in_turn(
            turn, scripts.FORGET_DIGESTS, [self._key("sent", view), self._key("closed")], [view]
        )

    def note_closed(self, turn: Turn, view: str, closed: int) -> None:
        """Note when a window closed whose last document the topic has. No clock of the view begins before it."""
        self._in_turn(turn, scripts.ADVANCE, [self._key("closed")], [view, closed])

    def late(self, view: str) -> list[LateChange]:
        """Read the latest changes that came after a window had closed, the last one first."""
        with self._server() as server:
            changes = map(_unpack_late, server.lrange(self._key("late", view), 0, -1))
        return [LateChange(row_id, unescape(pane), float(at)) for row_id, pane, at in changes]

    def sent(
        self,
        turn: Turn,
        view: str,
        marks: Mapping[str, str],
        due: Mapping[str, int] = NOTHING,
        digests: Mapping[str, bytes | None] = NOTHING,
        dropped: Collection[Pane] = (),
    ) -> None:
        """Forget that ids are dirty whose mark is still the one that was read. In the same step, remember
        when these documents are due next; those without a time never are. And store the digests of what
        was sent, which ends what `begin_sending` began; and drop panes.
        """
        keys = [
            self._key("dirty", view),
            self._key("gone", view),
            self._key("unsent"),
            self._key("due", view),
            self._key("sent", view),
            *(self._index_key(pane.table, pane.name, pane.text) for pane in dropped),
        ]
        times = [due.get(row_id, "") for row_id in marks]
        flat = [part for row_id, digest in digests.items() for part in (row_id, digest or b"")]
        self._in_turn(
            turn, scripts.SENT, keys, [len(marks), *marks, *marks.values(), *times, *flat]
        )

    def times_seen(self) -> dict[str, int]:
        """Read the latest time that rows had in the column that is a view's clock, by view. It may be of
        rows that are only about to be applied.
        """
        return self._times("seen")

    def clocks(self) -> dict[str, int]:
        return self._times("clocks")

    def _times(self, name: str) -> dict[str, int]:
        with self._server() as server:
            fields = server.hgetall(self._key(name))
        return {view.decode(): int(time) for view, time in fields.items()}

    def advance(self, turn: Turn, clocks: Mapping[str, int]) -> None:
        """Set clocks forward, by view. None goes back, nor begins before what `note_closed` noted. From
        then on changes to panes that close by then are refused.
        """
        closed = self._times("closed")
        flat = [
            part for view, now in clocks.items() for part in (view, max(now, closed.get(view, now)))
        ]
        self._in_turn(turn, scripts.ADVANCE, [self._key("clocks")], flat)

    def ripen(self, turn: Turn, view: str, now: int) -> None:
        """Mark as dirty the documents that are due by then."""
        keys = [self._key("due", view), self._key("dirty", view), self._key("number")]
        while self._in_turn(turn, scripts.RIPEN, keys, [now, PAGE]):
            pass

    def is_due(self, view: str, now: int) -> bool:
        with self._server() as server:
            return bool(server.zrangebyscore(self._key("due", view), "-inf", now, 0, 1))

    def mark(self, view: str, keys: Mapping[str, bytes], *, send_again: bool = False) -> None:
        """Mark root ids as dirty, given with the connector's keys, whether there are such rows or
        not. With `send_again` their documents are sent even if the topic has them as they are, unless
        they are final.
        """
        places = [
            self._key("dirty", view),
            self._key("gone", view),
            self._key("number"),
            *([self._key("sent", view)] if send_again else []),
        ]
        for page in pages(keys.items()):
            self._call(scripts.MARK, places, [part for pair in page for part in pair])

    def is_clean(self) -> bool:
        """Say whether nothing is pending and nothing dirty."""
        with self._server() as server:
            pipeline = server.pipeline(transaction=False)
            pipeline.hlen(self._key("pending"))
            for view in self.views:
                pipeline.zcard(self._key("dirty", view))
            return not any(pipeline.execute())

    def sizes(self, tables: Collection[str], views: Collection[str]) -> StateSizes:
        """Read how much there is of these tables, and to do for these views."""
        memory: dict[str, Any] = {}
        with self._server() as server:
            pipeline = server.pipeline(transaction=False)
            for table in tables:
                pipeline.hgetall(position_key(self.prefix, table))
            for view in views:
                pipeline.zcard(self._key("dirty", view))
            pipeline.hlen(self._key("pending"))
            pipeline.hgetall(self._key("late"))
            pipeline.hget(self._key("documents"), "began")
            *counts, pending, late, began = pipeline.execute()
            with suppress(redis.exceptions.NoPermissionError):
                memory = server.info("memory")
        stored = {
            table: {field.decode(): value.decode() for field, value in fields.items()}
            for table, fields in zip(tables, counts, strict=False)
        }
        return StateSizes(
            {table: int(fields.get("state_rows", 0)) for table, fields in stored.items()},
            {table: int(fields.get("state_bytes", 0)) for table, fields in stored.items()},
            dict(zip(views, counts[len(tables) :], strict=True)),
            pending,
            memory.get("used_memory"),
            memory.get("maxmemory") or None,
            {table: checkpoint_of(fields) for table, fields in stored.items()},
            {view.decode(): int(number) for view, number in late.items()},
            float(began) if began else None,
        )

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
        fields = [part for view, now in clocks.items() for part in (f"{view} {CLOCK}", str(now))]
        for view, checkpoints in reached.items():
            for topic, checkpoint in checkpoints.items():
                if checkpoint:
                    topic_id = checkpoint.position.topic_id
                    offsets = checkpoint.position.offsets
                    fields.append(f"{view} {topic}")
                    fields.append(json.dumps([topic_id, offsets, checkpoint.floor]))
        self._in_turn(turn, scripts.WHILE_TURN, [], fields)

    def _notes(self) -> Iterator[tuple[str, str, bytes]]:
        """Read the notes: of which view, the topic or `CLOCK`, the value."""
        with self._server() as server:
            fields = server.hgetall(self._key("documents"))
        for field, text in fields.items():
            view, _, topic = field.decode().partition(" ")
            if topic:
                yield view, topic, text

    def current(self) -> dict[str, dict[str, ViewCheckpoint]]:
        """Read what `note_current` stored, by view and topic: position and floor."""
        notes: dict[str, dict[str, ViewCheckpoint]] = {}
        for view, topic, text in self._notes():
            if topic != CLOCK:
                topic_id, offsets, floor = json.loads(text)
                position = Position(topic_id, tuple(offsets))
                notes.setdefault(view, {})[topic] = ViewCheckpoint(position, floor=floor)
        return notes

    def noted_clocks(self) -> dict[str, int]:
        """Read the times that `note_current` stored, by view."""
        return {view: int(text) for view, topic, text in self._notes() if topic == CLOCK}

    def waiting(self) -> dict[str, list[str]]:
        """Read which views wait, as last passed to `adopt`."""
        with self._server() as server:
            text = server.hget(self._key("documents"), "waiting")
        views: dict[str, list[str]] = json.loads(text) if text else {}
        return views

    def adopt(
        self,
        needs: Mapping[str, str],
        used: Mapping[str, Collection[str]],
        waiting: Mapping[str, list[str]],
    ) -> None:
        """Forget that documents are current, see `StateSink.adopt`, and the marks of other views.

        needs: by table. used: by view, its tables.
        """
        documents = self._key("documents")
        with self._server() as server:
            noted = server.hgetall(self._key("needs"))
            stored = {name.decode(): text.decode() for name, text in noted.items()}
            same = {name for name, text in needs.items() if stored.get(name) == text}
            current = {view for view, tables in used.items() if same.issuperset(tables)}
            fields = server.hkeys(documents)
            server.hset(documents, "waiting", json.dumps(waiting))
            if stale := stale_fields(map(bytes.decode, fields), current):
                server.hdel(documents, *stale)
            # Rows of these tables are read again, also when the file is changed back after a crash.
            if changed := [name for name, text in stored.items() if needs.get(name) != text]:
                server.hdel(self._key("needs"), *changed)
            # Only now: with a view's marks goes what is to be sent of it. Its root has other needs.
            former = server.hget(documents, "views")
            for view in set(json.loads(former or "[]")).difference(self.views):
                server.unlink(*(self._key(name, view) for name in OF_VIEW))
                for name in BY_VIEW:
                    server.hdel(self._key(name), view)
                server.srem(self._key("unsent"), self._key("dirty", view))
            server.hset(documents, "views", json.dumps(self.views))
            server.hsetnx(documents, "began", f"{time.time():.3f}")

    def _key(self, name: str, view: str = "") -> str:
        return state_key(self.prefix, name, view)

    def _index_key(self, table: str, slot: int | str, text: str) -> str:
        """Name what there is of a text: in a slot, in a listing (l0), in a tally (c0)."""
        return f"{index_prefix(self.prefix, table)}{slot}{GROUP}{escape(text)}"

    @contextmanager
    def _server(self) -> Iterator[Any]:
        """Ask the server; what fails is raised as Failure."""
        try:
            yield client(self.url, is_text=False)
        except redis.exceptions.RedisError as error:
            subject = "the state of documents"
            raise lane.Failure(*state_failure(error, self.url, subject)) from None

    def _call(self, source: str, keys: Sequence[str], arguments: Sequence[Any]) -> Any:
        with self._server() as server:
            return server.register_script(source)(keys=keys, args=arguments)

    def _in_turn(
        self, turn: Turn, source: str, keys: Sequence[str], arguments: Sequence[Any]
    ) -> Any:
        """Call a script that wants a turn. Raises Failure unless it is this one."""
        places = [self._key("documents"), *keys]
        answer = self._call(scripts.DURING_TURN + source, places, [*turn, *arguments])
        if isinstance(answer, bytes) and answer != b"ok":
            raise lane.Failure(*REFUSALS[answer.decode()])
        return answer


def stale_fields(fields: Iterable[str], current: Collection[str]) -> list[str]:
    """List the fields of notes of other views than these."""
    parts = ((field, *field.partition(" ")) for field in fields)
    return [field for field, view, space, _ in parts if space and view not in current]


def pages(items: Iterable[Item]) -> Iterator[list[Item]]:
    """Split what is asked for into lists, each for one request."""
    remaining = iter(items)
    while page := list(islice(remaining, PAGE)):
        yield page


def scan_spans(
    state: State, table: str, number: int, spans: Sequence[Span]
) -> Iterator[tuple[int, list[Place]]]:
    """Read all places of parts of lists, by page: the number of a part, and places of it in their order."""
    remaining = dict(enumerate(spans))
    while remaining:
        found = state.ranged(table, number, list(remaining.values()), SPAN_PAGE)
        for place, page in zip(list(remaining), found, strict=True):
            if page:
                yield place, page
            if len(page) < SPAN_PAGE:
                del remaining[place]
            else:
                # A text follows another directly with a NUL after it.
                remaining[place] = remaining[place]._replace(low=f"{page[-1].member}\0", skipped=0)


class StateSink(Applier, Protocol):
    """A state as the destination of a stream.

    plan   which tables the state has, and what it keeps of their rows
    needs  by table, a text that changes with what the rows are stored for: rows that were stored
           for something else are as none
    """

    plan: StatePlan
    needs: Mapping[str, str]

    def adopt(
        self, plan: StatePlan, needs: Mapping[str, str], waiting: Mapping[str, list[str]]
    ) -> None:
        """Take a plan for what the file's views need now, before rows are undone or applied for it.

        `waiting`: views that the plan lacks, see `cdc.documents.tables.Waiting`. Documents count as
        current no more whose view isn't in the plan, or whose tables' rows are stored for something
        else: some may be of rows that the state never meets again. May raise Failure of
        `cdc.sink.lane`.
        """

    def open_state(self) -> State:
        """Return the state of the plan, for any process."""
