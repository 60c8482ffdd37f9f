"""What the executors do for the cache: one Lua call per chunk of a partition, rows and position at once."""

import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import redis

from cdc.change import Advance, Position
from cdc.errors import CdcError, SinkUnavailable
from cdc.report import Report, Row, partitions, report, rows
from cdc.sink import UNKNOWN, mismatch
from sinks.redis_chunks import chunks, ends, length, states
from sinks.redis_scripts import APPLY
from sinks.redis_server import client, failure, position_key, view_key

if TYPE_CHECKING:
    import pyarrow as pa


class Due(NamedTuple):
    """What is left of an advance: offsets to go on from, in this generation of the view, held by this writer."""

    advance: Advance
    offsets: tuple[int, ...]
    generation: str
    writer: str
    further: tuple[str, ...] = ()
    """What else is stored with the position: field, value, ..."""

    def arguments(self, *rest: str | int) -> list[str | int]:
        """Of `APPLY` and `FINISH`."""
        until, now = self.advance.until, f"{time.time():.3f}"
        count = len(self.further)
        held = (until.topic_id, self.writer, self.generation)
        return [*held, now, until.partition_count, count, *self.further, *rest]

    def offset(self, answer: Sequence[str], least: int, most: int) -> int | CdcError:
        """How far this writer has got by itself where a script has said `moved`, or why it can't go on.

        It has where another try of the same task was there before this one, or an answer was lost.
        """
        _, topic_id, writer, text, generation, _ = answer
        ours = generation == self.generation and writer == self.writer
        if ours and topic_id == self.advance.until.topic_id and least < int(text) <= most:
            return int(text)
        expected = Position(self.advance.until.topic_id, (least,))
        if not topic_id:
            return mismatch(self.advance.table, expected, None, ours=True)
        return mismatch(self.advance.table, expected, Position(topic_id, (int(text),)), ours=ours)


def sender(
    url: str, prefix: str, dues: Sequence[Due]
) -> Callable[[Iterator["pa.RecordBatch"]], Iterator["pa.RecordBatch"]]:
    known = {due.advance.table.topic: due for due in dues}

    def apply(batches: Iterator["pa.RecordBatch"]) -> Iterator["pa.RecordBatch"]:
        reports = []
        for topic, partition, part in partitions(batches):
            if topic in known:
                lane = Lane(url, prefix, known[topic], partition)
                lane.apply(itertools.chain.from_iterable(map(rows, part)))
                reports.append(lane.done)
            for _ in part:
                pass
        yield report(reports)

    return apply


class Lane:
    """The way of one partition into the view: `at` is where the view stands, `done` what became of the records."""

    def __init__(self, url: str, prefix: str, due: Due, partition: int) -> None:
        self._url, self._due, self._partition = url, due, partition
        table = due.advance.table
        self._view, self._position = view_key(prefix, table.qualified), position_key(prefix, table.qualified)
        self._end = due.advance.until.offsets[partition]
        self.at = due.offsets[partition]
        self.done = Report(topic=table.topic, partition=partition)

    def apply(self, given: Iterable[Row]) -> None:
        """Send rows chunk by chunk; those below where it goes on are there from an earlier try."""
        try:
            server = client(self._url)
            for chunk, reach in chunks(states(self._due_rows(given))):
                for part, to in self._fitting(server, chunk, reach):
                    if self.done.refused or not self._send(server, part, self._end if to is None else to):
                        return
        except redis.exceptions.RedisError as error:
            what = f"rows of {self._due.advance.table.qualified}"
            self.done.failure, self.done.message = failure(error, self._url, what)

    def _due_rows(self, given: Iterable[Row]) -> Iterator[Row]:
        """Those that have to be written. After one that can't be, no other is; they are only looked at."""
        for row in given:
            if not row.book(self.done):
                continue
            # Before it is cut through: what is sent would be void with it.
            if row.kept is not None and ends(row) and row.complete(None) is None:
                self.done.refused.append((row.id, UNKNOWN))
            elif not self.done.refused:
                yield row

    def _fitting(
        self, server: redis.Redis, chunk: list[Row], reach: int | None
    ) -> Iterator[tuple[list[Row], int | None]]:
        """The chunk, cut again where what the view adds to its rows makes it too large."""
        asking = list({state.id: None for state in chunk if state.kept is not None and state.asks_view})
        if not asking:
            yield chunk, reach
            return
        pipeline = server.pipeline(transaction=False)
        for key in asking:
            pipeline.strlen(f"{self._view}{key}")
        sizes = dict(zip(asking, pipeline.execute(), strict=True))

        def size(state: Row) -> int:
            return length(state) + (sizes[state.id] if state.asks_view else 0)

        for part, to in chunks(chunk, size):
            yield part, reach if to is None else to

    def _send(self, server: redis.Redis, chunk: list[Row], reach: int) -> bool:
        """Whether it can go on after that."""
        script, repairs = server.register_script(APPLY), self._due.advance.repairs
        to = max(self.at, min(reach, self._end))
        while True:
            low = self.at
            due = (state for state in chunk if (state.records if repairs else (state.offset or 0) >= low))
            newest = {state.id: state for state in due}
            values = self._documents(server, newest)
            if self.done.refused:
                return False
            keys = [self._position, *(f"{self._view}{key}" for key in newest)]
            arguments = self._due.arguments(self._partition, self.at, to, *values)
            answer: Any = script(keys=keys, args=arguments)
            if answer[0] == "ok":
                self._count(chunk, newest, values)
                self.at = to
                return True
            further = self._due.offset(answer, self.at, self._end)
            if isinstance(further, CdcError):
                self.done.failure = "rewound" if isinstance(further, SinkUnavailable) else "fenced"
                self.done.message = further.message
                return False
            self.at, to = further, max(further, to)

    def _documents(self, server: redis.Redis, newest: Mapping[str, Row]) -> list[str]:
        """What to write for each row, '' to delete it. A row that can't be completed is refused."""
        asking = [key for key, state in newest.items() if state.kept is not None and state.asks_view]
        held: Any = server.mget([f"{self._view}{key}" for key in asking]) if asking else []
        viewed: dict[str, str | None] = dict(zip(asking, held, strict=True))
        values = []
        for key, state in newest.items():
            document = state.document if state.kept is None else state.complete(viewed.get(key))
            if document is None and state.kept is not None:
                self.done.refused.append((key, UNKNOWN))
            values.append(document or "")
        return values

    def _count(self, chunk: list[Row], newest: Mapping[str, Row], values: list[str]) -> None:
        """A row counts where its newest record is; what it was before is written for the sake of the position only."""
        counted = [value for state, value in zip(newest.values(), values, strict=True) if state.records]
        deleted = counted.count("")
        self.done.deleted += deleted
        self.done.written += len(counted) - deleted
        self.done.stale += sum(1 for state in chunk if state.records) - len(counted)
