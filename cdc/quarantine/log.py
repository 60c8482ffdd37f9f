"""The topic <pipeline>.quarantine seen from outside of Spark: what is in it, requests to try again, settling.

See `cdc.quarantine` for the forms of its records. Its values hold rows: they are shown to who asks for one, and else
appear nowhere.
"""

import json
from base64 import b64decode
from collections.abc import Collection, Iterable
from dataclasses import asdict, dataclass, replace

from cdc.config.settings import Pipeline
from cdc.kafka.records import Record
from cdc.kafka.tail import Tail
from cdc.kafka.topics import Topics


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
    def order(self) -> tuple[str, str, int, int]:
        return self.sink, self.topic, self.partition, self.offset

    @property
    def place(self) -> str:
        """What a person calls it: sink/topic/partition/offset."""
        return f"{self.sink}/{self.topic}/{self.partition}/{self.offset}"

    def to_key(self) -> bytes:
        named = {name: value for name, value in asdict(self).items() if name != "redrive" or value}
        return json.dumps(named, separators=(",", ":"), ensure_ascii=False).encode()


@dataclass(frozen=True)
class Held:
    """An entry with why and since when (Unix seconds) it is there; `place` is its offset in the quarantine's topic."""

    entry: Entry
    reason: str
    at: float
    place: int


class QuarantineLog:
    """What is open for all sinks, requests included, brought up to now by each `read`; holds no rows.

    Every method raises ConnectorError. One user per thread.
    """

    def __init__(self, kafka: Topics, pipeline: Pipeline) -> None:
        self._kafka, self._topic = kafka, pipeline.quarantine_topic
        self._open: dict[Entry, Held] = {}
        self._tail = Tail(kafka, self._topic, begin=self._open.clear, take=self._take)

    def read(self) -> Collection[Held]:
        """In no order; true until the next call."""
        self._tail.read()
        return self._open.values()

    def moved(self) -> bool:
        """Whether somebody has written to the topic since `read`."""
        return self._tail.moved()

    def record(self, held: Held) -> tuple[bytes | None, bytes | None]:
        """The key and the value of the record itself; nothing of one that has been settled meanwhile."""
        records = self._kafka.between(self._topic, held.place, held.place + 1)
        note = json.loads(records[0].value or b"{}") if records else {}
        key, value = (b64decode(note[name]) if note.get(name) is not None else None for name in ("key", "value"))
        return key, value

    def _take(self, record: Record) -> None:
        entry = Entry(**json.loads(record.key or b"{}"))
        if record.value:
            note = json.loads(record.value)
            self._open[entry] = Held(entry, note["reason"], note.get("at", 0.0), record.offset)
        else:
            self._open.pop(entry, None)


def request(kafka: Topics, pipeline: Pipeline, entries: Iterable[Entry]) -> None:
    """Ask the sinks' streams to try entries again."""
    wanted = [replace(entry, redrive=True).to_key() for entry in entries]
    kafka.write(pipeline.quarantine_topic, [(key, b'{"reason":"asked for"}') for key in wanted])


def close(kafka: Topics, pipeline: Pipeline, entries: Iterable[Entry]) -> None:
    """Settle entries and requests."""
    if listed := list(entries):
        kafka.write(pipeline.quarantine_topic, [(entry.to_key(), None) for entry in listed])
