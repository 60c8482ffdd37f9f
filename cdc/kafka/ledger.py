"""Facts about the pipeline's topics that the broker doesn't store, in the topic
`<pipeline>.settings`.

In:  the topic. Out: its entries. The last entry of a key counts. A key is a kind and its subject
with a space between: a topic's name has none.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import msgspec

from cdc.config.settings import Pipeline
from cdc.errors import ConnectorError
from cdc.model.position import Position

if TYPE_CHECKING:
    from cdc.kafka.topics import Topics

HOLES = "holes"
SHAPES = "made"
SNAPSHOTS = "snapshot"


@dataclass(frozen=True)
class TopicShape:
    """How a topic was created. With another number of partitions keys move, and their records have
    no order.
    """

    topic_id: str
    partitions: int


@dataclass(frozen=True)
class Hole:
    """Offsets [start, end) of a topic whose superseded records may be missing in a log of changes.

    They were written in [since, until), in Unix seconds, and compaction removed them before they
    were read.
    """

    start: Position
    end: Position
    since: float
    until: float

    def __str__(self) -> str:
        spans = zip(self.start.offsets, self.end.offsets, strict=True)
        parts = [
            f"{first}-{last - 1} of partition {partition}"
            for partition, (first, last) in enumerate(spans)
            if first < last
        ]
        return f"offsets {', '.join(parts)}, written from {_utc(self.since)} to {_utc(self.until)}"

    def merged(self, holes: Sequence["Hole"]) -> list["Hole"]:
        """Append this hole to earlier ones of the same log; those that reach into it become part of
        it.
        """
        separate = []
        start = self.start
        oldest = self.since
        for hole in holes:
            if self._is_after(hole):
                separate.append(hole)
            else:
                start = Position(start.topic_id, tuple(map(min, start.offsets, hole.start.offsets)))
                oldest = min(oldest, hole.since)
        return [*separate, Hole(start, self.end, oldest, self.until)]

    def _is_after(self, hole: "Hole") -> bool:
        """Whether no offset lies in both: they are of two topics, or that one ends where this one
        starts.
        """
        if hole.end.topic_id != self.end.topic_id:
            return True
        return all(
            last <= first for last, first in zip(hole.end.offsets, self.start.offsets, strict=True)
        )


# Made here, in one thread: threads that decode a class for the first time at the same time crash msgspec 0.22.
_decode_holes = msgspec.json.Decoder(list[Hole]).decode
_decode_shape = msgspec.json.Decoder(TopicShape).decode
_decode_ends = msgspec.json.Decoder(dict[str, Position]).decode


class Ledger:
    """The entries as of the last `read`. Every method raises ConnectorError."""

    def __init__(self, pipeline: Pipeline, kafka: "Topics") -> None:
        self.topic = pipeline.settings_topic
        self._kafka = kafka
        self._holes: dict[str, list[Hole]] = {}
        self.original_shapes: dict[str, TopicShape] = {}
        """By topic: its shape when it was created, or seen first."""
        self.snapshots: dict[str, dict[str, Position]] = {}
        """By its name, where topics ended before a new snapshot. Rows that it hasn't sent are still to be deleted."""

    def read(self) -> "Ledger":
        holes: dict[str, list[Hole]] = {}
        shapes: dict[str, TopicShape] = {}
        snapshots: dict[str, dict[str, Position]] = {}
        if self.topic in self._kafka.existing([self.topic]):
            for record in self._kafka.read_all(self.topic):
                try:
                    kind, _, subject = (record.key or b"").decode().partition(" ")
                    if kind == HOLES:
                        holes[subject] = _decode_holes(record.value or b"")
                    elif kind == SHAPES:
                        shapes[subject] = _decode_shape(record.value or b"")
                    elif kind == SNAPSHOTS and record.value is not None:
                        snapshots[subject] = _decode_ends(record.value)
                    elif kind == SNAPSHOTS:
                        snapshots.pop(subject, None)
                except ValueError:
                    raise _damaged(self.topic, record.offset) from None
        self._holes = holes
        self.original_shapes = shapes
        self.snapshots = snapshots
        return self

    def add_shapes(self, shapes: Mapping[str, "TopicShape"]) -> None:
        self._write({f"{SHAPES} {topic}": asdict(shape) for topic, shape in shapes.items()})

    def begin_snapshot(self, ends: Mapping[str, Position]) -> None:
        """Note that a snapshot begins where these topics end now."""
        entry = {topic: asdict(end) for topic, end in ends.items()}
        self._write({f"{SNAPSHOTS} {uuid4().hex}": entry})

    def end_snapshot(self, name: str) -> None:
        """Forget a snapshot: the rows that it hasn't sent are deleted."""
        self._kafka.write(self.topic, [(f"{SNAPSHOTS} {name}".encode(), None)])

    def holes(self, sink: str, topic: str) -> list[Hole]:
        """The holes in a sink's log of changes of a topic."""
        return self._holes.get(f"{sink} {topic}", [])

    def add_hole(self, sink: str, topic: str, hole: Hole) -> None:
        """Remember a hole, unless the ledger has it."""
        holes = hole.merged(self.holes(sink, topic))
        if holes != self.holes(sink, topic):
            self._holes[f"{sink} {topic}"] = holes
            self._write({f"{HOLES} {sink} {topic}": [asdict(item) for item in holes]})

    def _write(self, entries: Mapping[str, Any]) -> None:
        """Write entries; durable on return."""
        encoded = [(key.encode(), json.dumps(value).encode()) for key, value in entries.items()]
        if encoded:
            self._kafka.write(self.topic, encoded)


def _damaged(topic: str, offset: int) -> ConnectorError:
    return ConnectorError(
        f"The record at offset {offset} of {topic} can't be read: something else has written to it.",
        hint=f"the topic is the pipeline's own: delete {topic} by kafka-topics.sh, then: cdc -p FILE register;"
        " the holes in logs of changes that it knew are forgotten, and with how many partitions topics were made",
        topic=topic,
    )


def _utc(moment: float) -> str:
    return datetime.fromtimestamp(moment, UTC).isoformat(" ", "seconds")
