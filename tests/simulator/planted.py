"""Planted bugs: each is one that a pipeline like this has had, and each must be found."""

from __future__ import annotations

import json
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any
from unittest import mock

from cdc.codec.forms import Documents, FilledValue
from cdc.codec.record import Change as Decoded
from cdc.codec.record import Placeholder, RecordDecoder
from cdc.control.control_topics import Truncations
from cdc.errors import SinkError
from cdc.kafka import log_continuity
from cdc.kafka.log_reader import Block, OffsetRange, gone_error
from cdc.model.outcome import Advance, Applied
from cdc.model.position import ViewCheckpoint
from cdc.model.table import Table
from cdc.sink.contract import Batch, Outcome
from cdc.sink.fencing import must_apply
from cdc.sink.lane import Lane, Part, Verdicts
from cdc.sink.lane_task import LaneRun, Records
from cdc.spark.lane_records import LoggedRecords
from tests.simulator import source, views
from tests.simulator.life import SlowLog
from tests.simulator.source import Change, Connector, Source
from tests.simulator.views import Cache, Index, VersionedWriter, View, Warehouse
from tests.support.simulated import MemoryEnds, MemoryPartition

Place = tuple[Any, str, Any]
"""An object, the name of what it has, and what stands there instead."""

DECODE = RecordDecoder.decode
FOLD = LaneRun.fold
READ = SlowLog.read
RANGES = LoggedRecords._ranges
APPLY_INDEX = Index.apply
APPLY_WAREHOUSE = Warehouse.apply
CHANGE = Source._change
RECORDS = source.records
CLEAR = View.clear
TAKE = Cache._take


def last_row_wins(_: object, __: Table, value: bytes, *___: object) -> FilledValue:
    return FilledValue(value, ())


def nothing(*_: Any, **__: Any) -> None:
    return None


def always(*_: Any, **__: Any) -> bool:
    return True


def without_lsn(decoder: RecordDecoder, topic: str, key: bytes, value: bytes) -> Decoded:
    change = DECODE(decoder, topic, key, value)
    change.lsn = None
    return change


def without_deletes(run: LaneRun, topic: str, partition: int, records: Records) -> None:
    kept = [r for r in records if r[1] is not None and b'"op":"d"' not in r[1]]
    FOLD(run, topic, partition, kept)


def without_tombstones(run: LaneRun, topic: str, partition: int, records: Records) -> None:
    """As if `before` of a delete were the row that stays."""
    kept = []
    for key, value, offset in records:
        if value is not None:
            event = json.loads(value)
            if event["op"] == "d":
                event["op"], event["after"] = "u", {**event["before"], "n": 0, "w": None}
            kept.append((key, json.dumps(event).encode(), offset))
    FOLD(run, topic, partition, kept)


def newest_first(run: LaneRun, topic: str, partition: int, records: Records) -> None:
    FOLD(run, topic, partition, sorted(records, key=lambda record: record[2] % 3))


def one_short(records: LoggedRecords, lane: Lane) -> Sequence[OffsetRange]:
    return [asked._replace(end=asked.end - 1) for asked in RANGES(records, lane)]


def without_first(records: LoggedRecords, lane: Lane) -> Sequence[OffsetRange]:
    return [
        asked._replace(start=min(asked.start + (asked.start > 0), asked.end))
        for asked in RANGES(records, lane)
    ]


def gaps_are_loss(log: SlowLog, bootstrap: str, ranges: Sequence[OffsetRange]) -> Generator[Block]:
    for block in READ(log, bootstrap, ranges):
        offsets = [record[2] for record in block[2]]
        if offsets and offsets != list(range(offsets[0], offsets[-1] + 1)):
            raise gone_error(block[0], "an offset is missing")
        yield block


def as_far_as_it_goes(log: SlowLog, _: str, ranges: Sequence[OffsetRange]) -> Generator[Block]:
    """Reads what there is, as with `failOnDataLoss=false`."""
    for topic, partition, start, end, _id in ranges:
        there = log.topics[topic].partitions[partition]
        records = there.between(start, min(end, there.stable_end))
        yield topic, partition, [(r.key, r.value, r.offset) for r in records]


def behind_open_transactions(
    ends: MemoryEnds, partitions: Mapping[str, int], **_: Any
) -> dict[str, tuple[int, ...]]:
    return {name: end.offsets for name, end in ends._log.log_ends(list(partitions)).items()}


def position_first(index: Index, batch: Batch) -> Outcome:
    for step in batch.advances:
        place = index.place(step.table)
        if must_apply(step, place.stored, batch.writer):
            index.store(step, Applied(), batch.writer)
            index.link.answer()
            place.stored = None if step.start is None else ViewCheckpoint(step.start)
    return APPLY_INDEX(index, batch)


