"""Many small tables read by one job of Spark's: how large they are, which go together, and their rows.

A task reads several tables, each in a transaction of its own: all of one snapshot, no more locks than for one table.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import psycopg
from psycopg import sql
from pyspark.sql import DataFrame

from cdc.model.table import Table
from cdc.postgres import source
from cdc.verify.source_rows import SESSION, Reader, Snapshot, begin, copied, join, row_query, throttled

if TYPE_CHECKING:
    import pyarrow as pa

SMALL_BYTES = 512 << 10
"""A table up to this is read together with others; reading a larger one takes longer than a job of its own costs."""
GROUP_BYTES = 64 << 20
GROUP_TABLES = 250
"""Of one snapshot, which locks them: the server has room for 6,400 locks by default."""
GROUPED = "table string, id string, document string"
# All that a table has, large values too; of a partitioned one all partitions. Null for one that isn't there.
SIZES = """
SELECT name, (SELECT sum(pg_table_size(t.relid)) FROM (
    SELECT relid FROM pg_partition_tree(to_regclass(name)) UNION SELECT to_regclass(name)) AS t (relid))::bigint
FROM unnest(%s::text[]) AS name
"""


def sizes(dsn: str, tables: Sequence[Table]) -> dict[str, int]:
    """Bytes of each table that is there, by its name."""
    named = {sql.Identifier(table.schema, table.name).as_string(None): table.qualified for table in tables}
    with source.connect(dsn) as connection:
        listed = connection.execute(SIZES, [list(named)]).fetchall()
    return {named[name]: size for name, size in listed if size is not None}


def groups(tables: Sequence[Table], bytes_of: Mapping[str, int]) -> list[list[Table]]:
    """The small tables in groups, in their order; one that has no other small one beside it needs no group."""
    gathered: list[list[Table]] = []
    room = 0
    for table in tables:
        size = bytes_of.get(table.qualified, SMALL_BYTES + 1)
        if size > SMALL_BYTES:
            continue
        if not gathered or size > room or len(gathered[-1]) == GROUP_TABLES:
            gathered.append([])
            room = GROUP_BYTES
        gathered[-1].append(table)
        room -= size
    return [group for group in gathered if len(group) > 1]


def rows_of_group(reader: Reader, snapshot: Snapshot, where: Mapping[str, sql.Composable]) -> DataFrame:
    """The rows of all tables of a snapshot: as `cdc.sink.contract.GroupScanner` gives a view's.

    `where` may have a condition for a table, by its name.
    """
    tables = snapshot.tables
    tasks = max(1, min(reader.spark.sparkContext.defaultParallelism, len(tables)))
    rate, dsn, joining = reader.rate and reader.rate / tasks, snapshot.dsn, join(snapshot)
    queries = [(one.qualified, row_query(one, where.get(one.qualified)).as_string(None)) for one in tables]

    def read(parts: Iterator["pa.RecordBatch"]) -> Iterator["pa.RecordBatch"]:
        for task in (task for part in parts for task in part.column("id").to_pylist()):
            with psycopg.connect(dsn, options=SESSION, autocommit=True) as connection:
                yield from throttled(_each(connection, queries[task::tasks], joining), rate)

    return reader.spark.range(0, tasks, numPartitions=tasks).mapInArrow(read, GROUPED)


def _each(
    connection: source.Connection, queries: Sequence[tuple[str, str]], joining: str
) -> Iterator["pa.RecordBatch"]:
    import pyarrow as pa

    for table, query in queries:
        begin(connection, joining)
        try:
            for batch in copied(connection, query):
                names = pa.array([table] * batch.num_rows, "string")
                yield pa.RecordBatch.from_arrays([names, *batch.columns], names=["table", "id", "document"])
        except (psycopg.ProgrammingError, psycopg.DataError):
            # Dropped, altered or forbidden: what it is shows when the table is read by itself.
            nothing = pa.array([None], "string")
            yield pa.RecordBatch.from_arrays(
                [pa.array([table], "string"), nothing, nothing], names=["table", "id", "document"]
            )
        connection.execute("ROLLBACK")
