"""The state as `cdc.views.state.State`: reads and small scripts, from any process."""

import json
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

import msgspec
import redis

from cdc.model.position import ViewCheckpoint
from cdc.sink.lane import Failure
from cdc.sinks.redis.checkpoint import checkpoint_of
from cdc.sinks.redis.documents.keys import (
    clocks_key,
    closed_key,
    dirty_key,
    documents_key,
    due_key,
    gone_key,
    index_key,
    late_key,
    needs_key,
    number_key,
    pending_key,
    seen_key,
    sent_key,
    unsent_key,
)
from cdc.sinks.redis.documents.notes import (
    clocks_from_fields,
    from_fields,
    stale_fields,
    to_fields,
)
from cdc.sinks.redis.documents.row_reader import PAGE, RowReader, pages
from cdc.sinks.redis.documents.scripts import (
    ADVANCE,
    BEGIN_SENDING,
    CLIMBED,
    FORGET_DIGESTS,
    MARK,
    MARK_ROWS,
    NOTE_DIGESTS,
    RIPEN,
    SENT,
    TAKE_TURN,
    WHILE_TURN,
)
from cdc.sinks.redis.server import position_key
from cdc.views.plan import StatePlan
from cdc.views.rows import decode_entries, unescape
from cdc.views.state import (
    NEVER_DUE,
    NOTHING_SENT,
    Chunk,
    LateChange,
    Pane,
    SentDigests,
    StateSizes,
    Turn,
)

REFUSALS = {
    "fenced": ("fenced", "Another run sends the documents of this pipeline now."),
    "rewound": ("rewound", "The state of documents has lost its last writes."),
    "unsettled": ("rewound", "A transaction of documents was begun, and not noted as sent."),
}
"""The kind and the message of a failure, by what a script answers."""
_unpack = msgspec.msgpack.Decoder(tuple[str, list[str]]).decode
_unpack_late = msgspec.msgpack.Decoder(tuple[str, str, str]).decode


