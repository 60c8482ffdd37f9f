"""Facts about the pipeline's topics that the broker doesn't store, in the topic
`<pipeline>.settings`.

In:  the topic. Out: its entries. The last entry of a key counts; a null removes the key. A key is
the name of a topic whose settings are lowered, or a kind and its subject with a space between: a
topic's name has none.
"""

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from cdc.config.settings import Pipeline
from cdc.model.position import Position

if TYPE_CHECKING:
    from cdc.kafka.topics import Topics

COMPACTED, UNBURIED, HOLES, SHAPES = "compacted", "unburied", "holes", "made"
HEARTBEAT = "compaction at-work"
STALE_S = 5.0
"""Seconds without a heartbeat after which a compaction is dead."""
POLL_S = 0.5


@dataclass(frozen=True)
class TopicShape:
    """How a topic was created. With another number of partitions keys move, and their records have
    no order.
    """

    topic_id: str
    partitions: int


@dataclass(frozen=True)
class Compaction:
    """The last compaction of a topic on demand; times are Unix seconds.

    `position`: the end of the topic when the compaction `began`; it removes records below. A reader
    that began before the compaction `ended` may miss these; 0 means that it hasn't ended.
    """

    position: Position
    began: float
    ended: float = 0.0


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
        separate, start, oldest = [], self.start, self.since
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


class Ledger:
    """The entries as of the last `read`. Every method raises ConnectorError."""

    def __init__(self, pipeline: Pipeline, kafka: "Topics") -> None:
        self.topic, self._kafka = pipeline.settings_topic, kafka
        self.lowered: dict[str, dict[str, str]] = {}
        """By topic, the settings of its own that have to be restored."""
        self.compacted: dict[str, Compaction] = {}
        self.tombstones_removed: dict[str, Compaction] = {}
        """Compactions that have removed tombstones as well."""
        self._holes: dict[str, list[Hole]] = {}
        self.original_shapes: dict[str, TopicShape] = {}
        """By topic: its shape when it was created, or seen first."""
        self.heartbeat_at = 0.0
        """The last heartbeat of a compaction at work, in Unix seconds; 0 if it has ended."""

    def read(self) -> "Ledger":
        """Load all entries."""
        entries: dict[str, bytes] = {}
        self.heartbeat_at = 0.0
        if self.topic in self._kafka.existing([self.topic]):
            for record in self._kafka.read_all(self.topic):
                key = (record.key or b"").decode()
                if key == HEARTBEAT:
                    self.heartbeat_at = record.timestamp_ms / 1000 if record.value else 0.0
                elif record.value is None:
                    entries.pop(key, None)
                else:
                    entries[key] = record.value
        parsed = {key: json.loads(value) for key, value in entries.items()}
        self.lowered = {key: value for key, value in parsed.items() if " " not in key}
        self.compacted = {
            topic: _compaction(value) for topic, value in _of_kind(COMPACTED, parsed).items()
        }
        self.tombstones_removed = {
            topic: _compaction(value) for topic, value in _of_kind(UNBURIED, parsed).items()
        }
        self._holes = {
            subject: list(map(_hole, value)) for subject, value in _of_kind(HOLES, parsed).items()
        }
        self.original_shapes = {
            topic: TopicShape(**value) for topic, value in _of_kind(SHAPES, parsed).items()
        }
        return self

    def add_shapes(self, shapes: Mapping[str, "TopicShape"]) -> None:
        """Remember the shapes of topics, by topic."""
        self._write({f"{SHAPES} {topic}": asdict(shape) for topic, shape in shapes.items()})

    def holes(self, sink: str, topic: str) -> list[Hole]:
        """The holes in a sink's log of changes of a topic."""
        return self._holes.get(f"{sink} {topic}", [])

    def add_hole(self, sink: str, topic: str, hole: Hole) -> None:
        """Remember a hole, unless the ledger has it."""
        holes = hole.merged(self.holes(sink, topic))
        if holes != self.holes(sink, topic):
            self._holes[f"{sink} {topic}"] = holes
            self._write({f"{HOLES} {sink} {topic}": [asdict(item) for item in holes]})

    def is_interrupted(self) -> bool:
        """Whether settings are lowered and no compaction is at work that will restore them.

        Waits for a heartbeat, at most `STALE_S`.
        """
        last_heartbeat = self.heartbeat_at
        while self.lowered and time.time() - self.heartbeat_at < STALE_S:
            time.sleep(POLL_S)
            self.read()
            if self.heartbeat_at != last_heartbeat:
                return False
        return bool(self.lowered)

    @property
    def at_work(self) -> bool:
        """Whether a compaction has written a heartbeat within `STALE_S`."""
        return time.time() - self.heartbeat_at < STALE_S

    def add_lowered(self, overrides: Mapping[str, Mapping[str, str]]) -> None:
        """Remember the settings that topics have of their own, before these are lowered."""
        self._write({topic: dict(settings) for topic, settings in overrides.items()})

    def forget_lowered(self, topics: Mapping[str, Any]) -> None:
        """Forget settings that are restored."""
        self._write(dict.fromkeys(topics))

    def add_compactions(self, compactions: Mapping[str, Compaction], *, tombstones: bool) -> None:
        """Remember compactions, by topic, before they remove anything."""
        kinds = (COMPACTED, UNBURIED) if tombstones else (COMPACTED,)
        self._write(
            {
                f"{kind} {topic}": asdict(compaction)
                for kind in kinds
                for topic, compaction in compactions.items()
            }
        )

    def write_heartbeat(self, *, at_work: bool) -> None:
        """Write the heartbeat of a compaction, or that it has ended."""
        self._write({HEARTBEAT: {} if at_work else None})

    def _write(self, entries: Mapping[str, Any]) -> None:
        """Write entries; durable on return. None removes a key."""
        encoded = [
            (key.encode(), None if value is None else json.dumps(value).encode())
            for key, value in entries.items()
        ]
        if encoded:
            self._kafka.write(self.topic, encoded)


def _of_kind(kind: str, entries: Mapping[str, Any]) -> dict[str, Any]:
    """The entries of a kind, by subject."""
    return {
        key.removeprefix(f"{kind} "): value
        for key, value in entries.items()
        if key.startswith(f"{kind} ")
    }


def _compaction(value: Mapping[str, Any]) -> Compaction:
    return Compaction(_position(value["position"]), value["began"], value["ended"])


def _hole(value: Mapping[str, Any]) -> Hole:
    return Hole(_position(value["start"]), _position(value["end"]), value["since"], value["until"])


def _position(value: Mapping[str, Any]) -> Position:
    return Position(value["topic_id"], tuple(value["offsets"]))


def _utc(moment: float) -> str:
    return datetime.fromtimestamp(moment, UTC).isoformat(" ", "seconds")
