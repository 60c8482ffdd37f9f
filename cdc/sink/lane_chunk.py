"""Chunks of a lane's task, one after the other: changes are folded, the newest of each row; rows that
miss values are filled from the view; what is rejected is put aside, and the rest is written.

In:  decoded changes of a partition, in the order of offsets, and its state.
Out: rows in the view, and numbers in the report of each partition.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from cdc.codec.forms import Form
from cdc.codec.record import Change
from cdc.errors import ConnectorError
from cdc.sink.lane import (
    REPORTED_ROWS,
    SUPERSEDED,
    TAINTED,
    UNKNOWN,
    Failure,
    FoldedRow,
    Lane,
    Part,
    Verdicts,
)
from cdc.sink.rejection import REFUSED, Rejected, Source

SOURCE_BYTES = 200
"""Memory of a record besides its key and value."""
ASSUMED_FILLED_BYTES, MIN_FILLED_BYTES, FILLED_MARGIN = 100_000, 2_000, 8
"""Assumed size of a row that still misses large values: at first; at least; as a multiple of the
mean.
"""
Decoded = tuple[Change, Any, Source, bool]
"""A change, its row in the view's form (None for a delete), its record, and whether the change is
dead.
"""


class PartitionState:
    """State of one partition for as long as the task runs.

    entries: by id of a row, the offsets of its records in quarantine; tainted: rows of which a
    record was rejected that no change has made up for yet; marked: all that have, or may have by
    now, entries.
    """

    def __init__(self, lane: Lane, part: Part, form: Form | None) -> None:
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
        self.convert: Callable[[bytes], Any] = form.converter(advance.table) if form else bytes

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


class Chunks:
    """The chunk at hand of a task, and how it is written. One thread uses it."""

    def __init__(self, lane: Lane) -> None:
        self._lane, self._writer = lane, lane.writer
        self._states: dict[tuple[str, int], PartitionState] = {}
        self._rows = self._bytes = 0
        self._filled_sizes = MeanSize()
        self._rejections: list[tuple[Rejected, Source]] = []
        self.stopped = False
        """Whether a record has ended the batch, or the task has failed: nothing is written any
        more.
        """

    def fold(self, state: PartitionState, changes: Iterable[Decoded | None]) -> None:
        """Fold changes of a partition, in the order of offsets; write the chunk whenever it is
        full. None is a record that was rejected.
        """
        part, limits, size, observe = (
            state.part,
            self._writer.limits,
            self._writer.form.size,
            self._writer.observe,
        )
        place = part.topic, part.partition
        self._states[place] = state
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
                self.flush()
                self._states[place] = state
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
        part, older = state.part, state.part.rows.get(change.id)
        if change.id in state.tainted:
            self.reject(state, change.id, REFUSED, TAINTED, [source])
        elif older is None:
            self._rows += 1
            self._bytes += self._filled_sizes.assumed
            part.rows[change.id] = FoldedRow(
                change.id, source.offset, value, change.missing, [source]
            )
        elif older.value is None:
            # The values from before the delete are void.
            self.reject(state, change.id, REFUSED, UNKNOWN, [source])
        else:
            filled = self._writer.form.fill(
                part.advance.table, value, change.missing, older.value, older.missing
            )
            if not set(filled.missing).issubset(older.missing):
                # The older row is whole but for what it misses itself, and doesn't have them.
                self.reject(state, change.id, REFUSED, UNKNOWN, [source])
                return
            # Appended, not copied: a chunk may hold tens of thousands of changes of one row.
            older.sources.append(source)
            part.rows[change.id] = FoldedRow(
                change.id, source.offset, filled.value, filled.missing, older.sources
            )

    def reject(
        self,
        state: PartitionState,
        row_id: str | None,
        kind: str,
        reason: str,
        sources: Sequence[Source],
    ) -> None:
        """Reject records for one reason; the row, where their key tells it, is tainted."""
        report, part = state.part.report, state.part
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

    def flush(self) -> None:
        """Write the chunk: first its rejected records, then its rows.

        The last chunk also moves the position to its last record, not to the end of the batch. If
        Spark cancels a task because another one failed, the task's records may just end. Only the
        driver knows that all records were read, once all tasks have ended well.
        """
        states, self._states = list(self._states.values()), {}
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
            rejections, self._rejections = self._rejections, []
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
                self.reject(state, row.id, REFUSED, UNKNOWN, row.sources)

    def _count_outcome(self, state: PartitionState, verdicts: Verdicts) -> None:
        part, report = state.part, state.part.report
        for row in part.rows.values():
            if row.id in verdicts.refused:
                self.reject(state, row.id, REFUSED, verdicts.refused[row.id], row.sources)
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
