"""The topic <pipeline>.quarantine without Spark.

Read its entries, request redrives, settle entries.

`cdc.quarantine.store` describes its records. Values contain rows: a row is shown only to the
operator who asks for that entry, and appears nowhere else.
"""

import json
import time
from base64 import b64decode
from collections.abc import Callable, Collection, Iterable
from dataclasses import asdict, dataclass, replace

from cdc.config.settings import Pipeline
from cdc.kafka.records import Record
from cdc.kafka.tail import Tail
from cdc.kafka.topics import Topics


@dataclass(frozen=True, order=True)
class QuarantineKey:
    """The key of an entry: one record in quarantine, or the request to redrive it.

    Stored as the record's key.
    """

    sink: str
    topic: str
    partition: int
    offset: int
    id: str | None
    redrive: bool = False

    @property
    def row(self) -> tuple[str, str] | None:
        """The row that the entry taints: topic and id. None: the record's key can't be read."""
        return None if self.id is None else (self.topic, self.id)

    @property
    def order(self) -> tuple[str, str, int, int]:
        """The sort key of lists: sink, topic, partition, offset."""
        return self.sink, self.topic, self.partition, self.offset

    @property
    def place(self) -> str:
        """The entry's name on the command line: sink/topic/partition/offset."""
        return f"{self.sink}/{self.topic}/{self.partition}/{self.offset}"

    def to_key(self) -> bytes:
        """Encode the key of the entry's record: JSON; `redrive` only where it is true."""
        fields = {name: value for name, value in asdict(self).items() if name != "redrive" or value}
        return json.dumps(fields, separators=(",", ":"), ensure_ascii=False).encode()


@dataclass(frozen=True)
class QuarantinedRecord:
    """An entry with its reason and its time `at` (Unix seconds).

    `place` is its offset in the quarantine topic.
    """

    entry: QuarantineKey
    reason: str
    at: float
    place: int


class QuarantineLog:
    """The open entries of all sinks, requests included.

    Each `read` brings them up to date; rows aren't kept.

    Every method raises ConnectorError. An instance belongs to one thread.
    """

    def __init__(
        self, kafka: Topics, pipeline: Pipeline, now: Callable[[], float] = time.time
    ) -> None:
        self._kafka, self._topic = kafka, pipeline.quarantine_topic
        self._open: dict[QuarantineKey, QuarantinedRecord] = {}
        self._tail = Tail(
            kafka, self._topic, begin=self._open.clear, take=self._apply_record, now=now
        )

    def read(self) -> Collection[QuarantinedRecord]:
        """Read what is new, and return the open entries in no order.

        The collection is live until the next call.
        """
        self._tail.read()
        return self._open.values()

    def has_changed(self) -> bool:
        """Whether the topic has new records since `read`."""
        return self._tail.has_changed()

    def read_record(self, quarantined: QuarantinedRecord) -> tuple[bytes | None, bytes | None]:
        """Read the key and the value of the quarantined record.

        Both None: the entry was settled meanwhile.
        """
        records = self._kafka.read_range(self._topic, quarantined.place, quarantined.place + 1)
        note = records[0].value if records else None
        return quarantined_parts(note) if note else (None, None)

    def _apply_record(self, record: Record) -> None:
        entry = QuarantineKey(**json.loads(record.key or b"{}"))
        if record.value:
            note = json.loads(record.value)
            self._open[entry] = QuarantinedRecord(
                entry, note["reason"], note.get("at", 0.0), record.offset
            )
        else:
            self._open.pop(entry, None)


def quarantined_parts(note: bytes) -> tuple[bytes | None, bytes | None]:
    """Decode the key and the value of a record in quarantine from the value of its entry."""
    fields = json.loads(note)

    def decoded(name: str) -> bytes | None:
        return b64decode(fields[name]) if fields.get(name) is not None else None

    return decoded("key"), decoded("value")


def request_redrive(kafka: Topics, pipeline: Pipeline, entries: Iterable[QuarantineKey]) -> None:
    """Request a redrive of entries from the sinks' streams."""
    keys = [replace(entry, redrive=True).to_key() for entry in entries]
    kafka.write(pipeline.quarantine_topic, [(key, b'{"reason":"asked for"}') for key in keys])


def settle_topics(kafka: Topics, pipeline: Pipeline, topics: Collection[str]) -> None:
    """Settle all entries and requests of topics whose records are dead, or gone: an entry's place
    doesn't tell one topic of that name from the next.
    """
    if topics:
        entries = [record.entry for record in QuarantineLog(kafka, pipeline).read()]
        settle_entries(kafka, pipeline, [entry for entry in entries if entry.topic in topics])


def settle_entries(kafka: Topics, pipeline: Pipeline, entries: Iterable[QuarantineKey]) -> None:
    """Settle entries and requests: write a tombstone for each."""
    if listed := list(entries):
        kafka.write(pipeline.quarantine_topic, [(entry.to_key(), None) for entry in listed])
