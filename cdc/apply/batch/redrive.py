"""Redrive rows in quarantine: write them as of the topic, at the position of the view.

Each row is folded from its first record in quarantine up to that position, so that newer changes
win.
"""

from collections.abc import Collection, Mapping

from cdc.apply.stream_options import Executors
from cdc.apply.views import Views
from cdc.codec.record import RecordDecoder
from cdc.kafka.log_reader import OffsetRange
from cdc.model.outcome import Advance
from cdc.model.position import Position
from cdc.model.table import Table
from cdc.quarantine.log import QuarantineKey
from cdc.quarantine.store import SinkQuarantine
from cdc.sink.contract import Batch, Outcome
from cdc.sink.lane import BatchRecords
from cdc.sink.rejection import Rejection

Rows = Mapping[QuarantineKey, str]
"""The id of each entry's row."""


class Redrive:
    """Answers the redrive requests of one sink; no other writer may move its positions
    meanwhile.
    """

    def __init__(
        self,
        executors: Executors,
        quarantine: SinkQuarantine,
        views: Views,
        writer: str,
        rejection: Rejection,
    ) -> None:
        self._executors = executors
        self._quarantine = quarantine
        self._views = views
        self._writer = writer
        self._rejection = rejection

    def run(self, requests: Collection[QuarantineKey]) -> None:
        """Settle the requests, and the entries that can be written now; others get their newest
        reason. Raises errors of the sink.

        The standby gets the same rows, as of its own position.
        """
        sink = self._views.sink
        requested = {request.row or request.place for request in requests}
        for table in self._views.plan.tables:
            entries = [entry for entry in self._quarantine.open if entry.topic == table.topic]
            rows = self._identified(
                table, [entry for entry in entries if (entry.row or entry.place) in requested]
            )
            standby_at, live_at = sink.standby_at.get(table.topic), sink.live_at.get(table.topic)
            outcome = Outcome()
            if live_at and (live_rows := _rows_before(rows, live_at)):
                outcome = sink.live.apply(self._batch(table, live_at, live_rows))
            if standby_at and (standby_rows := _rows_before(rows, standby_at)):
                sink.write_standby(self._batch(table, standby_at, standby_rows), outcome)
            if live_at:
                self._quarantine.settle(_settled(_rows_before(rows, live_at), outcome))
        self._quarantine.settle(requests)

    def _identified(self, table: Table, entries: list[QuarantineKey]) -> Rows:
        """The row of each entry. A key that couldn't be read may be readable now; entries without
        one are left out.
        """
        decoder = RecordDecoder([table], self._views.reading.placeholder)
        rows = {}
        for entry in entries:
            row_id = entry.id
            if row_id is None:
                row_id = decoder.row_id(table.topic, self._quarantine.read_key(entry))
            if row_id is not None:
                rows[entry] = row_id
        return rows

    def _batch(self, table: Table, position: Position, rows: Rows) -> Batch:
        step = Advance(table, position, position, self._views.plan.floor(table))
        records = self._records(table, position, rows)
        only = {table.topic: frozenset(rows.values())}
        entries = self._quarantine.entries([table.topic])
        return Batch(
            self._writer, (step,), records, self._views.reading, self._rejection, entries, only
        )

    def _records(self, table: Table, position: Position, rows: Rows) -> BatchRecords:
        """The records in quarantine, and all records of their partitions from the first of them
        on.
        """
        ranges = tuple(
            OffsetRange(
                table.topic,
                partition,
                min(entry.offset for entry in rows if entry.partition == partition),
                position.offsets[partition],
                position.topic_id,
            )
            for partition in sorted({entry.partition for entry in rows})
        )
        return self._executors.records(ranges, self._quarantine.with_log(rows))


def _rows_before(rows: Rows, position: Position) -> Rows:
    """The rows of entries before a position; the view will read later entries by itself."""
    return {entry: row for entry, row in rows.items() if is_before(entry, position)}


def is_before(entry: QuarantineKey, position: Position) -> bool:
    """Whether a view at this position has passed the entry's record. None has passed one of a
    partition that its topic lacks.
    """
    return (
        entry.partition < position.partition_count
        and entry.offset < position.offsets[entry.partition]
    )


def _settled(rows: Rows, outcome: Outcome) -> list[QuarantineKey]:
    """The entries that are applied now, or void. If the outcome lists all rejections, all others
    are applied.
    """
    rejected = {(record.topic, record.partition, record.offset) for record in outcome.rejected}
    applied = outcome.complete
    return [
        entry
        for entry, row_id in rows.items()
        if (applied and (entry.topic, entry.partition, entry.offset) not in rejected)
        or entry.offset < outcome.cured.get((entry.topic, row_id), 0)
    ]
