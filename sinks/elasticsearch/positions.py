"""How far each index has got: documents of the index `cdc-position`, changed by if_seq_no
compare-and-set alone.

A record also says how far rows may be *visible*: a batch writes that down before its first row. So
whoever finds a batch cut half way knows what readers may have seen of it, and of two writers who
begin at the same place only one gets as far as sending rows.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from cdc.model.outcome import Advance, Applied
from cdc.model.position import Position, ViewCheckpoint, distance
from cdc.model.table import Table
from cdc.sink.fencing import checkpoint_after, mismatch, must_apply
from cdc.sinks.elasticsearch.client import (
    FORBIDDEN,
    NOT_FOUND,
    SECURITY,
    Refusal,
    Server,
    blocked_error,
    forbidden_error,
    is_blocked,
)
from cdc.sinks.elasticsearch.connection import unavailable
from cdc.sinks.elasticsearch.index.indices import Indices, WritableIndex

POSITIONS = "cdc-position"
CONFLICT = 409


@dataclass(frozen=True)
class Record:
    """What is stored of an index; without `condition` there is no record, and no row has ever been
    sent to it.

    `visible`: how far rows may have got. `condition`: under which the record may be replaced.
    """

    stored: ViewCheckpoint | None = None
    visible: Position | None = None
    condition: Mapping[str, int] = field(default_factory=dict)

    @property
    def fresh(self) -> bool:
        """Whether no row was ever sent, so that there is nothing to delete."""
        return self.stored is None and self.visible is None

    @property
    def seen(self) -> ViewCheckpoint | None:
        """The checkpoint of what readers may have seen, as if it was stored."""
        floor = self.stored.floor if self.stored else 0
        return ViewCheckpoint(self.visible, floor=floor) if self.visible else None

    def begins(self, end: Position) -> "Record":
        return replace(self, visible=_furthest(self.visible, end))

    def ends(self, stored: ViewCheckpoint) -> "Record":
        """Build the record to store when the rows are durable.

        Rows that an earlier batch has shown stay visible.
        """
        return replace(self, stored=stored, visible=_furthest(self.visible, stored.position))

    def to_json(self) -> str:
        values: dict[str, Any] = json.loads(self.stored.to_json()) if self.stored else {}
        if self.visible:
            values["visible"] = {
                "topic_id": self.visible.topic_id,
                "offsets": list(self.visible.offsets),
            }
        return json.dumps(values)

    @classmethod
    def from_item(cls, item: Mapping[str, Any], generation: str) -> "Record":
        """Parse an item of an `_mget`'s answer."""
        source = item["_source"]
        stored = (
            replace(ViewCheckpoint.from_mapping(source), generation=generation)
            if "topic_id" in source
            else None
        )
        visible = Position(source["visible"]["topic_id"], tuple(source["visible"]["offsets"]))
        return cls(stored, visible, _condition(item))


@dataclass(frozen=True)
class PendingAdvance:
    """A step that a batch brings to an index. record: what is stored of the index."""

    advance: Advance
    place: WritableIndex
    record: Record

    @property
    def table(self) -> Table:
        return self.advance.table


