"""How far each table has got in a database: read, taken over by a writer, and moved by it; and the
exchange of two generations row by row, in databases that others use, too.

Positions change places first, in one script. From then on nobody writes rows until `complete` has
exchanged them all. So an exchange that is interrupted loses nothing: whoever has to write next
completes it first. Two may do so at once.
"""

import itertools
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import redis

from cdc.model.generation import new_generation
from cdc.model.outcome import Advance, Applied
from cdc.model.position import ViewCheckpoint, distance
from cdc.model.table import Table
from cdc.redis.checkpoint import checkpoint_of, extra_fields
from cdc.redis.server import Switched, glob_literal, view_key
from cdc.sink.contract import Batch, Outcome, PositionLost
from cdc.sink.fencing import checkpoint_after, mismatch, require_floor
from cdc.sink.lane_run import run_on_executors
from cdc.sink.promotion import GenerationReplaced
from cdc.sinks.redis.database import Database
from cdc.sinks.redis.executor import ChunkWriter, PendingAdvance
from cdc.sinks.redis.scan import run_id
from cdc.sinks.redis.scripts import EXCHANGE_SOME, FINISH, SETTLE, TAKE

FIRST_ROWS = 50
SLICE_ROWS = 250
SLICE_BYTES = 500_000
"""Size of a call of `complete`: it takes a few milliseconds, during which the server serves nobody else."""


OVER = -1
"""The answer of the scripts to an exchange that is complete."""


class Exchange(NamedTuple):
    """An exchange that isn't complete.

    mark: distinguishes it from all others. live, other: numbers of the databases.
    """

    mark: str
    live: int
    other: int


def exchange_of(fields: Mapping[str, str]) -> Exchange | None:
    """Parse the exchange that a position is in; None where all rows are in their places."""
    mark = fields.get("exchange")
    if mark is None:
        return None
    _, live, other = json.loads(mark)
    return Exchange(mark, live, other)


def new_mark(live: Database, other: Database) -> str:
    return json.dumps([new_generation(), live.number, other.number])


def shown_offsets(live: ViewCheckpoint | None, candidate: ViewCheckpoint) -> tuple[int, ...]:
    """Choose the offsets that readers get while rows change places: every row has the changes before
    them. If the two generations can't be compared, that is offset zero.
    """
    if live and live.floor == candidate.floor and distance(live, candidate.position).comparable:
        return live.position.offsets
    return (0,) * candidate.position.partition_count


