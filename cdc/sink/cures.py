"""Find the rows that records which a view has already have cured: whose entries in quarantine are
void since. Nothing is written.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from cdc.codec.forms import Documents
from cdc.codec.record import Change
from cdc.model.outcome import Advance
from cdc.sink.lane import BatchRecords, ChunkLimits, Entries, FoldedRow, Lane, Part, Verdicts
from cdc.sink.lane_run import run_on_executors
from cdc.sink.rejection import Source, Stop

if TYPE_CHECKING:
    from cdc.codec.decode_options import DecodeOptions
    from cdc.sink.contract import Key


class PassedWriter:
    """A view that has all records of a batch, so that nothing comes to be written."""

    form = Documents()
    limits = ChunkLimits(1, 1)
    archives = False

    def start_offset(self, advance: Advance, partition: int) -> int:
        """Return the step's end."""
        return advance.end.offsets[partition]

    def read_stored(self, part: Part, rows: Sequence[FoldedRow]) -> Mapping[str, bytes]:  # noqa: ARG002
        """Read nothing."""
        return {}

    def observe(self, part: Part, change: Change, source: Source, value: object) -> int:  # noqa: ARG002
        """Keep nothing."""
        return 0

    def write(self, parts: Sequence[Part]) -> Sequence[Verdicts]:
        """Write nothing."""
        return [Verdicts()] * len(parts)

    def finish(self) -> Mapping[str, Sequence[str]]:
        """Hand over nothing."""
        return {}


def find_cures(
    advances: Sequence[Advance],
    records: BatchRecords,
    reading: DecodeOptions,
    entries: Entries,
    sink: str,
) -> Mapping[Key, int]:
    """Find the rows with entries that records of these steps have cured: see `Outcome.cured`.

    The view has the records, which come as in a batch. Those that have an entry themselves cure
    nothing.
    """
    lane = Lane(tuple(advances), reading, PassedWriter(), Stop(), entries)
    return run_on_executors(lane, records, sink, {}).cured
