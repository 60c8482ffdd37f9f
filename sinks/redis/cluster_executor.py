"""The cache's writer on executors, for a cluster: a Lua call for each slot that a part has rows in."""

from bisect import bisect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import redis

from cdc.model.position import Position
from cdc.redis.server import client, first_word, view_key
from cdc.sink.fencing import mismatch
from cdc.sink.lane import SUPERSEDED, Failure, FoldedRow, Part, Superseded, Verdicts
from cdc.sinks.redis.catalog import applied_key
from cdc.sinks.redis.cluster_scripts import WRITE
from cdc.sinks.redis.executor import RedisWriter
from cdc.sinks.redis.hashes import packed_fields
from cdc.sinks.redis.scan import values
from cdc.sinks.redis.slots import Call, ask, call, checked, slot_of


class Target(NamedTuple):
    """Where the rows of a table go.

    name: what keys have instead of the table's name. starts: of ranges of slots, ascending. trusted: for
    each range, the takeover since which is trusted what its slots say is applied.
    """

    name: str
    starts: Sequence[int]
    trusted: Sequence[str]


@dataclass
class ClusterWriter(RedisWriter):
    """The writer of rows. targets: by topic."""

    targets: Mapping[str, Target] = field(default_factory=dict)
    _written: dict[str, int] = field(init=False, default_factory=dict)

    def finish(self) -> Mapping[str, Sequence[str]]:
        """Return how many rows were written, by topic."""
        return {topic: [str(rows)] for topic, rows in self._written.items()}

    def read_stored(
        self, part: Part, rows: Sequence[FoldedRow]
    ) -> Mapping[str, bytes | Superseded]:
        """Read documents, then what is applied in their slots."""
        table = part.advance.table
        hashed = table if table.qualified in self.hashes else None
        keys = self._keys(part, [row.id for row in rows])
        slots = [slot_of(key) for key in keys]
        partition = str(part.partition)
        requests = [
            (slot, ("HMGET", self._applied_key(part, slot), "epoch", partition)) for slot in slots
        ]
        try:
            # In this order: a row that is changed in between is below what is applied then.
            by_key = dict(values(self.url, hashed, keys))
            marks = checked(ask(self._server, requests))
        except redis.exceptions.RedisError as error:
            raise self._failure(part, error) from None
        documents: dict[str, bytes | Superseded] = {}
        for row, key, slot, (epoch, applied) in zip(rows, keys, slots, marks, strict=True):
            is_trusted = int(epoch or 0) >= int(self._trusted(part, slot))
            # A repair reads records from below the position; no other try has written those.
            if is_trusted and part.view_offset <= row.offset < int(applied or 0):
                documents[row.id] = SUPERSEDED
            elif key in by_key:
                documents[row.id] = by_key[key].encode()
        return documents

    def _write(self, part: Part) -> Verdicts:
        rows = list(part.rows.values())
        by_slot: dict[int, list[tuple[str, FoldedRow]]] = {}
        for key, row in zip(self._keys(part, [row.id for row in rows]), rows, strict=True):
            by_slot.setdefault(slot_of(key), []).append((key, row))
        try:
            calls = [self._slot_call(part, slot, pairs) for slot, pairs in by_slot.items()]
            answers = call(self._server, WRITE, calls)
        except redis.exceptions.RedisError as error:
            raise self._failure(part, error) from None
        groups = zip(by_slot.values(), answers, strict=True)
        stale = frozenset(pairs[i - 1][1].id for pairs, stay in groups for i in stay)
        written = self._written.get(part.topic, 0) + len(rows) - len(stale)
        self._written[part.topic] = written
        return Verdicts(stale=stale)

    def _slot_call(self, part: Part, slot: int, pairs: Sequence[tuple[str, FoldedRow]]) -> Call:
        table = part.advance.table
        pending = self.pending[part.topic]
        position = pending.offsets[part.partition] if part.advance.is_repair else ""
        form = "hash" if table.qualified in self.hashes else "json"
        trusted = self._trusted(part, slot)
        arguments: list[str | int | bytes] = [pending.takeover, trusted, part.partition, position]
        arguments.append(form)
        for _, row in pairs:
            value = b"" if row.value is None else row.value
            if value and form == "hash":
                value = packed_fields(table, value)
            arguments += [row.offset + 1, value]
        if table.qualified in self.lifetimes_ms:
            arguments += [self._ends_ms(part, row) for _, row in pairs]
        return Call(slot, [self._applied_key(part, slot), *(key for key, _ in pairs)], arguments)

    def _trusted(self, part: Part, slot: int) -> str:
        target = self.targets[part.topic]
        return target.trusted[bisect(target.starts, slot) - 1]

    def _applied_key(self, part: Part, slot: int) -> str:
        return applied_key(self.prefix, self.targets[part.topic].name, slot)

    def _keys(self, part: Part, ids: Sequence[str]) -> list[str]:
        begin = view_key(self.prefix, self.targets[part.topic].name)
        return [f"{begin}{row_id}" for row_id in ids]

    def _failure(self, part: Part, error: redis.exceptions.RedisError) -> Failure:
        table = part.advance.table
        word = first_word(error)
        if word == "FENCED":
            position = Position(part.advance.end.topic_id, (part.view_offset,))
            return Failure("fenced", mismatch(table, position, position, ours=False).message)
        if word == "PASSED":
            return Failure("unavailable", f"Rows of {table.qualified} are written meanwhile.")
        return super()._failure(part, error)

    @property
    def _server(self) -> redis.Redis:
        return client(self.url)
