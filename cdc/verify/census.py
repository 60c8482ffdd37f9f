"""Census of many small tables.

One job proves which of their views are equal, and counts their rows.

A view that isn't proved equal here may still be equal: `cdc.verify` compares it by itself, and
reports what differs.
"""

import random
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import reduce
from typing import TYPE_CHECKING

import psycopg
from psycopg import sql
from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from cdc.model.table import Table
from cdc.postgres import source
from cdc.postgres.row_query import BUCKETS, Sample, row_query, sample_condition
from cdc.sink.contract import GroupScanner, Sink
from cdc.verify.bucket_hashes import Work, record_batch
from cdc.verify.comparison import Comparison, View
from cdc.verify.row_equality import SOURCE, Comparable, RowSums, bucket_digest, comparable, sum_rows
from cdc.verify.source_rows import (
    SourceReader,
    SourceSnapshot,
    begin_in_snapshot,
    copy_rows,
    open_snapshot,
    throttle,
)

if TYPE_CHECKING:
    import pyarrow as pa

SCHEMA = "side string, table string, rows long, folded long, total long"
SumsByView = dict[View, RowSums | None]
"""None: the view couldn't be read. A view without an entry has no rows."""
SMALL_BYTES = 512 << 10
"""Largest table that is read together with others: reading a larger one takes longer than starting
a job for it."""
GROUP_BYTES = 64 << 20
GROUP_TABLES = 250
"""Tables of one snapshot, which locks them; a server has room for 6,400 locks by default."""
GROUP_SCHEMA = "table string, id string, document string"
# Size with TOAST; of a partitioned table the sum of all partitions. Null: there is no such table.
SIZES = """
SELECT name, (SELECT sum(pg_table_size(t.relid)) FROM (
    SELECT relid FROM pg_partition_tree(to_regclass(name)) UNION SELECT to_regclass(name)
) AS t (relid))::bigint
FROM unnest(%s::text[]) AS name
"""


def equal_small_views(
    reader: SourceReader,
    dsn: str,
    tables: Sequence[Table],
    sinks: Sequence[Sink],
    sample: Sample | None,
    report: Callable[[str], object] = lambda _: None,
    setting: str = source.OWNER,
) -> dict[View, Comparison]:
    """Find the views of small tables that are equal to their source.

    Only sinks that read many views at once take part.

    Raises:
        SourceError, SinkError: a server can't be read.
    """
    equal: dict[View, Comparison] = {}
    grouped = {sink.name: sink for sink in sinks if isinstance(sink, GroupScanner)}
    # Of a table of which sinks have different columns each is compared by itself.
    times = Counter(table.qualified for table in tables)
    tables = [table for table in tables if times[table.qualified] == 1]
    for group in group_tables(tables, table_sizes(dsn, tables, setting)) if grouped else ():
        pending = group
        previous_count = 0
        # A table that changed during a census differs without an error. Take another census while
        # fewer tables differ each time.
        while len(pending) > 1 and len(pending) != previous_count:
            first = pending[0].qualified
            report(f"comparing {len(pending)} small tables together, the first of them {first}")
            start = time.monotonic()
            previous_count = len(pending)
            proved = take_census(reader, dsn, pending, grouped, sample, setting)
            each_s = round((time.monotonic() - start) / previous_count, 3)
            for (sink, table), rows in proved.items():
                equal[sink, table] = Comparison(
                    sink, table, rows, rows, source_s=each_s, view_s=each_s
                )
            pending = [
                table
                for table in pending
                if any(
                    (sink, table.qualified) not in equal for sink in filter(table.is_in, grouped)
                )
            ]
    return equal


def take_census(
    reader: SourceReader,
    dsn: str,
    tables: Sequence[Table],
    sinks: Mapping[str, GroupScanner],
    sample: Sample | None,
    setting: str = source.OWNER,
) -> dict[View, int]:
    """Compare views, of sinks by name, with one snapshot of these tables.

    Returns the equal ones, with their rows.

    Raises:
        SourceError, SinkError: a server can't be read.
    """
    try:
        with open_snapshot(dsn, *tables, setting=setting) as snapshot:
            frames = {SOURCE: rows_of_group(reader, snapshot, sample)}
            for name, sink in sinks.items():
                if own := [table for table in tables if table.is_in(name)]:
                    frames[name] = sink.scan_group(own, reader.spark)
            sums = sum_sides(frames, tables, sample)
    except psycopg.ProgrammingError:
        # A table is gone or can't be read: reading each by itself shows which.
        return {}
    proved = proved_equal(sums, [table.qualified for table in tables], list(sinks))
    views = {(sink, table.qualified) for table in tables for sink in filter(table.is_in, sinks)}
    return {view: rows for view, rows in proved.items() if view in views}


def sample_range(percent: float) -> Sample:
    """Draw a range of so many percent of the buckets, at random.

    Returns its first and its last bucket.
    """
    width = max(1, round(BUCKETS * min(percent, 100.0) / 100))
    start = random.randrange(BUCKETS - width + 1)  # noqa: S311  # which rows are looked at is no secret
    return f"{start:04x}", f"{start + width - 1:04x}"


def proved_equal(sums: SumsByView, tables: Sequence[str], sinks: Sequence[str]) -> dict[View, int]:
    """Select the views whose sums equal the source's, with the rows of each."""
    proved = {}
    for table in tables:
        source = sums.get((SOURCE, table), RowSums())
        for sink in sinks:
            if source is not None and sums.get((sink, table), RowSums()) == source:
                proved[sink, table] = source.rows
    return proved


