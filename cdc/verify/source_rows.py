"""Read the rows of a table with Spark's executors, as documents that Postgres itself writes.

In:  a snapshot of the source, a condition. Out: frames of id string, document string.
Invariant: every transaction is READ ONLY and sees that same snapshot; memory doesn't grow with the
table.
"""

import io
import json
import re
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from types import TracebackType
from typing import TYPE_CHECKING, Any

import psycopg
from psycopg import sql
from pyspark.sql import DataFrame, SparkSession

from cdc.codec.types import kind
from cdc.model import pg_types
from cdc.model.table import Table
from cdc.postgres import source

if TYPE_CHECKING:
    import pyarrow as pa

CHUNK_ROWS = 5000
CHUNK_BYTES = 8 << 20
"""Largest batch of rows, unless a single row is larger."""
PAGES_PER_TASK = 256
Sample = tuple[str, str]
"""The first and the last bucket whose rows are compared."""
IDS_PER_QUERY = 1000
BUCKET_DIGITS = 4
BUCKETS = 16**BUCKET_DIGITS
READ_ONLY = "BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY"
SESSION = "-c timezone=UTC -c extra_float_digits=1 -c datestyle=ISO"
# Of a partitioned table the largest partition: a range of pages is read in all of them.
PAGES = """
SELECT coalesce(max(pg_relation_size(t.relid) / current_setting('block_size')::int), 0)::bigint
FROM (
    SELECT relid FROM pg_partition_tree(%(table)s::regclass) UNION SELECT %(table)s::regclass
) AS t (relid)
"""
DATES = ("date", "timestamp without time zone", "timestamp with time zone")
CASTABLE = (*DATES, "smallint", "integer", "bigint", "numeric", "text", "character varying", "uuid")
"""Types whose text in an id casts back to the same value, so that the key's index can be used."""