class Positions:
    """The records of the indices of a pipeline, or of generations of it.

    Threads: of the sink's, see `cdc.sink.contract.Sink`. Errors: see `Server`.
    """

    def __init__(self, server: Server, indices: Indices) -> None:
        self.server = server
        self.indices = indices

    def checkpoints(self, tables: Sequence[Table]) -> dict[str, ViewCheckpoint | None]:
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
        """Delete records; called before their indices go: no index without rows has a position."""
        if not indices:
            return
        lines = [json.dumps({"delete": {"_index": POSITIONS, "_id": index}}) for index in indices]
        items = self._bulk(lines, len(indices))
        for item in items:
            _require_allowed(item)
        if any(item["status"] >= 400 and item["status"] != 404 for item in items):
            raise unavailable(f"Not all positions in {POSITIONS} could be removed.")

    def take_over(self, pending: Sequence[PendingAdvance], token: str) -> None:
        """Replace the writers' aliases of these indices by those of this token, if no other writer
        has done so meanwhile.

        Raises:
            Fenced: somebody has. PositionLost: an index is gone.
        """
        actions: list[dict[str, Any]] = []
        for step in pending:
            index = step.place.index
            own_alias = step.place.writer(token)
            actions += [
                {"remove": {"index": index, "alias": alias, "must_exist": True}}
                for alias in step.place.writers
                if alias != own_alias
            ]
            if own_alias not in step.place.writers:
                actions.append({"add": {"index": index, "alias": own_alias}})
        try:
            if actions:
                self.server.switch(actions)
        except Refusal as error:
            if error.status != NOT_FOUND:
                raise
            self.require_indices(pending)
            # Of two who take over at the same time, the other has been quicker.
            advance = pending[0].advance
            raise mismatch(advance.table, advance.start, advance.start, ours=False) from None

    def _store(self, steps: Sequence[PendingAdvance], writer: str) -> list[PendingAdvance]:
        """Store the records that are still as they were read; returns the steps with the conditions
        of the next change.

        Durable on return.

        Raises:
            Fenced, PositionLost: one was not. The others are written.
        """
        lines = []
        for step in steps:
            condition = step.record.condition
            action = "index" if condition else "create"
            lines += [
                json.dumps({action: {"_index": POSITIONS, "_id": step.place.index, **condition}}),
                step.record.to_json(),
            ]
        stored = []
        for step, item in zip(steps, self._bulk(lines, len(steps)), strict=True):
            if item["status"] == CONFLICT:
                start = step.advance.start
                checkpoint = self.checkpoints([step.table])[step.table.qualified]
                ours = checkpoint is not None and checkpoint.writer == writer
                position = checkpoint.position if checkpoint else None
                raise mismatch(step.table, start, position, ours=ours)
            if item["status"] >= 400:
                _require_allowed(item)
                raise unavailable(
                    f"The position of {step.place.index} could not be stored (status {item['status']})."
                )
            stored.append(replace(step, record=replace(step.record, condition=_condition(item))))
        return stored

    def _read(self, places: Mapping[str, WritableIndex]) -> dict[str, Record]:
        """Read the record of each index, by the same keys. Only `found: false` stands for none."""
        if not places:
            return {}
        ids = [place.index for place in places.values()]
        answer = self.server.ask("POST", f"/{POSITIONS}/_mget", {"ids": ids})
        pairs = zip(places.items(), _counted(answer.get("docs", ()), len(ids)), strict=True)
        return {key: _record(place.index, item) for (key, place), item in pairs}

    def _bulk(self, lines: Sequence[str], count: int) -> Sequence[Mapping[str, Any]]:
        """Send a bulk of so many items; returns their answers."""
        answer = self.server.ask("POST", "/_bulk", "\n".join(lines) + "\n")
        return _counted([next(iter(item.values())) for item in answer.get("items", ())], count)


def _counted(items: Sequence[Mapping[str, Any]], count: int) -> Sequence[Mapping[str, Any]]:
    """Return these answers; raises SinkUnavailable when there are fewer than were asked for."""
    if len(items) != count:
        raise unavailable(f"{POSITIONS} has answered for {len(items)} of {count} indices.")
    return items


def _condition(item: Mapping[str, Any]) -> Mapping[str, int]:
    """Read the condition under which what an item of an answer is about may be replaced."""
    return {"if_seq_no": item["_seq_no"], "if_primary_term": item["_primary_term"]}


def _require_indices(advances: Sequence[Advance], places: Mapping[str, WritableIndex]) -> None:
    """Raise PositionLost for a deleted index: no other writer has taken over."""
    for advance in advances:
        if advance.table.qualified not in places:
            raise mismatch(advance.table, advance.start, None, ours=True)


def _require_allowed(item: Mapping[str, Any]) -> None:
    """Raise SinkBlocked where a block has refused an item of a bulk, Refusal where the user may not write it."""
    error = item.get("error", {})
    if error.get("type") == SECURITY:
        raise forbidden_error(POSITIONS, FORBIDDEN, error.get("reason", ""))
    if is_blocked(item["status"], error.get("type")):
        raise blocked_error(POSITIONS, error.get("reason", ""))


def _record(index: str, item: Mapping[str, Any]) -> Record:
    error = item.get("error", {})
    kind = error.get("type")
    if kind == SECURITY:
        raise forbidden_error(POSITIONS, FORBIDDEN, error.get("reason", ""))
    if item.get("found") is False or kind == "index_not_found_exception":
        # The cluster itself says that there are no positions at all, as before the first start.
        return Record()
    if item.get("found") is True and item.get("_id") == index:
        return Record.from_item(item, index.rsplit("@", 1)[1])
    raise unavailable(f"The position of {index} can't be read: {kind or 'there is no answer'}.")


def _furthest(visible: Position | None, end: Position) -> Position:
    if visible is None or not distance(visible, end).comparable:
        return end
    return replace(end, offsets=tuple(map(max, visible.offsets, end.offsets)))
