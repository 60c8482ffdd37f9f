"""The state's writer on executors: one Lua call per part of a chunk."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import redis

from cdc.documents.plan import StatePlan
from cdc.documents.rows import ConnectorRows, entry_maker, latest_times
from cdc.model.table import Table
from cdc.sink.lane import ChunkLimits, Failure, FoldedRow, Part
from cdc.sinks.redis.documents.keys import index_prefix, state_key
from cdc.sinks.redis.documents.scripts import APPLY, SEE
from cdc.sinks.redis.documents.state import RedisState, state_failure
from cdc.sinks.redis.executor import ChunkWriter, PendingAdvance
from cdc.sinks.redis.server import client, position_key, view_key

CHUNK = ChunkLimits(rows=500, bytes=2_000_000)
"""Size of a Lua call: with five entries a row it takes some 12 ms."""


@dataclass
class StateWriter(ChunkWriter):
    plan: StatePlan
    form = ConnectorRows()
    limits = CHUNK

    def read_stored(self, part: Part, rows: Sequence[FoldedRow]) -> Mapping[str, bytes]:
        state = RedisState(self.url, self.prefix)
        stored = state.rows(part.advance.table.qualified, [row.id for row in rows])
        return {row_id: row.row for row_id, row in stored.items()}

    def _call(
        self, part: Part, pending: PendingAdvance, rows: Sequence[FoldedRow], start: int, end: int
    ) -> Sequence[str]:
        table = part.advance.table
        entries = entry_maker(self.plan, table)
        current = [row.value for row in rows if row.value is not None]
        latest = latest_times(self.plan, table, current, time.time_ns() // 1000)
        values: list[str | bytes] = []
        for row in rows:
            head = "" if row.value is None else entries(row.value)
            values += [row.id, head, row.sources[-1].key or b"", row.value or b""]
        arguments = pending.arguments(
            part.partition,
            start,
            end,
            table.qualified,
            *changing(self.plan, self.prefix, table),
            *values,
        )
        keys = [
            position_key(self.prefix, table.qualified),
            state_key(self.prefix, "number"),
            state_key(self.prefix, "pending"),
            state_key(self.prefix, "unsent"),
            state_key(self.prefix, "late"),
        ]
        try:
            if latest:
                # Before the rows: of a crash between the two, the rows come again.
                seen = [part for pair in latest.items() for part in pair]
                keys_seen = [state_key(self.prefix, "seen")]
                client(self.url).register_script(SEE)(keys=keys_seen, args=seen)
            answer: Sequence[str] = client(self.url).register_script(APPLY)(
                keys=keys, args=arguments
            )
        except redis.exceptions.RedisError as error:
            raise Failure(*state_failure(error, self.url, f"rows of {table.qualified}")) from None
        return answer


def changing(plan: StatePlan, prefix: str, table: Table) -> list[Any]:
    """Build the scripts' arguments about a table, which precede its rows: see `CHANGING`."""
    roots = plan.roots(table.qualified)
    return [
        view_key(prefix, table.qualified),
        index_prefix(prefix, table.qualified),
        int(plan.leads_to_documents(table.qualified)),
        state_key(prefix, "clocks"),
        len(roots),
        *(state_key(prefix, name, view) for view in roots for name in ("dirty", "gone")),
    ]
