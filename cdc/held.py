"""The topic <pipeline>.quarantine seen from outside of Spark: what is in it, requests to try again, settling.

See `cdc.quarantine` for the forms of its records. Its values hold rows: they are shown to who asks for one, and else
appear nowhere.
"""

import json
from base64 import b64decode
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace

from cdc.settings import Pipeline
from cdc.topics import Topics


@dataclass(frozen=True, order=True)
class Entry:
    """One record in quarantine, or the request to try it again."""

    sink: str
    topic: str
    partition: int
    offset: int
    id: str | None
    redrive: bool = False

    @property
    def row(self) -> tuple[str, str] | None:
        return None if self.id is None else (self.topic, self.id)

    @property
    def place(self) -> str:
        """What a person calls it: sink/topic/partition/offset."""
        return f"{self.sink}/{self.topic}/{self.partition}/{self.offset}"

    def to_key(self) -> bytes:
        named = {name: value for name, value in asdict(self).items() if name != "redrive" or value}
        return json.dumps(named, separators=(",", ":"), ensure_ascii=False).encode()


@dataclass(frozen=True)
class Held:
    """An entry with why and since when (Unix seconds) it is there, and the record's own bytes."""

    entry: Entry
    reason: str
    at: float
    key: bytes | None
    value: bytes | None


def held(kafka: Topics, pipeline: Pipeline) -> list[Held]:
    """What is open for all sinks, requests included. Raises ConnectorError."""
    found: dict[Entry, bytes | None] = {}
    for record in kafka.all(pipeline.quarantine_topic):
        found[Entry(**json.loads(record.key or b"{}"))] = record.value
    listed = [_held(entry, value) for entry, value in found.items() if value]
    return sorted(listed, key=lambda one: (one.entry.sink, one.entry.topic, one.entry.partition, one.entry.offset))


def request(kafka: Topics, pipeline: Pipeline, entries: Iterable[Entry]) -> None:
    """Ask the sinks' streams to try entries again."""
    wanted = [replace(entry, redrive=True).to_key() for entry in entries]
    kafka.write(pipeline.quarantine_topic, [(key, b'{"reason":"asked for"}') for key in wanted])


def close(kafka: Topics, pipeline: Pipeline, entries: Iterable[Entry]) -> None:
    """Settle entries and requests."""
    if listed := list(entries):
        kafka.write(pipeline.quarantine_topic, [(entry.to_key(), None) for entry in listed])


def _held(entry: Entry, value: bytes) -> Held:
    told = json.loads(value)
    key, record = (b64decode(told[name]) if told.get(name) is not None else None for name in ("key", "value"))
    return Held(entry, told["reason"], told.get("at", 0.0), key, record)
