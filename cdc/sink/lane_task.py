"""One task of a lane: decodes the records that it is given, and has them folded, filled and written
by chunks (`cdc.sink.lane_chunk`).

A view is taken from one offset to a later one as if record by record, wherever chunks are cut. One
thing depends on that: changes that carry all of a row only together, of which the view has nothing,
are put together within a chunk, and rejected where they are cut.

A record that can't be applied is rejected by itself (`cdc.sink.rejection`), before the position of
its chunk moves. Its row is tainted then: a later change that doesn't carry all values can't be
completed across it, and is rejected, too; a later one that carries all cures it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from cdc.codec.problem import EventChanged, Unreadable, ValueNotRepresentable
from cdc.codec.record import RecordDecoder
from cdc.errors import ConnectorError
from cdc.model.outcome import Advance
from cdc.sink.lane import Failure, Lane, Part, PartitionOutcome
from cdc.sink.lane_chunk import Chunks, Decoded, PartitionState
from cdc.sink.rejection import DECODE, REFUSED, UNHOLDABLE, Source

Records = Iterable[tuple[bytes | None, bytes | None, int]]
"""Key, value, offset."""
Blocks = Iterable[tuple[str, int, Records]]
"""Topic, partition, and some of its records in the order of offsets. All records of a partition are
in the same task.
"""


def run_task(lane: Lane, blocks: Blocks) -> list[PartitionOutcome]:
    """Run a lane over one task's records. Returns what became of each partition's records, also
    where they can't be read to the end.
    """
    lane_run = LaneRun(lane)
    try:
        for topic, partition, records in blocks:
            lane_run.fold(topic, partition, records)
            if lane_run.stopped:
                break
    except ConnectorError as error:
        lane_run.fail(Failure(error.kind, error.message))
    return lane_run.finish()


class LaneRun:
    """One task's run of a lane. One thread uses it."""

    def __init__(self, lane: Lane) -> None:
        self._lane, self._writer = lane, lane.writer
        self._advances = {advance.table.topic: advance for advance in lane.advances}
        self._decoder = RecordDecoder(
            [advance.table for advance in lane.advances], lane.reading.placeholder
        )
        self._partitions: dict[tuple[str, int], PartitionState] = {}
        self._chunks = Chunks(lane)

    @property
    def stopped(self) -> bool:
        """Whether the task has failed or a record has ended the batch: later records aren't
        applied.
        """
        return self._chunks.stopped

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
            self._chunks.fold(state, self._decode_changes(state, records))
        except Failure as failure:
            self._fail(topic, partition, failure)

    def fail(self, failure: Failure) -> None:
        """End the task: its records can't be read to the end."""
        first_topic = self._lane.advances[0].table.topic
        self._fail(*next(iter(self._partitions), (first_topic, 0)), failure)

    def finish(self) -> list[PartitionOutcome]:
        """Write the last chunk; returns what became of each partition's records."""
        first_partition = next(iter(self._partitions), ("", 0))
        try:
            if not self.stopped:
                self._chunks.flush()
            if not self.stopped:
                for topic, results in self._writer.finish().items():
                    self._outcome_of(topic).writer_results.extend(results)
        except Failure as failure:
            self._fail(*first_partition, failure)
        return [state.part.report for state in self._partitions.values()]

    def _outcome_of(self, topic: str) -> PartitionOutcome:
        return next(
            state.part.report for (name, _), state in self._partitions.items() if name == topic
        )

    def _fail(self, topic: str, partition: int, failure: Failure) -> None:
        self._chunks.stopped = True
        if (topic, partition) not in self._partitions:
            report = PartitionOutcome(topic, partition)
            self._partitions[topic, partition] = PartitionState(
                self._lane, Part(self._advances[topic], partition, 0, report), None
            )
        report = self._partitions[topic, partition].part.report
        report.failure, report.message = failure.kind, failure.message

    def _open_partition(self, advance: Advance, partition: int) -> PartitionState:
        topic = advance.table.topic
        report = PartitionOutcome(topic, partition)
        view_offset = self._writer.start_offset(advance, partition)
        state = PartitionState(
            self._lane,
            Part(advance, partition, view_offset, report, view_offset),
            self._writer.form,
        )
        self._partitions[topic, partition] = state
        return state

    def _decode_changes(self, state: PartitionState, records: Records) -> Iterator[Decoded | None]:
        """Decode records; None for one that is rejected.

        Dead changes come only to a writer that archives them.
        """
        part, report, topic = state.part, state.part.report, state.part.topic
        start, end, view_offset = state.start_offset, state.end_offset, state.view_offset
        first_offset, floor, only = state.first_offset, state.floor, state.only
        decode, row_id, convert = self._decoder.decode, self._decoder.row_id, state.convert
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
                self._chunks.reject(
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


def _rejection_kind(problem: Unreadable) -> str:
    if isinstance(problem, EventChanged):
        return REFUSED
    return UNHOLDABLE if isinstance(problem, ValueNotRepresentable) else DECODE
