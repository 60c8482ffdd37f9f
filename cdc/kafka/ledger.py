"""What the pipeline remembers of its topics and the broker doesn't tell, in the topic `<pipeline>.settings`.

In:  the topic. Out: what it says by now; of a key the last entry counts, a null forgets it.
A key is a topic, whose settings are lowered then, or a kind and what it is about: no topic's name has a space.
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

COMPACTED, UNBURIED, HOLES, MADE = "compacted", "unburied", "holes", "made"
BEAT = "compaction at-work"
STALE_S = 5.0
"""A compaction that has written nothing for so long is dead."""
LOOK_S = 0.5


@dataclass(frozen=True)
class TopicShape:
    """Of a topic: with more partitions keys would move, so that their records have no order."""

    topic_id: str
    partitions: int


@dataclass(frozen=True)
class Compaction:
    """The last time that a topic was compacted on demand; times are Unix seconds.

    `position`: where the topic ended when it `began`. What it removes lies below; who began to read before it `ended`
    may miss that; 0: it hasn't ended.
    """

    position: Position
    began: float
    ended: float = 0.0


@dataclass(frozen=True)
class Hole:
    """Offsets [start, end) of a topic whose superseded records may be missing in a log of changes.

    They were written in [since, until), in Unix seconds, and had gone before they were read.
    """

    start: Position
    end: Position
    since: float
    until: float

    def __str__(self) -> str:
        spans = zip(self.start.offsets, self.end.offsets, strict=True)
        parts = [f"{first}-{last - 1} of partition {at}" for at, (first, last) in enumerate(spans) if first < last]
        since, until = (datetime.fromtimestamp(at, UTC).isoformat(" ", "seconds") for at in (self.since, self.until))
        return f"offsets {', '.join(parts)}, written from {since} to {until}"

    def merged(self, others: Sequence["Hole"]) -> list["Hole"]:
        """This one behind others of the same log, with those that reach into it."""
        apart, start, since = [], self.start, self.since
        for other in others:
            if other.end.topic_id != self.end.topic_id or all(
                last <= first for last, first in zip(other.end.offsets, self.start.offsets, strict=True)
            ):
                apart.append(other)
            else:
                start = Position(start.topic_id, tuple(map(min, start.offsets, other.start.offsets)))
                since = min(since, other.since)
        return [*apart, Hole(start, self.end, since, self.until)]


class Ledger:
    """The entries as `read` found them. Every method raises ConnectorError."""

    def __init__(self, pipeline: Pipeline, kafka: "Topics") -> None:
        self.topic, self._kafka = pipeline.settings_topic, kafka
        self.lowered: dict[str, dict[str, str]] = {}
        """By topic, the settings of its own that it has to be given back."""
        self.compacted: dict[str, Compaction] = {}
        self.tombstones_removed: dict[str, Compaction] = {}
        """Those that have removed tombstones as well."""
        self._holes: dict[str, list[Hole]] = {}
        self.made: dict[str, TopicShape] = {}
        """As topics were made, or seen first."""
        self.beat = 0.0
        """When a compaction at work has last said so, in Unix seconds; 0 when it has ended."""

    def read(self) -> "Ledger":
        entries: dict[str, bytes] = {}
        self.beat = 0.0
        if self.topic in self._kafka.existing([self.topic]):
            for record in self._kafka.read_all(self.topic):
                key = (record.key or b"").decode()
                if key == BEAT:
                    self.beat = record.timestamp_ms / 1000 if record.value else 0.0
                elif record.value is None:
                    entries.pop(key, None)
                else:
                    entries[key] = record.value
        told = {key: json.loads(value) for key, value in entries.items()}
        self.lowered = {key: value for key, value in told.items() if " " not in key}
        self.compacted = {topic: _compaction(value) for topic, value in _of(COMPACTED, told).items()}
        self.tombstones_removed = {topic: _compaction(value) for topic, value in _of(UNBURIED, told).items()}
        self._holes = {about: list(map(_hole, value)) for about, value in _of(HOLES, told).items()}
        self.made = {topic: TopicShape(**value) for topic, value in _of(MADE, told).items()}
        return self

    def add_shapes(self, shapes: Mapping[str, "TopicShape"]) -> None:
        self._write({f"{MADE} {topic}": asdict(shape) for topic, shape in shapes.items()})

    def holes(self, sink: str, topic: str) -> list[Hole]:
        return self._holes.get(f"{sink} {topic}", [])

    def add_hole(self, sink: str, topic: str, hole: Hole) -> None:
        """Remember it, unless that has been done."""
        now = hole.merged(self.holes(sink, topic))
        if now != self.holes(sink, topic):
            self._holes[f"{sink} {topic}"] = now
            self._write({f"{HOLES} {sink} {topic}": [asdict(one) for one in now]})

    def is_interrupted(self) -> bool:
        """Whether settings are lowered and nobody is at work who will raise them; waits until that is known."""
        seen = self.beat
        while self.lowered and time.time() - self.beat < STALE_S:
            time.sleep(LOOK_S)
            self.read()
            if self.beat != seen:
                return False
        return bool(self.lowered)

    @property
    def at_work(self) -> bool:
        """Whether a compaction has just said that it is at work."""
        return time.time() - self.beat < STALE_S

    def add_lowered(self, own: Mapping[str, Mapping[str, str]]) -> None:
        """Remember the settings that topics have of their own, before they are lowered."""
        self._write({topic: dict(settings) for topic, settings in own.items()})

    def forget_lowered(self, topics: Mapping[str, Any]) -> None:
        self._write(dict.fromkeys(topics))

    def add_compactions(self, compactions: Mapping[str, Compaction], *, tombstones: bool) -> None:
        """Remember what is removed, before it is."""
        kinds = (COMPACTED, UNBURIED) if tombstones else (COMPACTED,)
        self._write({f"{kind} {topic}": asdict(one) for kind in kinds for topic, one in compactions.items()})

    def write_heartbeat(self, *, at_work: bool) -> None:
        """Say that a compaction is at work, or is no more."""
        self._write({BEAT: {} if at_work else None})

    def _write(self, entries: Mapping[str, Any]) -> None:
        """Durable on return."""
        encoded = [
            (key.encode(), None if value is None else json.dumps(value).encode()) for key, value in entries.items()
        ]
        if encoded:
            self._kafka.write(self.topic, encoded)


def _of(kind: str, entries: Mapping[str, Any]) -> dict[str, Any]:
    """The entries of a kind, by what they are about."""
    return {key.removeprefix(f"{kind} "): value for key, value in entries.items() if key.startswith(f"{kind} ")}


def _compaction(told: Mapping[str, Any]) -> Compaction:
    return Compaction(_position(told["position"]), told["began"], told["ended"])


def _hole(told: Mapping[str, Any]) -> Hole:
    return Hole(_position(told["start"]), _position(told["end"]), told["since"], told["until"])


def _position(told: Mapping[str, Any]) -> Position:
    return Position(told["topic_id"], tuple(told["offsets"]))
