"""A lane's writer into dictionaries, and a run of a lane over records in memory."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from operator import attrgetter
from typing import Any

from cdc.codec import forms
from cdc.codec.record import Change
from cdc.model.outcome import Advance
from cdc.sink.lane import (
    SUPERSEDED,
    ChunkLimits,
    Failure,
    FoldedRow,
    Lane,
    Part,
    PartitionOutcome,
    Verdicts,
)
from cdc.sink.lane_task import LaneRun
from cdc.sink.rejection import Rejected, Source
from tests.support.twin import Raw


@dataclass
class Writer:
    """Views by topic; `writes` are the sizes of what each call has brought, `refuses` ids that it won't take."""

    form: forms.Form = field(default_factory=forms.Documents)
    limits: ChunkLimits = field(default_factory=lambda: ChunkLimits(1000, 10**6))
    views: dict[str, dict[str, Any]] = field(default_factory=dict)
    versions: dict[str, int] = field(default_factory=dict)
    refuses: frozenset[str] = frozenset()
    writes: list[int] = field(default_factory=list)
    reached: dict[tuple[str, int], int] = field(default_factory=dict)
    stands: Mapping[int, int] = field(default_factory=dict)
    fails: bool = False
    archives: bool = False
    offsets: list[int] = field(default_factory=list)
    """Offsets of the changes that it was shown."""

    def start_offset(self, advance: Advance, partition: int) -> int:
        return self.stands.get(partition, advance.start_offsets[partition])

    def observe(self, part: Part, change: Change, source: Source, value: object) -> int:
        self.offsets.append(source.offset)
        return 0

    def read_stored(self, part: Part, rows: Sequence[FoldedRow]) -> Mapping[str, Any]:
        view = self.views.get(part.topic, {})
        newer = {row.id: SUPERSEDED for row in rows if self._has_newer(row)}
        return {row.id: view[row.id] for row in rows if row.id in view} | newer

    def write(self, parts: Sequence[Part]) -> Sequence[Verdicts]:
        if self.fails:
            raise Failure("unavailable", "away")
        verdicts = []
        for part in parts:
            view = self.views.setdefault(part.topic, {})
            self.writes.append(len(part.rows))
            refused = dict.fromkeys(self.refuses & part.rows.keys(), "too large")
            stale = {row.id for row in part.rows.values() if self._has_newer(row)}
            verdicts.append(Verdicts(refused, frozenset(stale)))
            for row in part.rows.values():
                assert not row.missing
                if row.id in refused or row.id in stale:
                    continue
                if row.value is None:
                    view.pop(row.id, None)
                else:
                    view[row.id] = row.value
            self.reached[part.topic, part.partition] = part.end_offset
        return verdicts

    def _has_newer(self, row: FoldedRow) -> bool:
        return self.versions.get(row.id, -1) > row.offset

    def finish(self) -> Mapping[str, Sequence[str]]:
        return {topic: ["done"] for topic in self.views}


@dataclass
class Remembered:
    """Keeps what is rejected."""

    stops = False
    records: list[tuple[Rejected, Source]] = field(default_factory=list)

    def put(self, records: Sequence[tuple[Rejected, Source]]) -> None:
        self.records.extend(records)

    @property
    def reasons(self) -> list[tuple[int, str]]:
        """By offset."""
        return [(record.offset, record.reason) for record, _ in self.records]


def run(lane: Lane, records: Iterable[Raw]) -> list[PartitionOutcome]:
    """Records of a partition that follow each other come in one block, as an executor reads them."""
    task = LaneRun(lane)
    for place, block in groupby(records, attrgetter("topic", "partition")):
        if not task.stopped:
            task.fold(*place, [(record.key, record.value, record.offset) for record in block])
    return task.finish()
