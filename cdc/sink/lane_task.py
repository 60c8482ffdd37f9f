"""One task of a lane: decodes, folds, fills and has written what Spark hands it, chunk by chunk.

A view is taken from one offset to a later one as if record by record, wherever chunks are cut. One thing depends on
that: changes that carry all of a row only together, of which the view has nothing, are put together within a chunk, and
rejected where they are cut.

A record that can't be applied is rejected by itself (`cdc.sink.rejection`), before the position of its chunk moves. Its
row is tainted then: a later change that doesn't carry all values can't be completed across it, and is rejected, too; a
later one that carries all cures it.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from cdc.codec.forms import Form
from cdc.codec.record import Change, RecordDecoder, Unholdable, Unreadable
from cdc.errors import KafkaUnavailable
from cdc.model.outcome import Advance
from cdc.sink.lane import REPORTED_ROWS, SUPERSEDED, TAINTED, UNKNOWN, Failure, Lane, Part, Report, Row, Verdicts
from cdc.sink.rejection import DECODE, REFUSED, UNHOLDABLE, Rejected, Source

if TYPE_CHECKING:
    import pyarrow as pa

SOURCE_BYTES = 200
"""Of memory, besides its key and value."""
FILLED_BYTES, LEAST_BYTES, LARGER = 100_000, 2_000, 8
"""What a row is taken for that has yet to be filled with large values: first, at least, times the mean so far."""


def work(lane: Lane, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """What a task does: COLUMNS in, a partition's records in the order of offsets and all in one task; REPORT."""
    import pyarrow as pa

    run = Run(lane)
    for topic, partition, records in itertools.chain.from_iterable(map(stretches, batches)):
        # To its end, even where nothing is left to do: Spark throws a worker away that hasn't read all.
        if not run.ended:
            run.take(topic, partition, records)
    reports = [msgspec.json.encode(report) for report in run.end()]
    yield pa.RecordBatch.from_arrays([pa.array(reports, pa.binary())], ["report"])


Records = Iterable[tuple[bytes | None, bytes | None, int]]
"""Key, value, offset."""


def stretches(batch: pa.RecordBatch) -> Iterator[tuple[str, int, Records]]:
    """The records of each Kafka partition: topic, partition, records in the order of offsets."""
    topics, partitions, offsets = (batch.column(name).to_pylist() for name in ("topic", "partition", "offset"))
    keys, values = batch.column("key").to_pylist(), batch.column("value").to_pylist()
    places = list(zip(topics, partitions, strict=True))
    start = 0
    while start < len(places):
        place, until = places[start], len(places)
        if places[-1] != place:
            until = next(at for at in range(start, len(places)) if places[at] != place)
        yield *place, zip(keys[start:until], values[start:until], offsets[start:until], strict=True)
        start = until


