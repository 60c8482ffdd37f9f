"""The state as `cdc.documents.state.State`: reads and small scripts, from any process.

What documents are current in is noted in the hash of documents. A field is `<view> <topic>`, its value the
JSON of topic id, offsets and floor; or `<view> now()`, its value the time of the view's clock. No name of a
view has a space, nor have the hash's other fields.
"""

import json
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any, TypeVar

import msgspec
import redis

from cdc.documents.rows import LISTING, TALLY, StoredRow, decode_entries, decode_row, unescape
from cdc.documents.state import (
    NEVER_DUE,
    NOTHING_SENT,
    Chunk,
    LateChange,
    Pane,
    Place,
    SentDigests,
    Span,
    StateSizes,
    Turn,
)
from cdc.model.address import address
from cdc.model.position import Position, ViewCheckpoint
from cdc.sink import lane
from cdc.sinks.redis.checkpoint import checkpoint_of
from cdc.sinks.redis.documents import scripts
from cdc.sinks.redis.documents.keys import KeyName, index_key, state_key
from cdc.sinks.redis.server import Failure, client, failure, first_word, position_key, view_key

PAGE = 2000
"""Keys of one request."""
SCANNED_SETS = 500
"""Index sets that are scanned at once. The server answers with small ones as a whole."""
CLOCK = "now()"
"""No name of a topic has parentheses."""
OF_VIEW: tuple[KeyName, ...] = ("dirty", "gone", "due", "sent", "late")
BY_VIEW: tuple[KeyName, ...] = ("clocks", "closed", "late", "seen")
"""What there is of a view: keys, and fields of hashes."""
REFUSALS = {
    "fenced": ("fenced", "Another run sends the documents of this pipeline now."),
    "rewound": ("rewound", "The state of documents has lost its last writes."),
    "unsettled": ("rewound", "A transaction of documents was begun, and not noted as sent."),
}
"""The kind and the message of a failure, by what a script answers."""
Item = TypeVar("Item")
_unpack = msgspec.msgpack.Decoder(tuple[str, list[str]]).decode
_unpack_late = msgspec.msgpack.Decoder(tuple[str, str, str]).decode


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
class RedisState:
    """The state under a prefix of a database. Can be pickled; connects where it is used."""

    url: str
    prefix: str
    views: tuple[str, ...] = ()
    """Names of the views whose documents are made."""

    # Rows and what is found by their values: reads that want no turn.

    def rows(self, table: str, ids: Collection[str]) -> dict[str, StoredRow]:
        begin = view_key(self.prefix, table)
        stored = self._values(
            ids, lambda server, page: server.mget([begin + row_id for row_id in page])
        )
        return {row_id: decode_row(value) for row_id, value in stored.items()}

    def members(self, table: str, slot: int, texts: Collection[str]) -> dict[str, set[str]]:
        sets = self._by_text(table, slot, texts, "smembers")
        return {text: {row_id.decode() for row_id in ids} for text, ids in sets.items()}

    def scan_members(
        self, table: str, slot: int, texts: Collection[str]
    ) -> Iterable[Collection[str]]:
        """Scan the index sets of a page of texts side by side, with an SSCAN each in a round trip."""
        remaining = iter(texts)
        while page := list(islice(remaining, SCANNED_SETS)):
            cursors = dict.fromkeys((index_key(self.prefix, table, slot, text) for text in page), 0)
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

    def listed(
        self, table: str, number: int, texts: Collection[str], limit: int
    ) -> dict[str, list[str]]:
        lists = self._by_text(table, f"{LISTING}{number}", texts, "zrange", 0, limit - 1)
        # The order has no space; an id may have.
        return {
            text: [member.decode().partition(" ")[2] for member in members]
            for text, members in lists.items()
        }

    def ranged(
        self,
        table: str,
        number: int,
        spans: Sequence[Span],
        limit: int,
        *,
        last_first: bool = False,
    ) -> list[list[Place]]:
        def request(pipeline: Any, span: Span) -> None:
            key = index_key(self.prefix, table, f"{LISTING}{number}", span.text)
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
        hashes = self._by_text(table, f"{TALLY}{number}", texts, "hgetall")
        return {
            text: {field.decode(): int(value) for field, value in numbers.items()}
            for text, numbers in hashes.items()
        }

    def _by_text(
        self, table: str, slot: int | str, texts: Collection[str], command: str, *arguments: int
    ) -> dict[str, Any]:
        """Read what there is of each text, by this command; nothing is left out."""

        def request(pipeline: Any, text: str) -> None:
            getattr(pipeline, command)(index_key(self.prefix, table, slot, text), *arguments)

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

    def _fields(self, name: KeyName, view: str, ids: Iterable[str]) -> dict[str, bytes]:
        """Read the fields of a view's hash that there are."""
        key = self._key(name, view)
        return self._values(ids, lambda server, page: server.hmget(key, page))

    # Turns, and what is to be done in one.

    def take(self, owner: str) -> Turn:
        return Turn(owner, self._call(scripts.TAKE_TURN, [self._key("documents")], [owner]))

    def begin_turn(self, turn: Turn) -> None:
        former = turn._replace(number=turn.number - 1)
        self._in_turn(former, scripts.WHILE_TURN, [], ["turn", turn.number])

    def require_turn(self, turn: Turn) -> None:
        self._in_turn(turn, scripts.WHILE_TURN, [], [])

    def pending(self) -> Iterable[Chunk]:
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
        """Read the lowest and the highest marks in one round trip."""
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
        return {row_id: key for row_id, key in self._fields("gone", view, ids).items() if key}

    def is_unsent(self, view: str) -> bool:
        with self._server() as server:
            return bool(server.sismember(self._key("unsent"), self._key("dirty", view)))

    def digests(self, view: str, ids: Collection[str]) -> SentDigests:
        with self._server() as server:
            number = int(server.hget(self._key("documents"), "sending") or 0)
        if number % 2:
            raise lane.Failure(*REFUSALS["unsettled"])
        return SentDigests(number, self._fields("sent", view, ids))

    def begin_sending(self, turn: Turn, number: int) -> None:
        self._in_turn(turn, scripts.BEGIN_SENDING, [], [number])

    def note_digests(self, turn: Turn, view: str, digests: Mapping[str, bytes | None]) -> None:
        for page in pages(digests.items()):
            flat = [part for row_id, digest in page for part in (row_id, digest or b"")]
            self._in_turn(turn, scripts.NOTE_DIGESTS, [self._key("sent", view)], flat)

    def forget_digests(self, turn: Turn, view: str) -> None:
        self._in_turn(
            turn, scripts.FORGET_DIGESTS, [self._key("sent", view), self._key("closed")], [view]
        )

    def note_closed(self, turn: Turn, view: str, closed: int) -> None:
        self._in_turn(turn, scripts.ADVANCE, [self._key("closed")], [view, closed])

    def late(self, view: str) -> list[LateChange]:
        with self._server() as server:
            changes = map(_unpack_late, server.lrange(self._key("late", view), 0, -1))
        return [LateChange(row_id, unescape(pane), float(at)) for row_id, pane, at in changes]

    def sent(
        self,
        turn: Turn,
        view: str,
        marks: Mapping[str, str],
        due: Mapping[str, int] = NEVER_DUE,
        digests: Mapping[str, bytes | None] = NOTHING_SENT,
        dropped: Collection[Pane] = (),
    ) -> None:
        keys = [
            self._key("dirty", view),
            self._key("gone", view),
            self._key("unsent"),
            self._key("due", view),
            self._key("sent", view),
            *(index_key(self.prefix, pane.table, pane.name, pane.text) for pane in dropped),
        ]
        times = [due.get(row_id, "") for row_id in marks]
        flat = [part for row_id, digest in digests.items() for part in (row_id, digest or b"")]
        self._in_turn(
            turn, scripts.SENT, keys, [len(marks), *marks, *marks.values(), *times, *flat]
        )

    def times_seen(self) -> Mapping[str, int]:
        return self._times("seen")

    def clocks(self) -> Mapping[str, int]:
        return self._times("clocks")

    def _times(self, name: KeyName) -> dict[str, int]:
        with self._server() as server:
            fields = server.hgetall(self._key(name))
        return {view.decode(): int(time) for view, time in fields.items()}

    def advance(self, turn: Turn, clocks: Mapping[str, int]) -> None:
        closed = self._times("closed")
        flat = [
            part for view, now in clocks.items() for part in (view, max(now, closed.get(view, now)))
        ]
        self._in_turn(turn, scripts.ADVANCE, [self._key("clocks")], flat)

    def ripen(self, turn: Turn, view: str, now: int) -> None:
        keys = [self._key("due", view), self._key("dirty", view), self._key("number")]
        while self._in_turn(turn, scripts.RIPEN, keys, [now, PAGE]):
            pass

    def is_due(self, view: str, now: int) -> bool:
        with self._server() as server:
            return bool(server.zrangebyscore(self._key("due", view), "-inf", now, 0, 1))

    def mark(self, view: str, keys: Mapping[str, bytes], *, send_again: bool = False) -> None:
        places = [
            self._key("dirty", view),
            self._key("gone", view),
            self._key("number"),
            *([self._key("sent", view)] if send_again else []),
        ]
        for page in pages(keys.items()):
            self._call(scripts.MARK, places, [part for pair in page for part in pair])

    def is_clean(self) -> bool:
        with self._server() as server:
            pipeline = server.pipeline(transaction=False)
            pipeline.hlen(self._key("pending"))
            for view in self.views:
                pipeline.zcard(self._key("dirty", view))
            return not any(pipeline.execute())

    def sizes(self, tables: Collection[str], views: Collection[str]) -> StateSizes:
        """Ask for counters and sizes in one round trip, and for the server's memory."""
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

    def current(self) -> Mapping[str, Mapping[str, ViewCheckpoint]]:
        notes: dict[str, dict[str, ViewCheckpoint]] = {}
        for view, topic, text in self._notes():
            if topic != CLOCK:
                topic_id, offsets, floor = json.loads(text)
                position = Position(topic_id, tuple(offsets))
                notes.setdefault(view, {})[topic] = ViewCheckpoint(position, floor=floor)
        return notes

    def noted_clocks(self) -> Mapping[str, int]:
        return {view: int(text) for view, topic, text in self._notes() if topic == CLOCK}

    def waiting(self) -> Mapping[str, list[str]]:
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

    def _key(self, name: KeyName, view: str = "") -> str:
        return state_key(self.prefix, name, view)

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


def pages(items: Iterable[Item]) -> Iterable[list[Item]]:
    """Split what is asked for into lists, each for one request."""
    remaining = iter(items)
    while page := list(islice(remaining, PAGE)):
        yield page
