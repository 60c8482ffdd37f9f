"""Read the rows of a table with Spark's executors, as documents that Postgres itself writes.

In:  a snapshot of the source, a condition. Out: frames of id string, document string.
Invariant: every transaction is READ ONLY and sees that same snapshot; memory doesn't grow with the
table.
"""

import io
import json
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from itertools import chain, islice
from typing import TYPE_CHECKING, Any

import psycopg
from psycopg import sql
from pyspark.sql import DataFrame, SparkSession

from cdc.model.table import Table
from cdc.postgres import source
from cdc.postgres.row_query import (
    bucket,
    id_condition,
    key_page_query,
    row_query,
    source_names,
    text_condition,
)
from cdc.readiness.checks import CONSEQUENCE_OF_READER, hidden_rows
from cdc.readiness.facts import read_hidden

if TYPE_CHECKING:
    import pyarrow as pa

CHUNK_ROWS = 5000
CHUNK_BYTES = 8 << 20
"""Largest batch of rows, unless a single row is larger."""
PAGES_PER_TASK = 256
IDS_PER_QUERY = 1000
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
READ_ONLY = "BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY"
# Of a partitioned table the largest partition: a range of pages is read in all of them.
PAGES = """
SELECT coalesce(max(pg_relation_size(t.relid) / current_setting('block_size')::int), 0)::bigint
FROM (
    SELECT relid FROM pg_partition_tree(%(table)s::regclass) UNION SELECT %(table)s::regclass
) AS t (relid)
"""


@dataclass(frozen=True)
class SourceSnapshot:
    """A snapshot of one or several tables, for readers that join it.

    join_sql    the statements that make a transaction see it, and the time of the clock
    taken_ms    a time, by the server's clock, at which the snapshot existed already
    pages       of the first table
    now         the time of the first table's clock, if it has one, in microseconds since 1970
    """

    dsn: str = field(repr=False)
    tables: tuple[Table, ...]
    join_sql: str
    taken_ms: float
    pages: int
    now: int | None

    @property
    def table(self) -> Table:
        return self.tables[0]


@contextmanager
def open_snapshot(
    dsn: str, *tables: Table, now: int | None = None, setting: str = source.OWNER
) -> Iterator[SourceSnapshot]:
    """Open a snapshot until the context ends. `setting`: where the DSN is from.

    Tables are locked as by a SELECT: that keeps a rewrite (VACUUM FULL, TRUNCATE) from moving rows
    between one reader and the next.
    """
    labels = [name for table in tables for name in source_names(table)]
    names = [sql.Identifier(*label.split(".")) for label in labels]
    lock = sql.SQL("LOCK TABLE {} IN ACCESS SHARE MODE").format(sql.SQL(", ").join(names))
    first = tables[0]
    name = sql.Identifier(first.schema, first.name).as_string(None)
    with closing(source.connect(dsn, setting)) as connection:

        def fetch(query: str, **values: str) -> Any:
            row = connection.execute(query, values or None).fetchone()
            assert row is not None
            return row[0]

        require_all_rows(connection, labels, setting)
        connection.execute(READ_ONLY)
        connection.execute(lock)
        join = sql.SQL("SET TRANSACTION SNAPSHOT {}").format(fetch("SELECT pg_export_snapshot()"))
        taken_ms = fetch("SELECT extract(epoch FROM clock_timestamp())::float8 * 1000")
        pages = 0 if first.derivation else fetch(PAGES, table=name)
        parts = [join.as_string(None), clock_setting(first, now)]
        yield SourceSnapshot(dsn, tables, "; ".join(filter(None, parts)), taken_ms, pages, now)


def require_all_rows(connection: source.Connection, labels: Sequence[str], setting: str) -> None:
    """Raise SettingsError for a table with policies that hide rows from the reader's role."""
    # The owner by itself is taken at its word: a policy may show it all rows by another condition
    # than `true`.
    if setting == source.READER:
        role = connection.info.user
        for label, hidden_by in read_hidden(connection, role, labels).items():
            raise hidden_rows(label, role, hidden_by, CONSEQUENCE_OF_READER).error