class Run:
    """One task's run of a lane. One thread uses it."""

    def __init__(self, lane: Lane) -> None:
        self._lane, self._writer = lane, lane.writer
        self._advances = {advance.table.topic: advance for advance in lane.advances}
        self._decoder = RecordDecoder([advance.table for advance in lane.advances], lane.reading.placeholder)
        self._ways: dict[tuple[str, int], _Way] = {}
        self._parts: list[Part] = []
        self._rows = self._bytes = 0
        self._filled = _Mean()
        self._rejects: list[tuple[Rejected, Source]] = []
        self.ended = False
        """Nothing that comes is applied any more."""

    def take(self, topic: str, partition: int, records: Records) -> None:
        """Fold the records of a partition into the chunk at hand, which is written whenever it is full."""
        advance = self._advances.get(topic)
        if advance is None:
            return
        try:
            way = self._ways.get((topic, partition)) or self._way(advance, partition)
            self._take(way, records)
        except Failure as failure:
            self._fail(topic, partition, failure)

    def end(self) -> list[Report]:
        """Write what is left; what became of each partition's records."""
        place = next(iter(self._ways), ("", 0))
        try:
            if not self.ended:
                self._flush()
            if not self.ended:
                for topic, told in self._writer.end().items():
                    self._told(topic).told.extend(told)
        except Failure as failure:
            self._fail(*place, failure)
        return [way.part.report for way in self._ways.values()]

    def _told(self, topic: str) -> Report:
        return next(way.part.report for (name, _), way in self._ways.items() if name == topic)

    def _fail(self, topic: str, partition: int, failure: Failure) -> None:
        self.ended = True
        if (topic, partition) not in self._ways:
            report = Report(topic, partition)
            self._ways[topic, partition] = _Way(self._lane, Part(self._advances[topic], partition, 0, report), None)
        report = self._ways[topic, partition].part.report
        report.failure, report.message = failure.kind, failure.message

    def _way(self, advance: Advance, partition: int) -> _Way:
        topic = advance.table.topic
        report = Report(topic, partition)
        at = self._writer.at(advance, partition)
        way = _Way(self._lane, Part(advance, partition, at, report, at), self._writer.form)
        self._ways[topic, partition] = way
        return way

    def _take(self, way: _Way, records: Records) -> None:
        part, limits, size, look = way.part, self._writer.limits, self._writer.form.size, self._writer.take
        if not any(one is part for one in self._parts):
            self._parts.append(part)
        for said in self._changes(way, records):
            if said is not None:
                change, made, source, dead = said
                self._bytes += look(part, change, source, made)
                if dead:
                    pass
                elif change.missing:
                    self._fill(way, change, made, source)
                else:
                    self._replace(way, change, made, source)
                if made is not None:
                    self._bytes += size(made)
                self._bytes += len(source.value or b"") + SOURCE_BYTES
            if self._rows >= limits.rows or self._bytes >= limits.bytes:
                self._flush()
                self._parts.append(part)
            if self.ended:
                return

    def _changes(self, way: _Way, records: Records) -> Iterator[tuple[Change, Any, Source, bool] | None]:
        """What records say, each with its row in the view's form; None for one that is rejected.

        Last, whether it is dead; such changes come only to who archives them.
        """
        part, report, topic = way.part, way.part.report, way.part.topic
        low, high, at, since, floor, only = way.start, way.until, way.at, way.since, way.floor, way.only
        decode, row_id, convert = self._decoder.decode, self._decoder.row_id, way.convert
        archives = self._writer.archives
        for key, value, offset in records:
            if not low <= offset < high or (only is not None and row_id(topic, key) not in only):
                continue
            report.applied.read += 1
            source = Source(offset, key, value)
            if offset < at or (offset < since and not archives):
                report.applied.stale += 1
                if way.entries and offset >= since:
                    self._pass(way, source)
                continue
            if not way.is_repair:
                part.reach = offset + 1
            dead = offset < since
            try:
                change = decode(topic, key, value)
                dead |= bool(floor and change.lsn is not None and change.lsn < floor)
                if dead and not archives:
                    report.applied.stale += 1
                    continue
                made = None if change.row is None else convert(change.row)
            except Unreadable as problem:
                if dead:
                    # It need not be a change of the table as it is now.
                    report.applied.stale += 1
                    continue
                self._reject(way, row_id(topic, key), _kind(problem), problem.problem, [source])
                yield None
            else:
                report.applied.stale += dead
                yield change, made, source, dead

    def _pass(self, way: _Way, source: Source) -> None:
        """Look at a record that an earlier try has applied, or rejected: it may have cured a row."""
        topic = way.part.topic
        entries = way.entries.get(self._decoder.row_id(topic, source.key) or "", ())
        if not entries or source.offset in entries:
            return
        try:
            change = self._decoder.decode(topic, source.key, source.value)
        except Unreadable:
            # Somebody has given up its entry.
            return
        if not change.missing and not (way.floor and change.lsn is not None and change.lsn < way.floor):
            way.cure(change.id, source.offset + 1)
            way.part.report.cured[change.id] = source.offset + 1

    def _replace(self, way: _Way, change: Change, made: Any, source: Source) -> None:
        """Fold a change that carries all of its row, or deletes it."""
        rows = way.part.rows
        if old := rows.get(change.id):
            way.part.report.applied.folded += len(old.sources)
        else:
            self._rows += 1
        rows[change.id] = Row(change.id, source.offset, made, (), [source])
        if way.tainted:
            way.cure(change.id, source.offset + 1)

    def _fill(self, way: _Way, change: Change, made: Any, source: Source) -> None:
        """Fold a change that misses values."""
        part, old = way.part, way.part.rows.get(change.id)
        if change.id in way.tainted:
            self._reject(way, change.id, REFUSED, TAINTED, [source])
        elif old is None:
            self._rows += 1
            self._bytes += self._filled.assumed
            part.rows[change.id] = Row(change.id, source.offset, made, change.missing, [source])
        elif old.value is None:
            # What the row held before it was deleted is void.
            self._reject(way, change.id, REFUSED, UNKNOWN, [source])
        else:
            filled = self._writer.form.fill(part.advance.table, made, change.missing, old.value, old.missing)
            sources = [*old.sources, source]
            part.rows[change.id] = Row(change.id, source.offset, filled.value, filled.missing, sources)

    def _reject(self, way: _Way, row_id: str | None, kind: str, reason: str, sources: Sequence[Source]) -> None:
        report, part = way.part.report, way.part
        for source in sources:
            rejected = Rejected(part.topic, part.partition, source.offset, row_id, kind, reason)
            self._rejects.append((rejected, source))
            self._bytes += len(source.key or b"") + len(source.value or b"") + SOURCE_BYTES
            # Of a repair all: what isn't named is taken for mended.
            if way.is_repair or len(report.rejected) < REPORTED_ROWS:
                report.rejected.append(rejected)
        report.applied.quarantined += len(sources)
        if row_id is not None:
            way.tainted.add(row_id)
            way.marked.add(row_id)
        self.ended |= self._lane.rejection.stops

    def _flush(self) -> None:
        """Write the chunk: first what is rejected of it, then its rows.

        Also the last one leads to the last record that has come, not to the end of the batch: where Spark calls a task
        off, because another has failed, its records just end. That all have come the driver knows, once all tasks have
        ended well.
        """
        parts, self._parts = self._parts, []
        for part in parts:
            way = self._ways[part.topic, part.partition]
            lacking = [row for row in part.rows.values() if row.missing]
            if lacking:
                self._complete(way, lacking)
        self._put()
        if self.ended:
            return
        for part, verdicts in zip(parts, self._writer.write(parts), strict=True):
            self._count(part, verdicts)
        self._put()
        self._rows = self._bytes = 0

    def _put(self) -> None:
        if self._rejects:
            rejects, self._rejects = self._rejects, []
            try:
                self._lane.rejection.put(rejects)
            except KafkaUnavailable as error:
                raise Failure("broker", error.message) from None

    def _complete(self, way: _Way, lacking: Sequence[Row]) -> None:
        """Fill rows from what the view has of them; what isn't known there either is rejected."""
        part = way.part
        held = self._writer.held(part, lacking)
        for row in lacking:
            older = held.get(row.id)
            if older is SUPERSEDED:
                del part.rows[row.id]
                part.report.applied.stale += 1
                part.report.applied.folded += len(row.sources) - 1
                continue
            if older is not None:
                row.value, row.missing = self._writer.form.fill(part.advance.table, row.value, row.missing, older, ())
                self._filled.add(self._writer.form.size(row.value))
            if row.missing:
                del part.rows[row.id]
                self._reject(way, row.id, REFUSED, UNKNOWN, row.sources)

    def _count(self, part: Part, verdicts: Verdicts) -> None:
        report, way = part.report, self._ways[part.topic, part.partition]
        for row in part.rows.values():
            if row.id in verdicts.refused:
                self._reject(way, row.id, REFUSED, verdicts.refused[row.id], row.sources)
                continue
            report.applied.folded += len(row.sources) - 1
            if row.id in way.marked:
                # All of its values are known, whatever was rejected before.
                report.cured[row.id] = row.offset + 1
            if row.id in verdicts.stale:
                report.applied.stale += 1
            elif row.value is None:
                report.applied.deleted += 1
            else:
                report.applied.written += 1
        part.rows.clear()
        part.at = part.reach


