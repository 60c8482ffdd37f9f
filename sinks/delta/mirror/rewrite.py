"""Small mirrors are made anew by each batch, on the executors: less than marks cost."""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from cdc.errors import SinkUnavailable
from cdc.sink.lane_run import freeze_gc_after
from sinks.delta.files import parquet
from sinks.delta.files.failures import WRITABLE, unwritable
from sinks.delta.files.parquet import File

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import SparkSession

MADE = "number long, name string, size long, stats string, failure string"
TABLES_A_TASK = 8


class Rewrite(NamedTuple):
    """A mirror without marks: where its files lie, and those with the ids of rows that a batch changes.

    new: files with rows that come to it; name: of the file for all of its rows, in its folder.
    """

    folder: str
    places: Sequence[str]
    changed: Sequence[str]
    new: Sequence[str]
    schema: "pa.Schema"
    name: str


def rewritten(spark: "SparkSession", rewrites: Mapping[str, Rewrite]) -> dict[str, list[File]]:
    """All rows of each mirror after a batch as one file; none where there are none.

    Raises SinkUnavailable when a folder takes no more.
    """
    if not rewrites:
        return {}
    most = int(spark.conf.get("spark.sql.shuffle.partitions") or 1)
    tasks = min(most, -(-len(rewrites) // TABLES_A_TASK))
    listed = list(rewrites.values())
    rows = (
        spark.range(len(listed), numPartitions=tasks)
        .mapInArrow(freeze_gc_after(partial(_work, listed)), MADE)
        .collect()
    )
    if failed := next((row["failure"] for row in rows if row["failure"]), None):
        raise SinkUnavailable(failed, hint=WRITABLE)
    names, made = list(rewrites), dict[str, list[File]]()
    for row in rows:
        made[names[row["number"]]] = [File(row["name"], row["size"], row["stats"])] if row["name"] else []
    return made


def _work(rewrites: Sequence[Rewrite], parts: "Iterator[pa.RecordBatch]") -> "Iterator[pa.RecordBatch]":
    """What a task does: numbers of rewrites in, MADE out."""
    import pyarrow as pa

    for number in (number for part in parts for number in part.column("id").to_pylist()):
        made: dict[str, Any] = dict.fromkeys(("name", "size", "stats", "failure"))
        try:
            if file := remade(rewrites[number]):
                made |= {"name": file.name, "size": file.size, "stats": file.stats}
        except OSError as error:
            made["failure"] = unwritable(rewrites[number].folder, error).message
        columns = {name: pa.array([made[name]], pa.int64() if name == "size" else pa.string()) for name in made}
        yield pa.RecordBatch.from_pydict({"number": pa.array([number], pa.int64()), **columns})


def remade(rewrite: Rewrite) -> File | None:
    """A mirror's rows as a file. Raises OSError."""
    import pyarrow as pa
    import pyarrow.compute as pc

    parts = (part for place in rewrite.places for part in parquet.rows(place, rewrite.schema))
    rows = pa.concat_tables([rewrite.schema.empty_table(), *parts])
    for name in rewrite.changed:
        for ids in parquet.ids(f"{rewrite.folder}/{name}"):
            rows = rows.filter(pc.invert(pc.is_in(rows[parquet.ID], ids)))
    new = (part for name in rewrite.new for part in parquet.rows(f"{rewrite.folder}/{name}", rewrite.schema))
    # One row group: other readers take each for a thread of its own.
    whole = pa.concat_tables([rows, *new]).combine_chunks()
    return parquet.write(rewrite.folder, rewrite.name, iter([whole] if whole.num_rows else []))
