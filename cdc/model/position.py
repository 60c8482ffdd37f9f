"""The position of a view in its topic, and how far that is from an end. Standard library only."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, ClassVar, NamedTuple


@dataclass(frozen=True)
class Server:
    """Whose log it is: the cluster that initdb made, and how often one of its standbys was
    promoted.
    """

    system: str
    timeline: int

    def __str__(self) -> str:
        return f"{self.system}.{self.timeline}"


@dataclass(frozen=True)
class Position:
    """How far a topic has been applied: every record of partition p below offsets[p] is in the
    view.

    The topic id distinguishes a recreated topic from its predecessor of the same name: their
    offsets count different records.
    """

    topic_id: str
    offsets: tuple[int, ...]

    @property
    def partition_count(self) -> int:
        return len(self.offsets)


@dataclass(frozen=True)
class ViewCheckpoint:
    """What a view stores about itself. A sink changes it together with the rows, or after them."""

    position: Position
    writer: str = ""
    rows: int = 0
    """Rows written or deleted since the view was created; a replay counts them again."""
    changed_at: float = 0.0
    """Unix seconds of the last change of this checkpoint; `at` in its JSON."""
    floor: int = 0
    """LSN of the last TRUNCATE that the view has carried out: it holds no row from before."""
    generation: str = ""
    """The generation of the view."""
    shape: str = ""
    """`Table.shape` of what the view was made of."""

    JSON_START: ClassVar[str] = '{"topic_id"'
    """How its JSON begins. Notes of other programs in the same place begin differently."""

    def to_json(self) -> str:
        """The checkpoint as JSON, whose keys are those that `from_mapping` takes."""
        return json.dumps(
            {
                "topic_id": self.position.topic_id,
                "offsets": list(self.position.offsets),
                "writer": self.writer,
                "rows": self.rows,
                "at": self.changed_at,
                "floor": self.floor,
                "generation": self.generation,
                "shape": self.shape,
            }
        )

    @classmethod
    def from_mapping(cls, fields: Mapping[str, Any]) -> "ViewCheckpoint":
        """A checkpoint from the fields of its JSON; numbers may be texts, as Redis holds them."""
        offsets = tuple(int(offset) for offset in fields["offsets"])
        return cls(
            position=Position(fields["topic_id"], offsets),
            writer=fields["writer"],
            rows=int(fields["rows"]),
            changed_at=float(fields["at"]),
            floor=int(fields["floor"]),
            generation=str(fields["generation"]),
            # Missing in what was stored before sinks could have some columns only.
            shape=str(fields.get("shape", "")),
        )

    @classmethod
    def from_json(cls, text: str) -> "ViewCheckpoint":
        return cls.from_mapping(json.loads(text))


class Reach(StrEnum):
    """How a view relates to a position of its topic; the texts are the end of an error's
    sentence.
    """

    REACHED = "reached"
    BEHIND = "behind"
    OTHER_TOPIC = "was made from another topic of that name"
    REPARTITIONED = "was made from another number of partitions"
    BEFORE_FLOOR = "holds rows from before a TRUNCATE"


class Distance(NamedTuple):
    """The answer to "has this view reached the position?"; `offsets` counts what it still lacks.

    That is an upper bound of records, because compaction and transaction markers leave gaps.
    """

    reach: Reach
    offsets: int = 0

    @property
    def reached(self) -> bool:
        """Whether the view holds everything below the position."""
        return self.reach is Reach.REACHED

    @property
    def comparable(self) -> bool:
        """Whether offsets of the view and of the position count the same records."""
        return self.reach not in (Reach.OTHER_TOPIC, Reach.REPARTITIONED)


def distance(view: ViewCheckpoint | Position | None, end: Position, floor: int = 0) -> Distance:
    """Compare a view with `end`. No other code orders positions; fencing compares for equality.

    Topic and partition count are compared first, since offsets of another topic count other
    records. A view to which nothing has been applied is behind by everything. `floor` is compared
    for a checkpoint, not for a bare position, which has none.
    """
    position = view.position if isinstance(view, ViewCheckpoint) else view
    offsets = position.offsets if position else (0,) * end.partition_count
    if position and position.topic_id != end.topic_id:
        return Distance(Reach.OTHER_TOPIC)
    if len(offsets) != end.partition_count:
        return Distance(Reach.REPARTITIONED)
    pairs = zip(offsets, end.offsets, strict=True)
    missing = sum(max(0, last - offset) for offset, last in pairs)
    if isinstance(view, ViewCheckpoint) and view.floor < floor:
        return Distance(Reach.BEFORE_FLOOR, missing)
    return Distance(Reach.BEHIND if missing else Reach.REACHED, missing)
