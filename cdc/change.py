"""The words of the pipeline as plain data: table, column, topic, position, advance.

Standard library only: every part may import this module, it imports none.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any, ClassVar, Literal, NamedTuple

GENERATION = "%Y%m%dt%H%M%S%f"
Form = Literal["events", "documents"]
"""What a sink takes: every change with its row as the connector wrote it, or rows as documents of a view."""


@dataclass(frozen=True)
class Column:
    """One captured column: `type` is Postgres' own text for it, as `format_type` prints it: numeric(10,2)."""

    name: str
    type: str
    nullable: bool = True


@dataclass(frozen=True)
class IndexOptions:
    """What the pipeline file adds to how a search index is made: by column, and for the index as a whole."""

    fields: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Table:
    """A captured table; `key` names the columns that identify a row, in the order of the primary key."""

    schema: str
    name: str
    columns: tuple[Column, ...]
    key: tuple[str, ...]
    topic: str
    reshaped: bool = False
    """Whether the log holds rows with columns that the table has no more: they are left out."""
    index: IndexOptions = field(default=IndexOptions(), hash=False)

    @property
    def qualified(self) -> str:
        return f"{self.schema}.{self.name}"

    def column(self, name: str) -> Column:
        return next(column for column in self.columns if column.name == name)


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


@dataclass(frozen=True)
class Advance:
    """One table's step in a batch: apply the records in [start, until), then store `until`.

    `start` is None for a view that has no position yet; it then counts as offset 0 of every partition.
    """

    table: Table
    start: Position | None
    until: Position
    floor: int = 0
    """See `Stored.floor`."""

    @property
    def start_offsets(self) -> tuple[int, ...]:
        return self.start.offsets if self.start else (0,) * self.until.partition_count

    @property
    def repairs(self) -> bool:
        """A step of no length: its rows are written, the position stays."""
        return self.start == self.until

    @property
    def offsets(self) -> int:
        """How many offsets the step covers: an upper bound of its records."""
        return sum(self.until.offsets) - sum(self.start_offsets)


@dataclass
class Applied:
    """What one batch did to one view, in records: every record read is in exactly one of the other numbers."""

    read: int = 0
    written: int = 0
    deleted: int = 0
    folded: int = 0
    """Superseded by a newer change of the same row in the same batch."""
    stale: int = 0
    """Without effect: the view had a newer version already, or the change lies before a TRUNCATE."""
    quarantined: int = 0

    @property
    def rows(self) -> int:
        return self.written + self.deleted

    @property
    def accounted(self) -> int:
        return self.rows + self.folded + self.stale + self.quarantined

    def add(self, other: "Applied") -> None:
        """Add the numbers of another one, or of a report that has more to say."""
        for number in fields(Applied):
            setattr(self, number.name, getattr(self, number.name) + getattr(other, number.name))


def new_generation() -> str:
    """A name for a build of a view, made now: in order of time, and good for a file, an index and a key."""
    return datetime.now(UTC).strftime(GENERATION)


def made_at(generation: str) -> float:
    """When a build of that name was begun, in Unix seconds; 0 when the name doesn't tell."""
    try:
        return datetime.strptime(generation, GENERATION).replace(tzinfo=UTC).timestamp()
    except ValueError:
        return 0.0


def row_id(values: list[Any]) -> str:
    """The id of a row in every view: one key column is its text, several are a JSON array.

    The twin of `TableCodec.row_id`, for clients and tests. Values are what the topic's key holds.
    """
    if len(values) == 1:
        value = values[0]
        return value if isinstance(value, str) else json.dumps(value)
    return json.dumps(values, separators=(",", ":"), ensure_ascii=False)
