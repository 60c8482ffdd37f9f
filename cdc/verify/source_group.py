"""Read many small tables in one Spark job: their sizes, their groups, their rows.

A task reads several tables, each in a transaction of its own. All join one snapshot, and a
transaction locks one table.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import psycopg
from psycopg import sql
from pyspark.sql import DataFrame

from cdc.model.table import Table
from cdc.postgres import source
from cdc.postgres.row_query import row_query
from cdc.verify.source_rows import (
    SourceReader,
    SourceSnapshot,
    begin_in_snapshot,
    copy_rows,
    snapshot_statements,
    throttle,
)

if TYPE_CHECKING:
    import pyarrow as pa

SMALL_BYTES = 512 << 10
"""Largest table that is read together with others: reading a larger one takes longer than starting
a job for it."""
GROUP_BYTES = 64 << 20
GROUP_TABLES = 250
"""Tables of one snapshot. The snapshot locks them all, and a server has room for 6,400 locks by
default."""
GROUP_SCHEMA = "table string, id string, document string"
# Size with TOAST; of a partitioned table the sum of all partitions. Null: there is no such table.
SIZES = """
SELECT name, (SELECT sum(pg_table_size(t.relid)) FROM (
    SELECT relid FROM pg_partition_tree(to_regclass(name)) UNION SELECT to_regclass(name)
) AS t (relid))::bigint
FROM unnest(%s::text[]) AS name
"""


def table_sizes(dsn: str, tables: Sequence[Table]) -> dict[str, int]:
    """Return the bytes of each table that exists, by its name."""
    names = {
        sql.Identifier(table.schema, table.name).as_string(None): table.qualified
        for table in tables
    }
    with source.connect(dsn) as connection:
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
    reader: SourceReader, snapshot: SourceSnapshot, conditions: Mapping[str, sql.Composable]
) -> DataFrame:
    """Read the rows of all tables of a snapshot, in the form of `GroupScanner.scan_group`.

    `conditions` may have a condition for a table, by its name.
    """
    tables = snapshot.tables
    tasks = max(1, min(reader.spark.sparkContext.defaultParallelism, len(tables)))
    rate = reader.rate and reader.rate / tasks
    dsn = snapshot.dsn
    join_sql = snapshot_statements(snapshot)
    queries = [
        (table.qualified, row_query(table, conditions.get(table.qualified)).as_string(None))
        for table in tables
    ]

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
            null = pa.array([None], "string")
            yield pa.RecordBatch.from_arrays(
                [pa.array([table], "string"), null, null], names=["table", "id", "document"]
            )
        connection.execute("ROLLBACK")
