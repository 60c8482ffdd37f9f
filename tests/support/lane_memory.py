"""Memory of a lane's task, measured in a separate process: a lane over blocks as the log's
reader hands them over, made while it runs, with a writer that counts.

    python -m tests.support.lane_memory CASE RECORDS ROW_LIMIT BYTE_LIMIT FORM

prints what came of it as JSON.
"""

import json
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import NamedTuple

from cdc.codec import forms
from cdc.codec.decode_options import DecodeOptions
from cdc.codec.record import Change
from cdc.kafka import log_reader
from cdc.kafka.log_reader import BLOCK, Block
from cdc.model.outcome import Advance
from cdc.model.position import Position
from cdc.sink.lane import ChunkLimits, FoldedRow, Lane, Part, Verdicts
from cdc.sink.lane_task import LaneRun
from cdc.sink.rejection import Source, Stop
from tests.support.envelopes import PLACEHOLDER, encoded, envelope, table

QUEUED_BYTES = 8 * 2**20
"""What the client has fetched ahead at most, see `cdc.kafka.log_reader`. One record may be larger."""
TABLE = table("t.public.items")
FORMS: Mapping[str, Callable[[], forms.Form]] = {
    "documents": forms.Documents,
    "values": forms.Values,
}


class Record(NamedTuple):
    """A record, and the partition that it is in."""

    key: bytes
    value: bytes
    partition: int


class Counter:
    """A writer that counts rows and forgets them."""

    archives = False

    def __init__(self, form: forms.Form, limits: ChunkLimits) -> None:
        self.form, self.limits = form, limits
        self.rows = self.chunks = 0

    def start_offset(self, advance: Advance, partition: int) -> int:
        return advance.start_offsets[partition]

    def read_stored(self, part: Part, rows: Sequence[FoldedRow]) -> Mapping[str, object]:
        """Every row is there, with all of its values."""
        row = encoded({"a": "k", "b": 1, "v": "stored", "n": 1}) or b""
        stored = self.form.converter(TABLE)(row)
        return {folded.id: stored for folded in rows}

    def observe(self, part: Part, change: Change, source: Source, value: object) -> int:
        return 0

    def write(self, parts: Sequence[Part]) -> Sequence[Verdicts]:
        self.rows += sum(len(part.rows) for part in parts)
        self.chunks += 1
        return [Verdicts()] * len(parts)

    def finish(self) -> Mapping[str, Sequence[str]]:
        return {}


class Case(NamedTuple):
    """Records of a log: how many rows they are of, how many partitions they are in, one after the
    other, and the text that each carries.
    """

    rows: int
    partitions: int
    text: str

    def records(self, count: int) -> Iterator[Record]:
        """Make records, one after the other."""
        row = {"a": "%b", "b": 1, "v": self.text, "n": 1}
        op = "c" if self.text != PLACEHOLDER else "u"
        key, value = encoded({"a": "%b", "b": 1}), encoded(envelope(op, None, row))
        assert key is not None
        assert value is not None
        for number in range(count):
            name = b"%d" % (number % self.rows)
            yield Record(key % name, value % name, number % self.partitions)


MANY = 10**9
CASES = {
    "rows of 10 MB": Case(MANY, 1, "x" * 10_000_000),
    "one row": Case(1, 1, "x" * 100),
    "one row that misses values": Case(1, 1, PLACEHOLDER),
    "1,000 partitions": Case(MANY, 1000, "x" * 100),
    "a backlog": Case(MANY, 1, "x" * 100),
}


def blocks(records: Iterator[Record]) -> Iterator[Block]:
    """Blocks of the records, no larger than the log's reader makes them."""
    offsets: dict[int, int] = {}
    queued: list[tuple[int, log_reader.Record]] = []
    size = 0
    for record in records:
        offset = offsets.get(record.partition, 0)
        offsets[record.partition] = offset + 1
        queued.append((record.partition, (record.key, record.value, offset)))
        size += len(record.value)
        if len(queued) == BLOCK or size >= QUEUED_BYTES:
            yield from _by_partition(queued)
            queued = []
            size = 0
    yield from _by_partition(queued)


def _by_partition(queued: Sequence[tuple[int, log_reader.Record]]) -> Iterator[Block]:
    for partition, part in groupby(queued, itemgetter(0)):
        yield TABLE.topic, partition, [record for _, record in part]


def peak_bytes() -> int:
    """The most memory that this process has had: what the system says of it since it began, for
    `getrusage` tells also of the one that started it.
    """
    match = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert match
    return int(match[1]) * 1024


def run(case: Case, count: int, writer: Counter) -> int:
    """Run a lane over so many records; returns how many it has read."""
    end = Position("id", (count,) * case.partitions)
    lane = Lane((Advance(TABLE, None, end),), DecodeOptions(PLACEHOLDER), writer, Stop())
    task = LaneRun(lane)
    for topic, partition, records in blocks(case.records(count)):
        task.fold(topic, partition, records)
    reports = task.finish()
    assert [report.failure for report in reports] == [None] * len(reports)
    assert sum(report.applied.accounted for report in reports) == count
    return sum(report.applied.read for report in reports)


def main(name: str, count: int, limits: ChunkLimits, form: str) -> None:
    run(CASES["a backlog"], 2000, Counter(FORMS[form](), ChunkLimits(100, 10**6)))
    first_bytes, began = peak_bytes(), time.process_time()
    writer = Counter(FORMS[form](), limits)
    read = run(CASES[name], count, writer)
    result = {
        "read": read,
        "rows": writer.rows,
        "chunks": writer.chunks,
        "cpu_s": time.process_time() - began,
        "memory_bytes": peak_bytes() - first_bytes,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    case_name, records_text, rows_text, bytes_text, form_name = sys.argv[1:]
    main(case_name, int(records_text), ChunkLimits(int(rows_text), int(bytes_text)), form_name)
