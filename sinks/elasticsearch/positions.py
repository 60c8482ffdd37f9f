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

from cdc.errors import SinkUnavailable
from cdc.model.position import Position, ViewCheckpoint
from sinks.elasticsearch.client import HINTS, unavailable
from sinks.elasticsearch.server import Server

POSITIONS = "cdc-position"
CONFLICT = 409


class RecordChanged(Exception):
    """The record of an index has changed since it was read."""

    def __init__(self, index: str) -> None:
        super().__init__(index)
        self.index = index


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

    def visible_checkpoint(self, default: Position) -> ViewCheckpoint:
        """Build the checkpoint of what readers may have seen, as if it was stored."""
        return ViewCheckpoint(
            self.visible or default, floor=self.stored.floor if self.stored else 0
        )

    def begins(self, end: Position) -> "Record":
        """Build the record to store before rows of a batch are sent that ends at this position."""
        return replace(self, visible=_furthest(self.visible, end))

    def ends(self, stored: ViewCheckpoint) -> "Record":
        """Build the record to store when the rows are durable.

        Rows that an earlier batch has shown stay visible.
        """
        return replace(self, stored=stored, visible=_furthest(self.visible, stored.position))

    def to_json(self) -> str:
        """Write the record as the document of `cdc-position`."""
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
        condition = {"if_seq_no": item["_seq_no"], "if_primary_term": item["_primary_term"]}
        stored = (
            replace(ViewCheckpoint.from_mapping(source), generation=generation)
            if "topic_id" in source
            else None
        )
        visible = stored.position if stored else None
        # Records from before this was written down have none.
        if visible_value := source.get("visible"):
            visible = Position(visible_value["topic_id"], tuple(visible_value["offsets"]))
        return cls(stored, visible, condition)


def _furthest(visible: Position | None, end: Position) -> Position:
    is_same_topic = visible and (visible.topic_id, visible.partition_count) == (
        end.topic_id,
        end.partition_count,
    )
    return (
        replace(end, offsets=tuple(map(max, visible.offsets, end.offsets)))
        if visible and is_same_topic
        else end
    )


class Positions:
    """The records of a sink's indices."""

    def __init__(self, server: Server) -> None:
        self._server = server

    def read(self, indices: Mapping[str, str]) -> dict[str, Record]:
        """Read the record of each index, by the same keys. Only `found: false` says that there is
        none.
        """
        if not indices:
            return {}
        answer = self._server.ask("POST", f"/{POSITIONS}/_mget", {"ids": list(indices.values())})
        items = answer.get("docs", ())
        if len(items) != len(indices):
            raise unavailable(
                f"{POSITIONS} has answered for {len(items)} of {len(indices)} indices."
            )
        pairs = zip(indices.items(), items, strict=True)
        return {key: self._record(index, item) for (key, index), item in pairs}

    def _record(self, index: str, item: Mapping[str, Any]) -> Record:
        kind = item.get("error", {}).get("type")
        if item.get("found") is False or kind == "index_not_found_exception":
            # The cluster itself says that there are no positions at all, as before the first start.
            return Record()
        if item.get("found") is True and item.get("_id") == index:
            return Record.from_item(item, index.rsplit("@", 1)[1])
        raise unavailable(f"The position of {index} can't be read: {kind or 'there is no answer'}.")

    def write(self, records: Sequence[tuple[str, Record]]) -> list[Record]:
        """Store the records that are still as they were read; returns them with the conditions of
        the next change.

        Durable on return.

        Raises:
            Moved: one was not. The others are written.
        """
        lines = []
        for index, record in records:
            action = "index" if record.condition else "create"
            lines += [
                json.dumps({action: {"_index": POSITIONS, "_id": index, **record.condition}}),
                record.to_json(),
            ]
        answer = self._server.ask("POST", "/_bulk", "\n".join(lines) + "\n")
        items = [next(iter(item.values())) for item in answer.get("items", ())]
        if len(items) != len(records):
            raise unavailable(
                f"{POSITIONS} has answered for {len(items)} of {len(records)} indices."
            )
        for (index, _), item in zip(records, items, strict=True):
            if item["status"] == CONFLICT:
                raise RecordChanged(index)
            if item["status"] >= 400:
                raise SinkUnavailable(
                    f"The position of {index} could not be stored (status {item['status']}).",
                    hint=HINTS["unavailable"],
                )
        return [
            replace(
                record,
                condition={"if_seq_no": item["_seq_no"], "if_primary_term": item["_primary_term"]},
            )
            for (_, record), item in zip(records, items, strict=True)
        ]

    def forget(self, indices: Sequence[str]) -> None:
        """Delete records; called before the indices are deleted, so that no index without rows has
        a position.
        """
        if not indices:
            return
        lines = [json.dumps({"delete": {"_index": POSITIONS, "_id": index}}) for index in indices]
        answer = self._server.ask("POST", "/_bulk", "\n".join(lines) + "\n")
        statuses = [next(iter(item.values()))["status"] for item in answer["items"]]
        if any(status >= 400 and status != 404 for status in statuses):
            raise unavailable(f"Not all positions in {POSITIONS} could be removed.")
