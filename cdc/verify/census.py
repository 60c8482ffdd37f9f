"""Many small tables compared with their views in one job: which views are proved equal, and how many rows they have.

What isn't proved equal here may be so all the same: it is compared by itself (`cdc.verify`), which also tells why.
"""

import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import astuple
from functools import reduce
from hashlib import md5
from typing import TYPE_CHECKING

import psycopg
from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from cdc.codec.types import kind
from cdc.model.table import Table
from cdc.sink.contract import GroupScanner, Sink
from cdc.verify.comparison import Comparison
from cdc.verify.row_sums import Comparable, Leaf, leaf_of
from cdc.verify.source_group import groups, rows_of_group, sizes
from cdc.verify.source_rows import BUCKET_DIGITS, BUCKETS, Reader, Sample, Snapshot, within

if TYPE_CHECKING:
    import pyarrow as pa

SCHEMA = "side string, table string, unread boolean, rows long, folded long, total long"
SUMS = ["side", "table", "unread", "rows", "folded", "total"]
SOURCE = ""
"""The side that isn't a sink."""
View = tuple[str, str]
"""A sink's name and a table's."""
Leaves = dict[View, Leaf | None]
"""None for a view that couldn't be read; one that isn't named has no rows."""
Read = Callable[[Iterator["pa.RecordBatch"]], Iterator["pa.RecordBatch"]]


def small_and_equal(
    reader: Reader,
    dsn: str,
    tables: Sequence[Table],
    sinks: Sequence[Sink],
    sample: Sample | None,
    tell: Callable[[str], object] = lambda _: None,
) -> dict[View, Comparison]:
    """The views of small tables that are equal to their source, of the sinks that read many at once.

    Raises:
        SourceError, SinkError: a server can't be read.
    """
    equal: dict[View, Comparison] = {}
    grouped = {sink.name: sink for sink in sinks if isinstance(sink, GroupScanner)}
    for group in groups(tables, sizes(dsn, tables)) if grouped else ():
        rest, before = group, 0
        # A second look tells what was changed at the first one from what is wrong, as long as it is fewer each time.
        while len(rest) > 1 and len(rest) != before:
            tell(f"comparing {len(rest)} small tables together, the first of them {rest[0].qualified}")
            began, before = time.monotonic(), len(rest)
            proved = take_census(reader, dsn, rest, grouped, sample)
            each_s = round((time.monotonic() - began) / before, 3)
            for (sink, table), rows in proved.items():
                equal[sink, table] = Comparison(sink, table, rows, rows, source_s=each_s, view_s=each_s)
            rest = [one for one in rest if any((sink, one.qualified) not in equal for sink in grouped)]
    return equal


def take_census(
    reader: Reader, dsn: str, tables: Sequence[Table], sinks: Mapping[str, GroupScanner], sample: Sample | None
) -> dict[View, int]:
    """The views, of sinks by name, that are equal to one snapshot of these tables; the rows of each.

    Raises:
        SourceError, SinkError: a server can't be read.
    """
    try:
        with Snapshot(dsn, *tables) as snapshot:
            conditions = {one.qualified: within(one, sample) for one in tables} if sample else {}
            frames = {SOURCE: rows_of_group(reader, snapshot, conditions)}
            frames |= {name: sink.scan_group(tables, reader.spark) for name, sink in sinks.items()}
            leaves = tally(frames, tables, sample)
    except psycopg.ProgrammingError:
        # One of them isn't there any more, or can't be read: which one shows when each is read by itself.
        return {}
    return proved_equal(leaves, [table.qualified for table in tables], list(sinks))


def drawn(percent: float) -> Sample:
    """The first and the last of so many percent of the buckets, in a row, beginning anywhere."""
    width = max(1, round(BUCKETS * min(percent, 100.0) / 100))
    start = random.randrange(BUCKETS - width + 1)  # noqa: S311  # which rows are looked at is no secret
    return f"{start:04x}", f"{start + width - 1:04x}"


def proved_equal(leaves: Leaves, tables: Sequence[str], sinks: Sequence[str]) -> dict[View, int]:
    """The views that hold what the source does, with the rows of each."""
    proved = {}
    for table in tables:
        source = leaves.get((SOURCE, table), Leaf())
        for sink in sinks:
            if source is not None and leaves.get((sink, table), Leaf()) == source:
                proved[sink, table] = source.rows
    return proved


def tally(frames: Mapping[str, DataFrame], tables: Sequence[Table], sample: Sample | None) -> Leaves:
    """The leaf of each side and table that has rows. Only sums leave the executors."""
    sides = (frame.select(F.lit(side).alias("side"), "table", "id", "document") for side, frame in frames.items())
    rules = {one.qualified: Comparable(tuple((c.name, kind(c.type).compare) for c in one.columns)) for one in tables}
    sums = reduce(DataFrame.unionByName, sides).mapInArrow(_summing(rules, sample), SCHEMA)
    leaves: Leaves = {}
    for side, table, unread, rows, folded, total in sums.collect():
        count_in(leaves, (side, table), None if unread else Leaf(rows, folded, total))
    return leaves


def count_in(leaves: Leaves, view: View, leaf: Leaf | None) -> None:
    """Add a part of a view; what is unread once stays so."""
    known = leaves.get(view, Leaf())
    leaves[view] = None if known is None or leaf is None else known.plus(leaf)


def _summing(rules: Mapping[str, Comparable], sample: Sample | None) -> Read:
    """A row for each side and table that a task has met."""

    def read(parts: Iterator["pa.RecordBatch"]) -> Iterator["pa.RecordBatch"]:
        import pyarrow as pa

        leaves: Leaves = {}
        for part in parts:
            for view, rows in _by_view(part, sample).items():
                count_in(leaves, view, None if rows is None else leaf_of(rows, rules[view[1]]))
        sums = [(*view, leaf is None, *astuple(leaf or Leaf())) for view, leaf in leaves.items()]
        if sums:
            yield pa.RecordBatch.from_arrays([pa.array(column) for column in zip(*sums, strict=True)], names=SUMS)

    return read


def _by_view(part: "pa.RecordBatch", sample: Sample | None) -> dict[View, list[tuple[str, str]] | None]:
    """The rows of a batch, (id, document), that are of the sample; None for what couldn't be read."""
    found: dict[View, list[tuple[str, str]] | None] = {}
    for side, table, row_id, document in zip(*(column.to_pylist() for column in part.columns), strict=True):
        rows = found.setdefault((side, table), [])
        if row_id is None:
            found[side, table] = None
        elif rows is not None and (sample is None or sample[0] <= _bucket(row_id) <= sample[1]):
            rows.append((row_id, document))
    return found


def _bucket(row_id: str) -> str:
    """The twin of `source_rows.bucket`."""
    return md5(row_id.encode("utf-8", "surrogatepass"), usedforsecurity=False).hexdigest()[:BUCKET_DIGITS]
