"""The rows of a table as Postgres itself would write a view's documents; read by Spark's executors.

In:  a snapshot of the source, which of its rows. Out: frames of id string, document string.
Invariant: every transaction is READ ONLY and sees that one snapshot; memory doesn't grow with the table.
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
"""Of a batch of rows, unless a single one is longer."""
PAGES_PER_TASK = 256
Sample = tuple[str, str]
"""The first and the last bucket of those whose rows are looked at."""
IDS_PER_QUERY = 1000
BUCKET_DIGITS = 4
BUCKETS = 16**BUCKET_DIGITS
READ_ONLY = "BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY"
SESSION = "-c timezone=UTC -c extra_float_digits=1 -c datestyle=ISO"
# Of a partitioned table the largest partition: a range of pages is read in all of them.
PAGES = """
SELECT coalesce(max(pg_relation_size(t.relid) / current_setting('block_size')::int), 0)::bigint
FROM (SELECT relid FROM pg_partition_tree(%(table)s::regclass) UNION SELECT %(table)s::regclass) AS t (relid)
"""
DATES = ("date", "timestamp without time zone", "timestamp with time zone")
CASTABLE = (*DATES, "smallint", "integer", "bigint", "numeric", "text", "character varying", "uuid")
"""Types whose values, as an id has them, Postgres reads as these very values: their index finds them."""


class Snapshot:
    """One state of a table, or of several, held open for readers that join it; as a context manager.

    `taken_ms` is a time, by the server's clock, at which it had been taken. A table's lock is that of a SELECT: it
    keeps a rewrite (VACUUM FULL, TRUNCATE) from moving rows between one reader and the next.
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
        name = sql.Identifier(self.table.schema, self.table.name)
        names = [sql.Identifier(table.schema, table.name) for table in self.tables]
        self._connection.execute(READ_ONLY)
        self._connection.execute(sql.SQL("LOCK TABLE {} IN ACCESS SHARE MODE").format(sql.SQL(", ").join(names)))
        (self.id,) = self._one("SELECT pg_export_snapshot()")
        (self.taken_ms,) = self._one("SELECT extract(epoch FROM clock_timestamp())::float8 * 1000")
        (self.pages,) = self._one(PAGES, {"table": name.as_string(None)})

    def __enter__(self) -> "Snapshot":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._connection.close()

    def _one(self, query: str, values: dict[str, str] | None = None) -> tuple[Any, ...]:
        row = self._connection.execute(query, values).fetchone()
        assert row is not None
        return row


