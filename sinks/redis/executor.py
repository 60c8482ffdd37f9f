"""The cache's writer on executors: a Lua call per part of a chunk stores rows and position."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import redis

from cdc.codec.forms import Documents
from cdc.codec.record import Change
from cdc.errors import Fenced, SinkUnavailable
from cdc.model.outcome import Advance
from cdc.model.position import Position
from cdc.redis.server import client, failure, position_key, view_key
from cdc.sink.fencing import mismatch
from cdc.sink.lane import (
    SUPERSEDED,
    ChunkLimits,
    Failure,
    FoldedRow,
    Part,
    Superseded,
    Verdicts,
    Writer,
)
from cdc.sink.rejection import Source
from cdc.sinks.redis.hashes import HashedDocuments, packed_fields
from cdc.sinks.redis.scan import read_hashes
from cdc.sinks.redis.scripts import APPLY

COMMITTED_BYTES = 100
"""Memory that the time of a row's newest change takes."""
CHUNK = ChunkLimits(rows=1000, bytes=4_000_000)
"""Size of a Lua call: it takes a few milliseconds, during which the server serves nobody else."""


class PendingAdvance(NamedTuple):
    """The rest of an advance: offsets to continue from, in this generation, held by this writer."""

    advance: Advance
    offsets: tuple[int, ...]
    generation: str
    writer: str
    extra_fields: tuple[str, ...] = ()
    """Further fields that are stored with the position: field, value, ..."""
    takeover: int = 0
    """Number of the takeover by this writer. Where it is less, the server has gone back."""

    def arguments(self, *values: str | int | bytes) -> list[str | int | bytes]:
        """Build ARGV of `APPLY` and `FINISH`."""
        end = self.advance.end
        now = f"{time.time():.3f}"
        count = len(self.extra_fields)
        identity = (end.topic_id, self.writer, self.generation)
        return [*identity, now, end.partition_count, count, *self.extra_fields, *values]

    def offset(self, answer: Sequence[str], least: int, most: int) -> int:
        """Return how far this writer itself has moved a partition, after a script answered `moved`.

        It has moved it when another try of the same task came first, or when an answer was lost.

        Raises:
            Fenced, PositionLost: why it can't go on.
        """
        _, topic_id, writer, text, generation, takeovers, _ = answer
        ours = generation == self.generation and writer == self.writer
        if ours and topic_id == self.advance.end.topic_id and least < int(text) <= most:
            return int(text)
        expected = Position(self.advance.end.topic_id, (least,))
        is_same_topic = generation == self.generation and topic_id == expected.topic_id
        has_gone_back = is_same_topic and int(takeovers) < self.takeover
        if not topic_id or has_gone_back:
            raise mismatch(self.advance.table, expected, None, ours=True)
        raise mismatch(self.advance.table, expected, Position(topic_id, (int(text),)), ours=ours)


@dataclass
class ChunkWriter(Writer):
    """Writes each part of a chunk with one Lua call, which moves the position, too.

    pending: by topic, the rest of each advance.
    """

    url: str
    prefix: str
    pending: Mapping[str, PendingAdvance]
    _moved: dict[str, dict[int, int]] = field(init=False, default_factory=dict)

    def start_offset(self, advance: Advance, partition: int) -> int:
        return self.pending[advance.table.topic].offsets[partition]

    def write(self, parts: Sequence[Part]) -> Sequence[Verdicts]:
        return [self._write(part) for part in parts]

    def _write(self, part: Part) -> Verdicts:
        """Write a part with a call; with another where an earlier try has written some of it."""
        pending = self.pending[part.topic]
        if not part.rows and part.end_offset == part.view_offset:
            return Verdicts()
        stale = frozenset[str]()
        start = part.view_offset
        end = part.end_offset
        while True:
            # Skip the rows that an earlier try has written.
            rows = [row for row in part.rows.values() if row.id not in stale]
            answer = self._call(part, pending, rows, start, end)
            if answer[0] == "ok":
                self._moved.setdefault(part.topic, {})[part.partition] = end
                return Verdicts(stale=stale)
            try:
                start = pending.offset(answer, start, pending.advance.end.offsets[part.partition])
            except SinkUnavailable as error:
                raise Failure("rewound", error.message) from None
            except Fenced as error:
                raise Failure("fenced", error.message) from None
            end = max(start, end)
            stale = frozenset(row.id for row in part.rows.values() if row.offset < start)

    def finish(self) -> Mapping[str, Sequence[str]]:
        """Return how far each partition was moved, by topic: partition and offset."""
        return {
            topic: [f"{partition} {offset}" for partition, offset in moved.items()]
            for topic, moved in self._moved.items()
        }

    def _call(
        self, part: Part, pending: PendingAdvance, rows: Sequence[FoldedRow], start: int, end: int
    ) -> Sequence[str]:
        """Call the script for these rows of a part; returns its answer, `ok` or `moved` ..."""
        raise NotImplementedError


