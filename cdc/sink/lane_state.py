"""State of a lane's task: of each Kafka partition, and how large filled rows become."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from cdc.codec.forms import Form
from cdc.sink.lane import (
    Lane,
    Part,
)

ASSUMED_FILLED_BYTES, MIN_FILLED_BYTES, FILLED_MARGIN = 100_000, 2_000, 8
"""Assumed size of a row that still misses large values: at first; at least; as a multiple of the
mean.
"""


class PartitionState:
    """State of one partition for as long as the task runs.

    entries: by id of a row, the offsets of its records in quarantine; tainted: rows of which a
    record was rejected that no change has made up for yet; marked: all that have, or may have by
    now, entries.
    """

    def __init__(self, lane: Lane, part: Part, form: Form | None) -> None:
        advance, partition, topic = part.advance, part.partition, part.topic
        self.part, self.is_repair = part, advance.is_repair
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
        self._count, self._sum = self._count + 1, self._sum + size

    @property
    def assumed(self) -> int:
        """Assumed size of the next such row, with a margin for larger ones."""
        return (
            max(MIN_FILLED_BYTES, FILLED_MARGIN * self._sum // self._count)
            if self._count
            else ASSUMED_FILLED_BYTES
        )
