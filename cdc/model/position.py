"""Where a view stands in its topic, and how far that is from an end. Standard library only."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, ClassVar, NamedTuple


@dataclass(frozen=True)
class Server:
    """Which Postgres a log is of: the cluster that initdb made, and how often a standby of it was promoted."""

    system: str
    timeline: int

    def __str__(self) -> str:
        return f"{self.system}.{self.timeline}"


@dataclass(frozen=True)
class Position:
    """How far a topic has been applied: every record of partition p below offsets[p] is in the view.

    The topic id tells a recreated topic from the old one of the same name: offsets mean nothing across the two.
    """

    topic_id: str
    offsets: tuple[int, ...]

    @property
    def partition_count(self) -> int:
        return len(self.offsets)


@dataclass(frozen=True)
class Stored:
    """What a sink keeps of a view besides its rows, changed only together with them or after them."""

    position: Position
    writer: str = ""
    rows: int = 0
    """Rows written or deleted since the view was made; a replay counts again."""
    at: float = 0.0
    """Unix seconds of the last change of this record."""
    floor: int = 0
    """The LSN of the last TRUNCATE that the view was made after: it holds nothing from before."""
    generation: str = ""
    """Which build of the view it is."""

    MARK: ClassVar[str] = '{"topic_id"'
    """How its JSON begins: tells it from other people's notes in the same place."""

    def to_json(self) -> str:
        return json.dumps(
            {
                "topic_id": self.position.topic_id,
                "offsets": list(self.position.offsets),
                "writer": self.writer,
                "rows": self.rows,
                "at": self.at,
                "floor": self.floor,
                "generation": self.generation,
            }
        )

    @classmethod
    def from_mapping(cls, stored: Mapping[str, Any]) -> "Stored":
        offsets = tuple(int(offset) for offset in stored["offsets"])
        position = Position(stored["topic_id"], offsets)
        floor, generation = int(stored.get("floor", 0)), str(stored.get("generation", ""))
        return cls(position, stored["writer"], int(stored["rows"]), float(stored["at"]), floor, generation)

    @classmethod
    def from_json(cls, text: str) -> "Stored":
        return cls.from_mapping(json.loads(text))


class Reach(StrEnum):
    """Where a view stands, seen from a position of its topic."""

    REACHED = "reached"
    BEHIND = "behind"
    OTHER_TOPIC = "was made from another topic of that name"
    REPARTITIONED = "was made from another number of partitions"
    BEFORE_FLOOR = "holds rows from before a TRUNCATE"


class Distance(NamedTuple):
    """The answer to "has this view got there?": `offsets` counts what is left when it is behind.

    It is an upper bound of records, because compaction and transaction markers leave gaps.
    """

    reach: Reach
    offsets: int = 0

    @property
    def reached(self) -> bool:
        return self.reach is Reach.REACHED

    @property
    def comparable(self) -> bool:
        """Whether offsets of the view and of the position count the same records."""
        return self.reach not in (Reach.OTHER_TOPIC, Reach.REPARTITIONED)


def distance(view: Stored | Position | None, end: Position, floor: int = 0) -> Distance:
    """How far a view is from `end`: the only comparison of positions, for all who ask whether a view has got there.

    A view of another topic or partition count is told apart first, since its offsets mean other records. A view to
    which nothing has been applied is behind by everything. `floor` counts for what a sink has stored, not for a bare
    position.
    """
    position = view.position if isinstance(view, Stored) else view
    offsets = position.offsets if position else (0,) * end.partition_count
    if position and position.topic_id != end.topic_id:
        return Distance(Reach.OTHER_TOPIC)
    if len(offsets) != end.partition_count:
        return Distance(Reach.REPARTITIONED)
    left = sum(max(0, there - here) for here, there in zip(offsets, end.offsets, strict=True))
    if isinstance(view, Stored) and view.floor < floor:
        return Distance(Reach.BEFORE_FLOOR, left)
    return Distance(Reach.BEHIND if left else Reach.REACHED, left)
