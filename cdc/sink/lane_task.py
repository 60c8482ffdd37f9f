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

from cdc.codec.problem import EventChanged, Undecided, Unreadable, ValueNotRepresentable
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
    """One task's run of a lane, in its thread."""

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
        self._filled_count = 0
        self._filled_bytes = 0
        self._rejections: list[tuple[Rejected, Source]] = []
        self.stopped = False
        """Whether a record has ended the batch, or the task has failed."""

    def fold(self, topic: str, partition: int, records: Records) -> None:
        """Fold the records of a partition into the chunk, which is written whenever it is full."""
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
        """End the task. place: the topic and partition that it is about, as far as is known."""
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
        state = PartitionState(self._lane, advance, partition, view_offset, report)
        self._partitions[topic, partition] = state
        return state

    def _decode_changes(self, state: PartitionState, records: Records) -> Iterator[Decoded | None]:
        """Decode records; None for one that is rejected.

        Dead changes come only to a writer that archives them.
        """
        report = state.report
        topic = state.topic
        start = state.start_offset
        end = state.last_offset
        first_new = state.first_new
        first_offset = state.first_offset
        floor = state.floor
        only = state.only
        decode = self._decoder.decode
        select = self._decoder.select
        has_condition = state.advance.table.where is not None
        row_id = self._decoder.row_id
        convert = state.convert
        archives = self._writer.archives
        keeps_deleted = state.advance.table.events
        for key, raw_value, offset in records:
            if not start <= offset < end or (only is not None and row_id(topic, key) not in only):
                continue
            report.applied.read += 1
            source = Source(offset, key, raw_value)
            if offset < first_new or (offset < first_offset and not archives):
                report.applied.stale += 1
                if state.entries and offset >= first_offset:
                    self._note_cure(state, source)
                continue
            if not state.is_repair:
                state.end_offset = offset + 1
            is_dead = offset < first_offset
            try:
                change = decode(topic, key, raw_value)
                is_dead |= bool(floor and change.lsn is not None and change.lsn < floor)
                if has_condition and (archives or not is_dead):
                    change = select(topic, change)
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
        entries = state.entries.get(self._decoder.row_id(state.topic, source.key) or "", ())
        if not entries or source.offset in entries:
            return
        try:
            change = self._decoder.decode(state.topic, source.key, source.value)
            change = self._decoder.select(state.topic, change)
        except Unreadable:
            # Its quarantine entry was discarded.
            return
        is_purge = state.advance.table.events and change.row is None
        is_dead = state.floor and change.lsn is not None and change.lsn < state.floor
        if not (change.missing or is_dead or is_purge):
            state.cure(change.id, source.offset + 1)
            state.report.cured[change.id] = source.offset + 1

    def _fold_changes(self, state: PartitionState, changes: Iterable[Decoded | None]) -> None:
        """Fold changes of a partition, in the order of offsets; write the chunk whenever it is
        full. None is a record that was rejected.
        """
        limits = self._writer.limits
        size = self._writer.form.size
        observe = self._writer.observe
        place = state.topic, state.partition
        self._chunk[place] = state
        for decoded in changes:
            if decoded is not None:
                change, value, source, is_dead = decoded
                self._bytes += observe(state, change, source, value)
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
        rows = state.rows
        if older := rows.get(change.id):
            state.report.applied.folded += len(older.sources)
        else:
            self._rows += 1
        rows[change.id] = FoldedRow(change.id, source.offset, value, (), [source])
        if state.tainted:
            state.cure(change.id, source.offset + 1)

    def _fold_partial(
        self, state: PartitionState, change: Change, value: Any, source: Source
    ) -> None:
        """Fold a change that misses values."""
        older = state.rows.get(change.id)
        if change.id in state.tainted:
            self._reject(state, change.id, REFUSED, TAINTED, [source])
        elif older is None:
            self._rows += 1
            self._bytes += self._assumed_bytes()
            state.rows[change.id] = FoldedRow(
                change.id, source.offset, value, change.missing, [source]
            )
        elif older.value is None:
            # The values from before the delete are void.
            self._reject(state, change.id, REFUSED, UNKNOWN, [source])
        else:
            filled = self._writer.form.fill(
                state.advance.table, value, change.missing, older.value, older.missing
            )
            if not set(filled.missing).issubset(older.missing):
                # The older row is whole but for what it misses itself, and doesn't have them.
                self._reject(state, change.id, REFUSED, UNKNOWN, [source])
                return
            # Appended, not copied: a chunk may hold tens of thousands of changes of one row.
            older.sources.append(source)
            state.rows[change.id] = FoldedRow(
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
        report = state.report
        for source in sources:
            rejected = Rejected(state.topic, state.partition, source.offset, row_id, kind, reason)
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
            if lacking := [row for row in state.rows.values() if row.missing]:
                self._fill_from_view(state, lacking)
        self._put_rejections()
        if self.stopped:
            return
        for state, verdicts in zip(states, self._writer.write(states), strict=True):
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
        """Fill rows from the view; reject those whose values it doesn't have either."""
        stored_rows = self._writer.read_stored(state, lacking)
        for row in lacking:
            older = stored_rows.get(row.id)
            if older is SUPERSEDED:
                del state.rows[row.id]
                state.report.applied.stale += 1
                state.report.applied.folded += len(row.sources) - 1
                continue
            if older is not None:
                row.value, row.missing = self._writer.form.fill(
                    state.advance.table, row.value, row.missing, older, ()
                )
                self._filled_count += 1
                self._filled_bytes += self._writer.form.size(row.value)
            if row.missing:
                del state.rows[row.id]
                self._reject(state, row.id, REFUSED, UNKNOWN, row.sources)

    def _assumed_bytes(self) -> int:
        """The size that is assumed of a row that misses values: larger than most that were filled."""
        if not self._filled_count:
            return ASSUMED_FILLED_BYTES
        return max(MIN_FILLED_BYTES, FILLED_MARGIN * self._filled_bytes // self._filled_count)

    def _count_outcome(self, state: PartitionState, verdicts: Verdicts) -> None:
        report = state.report
        for row in state.rows.values():
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
        state.rows.clear()
        state.view_offset = state.end_offset


class PartitionState(Part):
    """State of one partition for as long as the task runs.

    first_new: the view had all records below it when the task began. entries: by id of a row, the
    offsets of its records in quarantine; tainted: rows of which a record was rejected that no change
    has made up for yet; marked: all that have, or may have by now, entries.
    """

    def __init__(
        self,
        lane: Lane,
        advance: Advance,
        partition: int,
        view_offset: int,
        report: PartitionOutcome,
    ) -> None:
        super().__init__(advance, partition, view_offset, report, view_offset)
        self.is_repair = advance.is_repair
        # A repair applies all records that it is given.
        self.first_new = 0 if self.is_repair else view_offset
        self.start_offset = 0 if self.is_repair else advance.start_offsets[partition]
        self.last_offset = sys.maxsize if self.is_repair else advance.end.offsets[partition]
        first_offsets = lane.reading.first_offsets.get(self.topic, ())
        self.first_offset = first_offsets[partition] if partition < len(first_offsets) else 0
        self.floor = lane.reading.floors.get(self.topic, 0)
        self.entries: dict[str, set[int]] = {}
        for offset, row_id in lane.entries.get((self.topic, partition), {}).items():
            if row_id is not None:
                self.entries.setdefault(row_id, set()).add(offset)
        self.marked = set(self.entries)
        # Entries above the position come again in this batch: each is rejected again, or applied.
        self.tainted = {
            row_id for row_id, offsets in self.entries.items() if min(offsets) < self.first_new
        }
        self.only = lane.only.get(self.topic)
        self.convert: Callable[[bytes], Any] = lane.writer.form.converter(advance.table)

    def cure(self, row_id: str, below: int) -> None:
        """Clear a row's taint: all of its values are known as of that offset."""
        if not any(below <= offset < self.first_new for offset in self.entries.get(row_id, ())):
            self.tainted.discard(row_id)


def _rejection_kind(problem: Unreadable) -> str:
    if isinstance(problem, EventChanged | Undecided):
        return REFUSED
    return UNHOLDABLE if isinstance(problem, ValueNotRepresentable) else DECODE
