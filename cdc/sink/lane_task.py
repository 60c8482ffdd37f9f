"""One task of a lane: decodes the records that it is given and folds them, the newest change of each row;
chunk by chunk fills rows that miss values from the view, and writes.

A view is taken from one offset to a later one as if record by record, wherever chunks are cut. One
thing depends on that: changes that carry all of a row only together, of which the view has nothing,
are put together within a chunk, and rejected where they are cut.

A record that can't be applied is rejected by itself (`cdc.sink.rejection`), before the position of
its chunk moves. Its row is tainted then: a later change that doesn't carry all values can't be
completed across it, and is rejected, too; a later one that carries all cures it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from cdc.codec.forms import Form
from cdc.codec.problem import EventChanged, Unreadable, ValueNotRepresentable
from cdc.codec.record import Change, RecordDecoder
from cdc.errors import ConnectorError
from cdc.model.outcome import Advance
from cdc.sink.lane import (
    REPORTED_ROWS,
    SUPERSEDED,
    TAINTED,
    UNKNOWN,
    Failure,
    FoldedRow,
    Lane,
    Part,
    PartitionOutcome,
    Verdicts,
)
from cdc.sink.rejection import DECODE, REFUSED, UNHOLDABLE, Rejected, Source

Records = Sequence[tuple[bytes | None, bytes | None, int]]
"""Key, value, offset."""
Blocks = Iterable[tuple[str, int, Records]]
"""Topic, partition, and some of its records in the order of offsets. All records of a partition are
in the same task.
"""
SOURCE_BYTES = 200
"""Memory of a record without its key and value."""
ASSUMED_FILLED_BYTES = 100_000
"""Assumed size of a row that still misses large values, until one has been filled."""
MIN_FILLED_BYTES = 2_000
"""The least size that is assumed later."""
FILLED_MARGIN = 8
"""The size that is assumed later, as a multiple of the mean of filled rows."""
Decoded = tuple[Change, Any, Source, bool]
"""A change, its row in the view's form (None for a delete), its record, and whether the change is
dead.
"""


def run_task(lanes: Sequence[Lane], blocks: Blocks) -> list[list[PartitionOutcome]]:
    """Run lanes over one task's records. Returns, for each lane, what became of each partition's
    records, also where they can't be read to the end. A lane that fails doesn't stop the others.
    """
    runs = [LaneRun(lane) for lane in lanes]
    try:
        for topic, partition, records in blocks:
            for run in runs:
                if not run.stopped:
                    run.fold(topic, partition, records)
            if all(run.stopped for run in runs):
                break
    except ConnectorError as error:
        for run in runs:
            if not run.stopped:
                run.fail(Failure(error.kind, error.message))
    return [run.finish() for run in runs]


class LaneRun:
    """One task's run of a lane. One thread uses it."""

    def __init__(self, lane: Lane) -> None:
        self._lane = lane
        self._writer = lane.writer
        self._advances = {advance.table.topic: advance for advance in lane.advances}
        self._decoder = RecordDecoder(
            [advance.table for advance in lane.advances], lane.reading.placeholder
        )
        self._partitions: dict[tuple[str, int], PartitionState] = {}
        self._reports: dict[tuple[str, int], PartitionOutcome] = {}
        self._chunk: dict[tuple[str, int], PartitionState] = {}
        """The partitions of the chunk at hand."""
        self._rows = 0
        self._bytes = 0
        self._filled_sizes = MeanSize()
        self._rejections: list[tuple[Rejected, Source]] = []
        self.stopped = False
        """Whether a record has ended the batch, or the task has failed: nothing is written any
        more.
        """

    def fold(self, topic: str, partition: int, records: Records) -> None:
        """Fold the records of a partition into the current chunk; write the chunk whenever it is
        full.
        """
        advance = self._advances.get(topic)
        if advance is None:
            return
        try:
            state = self._partitions.get((topic, partition)) or self._open_partition(
                advance, partition
            )
            self._fold_changes(state, self._decode_changes(state, records))
        except Failure as failure:
            self.fail(failure, (topic, partition))

    def fail(self, failure: Failure, place: tuple[str, int] | None = None) -> None:
        """End the task: records can't be read or written to the end; of this partition, as far as is
        known.
        """
        self.stopped = True
        first_topic = self._lane.advances[0].table.topic
        place = place or next(iter(self._reports), (first_topic, 0))
        report = self._reports.setdefault(place, PartitionOutcome(*place))
        report.failure = failure.kind
        report.message = failure.message

    def finish(self) -> list[PartitionOutcome]:
        """Write the last chunk; returns what became of each partition's records."""
        try:
            if not self.stopped:
                self._flush()
            if not self.stopped:
                for topic, results in self._writer.finish().items():
                    report = next(r for r in self._reports.values() if r.topic == topic)
                    report.writer_results.extend(results)
        except Failure as failure:
            self.fail(failure)
        return list(self._reports.values())

    def _open_partition(self, advance: Advance, partition: int) -> PartitionState:
        topic = advance.table.topic
        view_offset = self._writer.start_offset(advance, partition)
        report = self._reports[topic, partition] = PartitionOutcome(topic, partition)
        part = Part(advance, partition, view_offset, report, view_offset)
        state = PartitionState(self._lane, part, self._writer.form)
        self._partitions[topic, partition] = state
        return state

    def _decode_changes(self, state: PartitionState, records: Records) -> Iterator[Decoded | None]:
        """Decode records; None for one that is rejected.

        Dead changes come only to a writer that archives them.
        """
        part = state.part
        report = state.part.report
        topic = state.part.topic
        start = state.start_offset
        end = state.end_offset
        view_offset = state.view_offset
        first_offset = state.first_offset
        floor = state.floor
        only = state.only
        decode = self._decoder.decode
        row_id = self._decoder.row_id
        convert = state.convert
        archives = self._writer.archives
        keeps_deleted = part.advance.table.events
        for key, raw_value, offset in records:
            if not start <= offset < end or (only is not None and row_id(topic, key) not in only):
                continue
            report.applied.read += 1
            source = Source(offset, key, raw_value)
            if offset < view_offset or (offset < first_offset and not archives):
                report.applied.stale += 1
                if state.entries and offset >= first_offset:
                    self._note_cure(state, source)
                continue
            if not state.is_repair:
                part.end_offset = offset + 1
            is_dead = offset < first_offset
            try:
                change = decode(topic, key, raw_value)
                is_dead |= bool(floor and change.lsn is not None and change.lsn < floor)
                is_purge = keeps_deleted and change.row is None
                if is_purge or (is_dead and not archives):
                    report.applied.stale += 1
                    continue
                value = None if change.row is None else convert(change.row)
            except Unreadable as problem:
                if is_dead:
                    # It need not be a change of the table as it is now.
                    report.applied.stale += 1
                    continue
                self._reject(
                    state, row_id(topic, key), _rejection_kind(problem), problem.problem, [source]
                )
                yield None
            else:
                report.applied.stale += is_dead
                yield change, value, source, is_dead

    def _note_cure(self, state: PartitionState, source: Source) -> None:
        """Note whether a record that an earlier try has applied, or rejected, has cured a row."""
        topic = state.part.topic
        entries = state.entries.get(self._decoder.row_id(topic, source.key) or "", ())
        if not entries or source.offset in entries:
            return
        try:
            change = self._decoder.decode(topic, source.key, source.value)
        except Unreadable:
            # Its quarantine entry was discarded.
            return
        is_purge = state.part.advance.table.events and change.row is None
        is_dead = state.floor and change.lsn is not None and change.lsn < state.floor
        if not (change.missing or is_dead or is_purge):
            state.cure(change.id, source.offset + 1)
            state.part.report.cured[change.id] = source.offset + 1

    def _fold_changes(self, state: PartitionState, changes: Iterable[Decoded | None]) -> None:
        """Fold changes of a partition, in the order of offsets; write the chunk whenever it is
        full. None is a record that was rejected.
        """
        part = state.part
        limits = self._writer.limits
        size = self._writer.form.size
        observe = self._writer.observe
        place = part.topic, part.partition
        self._chunk[place] = state
        for decoded in changes:
            if decoded is not None:
                change, value, source, is_dead = decoded
                self._bytes += observe(part, change, source, value)
                if is_dead:
                    pass
                elif change.missing:
                    self._fold_partial(state, change, value, source)
                else:
                    self._fold_complete(state, change, value, source)
                if value is not None:
                    self._bytes += size(value)
                self._bytes += len(source.value or b"") + SOURCE_BYTES
            if self._rows >= limits.rows or self._bytes >= limits.bytes:
                self._flush()
                self._chunk[place] = state
            if self.stopped:
                return

    def _fold_complete(
        self, state: PartitionState, change: Change, value: Any, source: Source
    ) -> None:
        """Fold a change that carries all of its row, or deletes it."""
        rows = state.part.rows
        if older := rows.get(change.id):
            state.part.report.applied.folded += len(older.sources)
        else:
            self._rows += 1
        rows[change.id] = FoldedRow(change.id, source.offset, value, (), [source])
        if state.tainted:
            state.cure(change.id, source.offset + 1)

    def _fold_partial(
        self, state: PartitionState, change: Change, value: Any, source: Source
    ) -> None:
        """Fold a change that misses values."""
        part = state.part
        older = state.part.rows.get(change.id)
        if change.id in state.tainted:
            self._reject(state, change.id, REFUSED, TAINTED, [source])
        elif older is None:
            self._rows += 1
            self._bytes += self._filled_sizes.assumed
            part.rows[change.id] = FoldedRow(
                change.id, source.offset, value, change.missing, [source]
            )
        elif older.value is None:
            # The values from before the delete are void.
            self._reject(state, change.id, REFUSED, UNKNOWN, [source])
        else:
            filled = self._writer.form.fill(
                part.advance.table, value, change.missing, older.value, older.missing
            )
            if not set(filled.missing).issubset(older.missing):
                # The older row is whole but for what it misses itself, and doesn't have them.
                self._reject(state, change.id, REFUSED, UNKNOWN, [source])
                return
            # Appended, not copied: a chunk may hold tens of thousands of changes of one row.
            older.sources.append(source)
            part.rows[change.id] = FoldedRow(
                change.id, source.offset, filled.value, filled.missing, older.sources
            )

    def _reject(
        self,
        state: PartitionState,
        row_id: str | None,
        kind: str,
        reason: str,
        sources: Sequence[Source],
    ) -> None:
        """Reject records for one reason; the row, where their key names it, is tainted."""
        report = state.part.report
        part = state.part
        for source in sources:
            rejected = Rejected(part.topic, part.partition, source.offset, row_id, kind, reason)
            self._rejections.append((rejected, source))
            self._bytes += len(source.key or b"") + len(source.value or b"") + SOURCE_BYTES
            # A repair names all: its caller takes every record that isn't named for mended.
            if state.is_repair or len(report.rejected) < REPORTED_ROWS:
                report.rejected.append(rejected)
        report.applied.quarantined += len(sources)
        if row_id is not None:
            state.tainted.add(row_id)
            state.marked.add(row_id)
        self.stopped |= self._lane.rejection.stops

    def _flush(self) -> None:
        """Write the chunk: first its rejected records, then its rows.

        The last chunk also moves the position to its last record, not to the end of the batch. If
        Spark cancels a task because another one failed, the task's records may just end. Only the
        driver knows that all records were read, once all tasks have ended well.
        """
        states = list(self._chunk.values())
        self._chunk = {}
        for state in states:
            lacking = [row for row in state.part.rows.values() if row.missing]
            if lacking:
                self._fill_from_view(state, lacking)
        self._put_rejections()
        if self.stopped:
            return
        answers = self._writer.write([state.part for state in states])
        for state, verdicts in zip(states, answers, strict=True):
            self._count_outcome(state, verdicts)
        self._put_rejections()
        self._rows = self._bytes = 0

    def _put_rejections(self) -> None:
        if self._rejections:
            rejections = self._rejections
            self._rejections = []
            try:
                self._lane.rejection.put(rejections)
            except ConnectorError as error:
                raise Failure(error.kind, error.message) from None

    def _fill_from_view(self, state: PartitionState, lacking: Sequence[FoldedRow]) -> None:
        """Fill rows from what the view stores; reject a row whose values the view doesn't have
        either.
        """
        part = state.part
        stored_rows = self._writer.read_stored(part, lacking)
        for row in lacking:
            older = stored_rows.get(row.id)
            if older is SUPERSEDED:
                del part.rows[row.id]
                part.report.applied.stale += 1
                part.report.applied.folded += len(row.sources) - 1
                continue
            if older is not None:
                row.value, row.missing = self._writer.form.fill(
                    part.advance.table, row.value, row.missing, older, ()
                )
                self._filled_sizes.add(self._writer.form.size(row.value))
            if row.missing:
                del part.rows[row.id]
                self._reject(state, row.id, REFUSED, UNKNOWN, row.sources)

    def _count_outcome(self, state: PartitionState, verdicts: Verdicts) -> None:
        part = state.part
        report = state.part.report
        for row in part.rows.values():
            if row.id in verdicts.refused:
                self._reject(state, row.id, REFUSED, verdicts.refused[row.id], row.sources)
                continue
            report.applied.folded += len(row.sources) - 1
            if row.id in state.marked:
                # All of its values are known, whatever was rejected before.
                report.cured[row.id] = row.offset + 1
            if row.id in verdicts.stale:
                report.applied.stale += 1
            elif row.value is None:
                report.applied.deleted += 1
            else:
                report.applied.written += 1
        part.rows.clear()
        part.view_offset = part.end_offset