class _Way:
    """What is known of one partition for as long as the task runs.

    entries: by id of a row, the offsets of its records in quarantine; tainted: rows of which a record was rejected that
    no change has made up for yet; marked: all that have, or may have by now, entries.
    """

    def __init__(self, lane: Lane, part: Part, form: Form | None) -> None:
        advance, partition, topic = part.advance, part.partition, part.topic
        self.part, self.is_repair = part, advance.is_repair
        # All records that a repair is given are for it.
        self.at = 0 if self.is_repair else part.at
        self.start = 0 if self.is_repair else advance.start_offsets[partition]
        self.until = sys.maxsize if self.is_repair else advance.end.offsets[partition]
        since = lane.reading.since.get(topic, ())
        self.since = since[partition] if partition < len(since) else 0
        self.floor = lane.reading.floors.get(topic, 0)
        self.entries: dict[str, set[int]] = {}
        for offset, row_id in lane.entries.get((topic, partition), {}).items():
            if row_id is not None:
                self.entries.setdefault(row_id, set()).add(offset)
        self.marked = set(self.entries)
        # What lies further on comes again: it is rejected again, or applied.
        self.tainted = {row_id for row_id, offsets in self.entries.items() if min(offsets) < self.at}
        self.only = lane.only.get(topic)
        self.convert: Callable[[bytes], Any] = form.converter(advance.table) if form else bytes

    def cure(self, row_id: str, below: int) -> None:
        """All values of a row are known as of that offset."""
        if not any(below <= offset < self.at for offset in self.entries.get(row_id, ())):
            self.tainted.discard(row_id)


class _Mean:
    """How large rows have become that were filled with values they missed, in bytes."""

    def __init__(self) -> None:
        self._count = self._sum = 0

    def add(self, size: int) -> None:
        self._count, self._sum = self._count + 1, self._sum + size

    @property
    def assumed(self) -> int:
        """For the next one, with room for larger ones."""
        return max(LEAST_BYTES, LARGER * self._sum // self._count) if self._count else FILLED_BYTES


def _kind(problem: Unreadable) -> str:
    return UNHOLDABLE if isinstance(problem, Unholdable) else DECODE