@dataclass
class RedisWriter(ChunkWriter):
    """The writer of rows.

    lifetimes_ms  how long rows stay, by table with a `ttl`
    hashes        the tables with `form: hash`
    """

    lifetimes_ms: Mapping[str, int] = field(default_factory=dict)
    hashes: frozenset[str] = frozenset()
    _committed_ms: dict[tuple[str, int], dict[str, int]] = field(init=False, default_factory=dict)
    """By topic and partition, of rows that aren't written yet: when their newest change was committed."""
    limits = CHUNK

    @property
    def form(self) -> Documents:
        return HashedDocuments(self.hashes)

    def observe(self, part: Part, change: Change, source: Source, value: Any) -> int:  # noqa: ARG002
        if not self.lifetimes_ms or part.advance.table.qualified not in self.lifetimes_ms:
            return 0
        committed_us = time.time() * 1e6 if change.commit_us is None else change.commit_us
        rows = self._committed_ms.setdefault((part.topic, part.partition), {})
        rows[change.id] = int(committed_us // 1000)
        return COMMITTED_BYTES

    def read_stored(
        self, part: Part, rows: Sequence[FoldedRow]
    ) -> Mapping[str, bytes | Superseded]:
        """Read documents with one MGET, then how far this writer has moved the position.

        An earlier try of the task may have moved it past some of these rows: they are SUPERSEDED.
        """
        pending = self.pending[part.topic]
        keys = self._keys(part, [row.id for row in rows])
        table = part.advance.table
        position = position_key(self.prefix, table.qualified)
        server = client(self.url)
        try:
            # In this order: a row that is changed in between is below the position that follows.
            if table.qualified in self.hashes:
                by_key = dict(read_hashes(self.url, table, keys))
                texts: list[Any] = [by_key.get(key) for key in keys]
            else:
                texts = list(server.mget(keys))
            stored = server.hmget(position, "topic_id", "writer", "generation", str(part.partition))
        except redis.exceptions.RedisError as error:
            raise self._failure(part, error) from None
        documents: dict[str, bytes | Superseded] = {
            row.id: text.encode() for row, text in zip(rows, texts, strict=True) if text is not None
        }
        topic_id, writer, generation, offset = stored
        own = (pending.advance.end.topic_id, pending.writer, pending.generation)
        moved_to = int(offset or 0) if (topic_id, writer, generation or "") == own else 0
        # A repair reads records from below the position; those are none of another try.
        written = [row.id for row in rows if part.view_offset <= row.offset < moved_to]
        return documents | dict.fromkeys(written, SUPERSEDED)

    def write(self, parts: Sequence[Part]) -> Sequence[Verdicts]:
        now_ms = time.time() * 1000
        for part in parts:
            if part.advance.table.qualified not in self.lifetimes_ms:
                continue
            for row in part.rows.values():
                if self._ends_ms(part, row) <= now_ms:
                    # Deleted, not left out: the cache may have a state from before there was a `ttl`.
                    row.value = None
        verdicts = super().write(parts)
        for part in parts:
            self._committed_ms.pop((part.topic, part.partition), None)
        return verdicts

    def _ends_ms(self, part: Part, row: FoldedRow) -> int:
        """Return when a row expires, in milliseconds since 1970."""
        committed_ms = self._committed_ms[part.topic, part.partition][row.id]
        return committed_ms + self.lifetimes_ms[part.advance.table.qualified]

    def _call(
        self, part: Part, pending: PendingAdvance, rows: Sequence[FoldedRow], start: int, end: int
    ) -> Sequence[str]:
        table = part.advance.table.qualified
        keys = [position_key(self.prefix, table), *self._keys(part, [row.id for row in rows])]
        values = [b"" if row.value is None else row.value for row in rows]
        form = "json"
        if table in self.hashes:
            form = "hash"
            values = [value and packed_fields(part.advance.table, value) for value in values]
        ends_ms: list[str | int | bytes] = []
        if table in self.lifetimes_ms:
            ends_ms += [self._ends_ms(part, row) for row in rows]
        try:
            script = client(self.url).register_script(APPLY)
            answer: Sequence[str] = script(
                keys=keys,
                args=pending.arguments(part.partition, start, end, form, *values, *ends_ms),
            )
        except redis.exceptions.RedisError as error:
            raise self._failure(part, error) from None
        return answer

    def _keys(self, part: Part, ids: Sequence[str]) -> list[str]:
        prefix = view_key(self.prefix, part.advance.table.qualified)
        return [f"{prefix}{row_id}" for row_id in ids]

    def _failure(self, part: Part, error: redis.exceptions.RedisError) -> Failure:
        return Failure(*failure(error, self.url, f"rows of {part.advance.table.qualified}"))