def sum_sides(
    frames: Mapping[str, DataFrame], tables: Sequence[Table], sample: Sample | None
) -> SumsByView:
    """Sum up the rows of each side and table. Only sums leave the executors."""
    sides = (
        frame.select(F.lit(side).alias("side"), "table", "id", "document")
        for side, frame in frames.items()
    )
    rules = {table.qualified: comparable(table) for table in tables}
    summed = reduce(DataFrame.unionByName, sides).mapInArrow(_sum_parts(rules, sample), SCHEMA)
    sums: SumsByView = {}
    for side, table_name, *values in summed.collect():
        add_sums(sums, (side, table_name), None if None in values else RowSums(*values))
    return sums


def add_sums(sums: SumsByView, view: View, row_sums: RowSums | None) -> None:
    """Add the sums of a part of a view. A view stays unread once a part of it is."""
    sum_so_far = sums.get(view, RowSums())
    sums[view] = None if sum_so_far is None or row_sums is None else sum_so_far.plus(row_sums)


def _sum_parts(rules: Mapping[str, Comparable], sample: Sample | None) -> Work:
    """Build what sums up each side and table of a batch: NULL for a view that couldn't be read."""

    def read(parts: Iterator["pa.RecordBatch"]) -> Iterator["pa.RecordBatch"]:
        unread = (None, None, None)
        for part in parts:
            records = [
                (*view, *(unread if rows is None else sum_rows(rows, rules[view[1]])))
                for view, rows in _by_view(part, sample).items()
            ]
            yield record_batch(SCHEMA, records)

    return read


def _by_view(
    part: "pa.RecordBatch", sample: Sample | None
) -> dict[View, list[tuple[bytes, bytes]] | None]:
    """Group the rows of a batch, (id, document), that are in the sample.

    None: the view couldn't be read.
    """
    import pyarrow as pa

    rows_by_view: dict[View, list[tuple[bytes, bytes]] | None] = {}
    sides, tables, *texts = part.columns
    ids, documents = (column.cast(pa.binary()).to_pylist() for column in texts)
    for side, table, row_id, document in zip(
        sides.to_pylist(), tables.to_pylist(), ids, documents, strict=True
    ):
        rows = rows_by_view.setdefault((side, table), [])
        if row_id is None:
            rows_by_view[side, table] = None
        elif rows is not None and (
            sample is None or sample[0] <= bucket_digest(row_id).hex() <= sample[1]
        ):
            rows.append((row_id, document))
    return rows_by_view


def table_sizes(dsn: str, tables: Sequence[Table], setting: str) -> dict[str, int]:
    """Return the bytes of each table that exists, by its name."""
    names = {
        sql.Identifier(table.schema, table.name).as_string(None): table.qualified
        for table in tables
    }
    with source.connect(dsn, setting) as connection:
        listed = connection.execute(SIZES, [list(names)]).fetchall()
    return {names[name]: size for name, size in listed if size is not None}


def group_tables(tables: Sequence[Table], bytes_of: Mapping[str, int]) -> list[list[Table]]:
    """Group the small tables, in their order.

    A group has at least two: a single table is better read by itself.
    """
    collected: list[list[Table]] = []
    room = 0
    for table in tables:
        size = bytes_of.get(table.qualified, SMALL_BYTES + 1)
        if size > SMALL_BYTES:
            continue
        if not collected or size > room or len(collected[-1]) == GROUP_TABLES:
            collected.append([])
            room = GROUP_BYTES
        collected[-1].append(table)
        room -= size
    return [group for group in collected if len(group) > 1]


def rows_of_group(
    reader: SourceReader, snapshot: SourceSnapshot, sample: Sample | None
) -> DataFrame:
    """Read the sample's rows of all tables of a snapshot, as `GroupScanner.scan_group` does."""
    tables = snapshot.tables
    tasks = max(1, min(reader.spark.sparkContext.defaultParallelism, len(tables)))
    rate = reader.rate and reader.rate / tasks
    dsn = snapshot.dsn
    join_sql = snapshot.join_sql
    queries = []
    for table in tables:
        condition = sample_condition(table, sample) if sample else None
        queries.append((table.qualified, row_query(table, condition).as_string(None)))

    def read(parts: Iterator["pa.RecordBatch"]) -> Iterator["pa.RecordBatch"]:
        for task in (task for part in parts for task in part.column("id").to_pylist()):
            with source.open_session(dsn) as connection:
                yield from throttle(_read_tables(connection, queries[task::tasks], join_sql), rate)

    return reader.spark.range(0, tasks, numPartitions=tasks).mapInArrow(read, GROUP_SCHEMA)


def _read_tables(
    connection: source.Connection, queries: Sequence[tuple[str, str]], join_sql: str
) -> Iterator["pa.RecordBatch"]:
    import pyarrow as pa

    for table, query in queries:
        begin_in_snapshot(connection, join_sql)
        try:
            for batch in copy_rows(connection, query):
                names = pa.array([table] * batch.num_rows, "string")
                yield pa.RecordBatch.from_arrays(
                    [names, *batch.columns], names=["table", "id", "document"]
                )
        except (psycopg.ProgrammingError, psycopg.DataError):
            # Dropped, altered or forbidden: reading the table by itself shows which.
            yield record_batch(GROUP_SCHEMA, [(table, None, None)])
        connection.execute("ROLLBACK")