def complete(database: Database, table: str) -> None:
    """Exchange all rows of a table that haven't changed places yet; does nothing where all have.

    database: either of the two.

    Raises:
        SinkUnavailable: among others where another server has gone on meanwhile, which knows no cursor.
    """
    key = database.position_key(table)
    current = exchange_of(database.ask(lambda server: server.hgetall(key)))
    if current is None:
        return
    keys = [key, exchanged_key(key)]
    arguments = (current.mark, current.live, current.other)
    pattern = glob_literal(view_key(database.prefix, table)) + "*"
    script = database.script(EXCHANGE_SOME)
    first = database.ask(run_id)
    rows = FIRST_ROWS
    for number in (current.live, current.other):
        cursor = ""
        while cursor != "0":
            answer = script(keys, [*arguments, number, pattern, cursor or "0", rows])
            if answer == OVER:
                return
            cursor, size = answer
            rows = max(1, min(2 * rows, SLICE_ROWS, rows * SLICE_BYTES // max(size, 1)))

    def settle(server: redis.Redis) -> None:
        call = server.register_script(SETTLE)
        if not call(keys=keys, args=[*arguments, str(first or "")]):
            raise Switched("another server has gone on with a scan")

    database.ask(settle)


def exchanged_key(position_key: str) -> str:
    """Return the key of the set of rows that have changed places, in the live database."""
    return f"{position_key}:exchanged"


class Positions:
    """The positions of a generation's tables, in the database where it lies.

    generation_names: by table; None or empty for the generation that readers see. A position of
    another generation is refused, because two databases may have changed places.

    Threads: of the sink's, see `cdc.sink.contract.Sink`. Errors: see `Database`; a method that
    reads raises GenerationReplaced as well.
    """

    def __init__(self, database: Database, generation_names: Mapping[str, str] | None) -> None:
        self.database = database
        self._generation_names = generation_names
        self._last_generation: dict[str, str] = {}
        # By table, writer and generation: what `TAKE` returned last.
        self._takeovers: dict[tuple[str, str, str], int] = {}

    def generation(self, table: Table) -> str:
        """Return the name of this generation of a table; '' for the live one, whatever its name."""
        return self._generation_names[table.qualified] if self._generation_names else ""

    def last_generation(self, table: Table) -> str | None:
        """Return the generation that was read last; '' if there was none, None if none was read."""
        return self._last_generation.get(table.qualified)

    def create(self, table: Table) -> None:
        key = self._key(table)
        if exchange_of(self.database.ask(lambda server: server.hgetall(key))):
            raise self._completed(table)
        generation = self.generation(table) or new_generation()
        self._last_generation.pop(table.qualified, None)
        self.database.ask(lambda server: server.hsetnx(key, "generation", generation))

    def name(self, table: Table) -> str:
        """Read the generation that lies here, also without a checkpoint; '' where there is none."""
        return self._read(table).get("generation", "")

    def checkpoint(self, table: Table) -> ViewCheckpoint | None:
        return checkpoint_of(self._read(table))

    def read_all(self, tables: Sequence[Table]) -> list[dict[str, str]]:
        """Read the fields of many positions in one round trip; empty for one that isn't there."""

        def ask(server: redis.Redis) -> list[dict[str, str]]:
            pipeline = server.pipeline(transaction=False)
            for table in tables:
                pipeline.hgetall(self._key(table))
            return list(pipeline.execute())

        return [
            self._checked(table, fields)
            for table, fields in zip(tables, self.database.ask(ask), strict=True)
        ]

    def apply(
        self, batch: Batch, writer: Callable[[str, str, Mapping[str, PendingAdvance]], ChunkWriter]
    ) -> Outcome:
        """Take over the positions, run the lane, and move them to the end of the batch."""
        pending = [step for advance in batch.advances if (step := self.take(advance, batch.writer))]
        if not pending:
            return Outcome()
        database = self.database
        remaining = {step.advance.table.topic: step for step in pending}
        lane = batch.lane(
            writer(database.url, database.prefix, remaining), [step.advance for step in pending]
        )
        outcome = run_on_executors(lane, batch.records, database.sink, database.hints)
        for step in pending:
            self.finish(step, outcome.writer_results.get(step.advance.table.qualified, ()))
        return replace(outcome, writer_results={})

    def take(self, advance: Advance, writer: str) -> PendingAdvance | None:
        """Become the writer that moves a position, and return the rest of an advance.

        None when the advance is done: an earlier try may have applied a part of it, or all.

        Raises:
            Fenced, PositionLost: see `Sink.apply`. PositionLost, too, if it had to complete an exchange.
        """
        fields = self._read(advance.table)
        if exchange_of(fields):
            raise self._completed(advance.table)
        start = advance.start_offsets
        end = advance.end
        stored = checkpoint_of(fields)
        is_ours = stored is not None and stored.writer == writer
        require_floor(advance, stored)
        if stored and is_ours and not advance.is_repair and distance(stored, end).comparable:
            offsets = stored.position.offsets
            if offsets == end.offsets:
                return None
            bounds = zip(start, offsets, end.offsets, strict=True)
            if all(low <= offset <= high for low, offset, high in bounds):
                start = offsets
        generation = fields.get("generation", "")
        key = (advance.table.qualified, writer, generation)
        takeover = int(fields.get("takeovers", "0"))
        position = stored.position if stored else None
        if start == advance.start_offsets and position != advance.start:
            # Before this writer took over, the position of a server that has gone back: a replica
            # that had it not yet, or what was saved last.
            has_gone_back = takeover < self._takeovers.get(key, 0)
            raise mismatch(
                advance.table,
                advance.start,
                position,
                ours=stored is None or is_ours or has_gone_back,
            )
        checkpoint = checkpoint_after(advance, stored, Applied(), writer, generation)
        extra = () if advance.is_repair else extra_fields(checkpoint)
        pending = PendingAdvance(advance, start, generation, writer, extra, takeover)
        if fields.get("writer") != writer or "unguarded" in fields:
            pending = pending._replace(takeover=self._take_over(pending, fields))
        self._takeovers[key] = pending.takeover
        return pending

    def finish(self, pending: PendingAdvance, moved: Iterable[str]) -> None:
        """Move a position to the end of the batch: behind the last rows there may be transaction
        markers, which no executor sees.

        moved: what `ChunkWriter.finish` returns. A partition that is below that now is on a server
        that has lost its rows.
        """
        script = self.database.script(FINISH)
        end = pending.advance.end.offsets
        least = list(pending.offsets)
        for partition, offset in (map(int, text.split()) for text in moved):
            least[partition] = offset
        partitions = zip(range(len(end)), least, end, strict=True)
        arguments = pending.arguments(*itertools.chain.from_iterable(partitions))
        answer = script([self._key(pending.advance.table)], arguments)
        if answer[0] != "ok":
            start = least[int(answer[-1])]
            pending.offset(answer, start, start)

    def _take_over(self, pending: PendingAdvance, fields: Mapping[str, str]) -> int:
        """Become the writer that moves this position, if it is still where it was read; returns the
        number of this takeover.
        """
        script = self.database.script(TAKE)
        table = pending.advance.table
        offsets = (
            (text, fields.get(text, "0"))
            for text in map(str, range(pending.advance.end.partition_count))
        )
        arguments = [
            pending.writer,
            pending.generation,
            fields.get("topic_id", ""),
            *itertools.chain.from_iterable(offsets),
        ]
        takeover: int = script([self._key(table)], arguments)
        if not takeover:
            checkpoint = self.checkpoint(table)
            raise mismatch(
                table,
                pending.advance.start,
                checkpoint.position if checkpoint else None,
                ours=checkpoint is None,
            )
        return takeover

    def _completed(self, table: Table) -> PositionLost:
        """Complete the exchange of all tables before a row is written: the command that began it may be
        dead. Returns the error to raise, because the positions have changed.
        """
        names = self.database.ask(lambda server: server.smembers(self.database.names_key))
        for name in sorted({table.qualified, *names}):
            complete(self.database, name)
        return PositionLost(
            f"Generations of {table.qualified} have changed places, so its position is a different one now.",
            hint="`cdc run` tries again by itself; run any other command again",
            sink=self.database.sink,
        )

    def _key(self, table: Table) -> str:
        return self.database.position_key(table.qualified)

    def _read(self, table: Table) -> dict[str, str]:
        fields: dict[str, str] = self.database.ask(lambda server: server.hgetall(self._key(table)))
        return self._checked(table, fields)

    def _checked(self, table: Table, fields: dict[str, str]) -> dict[str, str]:
        self._last_generation[table.qualified] = fields.get("generation", "")
        if self._generation_names and fields.get("generation") not in (
            None,
            self.generation(table),
        ):
            raise GenerationReplaced(table.qualified, self.generation(table), self.database.sink)
        return fields
