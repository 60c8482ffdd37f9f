"""The batches of a stream: how large each is, how it is written to the sink, and which entries of the
quarantine are redriven or settled with it.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from math import ceil

from tenacity import Retrying

from cdc.apply.machine import Ends, ResumePlan
from cdc.apply.progress import Account
from cdc.apply.resume import SinkViews
from cdc.codec.record import RecordDecoder
from cdc.errors import SinkError
from cdc.kafka.log_reader import OffsetRange
from cdc.kafka.topics import Topics
from cdc.model.outcome import Advance
from cdc.model.position import Position, distance
from cdc.model.table import Table
from cdc.quarantine.log import QuarantineKey, SinkQuarantine
from cdc.quarantine.rejection import ToQuarantine
from cdc.sink.contract import Batch, Key, Outcome
from cdc.sink.lane import Lane, PassedWriter
from cdc.sink.lane_run import run_on_executors
from cdc.sink.rejection import Rejection, Stop
from cdc.spark.lane_records import LoggedRecords

LEAST = 10_000
"""The smallest limit of a batch, in offsets."""
MOST = 1_000_000
"""The largest limit of a batch, in offsets."""
FIRST = 500_000
"""The most offsets of a sink's first batch."""
FIRST_BYTES = 64 << 20
"""The most bytes of a sink's first batch, as the broker keeps them: compressed."""
TARGET_S = 10.0
Rows = Mapping[QuarantineKey, str]
"""The id of each entry's row."""


