"""Rewrite of small mirrors: each batch writes all of a mirror's rows as one new file.

Executors do it. For a small mirror that costs less than to mark rows as deleted.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from cdc.errors import SinkUnavailable
from cdc.sink.lane_run import freeze_gc_after
from cdc.sinks.delta.files import parquet
from cdc.sinks.delta.files.failures import WRITE_HINT, write_failure
from cdc.sinks.delta.files.parquet import DataFile

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import SparkSession

RESULT_COLUMNS = "number long, name string, size long, stats string, failure string"
TABLES_A_TASK = 8


class Rewrite(NamedTuple):
    """A mirror to be rewritten; it has no deletion vectors.

    folder: of the mirror.
    paths: where its files lie.
    id_files: names of staged files with the ids of all rows that the batch changes.
    row_files: names of staged files with rows that are added.
    name: of the file to write, for all of its rows.
    """

    folder: str
    paths: Sequence[str]
    id_files: Sequence[str]
    row_files: Sequence[str]
    schema: "pa.Schema"
    name: str


def rewrite_mirrors(
    spark: "SparkSession", rewrites: Mapping[str, Rewrite]
) -> dict[str, list[DataFile]]:
    """Write all rows that each mirror has after a batch as one file, in one Spark job.

    Returns the file by table, in a list that is empty where no rows remain.

    Raises:
        SinkUnavailable: a folder takes no more.
    """
    if not rewrites:
        return {}
    limit = int(spark.conf.get("spark.sql.shuffle.partitions") or 1)
    tasks = min(limit, -(-len(rewrites) // TABLES_A_TASK))
    names, requests = list(rewrites), list(rewrites.values())
    numbers = spark.range(len(requests), numPartitions=tasks)
    rows = numbers.mapInArrow(freeze_gc_after(partial(_work, requests)), RESULT_COLUMNS).collect()
    failures = [row["failure"] for row in rows if row["failure"]]
    if failures:
        raise SinkUnavailable(failures[0], hint=WRITE_HINT)
    files = dict[str, list[DataFile]]()
    for row in rows:
        name = names[row["number"]]
        files[name] = [DataFile(row["name"], row["size"], row["stats"])] if row["name"] else []
    return files


def _work(
    rewrites: Sequence[Rewrite], batches: "Iterator[pa.RecordBatch]"
) -> "Iterator[pa.RecordBatch]":
    """Do the rewrites of a task: numbers of rewrites in, RESULT_COLUMNS out."""
    import pyarrow as pa

    for number in (number for batch in batches for number in batch.column("id").to_pylist()):
        result: dict[str, Any] = dict.fromkeys(("name", "size", "stats", "failure"))
        try:
            if file := rewrite_mirror(rewrites[number]):
                result |= {"name": file.name, "size": file.size, "stats": file.stats}
        except OSError as error:
            result["failure"] = write_failure(rewrites[number].folder, error).message
        columns = {
            name: pa.array([result[name]], pa.int64() if name == "size" else pa.string())
            for name in result
        }
        yield pa.RecordBatch.from_pydict({"number": pa.array([number], pa.int64()), **columns})


def rewrite_mirror(rewrite: Rewrite) -> DataFile | None:
    """Write a mirror's rows as a file; None when no rows remain. Raises OSError."""
    import pyarrow as pa
    import pyarrow.compute as pc

    tables = (table for path in rewrite.paths for table in parquet.read_rows(path, rewrite.schema))
    rows = pa.concat_tables([rewrite.schema.empty_table(), *tables])
    for name in rewrite.id_files:
        for ids in parquet.read_ids(f"{rewrite.folder}/{name}"):
            rows = rows.filter(pc.invert(pc.is_in(rows[parquet.ID], ids)))
    row_paths = [f"{rewrite.folder}/{name}" for name in rewrite.row_files]
    additions = (table for path in row_paths for table in parquet.read_rows(path, rewrite.schema))
    # One row group: other readers start a thread for each.
    group = pa.concat_tables([rows, *additions]).combine_chunks()
    return parquet.write_file(rewrite.folder, rewrite.name, iter([group] if group.num_rows else []))