@dataclass(frozen=True)
class RedisState(RowReader):
    """The state under a prefix of a database. Can be pickled; connects where it is used."""

    views: tuple[str, ...]
    """Names of the views whose documents are made."""

    def take(self, owner: str) -> Turn:
        """Store the run's name and the next number with one script."""
        return Turn(owner, self._call(TAKE_TURN, [documents_key(self.prefix)], [owner]))

    def begin_turn(self, turn: Turn) -> None:
        """Set the turn with one script, if the state still has the one before it."""
        self._during(turn._replace(number=turn.number - 1), ["turn", turn.number])

    def require_turn(self, turn: Turn) -> None:
        """Compare the state's turn with this one."""
        self._during(turn, [])

    def _during(self, turn: Turn, fields: Sequence[Any]) -> None:
        self._require_ok(self._call(WHILE_TURN, [documents_key(self.prefix)], [*turn, *fields]))

    @staticmethod
    def _require_ok(answer: bytes) -> None:
        """Raise Failure for the answer of a script that wants a turn, unless it is `ok`."""
        if answer != b"ok":
            raise Failure(*REFUSALS[answer.decode()])

    def pending(self) -> Iterable[Chunk]:
        """Read the numbers at once, and each chunk when it is its turn."""
        numbers = self._ask(lambda server: server.hkeys(pending_key(self.prefix)))
        for number in sorted(numbers, key=int):
            packed = self._ask(partial(_field, pending_key(self.prefix), number))
            if packed is not None:
                table, flat = _unpack(packed)
                entries = (decode_entries(head) for head in flat[1::2])
                yield Chunk(number.decode(), table, dict(zip(flat[::2], entries, strict=True)))

    def mark_rows(self, view: str, ids: Collection[str]) -> None:
        """Mark a page of ids with one script."""
        keys = [dirty_key(self.prefix, view), number_key(self.prefix)]
        for page in pages(ids):
            self._call(MARK_ROWS, keys, page)

    def climbed(self, chunk: Chunk, marks: Mapping[str, Collection[str]]) -> None:
        """Mark the root ids and forget the chunk with one script."""
        flat = [
            part
            for view, ids in marks.items()
            for row_id in ids
            for part in (dirty_key(self.prefix, view), row_id)
        ]
        keys = [pending_key(self.prefix), number_key(self.prefix)]
        self._call(CLIMBED, keys, [chunk.number, *flat])

    def dirty(self, view: str, limit: int) -> dict[str, str]:
        """Read the lowest and the highest marks in one round trip."""
        key, newest = dirty_key(self.prefix, view), limit // 2

        def ask(server: redis.Redis) -> list[Any]:
            pipeline = server.pipeline(transaction=False)
            pipeline.zrange(key, 0, limit - newest - 1, withscores=True)
            # An end of -1 would be that of the whole set.
            if newest:
                pipeline.zrange(key, 0, newest - 1, desc=True, withscores=True)
            return list(pipeline.execute())

        pairs = chain.from_iterable(self._ask(ask))
        return {row_id.decode(): f"{mark:.0f}" for row_id, mark in pairs}

    def dirty_among(self, view: str, ids: Collection[str]) -> set[str]:
        """Read marks with a ZMSCORE a page."""
        dirty = set[str]()
        for page in pages(ids):
            scores = self._ask(partial(_scores, dirty_key(self.prefix, view), page))
            dirty |= {
                row_id for row_id, score in zip(page, scores, strict=True) if score is not None
            }
        return dirty

    def deleted_keys(self, view: str, ids: Collection[str]) -> dict[str, bytes]:
        """Read keys with an HMGET a page."""
        keys: dict[str, bytes] = {}
        for page in pages(ids):
            values = self._ask(partial(_fields, gone_key(self.prefix, view), page))
            keys |= {row_id: key for row_id, key in zip(page, values, strict=True) if key}
        return keys

    def is_unsent(self, view: str) -> bool:
        """Ask whether the view's dirty set is among those of which nothing was taken."""
        unsent, dirty = unsent_key(self.prefix), dirty_key(self.prefix, view)
        return bool(self._ask(lambda server: server.sismember(unsent, dirty)))

    def digests(self, view: str, ids: Collection[str]) -> SentDigests:
        """Read the counter, and digests with an HMGET a page."""
        held: Any = self._ask(lambda server: server.hget(documents_key(self.prefix), "sending"))
        number = int(held or 0)
        if number % 2:
            self._require_ok(b"unsettled")
        by_id: dict[str, bytes] = {}
        for page in pages(ids):
            values = self._ask(partial(_fields, sent_key(self.prefix, view), page))
            pairs = zip(page, values, strict=True)
            by_id |= {row_id: digest for row_id, digest in pairs if digest is not None}
        return SentDigests(number, by_id)

    def begin_sending(self, turn: Turn, number: int) -> None:
        """Make the counter odd with one script, while it is this turn."""
        answer = self._call(BEGIN_SENDING, [documents_key(self.prefix)], [*turn, number])
        self._require_ok(answer)

    def note_digests(self, turn: Turn, view: str, digests: Mapping[str, bytes | None]) -> None:
        """Store a page of digests with one script, while it is this turn."""
        keys = [documents_key(self.prefix), sent_key(self.prefix, view)]
        for page in pages(digests.items()):
            flat = [part for row_id, digest in page for part in (row_id, digest or b"")]
            self._require_ok(self._call(NOTE_DIGESTS, keys, [*turn, *flat]))

    def forget_digests(self, turn: Turn, view: str) -> None:
        """Remove the hash of digests with one script, while it is this turn."""
        keys = [
            documents_key(self.prefix),
            sent_key(self.prefix, view),
            closed_key(self.prefix),
        ]
        self._require_ok(self._call(FORGET_DIGESTS, keys, [*turn, view]))

    def note_closed(self, turn: Turn, view: str, closed: int) -> None:
        """Set a field of the hash of closed windows forward with one script."""
        keys = [documents_key(self.prefix), closed_key(self.prefix)]
        self._require_ok(self._call(ADVANCE, keys, [*turn, view, closed]))

    def late(self, view: str) -> list[LateChange]:
        """Read the view's list."""
        packed: Any = self._ask(lambda server: server.lrange(late_key(self.prefix, view), 0, -1))
        changes = map(_unpack_late, packed)
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
        """Remove the marks that are still the same with one script, while it is this turn."""
        keys = [
            documents_key(self.prefix),
            dirty_key(self.prefix, view),
            gone_key(self.prefix, view),
            unsent_key(self.prefix),
            due_key(self.prefix, view),
            sent_key(self.prefix, view),
            *(index_key(self.prefix, pane.table, pane.name, pane.text) for pane in dropped),
        ]
        times = [due.get(row_id, "") for row_id in marks]
        flat = [part for row_id, digest in digests.items() for part in (row_id, digest or b"")]
        arguments = [*turn, len(marks), *marks, *marks.values(), *times, *flat]
        self._require_ok(self._call(SENT, keys, arguments))

    def times_seen(self) -> Mapping[str, int]:
        """Read the hash of times."""
        fields: Any = self._ask(lambda server: server.hgetall(seen_key(self.prefix)))
        return {view.decode(): int(time) for view, time in fields.items()}

    def clocks(self) -> Mapping[str, int]:
        """Read the hash of clocks."""
        fields: Any = self._ask(lambda server: server.hgetall(clocks_key(self.prefix)))
        return {view.decode(): int(time) for view, time in fields.items()}

    def advance(self, turn: Turn, clocks: Mapping[str, int]) -> None:
        """Set the fields of clocks with one script, while it is this turn."""
        keys = [documents_key(self.prefix), clocks_key(self.prefix)]
        fields: Any = self._ask(lambda server: server.hgetall(closed_key(self.prefix)))
        closed = {view.decode(): int(time) for view, time in fields.items()}
        flat = [
            part for view, now in clocks.items() for part in (view, max(now, closed.get(view, now)))
        ]
        self._require_ok(self._call(ADVANCE, keys, [*turn, *flat]))

    def ripen(self, turn: Turn, view: str, now: int) -> None:
        """Move ids from the due set to the dirty set, a page with a script."""
        keys = [
            documents_key(self.prefix),
            due_key(self.prefix, view),
            dirty_key(self.prefix, view),
            number_key(self.prefix),
        ]
        while answer := self._call(RIPEN, keys, [*turn, now, PAGE]):
            if isinstance(answer, bytes):
                self._require_ok(answer)

    def is_due(self, view: str, now: int) -> bool:
        """Read the first of the due set."""
        key = due_key(self.prefix, view)
        return bool(self._ask(lambda server: server.zrangebyscore(key, "-inf", now, 0, 1)))

    def mark(self, view: str, keys: Mapping[str, bytes], *, send_again: bool = False) -> None:
        """Mark a page of ids with one script."""
        places = [
            dirty_key(self.prefix, view),
            gone_key(self.prefix, view),
            number_key(self.prefix),
            *([sent_key(self.prefix, view)] if send_again else []),
        ]
        for page in pages(keys.items()):
            self._call(MARK, places, [part for pair in page for part in pair])

    def is_clean(self) -> bool:
        """Ask for the sizes in one round trip."""

        def ask(server: redis.Redis) -> list[int]:
            pipeline = server.pipeline(transaction=False)
            pipeline.hlen(pending_key(self.prefix))
            for view in self.views:
                pipeline.zcard(dirty_key(self.prefix, view))
            return list(pipeline.execute())

        return not any(self._ask(ask))

    def sizes(self, tables: Collection[str], views: Collection[str]) -> StateSizes:
        """Ask for counters and sizes in one round trip, and for the server's memory."""

        def ask(server: redis.Redis) -> list[Any]:
            pipeline = server.pipeline(transaction=False)
            for table in tables:
                pipeline.hgetall(position_key(self.prefix, table))
            for view in views:
                pipeline.zcard(dirty_key(self.prefix, view))
            pipeline.hlen(pending_key(self.prefix))
            pipeline.hgetall(late_key(self.prefix))
            pipeline.hget(documents_key(self.prefix), "began")
            return list(pipeline.execute())

        *counts, pending, late, began = self._ask(ask)
        memory = self._ask(_memory)
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
        """Write each position and clock as a field, all in one step, while it is this turn."""
        self._during(turn, to_fields(reached, clocks))

    def current(self) -> Mapping[str, Mapping[str, ViewCheckpoint]]:
        """Read each position from its field."""
        fields: Any = self._ask(lambda server: server.hgetall(documents_key(self.prefix)))
        return from_fields(fields)

    def noted_clocks(self) -> Mapping[str, int]:
        """Read each clock from its field."""
        fields: Any = self._ask(lambda server: server.hgetall(documents_key(self.prefix)))
        return clocks_from_fields(fields)

    def waiting(self) -> Mapping[str, list[str]]:
        """Read the field `waiting`, a JSON object."""
        text: Any = self._ask(lambda server: server.hget(documents_key(self.prefix), "waiting"))
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

        def ask(server: redis.Redis) -> None:
            noted: Any = server.hgetall(needs_key(self.prefix))
            stored = {name.decode(): text.decode() for name, text in noted.items()}
            same = {name for name, text in needs.items() if stored.get(name) == text}
            current = {view for view, tables in used.items() if same.issuperset(tables)}
            fields: Any = server.hkeys(documents_key(self.prefix))
            server.hset(documents_key(self.prefix), "waiting", json.dumps(waiting))
            if stale := stale_fields(fields, current):
                server.hdel(documents_key(self.prefix), *stale)
            # Rows of these tables are read again, also when the file is changed back after a crash.
            if changed := [name for name, text in stored.items() if needs.get(name) != text]:
                server.hdel(needs_key(self.prefix), *changed)
            # Only now: with a view's marks goes what is to be sent of it. Its root has other needs.
            former: Any = server.hget(documents_key(self.prefix), "views")
            for view in set(json.loads(former or "[]")).difference(self.views):
                dirty = dirty_key(self.prefix, view)
                server.unlink(
                    dirty,
                    gone_key(self.prefix, view),
                    due_key(self.prefix, view),
                    sent_key(self.prefix, view),
                    late_key(self.prefix, view),
                )
                server.hdel(clocks_key(self.prefix), view)
                server.hdel(closed_key(self.prefix), view)
                server.hdel(late_key(self.prefix), view)
                server.hdel(seen_key(self.prefix), view)
                server.srem(unsent_key(self.prefix), dirty)
            server.hset(documents_key(self.prefix), "views", json.dumps(self.views))
            server.hsetnx(documents_key(self.prefix), "began", f"{time.time():.3f}")

        self._ask(ask)

    def _call(self, source: str, keys: Sequence[str], arguments: Sequence[Any]) -> Any:
        return self._ask(lambda server: server.register_script(source)(keys=keys, args=arguments))


@dataclass(frozen=True)
class OpenState:
    """Opens the state of a plan in any process; can be pickled."""

    url: str
    prefix: str
    plan: StatePlan | None

    def __call__(self) -> RedisState:
        """Return the state; it connects at its first question."""
        views = tuple(view.name for view in self.plan.views) if self.plan else ()
        return RedisState(self.url, self.prefix, views)


def _memory(server: redis.Redis) -> dict[str, Any]:
    """Read what INFO says of memory; nothing where the user may not ask."""
    try:
        return dict(server.info("memory"))
    except redis.exceptions.NoPermissionError:
        return {}


def _field(key: str, field: bytes, server: redis.Redis) -> Any:
    return server.hget(key, field.decode())


def _fields(key: str, fields: list[str], server: redis.Redis) -> Any:
    return server.hmget(key, fields)


def _scores(key: str, members: list[str], server: redis.Redis) -> Any:
    return server.zmscore(key, members)
