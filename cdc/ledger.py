"""What the pipeline remembers of its topics and the broker doesn't tell, in the topic `<pipeline>.settings`.

In:  the topic. Out: what it says by now; of a key the last entry counts, a null forgets it.
A key is a topic, whose settings are lowered then, or a kind and what it is about: no topic's name has a space.
"""

import json
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from cdc.change import Position
from cdc.settings import Pipeline

if TYPE_CHECKING:
    from cdc.topics import Topics

COMPACTED, BEAT = "compacted", "compaction at-work"
STALE_S = 10.0
"""A compaction that has written nothing for so long is dead."""


@dataclass(frozen=True)
class Compaction:
    """The last time that a topic was compacted on demand; times are Unix seconds.

    `position`: where the topic ended when it `began`. With `tombstones` those below may be gone since, for who began
    to read before it `ended`; 0: it hasn't.
    """

    position: Position
    began: float
    ended: float = 0.0
    tombstones: bool = False

    @classmethod
    def from_json(cls, text: bytes) -> "Compaction":
        told = json.loads(text)
        position = Position(told["position"]["topic_id"], tuple(told["position"]["offsets"]))
        return cls(position, told["began"], told["ended"], told["tombstones"])


class Ledger:
    """The entries as `read` found them. Every method raises ConnectorError."""

    def __init__(self, pipeline: Pipeline, kafka: "Topics") -> None:
        self.topic, self._kafka = pipeline.settings_topic, kafka
        self.lowered: dict[str, dict[str, str]] = {}
        """By topic, the settings of its own that it has to be given back."""
        self.compacted: dict[str, Compaction] = {}
        self._beat = 0.0

    def read(self) -> "Ledger":
        entries: dict[str, bytes] = {}
        self._beat = 0.0
        if self.topic in self._kafka.existing([self.topic]):
            for record in self._kafka.all(self.topic):
                key = (record.key or b"").decode()
                if key == BEAT:
                    self._beat = record.timestamp_ms / 1000 if record.value else 0.0
                elif record.value is None:
                    entries.pop(key, None)
                else:
                    entries[key] = record.value
        self.lowered = {key: json.loads(value) for key, value in entries.items() if " " not in key}
        self.compacted = {about: Compaction.from_json(value) for about, value in _of(COMPACTED, entries).items()}
        return self

    @property
    def beat(self) -> float:
        """When a compaction at work has last said so, in Unix seconds; 0 when it has ended."""
        return self._beat

    @property
    def at_work(self) -> bool:
        """Whether a compaction is at work now."""
        return time.time() - self._beat < STALE_S

    def lower(self, own: Mapping[str, Mapping[str, str]]) -> None:
        """Remember the settings that topics have of their own, before they are lowered."""
        self._write({topic: dict(settings) for topic, settings in own.items()})

    def raised(self, topics: Mapping[str, Any]) -> None:
        self._write(dict.fromkeys(topics))

    def compact(self, compactions: Mapping[str, Compaction]) -> None:
        self._write({f"{COMPACTED} {topic}": asdict(one) for topic, one in compactions.items()})

    def beating(self, *, at_work: bool) -> None:
        """Say that a compaction is at work, or is no more."""
        self._write({BEAT: {} if at_work else None})

    def _write(self, entries: Mapping[str, Any]) -> None:
        """Durable on return."""
        if entries:
            self._kafka.write(
                self.topic,
                [
                    (key.encode(), None if value is None else json.dumps(value).encode())
                    for key, value in entries.items()
                ],
            )


def _of(kind: str, entries: Mapping[str, bytes]) -> dict[str, bytes]:
    """The entries of a kind, by what they are about."""
    return {key.removeprefix(f"{kind} "): value for key, value in entries.items() if key.startswith(f"{kind} ")}