def answers_are_good() -> Any:
    """Takes the answer to every item for a good one."""
    return suppress(SinkError)


def unversioned(writer: VersionedWriter, part: Part) -> Verdicts:
    for row in part.rows.values():
        writer.view.link.request()
        views._put(writer.view.place(part.advance.table).rows, [row])
        writer.view.on_write()
    return Verdicts()


def live_instead(view: View, _: Mapping[str, str]) -> View:
    """Takes another generation for the live one."""
    return view


def position_kept(view: View, table: Table) -> None:
    """Empties the rows alone."""
    stored = view.place(table).stored
    CLEAR(view, table)
    view.place(table).stored = stored


def rows_kept(view: View, table: Table) -> None:
    """Forgets the position alone."""
    view.place(table).stored = None


def key_stays(made: Source, table: Table, verb: str, key: int, value: int) -> Iterator[Change]:
    """A change of a key is sent as one record."""
    changes = list(CHANGE(made, table, verb, key, value))
    yield from changes[1:] if verb == "rename" else changes


def null_left_out(change: Change) -> list[source.Sent]:
    """Writes null where the log leaves a value out."""
    row = {**change.row, **dict.fromkeys(change.lacking)}
    return RECORDS(Change(change.table, change.op, row, change.lsn))


def row_lost(change: Change) -> list[source.Sent]:
    return [] if change.lsn % 7 == 3 else RECORDS(change)


def offset_first(connector: Connector) -> None:
    """Stores its offset before the records are committed."""
    connector.stored = min(connector.stored + 1, len(connector.source.wal))
    POLL(connector)


POLL = Connector._poll


def fence_open(advance: Advance, stored: ViewCheckpoint | None, writer: str) -> bool:
    return True


def own_memory(advance: Advance, stored: ViewCheckpoint | None, writer: str) -> bool:
    """Trusts what it remembers of a server that has gone back."""
    if stored is None or stored.writer == writer:
        return not (stored and stored.position == advance.end)
    return must_apply(advance, stored, writer)


def take_anything(cache: Cache, advance: Advance, writer: str) -> tuple[int, ...]:
    place = cache.place(advance.table)
    place.owner = writer
    cache.taken[advance.table.qualified, writer] = place.takeovers
    return advance.start_offsets


def cleaner_too_quick(partition: MemoryPartition, now: float, retention_s: float) -> None:
    COMPACT(partition, now, 0.0)
    COMPACT(partition, now, 0.0)


COMPACT = MemoryPartition.compact
BUGS: dict[str, list[Place]] = {
    "last row wins": [(Documents, "fill", last_row_wins)],
    "placeholder written": [(Placeholder, "carried", nothing)],
    "null for what the log leaves out": [(source, "records", null_left_out)],
    "records in the wrong order": [(LaneRun, "fold", newest_first)],
    "deletes ignored": [(LaneRun, "fold", without_deletes)],
    "`before` of a delete trusted": [(LaneRun, "fold", without_tombstones)],
    "floor ignored": [(RecordDecoder, "decode", without_lsn)],
    "TRUNCATE ignored": [(Truncations, "_take", nothing)],
    "cleared, but for its position": [(View, "clear", position_kept)],
    "cleared, but for its rows": [(View, "clear", rows_kept)],
    "range ends short": [(LoggedRecords, "_ranges", one_short)],
    "range begins late": [(LoggedRecords, "_ranges", without_first)],
    "gap taken for lost records": [(SlowLog, "read", gaps_are_loss)],
    "lost records taken for a gap": [(SlowLog, "read", as_far_as_it_goes), (log_continuity, "refuse_gap", nothing)],
    "open transactions passed": [(MemoryEnds, "read", behind_open_transactions), (SlowLog, "read", as_far_as_it_goes)],
    "late deletes not refused": [(log_continuity, "safe_until", lambda *_: float("inf"))],
    "position before rows": [(Index, "apply", position_first)],
    "failure taken for success": [(views, "_failures", answers_are_good)],
    "rows without versions": [(VersionedWriter, "_write", unversioned)],
    "fence open": [(views, "must_apply", fence_open)],
    "cache's fence open": [(Cache, "_take", take_anything), (Cache, "require_taken", nothing)],
    "rollback of the server unnoticed": [(views, "must_apply", own_memory)],
    "wrong generation written": [(View, "for_generation", live_instead)],
    "change of a key leaves the old row": [(Source, "_change", key_stays)],
    "row lost by the connector": [(source, "records", row_lost)],
    "connector's offset before its records": [(Connector, "_poll", offset_first)],
}  # fmt: skip


@contextmanager
def planted(bug: str) -> Iterator[None]:
    """A context with a bug in it."""
    with ExitStack() as patches:
        for place in BUGS[bug]:
            patches.enter_context(mock.patch.object(*place))
        yield
