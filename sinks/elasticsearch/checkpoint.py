"""What is stored of an index: its checkpoint, how far rows may be visible, and the condition under
which both may be replaced.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from cdc.model.position import Position, ViewCheckpoint


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
        visible = Position(source["visible"]["topic_id"], tuple(source["visible"]["offsets"]))
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
