"""Frames of what a view holds: the tasks of one Spark job read it, item by item, in plain Python."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from cdc.sink.lane_run import freeze_gc_after

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession

SCANNED = "id string, document string"
GROUPED = f"table string, {SCANNED}"
Item = TypeVar("Item")


def scan_items(
    spark: "SparkSession",
    read: Callable[[Item], Iterator["pa.RecordBatch"]],
    items: Sequence[Item],
    schema: str = SCANNED,
    *,
    tasks_at_most: int | None = None,
) -> "DataFrame":
    """Read something of each item: a table, a part of one, some ids. `read` and `items` are pickled.

    tasks_at_most: how many may read side by side; as many as Spark has cores if None
    """
    tasks = max(1, min(tasks_at_most or spark.sparkContext.defaultParallelism, len(items)))
    work = partial(_read_shares, read, [items[task::tasks] for task in range(tasks)])
    return spark.range(tasks, numPartitions=tasks).mapInArrow(freeze_gc_after(work), schema)


def _read_shares(
    read: Callable[[Item], Iterator["pa.RecordBatch"]],
    shares: Sequence[Sequence[Item]],
    batches: Iterator["pa.RecordBatch"],
) -> Iterator["pa.RecordBatch"]:
    # To their end: Spark throws a worker away that hasn't read its input, which is 0.7 s of imports.
    for number in (number for batch in batches for number in batch.column("id").to_pylist()):
        for item in shares[number]:
            yield from read(item)


def text_batch(**columns: Sequence[str | None]) -> "pa.RecordBatch":
    import pyarrow as pa

    arrays = [pa.array(column, pa.string()) for column in columns.values()]
    return pa.RecordBatch.from_arrays(arrays, names=list(columns))


def pages(items: Sequence[Item], size: int) -> list[Sequence[Item]]:
    return [items[start : start + size] for start in range(0, len(items), size)]


def read_pages(
    read: Callable[[Sequence[Item]], Iterator["pa.RecordBatch"]], size: int, items: Sequence[Item]
) -> Iterator["pa.RecordBatch"]:
    """Read items in pages of at most `size`."""
    for page in pages(items, size):
        yield from read(page)