@dataclass(frozen=True)
class Reader:
    """How the source is read: `rate` limits rows per second over all tasks together."""

    spark: SparkSession
    rate: float | None = None

    def rows(self, snapshot: Snapshot, where: sql.Composable | None = None) -> DataFrame:
        """The rows of a whole table that meet a condition: ranges of its pages, read side by side."""
        tasks = max(1, min(self.spark.sparkContext.defaultParallelism, snapshot.pages // PAGES_PER_TASK))
        rate, dsn, joining = self.rate and self.rate / tasks, snapshot.dsn, join(snapshot)
        bounds = [snapshot.pages * task // tasks for task in range(tasks)]
        queries = [
            row_query(snapshot.table, _all(where, _pages(low, high))).as_string(None)
            for low, high in zip(bounds, [*bounds[1:], None], strict=True)
        ]

        def read(parts: Iterator["pa.RecordBatch"]) -> Iterator["pa.RecordBatch"]:
            for task in (task for part in parts for task in part.column("id").to_pylist()):
                with psycopg.connect(dsn, options=SESSION, autocommit=True) as connection:
                    begin(connection, joining)
                    yield from throttled(copied(connection, queries[task]), rate)

        return self.spark.range(0, tasks, numPartitions=tasks).mapInArrow(read, "id string, document string")

    def chosen(self, snapshot: Snapshot, ids: Sequence[str]) -> DataFrame:
        """The rows of these ids, as far as there are any."""
        table, rate, dsn, joining = snapshot.table, self.rate, snapshot.dsn, join(snapshot)

        def read(parts: Iterator["pa.RecordBatch"]) -> Iterator["pa.RecordBatch"]:
            wanted = [key for part in parts for key in part.column("key").to_pylist()]
            with psycopg.connect(dsn, options=SESSION, autocommit=True) as connection:
                begin(connection, joining)
                for at in range(0, len(wanted), IDS_PER_QUERY):
                    some = wanted[at : at + IDS_PER_QUERY]
                    yield from throttled(chosen_rows(connection, table, some, joining), rate)

        keys = self.spark.createDataFrame([(key,) for key in ids], "key string").coalesce(1)
        return keys.mapInArrow(read, "id string, document string")


def chosen_rows(
    connection: source.Connection, table: Table, ids: Sequence[str], joining: str
) -> Iterator["pa.RecordBatch"]:
    """The rows of these ids, in a transaction that `joining` lets see the snapshot, read as they are taken."""
    rows = copied(connection, row_query(table, by_id(table, ids)).as_string(None))
    try:
        # Postgres reads all ids before it sends a row, so that the first batch tells of any that it can't read.
        first = list(islice(rows, 1))
    except psycopg.DataError:
        # An id that is no value of the key's type; only the text can be compared with it.
        connection.execute("ROLLBACK")
        begin(connection, joining)
        first, rows = [], copied(connection, row_query(table, by_text(table, ids)).as_string(None))
    yield from chain(first, rows)


def row_query(table: Table, where: sql.Composable | None = None) -> sql.Composed:
    """Rows as (id, document), built by Postgres in the form that docs/use/types.md gives a view."""

    def member(name: str) -> sql.Composable:
        return sql.SQL("to_json({}::text)::text || ':' || coalesce(to_json({})::text, 'null')").format(
            sql.Literal(name), _form(table, name)
        )

    # Values of json last, as the views have them: rows that are written alike needn't be parsed.
    columns = sorted(table.columns, key=lambda column: kind(column.type).raw)
    members = sql.SQL(", ").join([member(column.name) for column in columns])
    query = sql.SQL("SELECT {}, '{{' || array_to_string(ARRAY[{}], ',') || '}}' FROM {}").format(
        identity(table), members, sql.Identifier(table.schema, table.name)
    )
    return query + sql.SQL(" WHERE ") + where if where else query


def identity(table: Table) -> sql.Composable:
    """A row's id, as an expression over its columns: the twin of `TableCodec.row_id`."""
    if len(table.key) == 1:
        return sql.SQL("{}::text").format(_form(table, table.key[0]))
    literals = [sql.SQL("to_json({})::text").format(_form(table, name)) for name in table.key]
    return sql.SQL("'[' || array_to_string(ARRAY[{}], ',') || ']'").format(sql.SQL(", ").join(literals))


def bucket(table: Table) -> sql.Composable:
    """The bucket of a row, of 65,536: the twin of `tree.bucket`."""
    return sql.SQL("substr(md5(convert_to({}, 'UTF8')), 1, {})").format(identity(table), sql.Literal(BUCKET_DIGITS))


def within(table: Table, sample: Sample) -> sql.Composable:
    """The condition that a row is of a sample."""
    return sql.SQL('{} COLLATE "C" BETWEEN {} AND {}').format(bucket(table), *map(sql.Literal, sample))


def by_text(table: Table, ids: Sequence[str]) -> sql.Composable:
    """The condition that a row has one of these ids, for any key; reads the whole table."""
    known = [key for key in ids if "\0" not in key]
    return sql.SQL("({}) = ANY ({}::text[])").format(identity(table), sql.Literal(known))


def by_id(table: Table, ids: Sequence[str]) -> sql.Composable:
    """The same by the columns of the key, so that their index is used, where their types allow it.

    A query with it may raise DataError: then one of the ids is no value of the key's type.
    """
    kinds = [pg_types.base_type(table.column(name).type) for name in table.key]
    values = [_values(key, len(kinds)) for key in ids]
    if not all(_castable(kinds, each) for each in values):
        return by_text(table, ids)
    rows = [
        sql.SQL("({})").format(sql.SQL(", ").join(_cast(kind, one) for kind, one in zip(kinds, each, strict=True)))
        for each in values
        if each
    ]
    names = sql.SQL(", ").join(map(sql.Identifier, table.key))
    return sql.SQL("({}) IN (VALUES {})").format(names, sql.SQL(", ").join(rows)) if rows else sql.SQL("false")


def _cast(kind: str, text: str) -> sql.Composable:
    return sql.SQL("{}::{}").format(sql.Literal(text), sql.SQL(kind))


def _castable(kinds: Sequence[str], values: Sequence[str]) -> bool:
    """No values at all are an id that no row can have."""
    each = zip(kinds, values, strict=True) if values else ()
    return all(kind in CASTABLE for kind in kinds) and all(
        "\0" not in text and (kind not in DATES or re.match(r"\d{4}-", text) is not None) for kind, text in each
    )


def _values(key: str, count: int) -> list[str]:
    """The texts of an id's parts; none when it isn't an id of so many columns."""
    if count == 1:
        return [key]
    try:
        found = json.loads(key, parse_int=str, parse_float=str)
    except ValueError:
        return []
    good = isinstance(found, list) and len(found) == count and all(isinstance(one, str) for one in found)
    return found if good else []


def _form(table: Table, name: str) -> sql.Composable:
    expression = kind(table.column(name).type).source
    return sql.SQL("({})").format(sql.SQL(expression).format(sql.Identifier(name)))


def _pages(low: int, high: int | None) -> sql.Composable:
    """Pages from low up to high, all the rest for None: rows may have come since the pages were counted."""
    above = sql.SQL("ctid >= {}::tid").format(sql.Literal(f"({low},0)"))
    if high is None:
        return above
    return sql.SQL("{} AND ctid < {}::tid").format(above, sql.Literal(f"({high},0)"))


def _all(where: sql.Composable | None, pages: sql.Composable) -> sql.Composable:
    return sql.SQL("({}) AND {}").format(where, pages) if where else pages


def join(snapshot: Snapshot) -> str:
    """What makes a transaction see what the snapshot does."""
    return sql.SQL("SET TRANSACTION SNAPSHOT {}").format(sql.Literal(snapshot.id)).as_string(None)


def begin(connection: source.Connection, joining: str) -> None:
    """A transaction that sees a snapshot, by the statement that `join` makes of it."""
    connection.execute(READ_ONLY)
    connection.execute(joining.encode())


def copied(connection: source.Connection, query: str) -> Iterator["pa.RecordBatch"]:
    """The rows of a query, a batch at a time."""
    with connection.cursor().copy(f"COPY ({query}) TO STDOUT (FORMAT csv)".encode()) as copy:
        for chunk in chunked(copy):
            yield _parsed(chunk)


def chunked(lines: Iterable[bytes | bytearray | memoryview]) -> Iterator[bytes]:
    """Lines together, at most CHUNK_ROWS of them and CHUNK_BYTES; a longer one by itself."""
    held: list[bytes | bytearray | memoryview] = []
    size = 0
    for line in lines:
        if held and (len(held) == CHUNK_ROWS or size + len(line) > CHUNK_BYTES):
            yield b"".join(held)
            held, size = [], 0
        held.append(line)
        size += len(line)
    if held:
        yield b"".join(held)


def _parsed(text: bytes) -> "pa.RecordBatch":
    import pyarrow as pa
    from pyarrow import csv

    table = csv.read_csv(
        io.BytesIO(text),
        csv.ReadOptions(column_names=["id", "document"], use_threads=False, block_size=len(text) + 1),
        csv.ParseOptions(newlines_in_values=True),
        csv.ConvertOptions(column_types={"id": pa.string(), "document": pa.string()}, strings_can_be_null=False),
    )
    (batch,) = table.combine_chunks().to_batches()
    return batch


def throttled(batches: Iterator["pa.RecordBatch"], rate: float | None) -> Iterator["pa.RecordBatch"]:
    """Not more than `rate` rows per second from now on; as many as there are for None."""
    began, rows = time.monotonic(), 0
    for batch in batches:
        yield batch
        rows += batch.num_rows
        if rate:
            time.sleep(max(0.0, began + rows / rate - time.monotonic()))
