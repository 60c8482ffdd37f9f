"""How far each index has got: documents of the index `cdc-position`, changed by if_seq_no
compare-and-set alone.

A record also says how far rows may be *visible*: a batch writes that down before its first row. So
whoever finds a batch cut half way knows what readers may have seen of it, and of two writers who
begin at the same place only one gets as far as sending rows.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from cdc.model.outcome import Advance, Applied
from cdc.model.position import ViewCheckpoint
from cdc.model.table import Table
from cdc.sink.fencing import checkpoint_after, mismatch, must_apply
from cdc.sinks.elasticsearch.checkpoint import Record
from cdc.sinks.elasticsearch.client import blocked_error, is_blocked, unavailable
from cdc.sinks.elasticsearch.index.indices import Indices, WritableIndex
from cdc.sinks.elasticsearch.server import Server

POSITIONS = "cdc-position"
CONFLICT = 409


class RecordChanged(Exception):
    """The record of an index has changed since it was read."""

    def __init__(self, index: str) -> None:
        super().__init__(index)
        self.index = index


@dataclass(frozen=True)
class PendingAdvance:
    """A step that a batch brings to an index.

    record: what is stored of the index.
    """

    advance: Advance
    place: WritableIndex
    record: Record

    @property
    def table(self) -> Table:
        """The source's table."""
        return self.advance.table