class PartitionState:
    """State of one partition for as long as the task runs.

    entries: by id of a row, the offsets of its records in quarantine; tainted: rows of which a
    record was rejected that no change has made up for yet; marked: all that have, or may have by
    now, entries.
    """

    def __init__(self, lane: Lane, part: Part, form: Form) -> None:
        advance = part.advance
        partition = part.partition
        topic = part.topic
        self.part = part
        self.is_repair = advance.is_repair
        # A repair applies all records that it is given.
        self.view_offset = 0 if self.is_repair else part.view_offset
        self.start_offset = 0 if self.is_repair else advance.start_offsets[partition]
        self.end_offset = sys.maxsize if self.is_repair else advance.end.offsets[partition]
        first_offsets = lane.reading.first_offsets.get(topic, ())
        self.first_offset = first_offsets[partition] if partition < len(first_offsets) else 0
        self.floor = lane.reading.floors.get(topic, 0)
        self.entries: dict[str, set[int]] = {}
        for offset, row_id in lane.entries.get((topic, partition), {}).items():
            if row_id is not None:
                self.entries.setdefault(row_id, set()).add(offset)
        self.marked = set(self.entries)
        # Entries above the position come again in this batch: each is rejected again, or applied.
        self.tainted = {
            row_id for row_id, offsets in self.entries.items() if min(offsets) < self.view_offset
        }
        self.only = lane.only.get(topic)
        self.convert: Callable[[bytes], Any] = form.converter(advance.table)

    def cure(self, row_id: str, below: int) -> None:
        """Clear a row's taint: all of its values are known as of that offset."""
        if not any(below <= offset < self.view_offset for offset in self.entries.get(row_id, ())):
            self.tainted.discard(row_id)


class MeanSize:
    """Mean size, in bytes, of rows after they were filled with missing values."""

    def __init__(self) -> None:
        self._count = self._sum = 0

    def add(self, size: int) -> None:
        self._count += 1
        self._sum += size

    @property
    def assumed(self) -> int:
        """Assumed size of the next such row, with a margin for larger ones."""
        return (
            max(MIN_FILLED_BYTES, FILLED_MARGIN * self._sum // self._count)
            if self._count
            else ASSUMED_FILLED_BYTES
        )


def _rejection_kind(problem: Unreadable) -> str:
    if isinstance(problem, EventChanged):
        return REFUSED
    return UNHOLDABLE if isinstance(problem, ValueNotRepresentable) else DECODE
