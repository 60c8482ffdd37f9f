"""The topic <pipeline>.quarantine: records that a sink can't apply, until they are settled. Without Spark.

    key    JSON {sink, topic, partition, offset, id}: the place, and the row's id (null when the key
           can't be read)
    value  JSON {reason, at, key, value}: the record itself, its bytes in base64; null once the
           entry is settled
    A key that also has `redrive` is a request to redrive that entry.

Executors write entries (`cdc.quarantine.rejection`). A row with an entry is tainted: a change that
doesn't carry all its values can't be completed, and follows into quarantine. A newer change with
all values settles the entry, and so does a redrive that succeeds. Row values are in this topic only:
a row is shown to the operator who asks for that entry, and appears nowhere else.
"""

import json
import time
from base64 import b64decode
from collections.abc import Callable, Collection, Generator, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace

from cdc.config.settings import Pipeline
from cdc.kafka import log_reader
from cdc.kafka.log_reader import Block, OffsetRange, read_records
from cdc.kafka.records import Record
from cdc.kafka.tail import Tail
from cdc.kafka.topics import Topics
from cdc.sink.contract import Key
from cdc.sink.lane import Entries


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
        self._kafka = kafka
        self._topic = pipeline.quarantine_topic
        self._unsettled: dict[QuarantineKey, QuarantinedRecord] = {}
        self._tail = Tail(
            kafka, self._topic, begin=self._unsettled.clear, take=self._apply_record, now=now
        )

    def read(self) -> Collection[QuarantinedRecord]:
        """Read what is new, and return the open entries in no order.

        The collection is live until the next call.
        """
        self._tail.read()
        return self._unsettled.values()

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
            self._unsettled[entry] = QuarantinedRecord(
                entry, note["reason"], note.get("at", 0.0), record.offset
            )
        else:
            self._unsettled.pop(entry, None)


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
    doesn't distinguish a topic from a later one of the same name.
    """
    if topics:
        entries = [record.entry for record in QuarantineLog(kafka, pipeline).read()]
        settle_entries(kafka, pipeline, [entry for entry in entries if entry.topic in topics])


def settle_entries(kafka: Topics, pipeline: Pipeline, entries: Iterable[QuarantineKey]) -> None:
    """Settle entries and requests: write a tombstone for each."""
    if listed := list(entries):
        kafka.write(pipeline.quarantine_topic, [(entry.to_key(), None) for entry in listed])


class SinkQuarantine(QuarantineLog):
    """The quarantine of one sink. `open` are its entries, `requests` those to redrive.

    One thread uses it.
    """

    def __init__(
        self,
        sink: str,
        pipeline: Pipeline,
        kafka: Topics,
        now: Callable[[], float] = time.time,
    ) -> None:
        super().__init__(kafka, pipeline, now)
        self._sink = sink
        self._pipeline = pipeline
        self.open: dict[QuarantineKey, QuarantinedRecord] = {}
        self.requests: set[QuarantineKey] = set()

    def refresh(self) -> None:
        """Read new entries and requests. Raises ConnectorError."""
        records = {
            record.entry: record for record in self.read() if record.entry.sink == self._sink
        }
        self.requests = {entry for entry in records if entry.redrive}
        self.open = {entry: record for entry, record in records.items() if not entry.redrive}

    def entries(self, topics: Iterable[str]) -> Entries:
        """Return the open entries of these topics: by partition, the row's id by offset."""
        topic_names = set(topics)
        entries = dict[tuple[str, int], dict[int, str | None]]()
        for entry in self.open:
            if entry.topic in topic_names:
                entries.setdefault((entry.topic, entry.partition), {})[entry.offset] = entry.id
        return entries

    def entries_cured_by(self, rows: Mapping[Key, int]) -> list[QuarantineKey]:
        """Select the entries that newer changes have cured; `rows`: see `Outcome.cured`."""
        return [entry for entry in self.open if entry.row and entry.offset < rows.get(entry.row, 0)]

    def settle(self, entries: Collection[QuarantineKey]) -> None:
        """Settle entries whose rows are right again, and requests that have been processed."""
        settle_entries(self._kafka, self._pipeline, entries)
        self.requests.difference_update(entries)
        for entry in entries:
            self.open.pop(entry, None)

    def read_key(self, entry: QuarantineKey) -> bytes | None:
        key, _ = self.read_record(self.open[entry])
        return key

    def with_log(self, entries: Collection[QuarantineKey]) -> "QuarantineAndLog":
        """Build what reads the records of open entries together with the log."""
        start = min(self.open[entry].place for entry in entries)
        # To the end: an entry that is rejected again has its record there since.
        end = self._kafka.ends([self._topic])[self._topic]
        notes = OffsetRange(self._topic, 0, start, end.offsets[0], end.topic_id)
        return QuarantineAndLog(frozenset(entries), notes)


@dataclass(frozen=True)
class QuarantineAndLog:
    """Reads ranges of the log, and in their order the records of entries, which the log may no longer
    have. Runs on the executors.

    notes: the range of the quarantine topic that has the entries' records
    """

    entries: frozenset[QuarantineKey]
    notes: OffsetRange

    def __call__(self, bootstrap: str, ranges: Sequence[OffsetRange]) -> Generator[Block]:
        """Read as `read_records` does. Each partition of an entry has a range."""
        unread = self._read_quarantined(
            bootstrap, {(asked.topic, asked.partition): {} for asked in ranges}
        )
        with closing(read_records(bootstrap, ranges)) as blocks:
            for topic, partition, records in blocks:
                quarantined = unread[topic, partition]
                reached = [offset for offset in quarantined if offset <= records[-1][2]]
                merged = {offset: quarantined.pop(offset) for offset in reached}
                merged.update((record[2], record) for record in records)
                yield topic, partition, [merged[offset] for offset in sorted(merged)]
        for (topic, partition), quarantined in unread.items():
            if quarantined:
                yield topic, partition, [quarantined[offset] for offset in sorted(quarantined)]

    def _read_quarantined(
        self, bootstrap: str, quarantined: dict[tuple[str, int], dict[int, log_reader.Record]]
    ) -> dict[tuple[str, int], dict[int, log_reader.Record]]:
        """Add the records of entries by topic and partition, then by offset."""
        for _, _, notes in read_records(bootstrap, [self.notes]):
            for entry_key, note, _ in notes:
                entry = QuarantineKey(**json.loads(entry_key or b"{}"))
                records = quarantined.get((entry.topic, entry.partition))
                if records is None or entry not in self.entries:
                    continue
                if note is None:
                    records.pop(entry.offset, None)
                else:
                    records[entry.offset] = (*quarantined_parts(note), entry.offset)
        return quarantined