def clock_setting(table: Table, now: int | None) -> str:
    """Write the statement that sets a table's clock for a transaction; empty if it has none."""
    if table.derivation is None or table.derivation.clock is None:
        return ""
    assert now is not None
    moment = EPOCH + timedelta(microseconds=now)
    name = sql.Identifier(*table.derivation.clock.split("."))
    return sql.SQL("SET LOCAL {} = {}").format(name, moment.isoformat()).as_string(None)


@dataclass(frozen=True)
class SourceReader:
    """Reads rows of the source with executors.

    `rate` limits rows per second, over all tasks together.
    """

    spark: SparkSession
    rate: float | None = None

    def rows(self, snapshot: SourceSnapshot, condition: sql.Composable | None = None) -> DataFrame:
        """Read the rows of a table that meet a condition.

        Ranges of its pages are read in parallel.
        """
        tasks = max(
            1, min(self.spark.sparkContext.defaultParallelism, snapshot.pages // PAGES_PER_TASK)
        )
        rate = self.rate and self.rate / tasks
        dsn = snapshot.dsn
        join_sql = snapshot.join_sql
        bounds = [snapshot.pages * task // tasks for task in range(tasks)]
        pages = zip(bounds, [*bounds[1:], None], strict=True)
        conditions = (
            [condition]
            if snapshot.table.derivation
            else [_within_pages(condition, low, high) for low, high in pages]
        )
        queries = [row_query(snapshot.table, part).as_string(None) for part in conditions]

        def read(parts: Iterator["pa.RecordBatch"]) -> Iterator["pa.RecordBatch"]:
            for task in (task for part in parts for task in part.column("id").to_pylist()):
                with source.open_session(dsn) as connection:
                    begin_in_snapshot(connection, join_sql)
                    yield from throttle(copy_rows(connection, queries[task]), rate)

        return self.spark.range(0, tasks, numPartitions=tasks).mapInArrow(
            read, "id string, document string"
        )

    def rows_in_buckets(self, snapshot: SourceSnapshot, buckets: Sequence[str]) -> DataFrame:
        condition = sql.SQL("{} = ANY ({}::text[])").format(
            bucket(snapshot.table), sql.Literal(list(buckets))
        )
        return self.rows(snapshot, condition)

    def rows_with_ids(self, snapshot: SourceSnapshot, ids: Sequence[str]) -> DataFrame:
        """Read the rows of these ids, as far as they exist."""
        table = snapshot.table
        rate = self.rate
        dsn = snapshot.dsn
        join_sql = snapshot.join_sql

        def read(parts: Iterator["pa.RecordBatch"]) -> Iterator["pa.RecordBatch"]:
            row_ids = [key for part in parts for key in part.column("key").to_pylist()]
            with source.open_session(dsn) as connection:
                begin_in_snapshot(connection, join_sql)
                for start in range(0, len(row_ids), IDS_PER_QUERY):
                    chunk_ids = row_ids[start : start + IDS_PER_QUERY]
                    yield from throttle(fetch_rows(connection, table, chunk_ids, join_sql), rate)

        keys = self.spark.createDataFrame([(key,) for key in ids], "key string").coalesce(1)
        return keys.mapInArrow(read, "id string, document string")


def fetch_rows(
    connection: source.Connection, table: Table, ids: Sequence[str], join_sql: str
) -> Iterator["pa.RecordBatch"]:
    """Read the rows of these ids, lazily, in a transaction that has joined the snapshot."""
    rows = copy_rows(connection, row_query(table, id_condition(table, ids)).as_string(None))
    try:
        # Postgres casts all ids before it sends a row, so the first batch raises for any that it
        # can't cast.
        first = list(islice(rows, 1))
    except psycopg.DataError:
        # An id is no value of the key's type: only its text can be compared.
        connection.execute("ROLLBACK")
        begin_in_snapshot(connection, join_sql)
        first = []
        rows = copy_rows(connection, row_query(table, text_condition(table, ids)).as_string(None))
    yield from chain(first, rows)


def list_ids(
    connection: source.Connection, table: Table, cursor: str | None, limit: int
) -> tuple[list[str], str | None]:
    """List ids of a table in the order of their keys, up to the last key that was there at the beginning: see
    `cdc.sink.contract.ListIds`.
    """

    def read(after: Sequence[str], last: Sequence[str], count: int) -> list[Any]:
        return connection.execute(key_page_query(table, after, last, count)).fetchall()

    after: Sequence[str] = ()
    if cursor is not None:
        after, last = json.loads(cursor)
    elif newest := read((), (), 1):
        last = json.loads(newest[0][1])
    else:
        return [], None
    rows = read(after, last, limit)
    ids = [row_id for row_id, _ in rows]
    if len(rows) < limit:
        return ids, None
    return ids, json.dumps([json.loads(rows[-1][1]), last])


def _within_pages(condition: sql.Composable | None, low: int, high: int | None) -> sql.Composable:
    """Narrow a condition to pages from low up to high.

    None: to the end, since rows may be newer than the count.
    """
    parts = [sql.SQL("({})").format(condition)] if condition else []
    parts.append(sql.SQL("ctid >= {}::tid").format(f"({low},0)"))
    if high is not None:
        parts.append(sql.SQL("ctid < {}::tid").format(f"({high},0)"))
    return sql.SQL(" AND ").join(parts)


def begin_in_snapshot(connection: source.Connection, join_sql: str) -> None:
    """Begin a transaction that sees a snapshot: see `SourceSnapshot.join_sql`. Without it, a new one."""
    connection.execute(READ_ONLY)
    if join_sql:
        connection.execute(join_sql.encode())


def copy_rows(connection: source.Connection, query: str) -> Iterator["pa.RecordBatch"]:
    """Read the rows of a query with COPY, a batch at a time."""
    with connection.cursor().copy(f"COPY ({query}) TO STDOUT (FORMAT csv)".encode()) as copy:
        for chunk in chunk_lines(copy):
            yield _parse_batch(chunk)


def chunk_lines(lines: Iterable[bytes | bytearray | memoryview]) -> Iterator[bytes]:
    """Join lines into chunks of at most CHUNK_ROWS and CHUNK_BYTES.

    A longer line makes a chunk by itself.
    """
    pending: list[bytes | bytearray | memoryview] = []
    size = 0
    for line in lines:
        if pending and (len(pending) == CHUNK_ROWS or size + len(line) > CHUNK_BYTES):
            yield b"".join(pending)
            pending = []
            size = 0
        pending.append(line)
        size += len(line)
    if pending:
        yield b"".join(pending)


def _parse_batch(text: bytes) -> "pa.RecordBatch":
    import pyarrow as pa
    from pyarrow import csv

    table = csv.read_csv(
        io.BytesIO(text),
        csv.ReadOptions(
            column_names=["id", "document"], use_threads=False, block_size=len(text) + 1
        ),
        csv.ParseOptions(newlines_in_values=True),
        csv.ConvertOptions(
            column_types={"id": pa.string(), "document": pa.string()}, strings_can_be_null=False
        ),
    )
    (batch,) = table.combine_chunks().to_batches()
    return batch


def throttle(batches: Iterator["pa.RecordBatch"], rate: float | None) -> Iterator["pa.RecordBatch"]:
    """Pass batches on at no more than `rate` rows per second. None: no limit."""
    start = time.monotonic()
    rows = 0
    for batch in batches:
        yield batch
        rows += batch.num_rows
        if rate:
            time.sleep(max(0.0, start + rows / rate - time.monotonic()))
