"""Quarantine: records that a sink can't apply, until they are settled.

The topic <pipeline>.quarantine holds them:

    key    JSON {sink, topic, partition, offset, id}: the place, and the row's id (null when the key
           can't be read)
    value  JSON {reason, at, key, value}: the record itself, its bytes in base64; null once the
           entry is settled
    A key that also has `redrive` is a request to redrive that entry.

Executors write entries (`cdc.sink.rejection`). A row with an entry is tainted: a change that
doesn't carry all its values can't be completed, and follows into quarantine. A newer change with
all values settles the entry, and so does a redrive that succeeds. Row values are in this topic
only.
"""

import json
import time
from collections.abc import Callable, Collection, Generator, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass

from cdc.config.settings import Pipeline
from cdc.kafka.log_reader import Block, OffsetRange, Record, read_records
from cdc.kafka.topics import Topics
from cdc.quarantine.log import (
    QuarantinedRecord,
    QuarantineKey,
    QuarantineLog,
    quarantined_parts,
    settle_entries,
)
from cdc.sink.contract import Key
from cdc.sink.lane import Entries


class SinkQuarantine:
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
        self._sink = sink
        self._pipeline = pipeline
        self._kafka = kafka
        self._log = QuarantineLog(kafka, pipeline, now)
        self.open: dict[QuarantineKey, QuarantinedRecord] = {}
        self.requests: set[QuarantineKey] = set()

    def has_changed(self) -> bool:
        return self._log.has_changed()

    def refresh(self) -> None:
        """Read new entries and requests. Raises ConnectorError."""
        records = {
            record.entry: record for record in self._log.read() if record.entry.sink == self._sink
        }
        self.requests = {entry for entry in records if entry.redrive}
        self.open = {entry: record for entry, record in records.items() if not entry.redrive}

    def entries(self, topics: Iterable[str]) -> Entries:
        """Return the open entries of these topics: by partition, the row's id by offset."""
        topic_names, entries = set(topics), dict[tuple[str, int], dict[int, str | None]]()
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
        key, _ = self._log.read_record(self.open[entry])
        return key

    def with_log(self, entries: Collection[QuarantineKey]) -> "QuarantineAndLog":
        """Build what reads the records of open entries together with the log."""
        topic = self._pipeline.quarantine_topic
        start = min(self.open[entry].place for entry in entries)
        # To the end: an entry that is rejected again has its record there since.
        end = self._kafka.ends([topic])[topic]
        notes = OffsetRange(topic, 0, start, end.offsets[0], end.topic_id)
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
        self, bootstrap: str, quarantined: dict[tuple[str, int], dict[int, Record]]
    ) -> dict[tuple[str, int], dict[int, Record]]:
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