class SourceSnapshot:
    """A snapshot of one or several tables, open for readers that join it. A context manager.

    `taken_ms` is a time, by the server's clock, at which the snapshot existed already. Tables are
    locked as by a SELECT: that keeps a rewrite (VACUUM FULL, TRUNCATE) from moving rows between one
    reader and the next.
    """

    def __init__(self, dsn: str, table: Table, *more: Table) -> None:
        self.dsn, self.table = dsn, table
        self.tables = (table, *more)
        self._connection = source.connect(dsn)
        try:
            self._open()
        except BaseException:
            self._connection.close()
            raise

    def _open(self) -> None:
        names = [
            sql.Identifier(*name.split("."))
            for table in self.tables
            for name in source_names(table)
        ]
        self._connection.execute(READ_ONLY)
        self._connection.execute(
            sql.SQL("LOCK TABLE {} IN ACCESS SHARE MODE").format(sql.SQL(", ").join(names))
        )
        (self.id,) = self._fetch_row("SELECT pg_export_snapshot()")
        (self.taken_ms,) = self._fetch_row(
            "SELECT extract(epoch FROM clock_timestamp())::float8 * 1000"
        )
        if self.table.derivation:
            self.pages = 0
        else:
            name = sql.Identifier(self.table.schema, self.table.name)
            (self.pages,) = self._fetch_row(PAGES, {"table": name.as_string(None)})

    def __enter__(self) -> "SourceSnapshot":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._connection.close()

    def _fetch_row(self, query: str, values: dict[str, str] | None = None) -> tuple[Any, ...]:
        row = self._connection.execute(query, values).fetchone()
        assert row is not None
        return row


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
        rate, dsn, join_sql = (
            self.rate and self.rate / tasks,
            snapshot.dsn,
            snapshot_statement(snapshot),
        )
        bounds = [snapshot.pages * task // tasks for task in range(tasks)]
        pages = zip(bounds, [*bounds[1:], None], strict=True)
        conditions = (
            [condition]
            if snapshot.table.derivation
            else [_both_conditions(condition, _page_condition(low, high)) for low, high in pages]
        )
        queries = [row_query(snapshot.table, part).as_string(None) for part in conditions]

        def read(parts: Iterator["pa.RecordBatch"]) -> Iterator["pa.RecordBatch"]:
            for task in (task for part in parts for task in part.column("id").to_pylist()):
                with psycopg.connect(dsn, options=SESSION, autocommit=True) as connection:
                    begin_in_snapshot(connection, join_sql)
                    yield from throttle(copy_rows(connection, queries[task]), rate)

        return self.spark.range(0, tasks, numPartitions=tasks).mapInArrow(
            read, "id string, document string"
        )

    def rows_with_ids(self, snapshot: SourceSnapshot, ids: Sequence[str]) -> DataFrame:
        """Read the rows of these ids, as far as they exist."""
        table, rate, dsn, join_sql = (
            snapshot.table,
            self.rate,
            snapshot.dsn,
            snapshot_statement(snapshot),
        )

        def read(parts: Iterator["pa.RecordBatch"]) -> Iterator["pa.RecordBatch"]:
            row_ids = [key for part in parts for key in part.column("key").to_pylist()]
            with psycopg.connect(dsn, options=SESSION, autocommit=True) as connection:
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
        first, rows = (
            [],
            copy_rows(connection, row_query(table, text_condition(table, ids)).as_string(None)),
        )
    yield from chain(first, rows)


def row_query(table: Table, condition: sql.Composable | None = None) -> sql.Composed:
    """Build the query of rows as (id, document), in the form of docs/use/types.md."""

    def member(name: str) -> sql.Composable:
        return sql.SQL(
            "to_json({}::text)::text || ':' || coalesce(to_json({})::text, 'null')"
        ).format(sql.Literal(name), _document_value(table, name))

    # Values of json come last, as in the views: equal rows then have equal text and needn't be
    # parsed.
    columns = sorted(table.columns, key=lambda column: kind(column.type).raw)
    members = sql.SQL(", ").join([member(column.name) for column in columns])
    query = sql.SQL("SELECT {}, '{{' || array_to_string(ARRAY[{}], ',') || '}}' FROM {}").format(
        identity(table), members, _relation(table)
    )
    return query + sql.SQL(" WHERE ") + condition if condition else query


def source_names(table: Table) -> list[str]:
    """Name the captured tables that the rows of a table are made of."""
    return [name for name, _ in table.derivation.tables] if table.derivation else [table.qualified]


def _relation(table: Table) -> sql.Composable:
    """Build what the rows are selected from: the table, or the query of a view."""
    if table.derivation:
        # The text is of the pipeline's own making, see `cdc.views.sql`.
        query = sql.SQL(table.derivation.query)
        return sql.SQL("({}) AS {}").format(query, sql.Identifier(table.name))
    return sql.Identifier(table.schema, table.name)


def identity(table: Table) -> sql.Composable:
    """Build the expression of a row's id over its columns.

    `TableCodec.row_id` computes the same in Python.
    """
    if len(table.key) == 1:
        return sql.SQL("{}::text").format(_document_value(table, table.key[0]))
    literals = [
        sql.SQL("to_json({})::text").format(_document_value(table, name)) for name in table.key
    ]
    return sql.SQL("'[' || array_to_string(ARRAY[{}], ',') || ']'").format(
        sql.SQL(", ").join(literals)
    )


def bucket(table: Table) -> sql.Composable:
    """Build the expression of a row's bucket, of 65,536.

    `bucket_hashes.bucket` computes the same in Spark.
    """
    return sql.SQL("substr(md5(convert_to({}, 'UTF8')), 1, {})").format(
        identity(table), sql.Literal(BUCKET_DIGITS)
    )


def sample_condition(table: Table, sample: Sample) -> sql.Composable:
    """Build the condition that a row's bucket is in the sample."""
    return sql.SQL('{} COLLATE "C" BETWEEN {} AND {}').format(
        bucket(table), *map(sql.Literal, sample)
    )


def text_condition(table: Table, ids: Sequence[str]) -> sql.Composable:
    """Build the condition that a row has one of these ids, for any type of key.

    It reads the whole table.
    """
    valid_ids = [key for key in ids if "\0" not in key]
    return sql.SQL("({}) = ANY ({}::text[])").format(identity(table), sql.Literal(valid_ids))


def id_condition(table: Table, ids: Sequence[str]) -> sql.Composable:
    """Build the same condition over the columns of the key, so that their index is used.

    Where their types don't allow it, it is `text_condition`.

    A query with it raises DataError when an id is no value of the key's type.
    """
    kinds = [pg_types.base_type(table.column(name).type) for name in table.key]
    values = [_key_values(row_id, len(kinds)) for row_id in ids]
    if not all(_castable(kinds, parts) for parts in values):
        return text_condition(table, ids)
    rows = [_cast_row(kinds, parts) for parts in values if parts]
    if not rows:
        return sql.SQL("false")
    names = sql.SQL(", ").join(map(sql.Identifier, table.key))
    return sql.SQL("({}) IN (VALUES {})").format(names, sql.SQL(", ").join(rows))


def _cast_row(kinds: Sequence[str], parts: Sequence[str]) -> sql.Composable:
    casts = [_cast(kind, part) for kind, part in zip(kinds, parts, strict=True)]
    return sql.SQL("({})").format(sql.SQL(", ").join(casts))


def _cast(kind: str, text: str) -> sql.Composable:
    return sql.SQL("{}::{}").format(sql.Literal(text), sql.SQL(kind))


def _castable(kinds: Sequence[str], values: Sequence[str]) -> bool:
    """Whether all values can be cast to the key's types. True for no values: the id of no row."""
    if not all(kind in CASTABLE for kind in kinds):
        return False
    pairs = zip(kinds, values, strict=True) if values else ()
    return all(_is_castable(kind, text) for kind, text in pairs)


def _is_castable(kind: str, text: str) -> bool:
    if "\0" in text:
        return False
    return kind not in DATES or re.match(r"\d{4}-", text) is not None


def _key_values(key: str, count: int) -> list[str]:
    """Split an id into the texts of its parts. Empty when it isn't an id of so many columns."""
    if count == 1:
        return [key]
    try:
        parts = json.loads(key, parse_int=str, parse_float=str)
    except ValueError:
        return []
    valid = (
        isinstance(parts, list)
        and len(parts) == count
        and all(isinstance(part, str) for part in parts)
    )
    return parts if valid else []


def _document_value(table: Table, name: str) -> sql.Composable:
    expression = kind(table.column(name).type).source
    return sql.SQL("({})").format(sql.SQL(expression).format(sql.Identifier(name)))


def _page_condition(low: int, high: int | None) -> sql.Composable:
    """Build the condition for pages from low up to high.

    None: to the end, since rows may be newer than the count.
    """
    above = sql.SQL("ctid >= {}::tid").format(sql.Literal(f"({low},0)"))
    if high is None:
        return above
    return sql.SQL("{} AND ctid < {}::tid").format(above, sql.Literal(f"({high},0)"))


def _both_conditions(condition: sql.Composable | None, pages: sql.Composable) -> sql.Composable:
    return sql.SQL("({}) AND {}").format(condition, pages) if condition else pages


def snapshot_statement(snapshot: SourceSnapshot) -> str:
    """Build the statement that makes a transaction see the snapshot."""
    return sql.SQL("SET TRANSACTION SNAPSHOT {}").format(sql.Literal(snapshot.id)).as_string(None)


def begin_in_snapshot(connection: source.Connection, join_sql: str) -> None:
    """Begin a transaction that sees a snapshot; `join_sql` comes from `snapshot_statement`."""
    connection.execute(READ_ONLY)
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
            pending, size = [], 0
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
    start, rows = time.monotonic(), 0
    for batch in batches:
        yield batch
        rows += batch.num_rows
        if rate:
            time.sleep(max(0.0, start + rows / rate - time.monotonic()))
