"""The state's writer on executors: one Lua call per part of a chunk."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import redis

from cdc.codec.record import Change
from cdc.errors import Fenced, SinkUnavailable
from cdc.model.outcome import Advance
from cdc.model.table import Table
from cdc.sink.lane import ChunkLimits, Failure, FoldedRow, Part, Verdicts
from cdc.sink.rejection import Source
from cdc.views.plan import StatePlan
from cdc.views.rows import ConnectorRows, encode_entries, entry_maker
from sinks.redis.documents.keys import (
    dirty_key,
    gone_key,
    index_prefix,
    number_key,
    pending_key,
    row_prefix,
)
from sinks.redis.documents.scripts import APPLY
from sinks.redis.documents.state import RedisState
from sinks.redis.executor import PendingAdvance
from sinks.redis.server import client, failure, position_key

CHUNK = ChunkLimits(rows=500, bytes=2_000_000)
"""Size of a Lua call: with five entries a row it takes some 12 ms."""


@dataclass
class StateWriter:
    """Writes rows into the state. pending: by topic, the rest of each advance."""

    url: str
    prefix: str
    plan: StatePlan
    pending: Mapping[str, PendingAdvance]
    form = ConnectorRows()
    limits = CHUNK
    archives = False

    def start_offset(self, advance: Advance, partition: int) -> int:
        """Return where the driver found the position."""
        return self.pending[advance.table.topic].offsets[partition]

    def observe(self, part: Part, change: Change, source: Source, value: object) -> int:  # noqa: ARG002
        """Keep nothing."""
        return 0

    def read_stored(self, part: Part, rows: Sequence[FoldedRow]) -> Mapping[str, bytes]:
        """Read rows with one MGET."""
        state = RedisState(self.url, self.prefix, ())
        stored = state.rows(part.advance.table.qualified, [row.id for row in rows])
        return {row_id: row.row for row_id, row in stored.items()}

    def write(self, parts: Sequence[Part]) -> Sequence[Verdicts]:
        """Write each part with one Lua call."""
        return [self._write(part) for part in parts]

    def finish(self) -> Mapping[str, Sequence[str]]:
        """Hand over nothing."""
        return {}

    def _write(self, part: Part) -> Verdicts:
        """Write a part; with another call where an earlier try of this task has written a part."""
        pending, stale = self.pending[part.topic], frozenset[str]()
        if not part.rows and part.end_offset == part.view_offset:
            return Verdicts()
        start, end = part.view_offset, part.end_offset
        while True:
            rows = [row for row in part.rows.values() if row.id not in stale]
            answer = self._call(part, pending, rows, start, end)
            if answer[0] == "ok":
                return Verdicts(stale=stale)
            try:
                start = pending.offset(answer, start, pending.advance.end.offsets[part.partition])
            except SinkUnavailable as error:
                raise Failure("rewound", error.message) from None
            except Fenced as error:
                raise Failure("fenced", error.message) from None
            end = max(start, end)
            stale = frozenset(row.id for row in part.rows.values() if row.offset < start)

    def _call(
        self, part: Part, pending: PendingAdvance, rows: Sequence[FoldedRow], start: int, end: int
    ) -> Sequence[str]:
        table = part.advance.table
        entries = entry_maker(self.plan, table)
        values: list[str | bytes] = []
        for row in rows:
            head = "" if row.value is None else encode_entries(entries(row.value))
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
            number_key(self.prefix),
            pending_key(self.prefix),
        ]
        try:
            answer: Sequence[str] = client(self.url).register_script(APPLY)(
                keys=keys, args=arguments
            )
        except redis.exceptions.RedisError as error:
            raise Failure(*failure(error, self.url, f"rows of {table.qualified}")) from None
        return answer


def changing(plan: StatePlan, prefix: str, table: Table) -> list[Any]:
    """Build what the scripts are told about a table, before its rows: see `CHANGING`."""
    roots = plan.roots(table.qualified)
    places = [key for view in roots for key in (dirty_key(prefix, view), gone_key(prefix, view))]
    is_nested = any(
        node.join is not None and node.table.qualified == table.qualified
        for view in plan.views
        for node in view.root.walk()
    )
    rows, index = row_prefix(prefix, table.qualified), index_prefix(prefix, table.qualified)
    return [rows, index, int(is_nested), len(roots), *places]