class BatchWriter:
    """The writer of one sink; one thread uses it."""

    def __init__(
        self,
        records: LoggedRecords,
        views: SinkViews,
        writer: str,
        retry_batch: Callable[[], Retrying],
    ) -> None:
        self._records = records
        self._views = views
        self._writer = writer
        self._retry_batch = retry_batch
        self._quarantine = SinkQuarantine(views.sink.name, views.pipeline, views.kafka, views.now)
        self._live_entries: frozenset[QuarantineKey] | None = (
            None if views.plan.shadow else frozenset()
        )
        """Entries from before a build began, which belong to the live views; None: not known."""
        self._is_settled = False
        """Whether the last batch that the sink has is known to have left no cure unsettled."""
        self.account = Account()

    def process_redrives(self) -> None:
        """Load the quarantine, settle what the last batch before the start has cured, and redrive
        the requested entries, before the first batch after a start. Redrives are of live views only.

        Raises:
            CdcError: what the broker and the sink raise.
        """
        self._quarantine.refresh()
        if self._views.plan.shadow:
            return
        if not self._is_settled:
            self._settle(self._cures_of(self._last_steps()))
            self._is_settled = True
        if requests := self._answerable_requests():
            self._redrive(requests)

    def redrive_requested(self) -> bool:
        """Whether there are requests that a redrive of the sink can answer now."""
        if self._views.plan.shadow or not self._quarantine.open:
            return False
        if self._quarantine.has_changed():
            self._quarantine.refresh()
        return bool(self._answerable_requests())

    def _answerable_requests(self) -> list[QuarantineKey]:
        """The requests for records that the live views have passed. Others stay open: their table
        waits, or its next batch has them.
        """
        live = self._views.plan.live
        return [
            request
            for request in self._quarantine.requests
            if (position := live.get(request.topic)) and _is_before(request, position)
        ]

    def write(self, ends: Ends) -> None:
        """Make a batch durable in the sink: what the views lack up to these ends.

        Raises:
            CdcError: from the sink; from a record if the pipeline says `on_error: stop`.
        """
        steps = self._views.plan.steps(ends)
        if not steps:
            return
        if self._live_entries is None:
            self._quarantine.refresh()
            self._live_entries = frozenset(self._quarantine.open)
        self._is_settled = False
        rejection = Stop() if self._views.pipeline.on_error == "stop" else self._to_quarantine
        for attempt in self._retry_batch():
            with attempt:
                # At each attempt: records that an earlier attempt has rejected aren't rejected
                # again.
                if (
                    self._quarantine.open or attempt.retry_state.attempt_number > 1
                ) and self._quarantine.has_changed():
                    self._quarantine.refresh()
                entries = self._quarantine.entries(step.table.topic for step in steps)
                batch = Batch(
                    self._writer,
                    tuple(steps),
                    self._records,
                    self._views.reading,
                    rejection,
                    entries,
                )
                with self.account.measured("apply"):
                    outcome = self._views.sink.apply(batch)
        with self.account.measured("settle"):
            self._account(outcome)
            if attempt.retry_state.attempt_number > 1:
                # The answer of an earlier attempt, which would have named its cures, was lost.
                self._settle(self._cures_of(steps))
        self._is_settled = True
        self._views.advance(steps)

    @property
    def _to_quarantine(self) -> Rejection:
        pipeline = self._views.pipeline
        return ToQuarantine(pipeline.kafka, pipeline.quarantine_topic, self._views.sink.name)

    def _account(self, outcome: Outcome) -> None:
        for table, applied in outcome.applied.items():
            if applied.read != applied.accounted:
                raise SinkError(
                    f"{self._views.sink.name} read {applied.read} records and accounts for {applied.accounted}.",
                    hint="this is a bug in the pipeline; the views may miss changes: cdc -p FILE verify",
                )
            self.account.count(table, applied)
        self.account.batches += 1
        if outcome.rejected:
            self._quarantine.refresh()
        self._settle(outcome.cured)

    def _settle(self, cured: Mapping[Key, int]) -> None:
        if entries := self._quarantine.entries_cured_by(cured):
            self._quarantine.settle(
                [entry for entry in entries if entry not in (self._live_entries or ())]
            )

    def _last_steps(self) -> list[Advance]:
        """The steps of the last batch that the live views have; they may begin too early.

        It had `MOST` offsets at most. What came before was settled, or this batch had not begun.
        """
        plan = self._views.plan
        steps = []
        for table in plan.tables:
            if position := plan.live.get(table.topic):
                start = replace(position, offsets=tuple(max(0, o - MOST) for o in position.offsets))
                steps.append(Advance(table, start, position, plan.floor(table)))
        return steps

    def _cures_of(self, steps: Sequence[Advance]) -> Mapping[Key, int]:
        """Find the rows that these steps, which the view has, have cured: see `Outcome.cured`. Their
        records are read again, from the oldest entry of a partition on at most.

        The outcome of the steps isn't known: the run was killed before it had settled the entries, or
        the broker was away then, or an answer was lost. Asks no server where no table of them has
        entries before a step's end.

        Raises:
            CdcError: from the broker.
        """
        entries = self._quarantine.entries(step.table.topic for step in steps)
        starts = self._views.kafka.starts(sorted({topic for topic, _ in entries}))
        ranges = []
        for step in steps:
            topic = step.table.topic
            for partition, (start, end) in enumerate(
                zip(step.start_offsets, step.end.offsets, strict=True)
            ):
                if offsets := entries.get((topic, partition)):
                    # Only what comes after an entry can cure its row.
                    first = max(start, min(offsets) + 1, starts[topic].offsets[partition])
                    if first < end:
                        ranges.append(OffsetRange(topic, partition, first, end, step.end.topic_id))
        if not ranges:
            return {}
        lane = Lane(tuple(steps), self._views.reading, PassedWriter(), Stop(), entries)
        records = replace(self._records, ranges=tuple(ranges))
        return run_on_executors(lane, records, self._views.sink.name, {}).cured

    def _redrive(self, requests: Collection[QuarantineKey]) -> None:
        """Write the rows of requested entries as of the topic, at the position of the view. Settle
        the requests, and the entries that can be written now; others get their newest reason. Raises
        errors of the sink.

        Each row is folded from its first record in quarantine up to that position, so that newer
        changes win. The standby gets the same rows, as of its position.
        """
        sink = self._views.sink
        requested = {request.row or request.place for request in requests}
        for table in self._views.plan.tables:
            entries = [entry for entry in self._quarantine.open if entry.topic == table.topic]
            rows = self._identified(
                table, [entry for entry in entries if (entry.row or entry.place) in requested]
            )
            standby_at = sink.standby_at.get(table.topic)
            live_at = sink.live_at.get(table.topic)
            outcome = Outcome()
            if live_at and (live_rows := _rows_before(rows, live_at)):
                outcome = sink.live.apply(self._redrive_batch(table, live_at, live_rows))
            if standby_at and (standby_rows := _rows_before(rows, standby_at)):
                sink.write_standby(self._redrive_batch(table, standby_at, standby_rows), outcome)
            if live_at:
                self._quarantine.settle(_settled(_rows_before(rows, live_at), outcome))
        self._quarantine.settle(requests)

    def _identified(self, table: Table, entries: Sequence[QuarantineKey]) -> Rows:
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

    def _redrive_batch(self, table: Table, position: Position, rows: Rows) -> Batch:
        """A batch of the records in quarantine, and of all records of their partitions from the
        first of them on.
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
        return Batch(
            self._writer,
            (Advance(table, position, position, self._views.plan.floor(table)),),
            replace(self._records, ranges=ranges, read=self._quarantine.with_log(rows)),
            self._views.reading,
            self._to_quarantine,
            self._quarantine.entries([table.topic]),
            {table.topic: frozenset(rows.values())},
        )


def _rows_before(rows: Rows, position: Position) -> Rows:
    """The rows of entries before a position; the view will read later entries by itself."""
    return {entry: row for entry, row in rows.items() if _is_before(entry, position)}


def _is_before(entry: QuarantineKey, position: Position) -> bool:
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


class BatchSize:
    """The size of a stream's batches: as many offsets as the sink applies in about ten seconds. One
    thread uses it.

    A batch costs most of a second, whatever its records, and a large one writes a row once that has
    changed often. A batch that takes long is stopped late and, after a crash, repeated. Limiting its
    duration also limits its bytes, whatever the size of a record.
    """

    def __init__(self, kafka: Topics) -> None:
        self._kafka = kafka
        self._limit = 0

    def begin(self, plan: ResumePlan) -> None:
        """Set the first limit, which follows from the size of records, since no batch was timed
        yet.
        """
        if not self._limit:
            topics = list(plan.shapes)
            starts = self._kafka.starts(topics)
            available = sum(
                distance(start, plan.shapes[topic]).offsets for topic, start in starts.items()
            )
            self._limit = first_limit(available, self._kafka.log_size_bytes(topics))

    def limited(self, plan: ResumePlan, ends: Ends) -> Ends | None:
        """The ends of a batch of what the topics have up to `ends`, of so many offsets at most as
        the limit says; each partition gives its share of them. None: there is nothing new.
        """
        starts = plan.starts()
        spans = {
            topic: list(zip(start, ends[topic], strict=True)) for topic, start in starts.items()
        }
        total = sum(max(0, end - start) for span in spans.values() for start, end in span)
        if not total:
            return None
        share = min(1.0, self._limit / total)
        return {
            # Rounded up, so that every partition moves.
            topic: tuple(start + ceil(share * max(0, end - start)) for start, end in span)
            for topic, span in spans.items()
        }

    def adapt(self, offsets: int, took_s: float) -> None:
        """Adapt the limit after a batch of so many offsets, which took so long. A batch that is
        small for the limit says nothing about it.
        """
        if offsets >= self._limit / 2:
            self._limit = fitting_limit(offsets, took_s)


def first_limit(offsets: int, size_bytes: int) -> int:
    """The limit of the first batch, if so many offsets take so many bytes; 0 bytes means
    unknown.
    """
    return max(LEAST, min(FIRST, offsets * FIRST_BYTES // size_bytes)) if size_bytes else FIRST


def fitting_limit(offsets: int, took_s: float) -> int:
    """The limit from now on, after a batch of `offsets` took `took_s`."""
    return min(MOST, max(LEAST, int(offsets * TARGET_S / took_s)))