class Positions:
    """The records of the indices of a pipeline, or of generations of it.

    Threads: of the sink's, see `cdc.sink.contract.Sink`. Errors: see `Server`.
    """

    def __init__(self, server: Server, indices: Indices) -> None:
        self.server = server
        self.indices = indices

    def checkpoints(self, tables: Sequence[Table]) -> dict[str, ViewCheckpoint | None]:
        """Read the checkpoint of each table; None for one without an index or a position."""
        records = self.records(tables)
        return {table.qualified: records.get(table.qualified, Record()).stored for table in tables}

    def records(self, tables: Sequence[Table]) -> dict[str, Record]:
        """Read the records by table, of the tables that have an index, in two requests."""
        return self._read(self.indices.find(tables))

    def take(self, advances: Sequence[Advance], writer: str) -> list[PendingAdvance]:
        """Read where a batch's tables stand; returns the steps that aren't done.

        Raises:
            Fenced, PositionLost: see `Sink.apply`.
        """
        places = self.indices.find([advance.table for advance in advances])
        _require_indices(advances, places)
        records = self._read(places)
        return [
            PendingAdvance(
                advance, places[advance.table.qualified], records[advance.table.qualified]
            )
            for advance in advances
            if must_apply(advance, records[advance.table.qualified].stored, writer)
        ]

    def require_indices(self, pending: Sequence[PendingAdvance]) -> None:
        """Raise PositionLost when an index is gone by now."""
        places = self.indices.find([step.table for step in pending])
        _require_indices([step.advance for step in pending], places)

    def begin(self, pending: Sequence[PendingAdvance], writer: str) -> list[PendingAdvance]:
        """Store how far rows may be visible from now on; returns the steps with what is stored.

        Raises:
            Fenced: another writer has stored a record since it was read.
        """
        return self._store(
            [replace(step, record=step.record.begins(step.advance.end)) for step in pending], writer
        )

    def finish(
        self, started: Sequence[PendingAdvance], applied: Mapping[str, Applied], writer: str
    ) -> None:
        """Store the positions that the views have reached.

        Raises:
            Fenced: another writer has stored a record since `begin`.
        """
        final = []
        for step in started:
            rows = applied[step.table.qualified]
            checkpoint = checkpoint_after(step.advance, step.record.stored, rows, writer)
            final.append(replace(step, record=step.record.ends(checkpoint)))
        self._store(final, writer)

    def forget(self, indices: Sequence[str]) -> None:
        """Delete records; called before the indices are deleted, so that no index without rows has
        a position.
        """
        if not indices:
            return
        lines = [json.dumps({"delete": {"_index": POSITIONS, "_id": index}}) for index in indices]
        answer = self.server.ask("POST", "/_bulk", "\n".join(lines) + "\n")
        items = [next(iter(item.values())) for item in answer["items"]]
        for item in items:
            _refuse_blocked(item)
        if any(item["status"] >= 400 and item["status"] != 404 for item in items):
            raise unavailable(f"Not all positions in {POSITIONS} could be removed.")

    def _store(self, steps: Sequence[PendingAdvance], writer: str) -> list[PendingAdvance]:
        try:
            records = self._write([(step.place.index, step.record) for step in steps])
        except RecordChanged as error:
            advance = next(step.advance for step in steps if step.place.index == error.index)
            checkpoint = self.checkpoints([advance.table])[advance.table.qualified]
            ours = checkpoint is not None and checkpoint.writer == writer
            raise mismatch(
                advance.table, advance.start, checkpoint.position if checkpoint else None, ours=ours
            ) from None
        return [replace(step, record=record) for step, record in zip(steps, records, strict=True)]

    def _read(self, places: Mapping[str, WritableIndex]) -> dict[str, Record]:
        """Read the record of each index, by the same keys. Only `found: false` says that there is
        none.
        """
        if not places:
            return {}
        ids = [place.index for place in places.values()]
        answer = self.server.ask("POST", f"/{POSITIONS}/_mget", {"ids": ids})
        items = answer.get("docs", ())
        if len(items) != len(ids):
            raise unavailable(f"{POSITIONS} has answered for {len(items)} of {len(ids)} indices.")
        pairs = zip(places.items(), items, strict=True)
        return {key: _record(place.index, item) for (key, place), item in pairs}

    def _write(self, records: Sequence[tuple[str, Record]]) -> list[Record]:
        """Store the records that are still as they were read; returns them with the conditions of
        the next change.

        Durable on return.

        Raises:
            RecordChanged: one was not. The others are written.
        """
        lines = []
        for index, record in records:
            action = "index" if record.condition else "create"
            lines += [
                json.dumps({action: {"_index": POSITIONS, "_id": index, **record.condition}}),
                record.to_json(),
            ]
        answer = self.server.ask("POST", "/_bulk", "\n".join(lines) + "\n")
        items = [next(iter(item.values())) for item in answer.get("items", ())]
        if len(items) != len(records):
            raise unavailable(
                f"{POSITIONS} has answered for {len(items)} of {len(records)} indices."
            )
        for (index, _), item in zip(records, items, strict=True):
            if item["status"] == CONFLICT:
                raise RecordChanged(index)
            if item["status"] >= 400:
                _refuse_blocked(item)
                raise unavailable(
                    f"The position of {index} could not be stored (status {item['status']})."
                )
        return [
            replace(
                record,
                condition={"if_seq_no": item["_seq_no"], "if_primary_term": item["_primary_term"]},
            )
            for (_, record), item in zip(records, items, strict=True)
        ]


def _require_indices(advances: Sequence[Advance], places: Mapping[str, WritableIndex]) -> None:
    """Raise PositionLost for a deleted index: no other writer has taken over."""
    for advance in advances:
        if advance.table.qualified not in places:
            raise mismatch(advance.table, advance.start, None, ours=True)


def _refuse_blocked(item: Mapping[str, Any]) -> None:
    """Raise SinkBlocked where a block has refused an item of a bulk."""
    error = item.get("error", {})
    if is_blocked(item["status"], error.get("type")):
        raise blocked_error(POSITIONS, error.get("reason", ""))


def _record(index: str, item: Mapping[str, Any]) -> Record:
    kind = item.get("error", {}).get("type")
    if item.get("found") is False or kind == "index_not_found_exception":
        # The cluster itself says that there are no positions at all, as before the first start.
        return Record()
    if item.get("found") is True and item.get("_id") == index:
        return Record.from_item(item, index.rsplit("@", 1)[1])
    raise unavailable(f"The position of {index} can't be read: {kind or 'there is no answer'}.")
