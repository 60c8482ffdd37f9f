"""Compare the rows of a table with its views by buckets of ids: equal buckets cost one pass over each
side. All sinks are compared in one job.

rows          id string, document string
differences   sink, id, kind and column string, count and seen long: a row that isn't equal

kind          missing, extra, duplicate or different
column        the first column that differs
count         how many rows are too many or wrong
seen          a hash of the view's row: see `Comparable.state_hash`; null where it has none
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import ExitStack
from functools import reduce
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F

from cdc.model.table import Table
from cdc.postgres.row_query import BUCKET_DIGITS, BUCKETS, Sample
from cdc.sink.contract import Sink
from cdc.verify.row_equality import SOURCE, Comparable, bucket_digest, comparable

if TYPE_CHECKING:
    import pyarrow as pa

BUCKET_SUMS = "side int, bucket int, rows long, folded long, total long, seconds double"
VERDICTS = "side int, bucket int, rows long, seconds double"
DIFFERENCES = "sink string, id string, kind string, column string, count long, seen long"
MAX_SUSPECTS = 20_000
"""Keys per view that are compared again. Rows that differ beyond that number count as undecided."""
OnlyIds = Mapping[str, Set[str]]
"""By sink, the ids that are compared; of a sink without an entry all are."""
ALL: OnlyIds = MappingProxyType({})
Numbers = np.ndarray[Any, Any]
"""A numpy array with one dimension."""
Work = Callable[[Iterator["pa.RecordBatch"]], Iterator["pa.RecordBatch"]]


class BucketComparison(NamedTuple):
    """What one pass over the source and its views has given.

    rows        by side, the number of rows
    seconds     by side, the time of the tasks that read and summed them up
    differing   the buckets that differ in any view
    """

    rows: Mapping[str, int]
    seconds: Mapping[str, float]
    differing: Sequence[str]


def scan(
    sink: Sink, table: Table, spark: SparkSession, ids: Sequence[str] | None = None
) -> DataFrame:
    """Read the rows of a view that are compared, as `Sink.scan` does: all but documents of closed windows,
    which the source may have changed since.
    """
    rows = sink.scan(table, spark, ids)
    return rows.where(~_is_final()) if table.derivation and table.derivation.closes else rows


def count_closed(sink: Sink, table: Table, spark: SparkSession) -> int:
    """Count the rows that `scan` leaves out."""
    if not table.derivation or not table.derivation.closes:
        return 0
    return sink.scan(table, spark).where(_is_final()).count()


def _is_final() -> Column:
    return F.get_json_object("document", "$.final").eqNullSafe("true")


def compare_buckets(
    table: Table, source: DataFrame, views: Mapping[str, DataFrame], sample: Sample | None
) -> BucketComparison:
    """Compare the sums of buckets, in one job; only sums are shuffled.

    sample: the buckets that count; `source` has their rows alone.
    """
    sides = [SOURCE, *views]
    rules = comparable(table)
    sums = (
        frame.select("id", "document").mapInArrow(_sum_buckets(rules, number, sample), BUCKET_SUMS)
        for number, frame in enumerate([source, *views.values()])
    )
    compared = (
        reduce(DataFrame.union, sums)
        .repartition("bucket")
        .mapInArrow(_compare_sums(len(sides)), VERDICTS)
    )
    rows = dict.fromkeys(sides, 0)
    seconds = dict.fromkeys(sides, 0.0)
    differing = []
    for number, bucket_number, side_rows, side_seconds in compared.collect():
        if number is None:
            differing.append(f"{bucket_number:0{BUCKET_DIGITS}x}")
        else:
            rows[sides[number]] += side_rows
            seconds[sides[number]] += side_seconds
    return BucketComparison(rows, seconds, sorted(differing))


def _sum_buckets(rules: Comparable, side: int, sample: Sample | None) -> Work:
    """Build the function that sums up the buckets of a task's rows: BUCKET_SUMS."""
    limits = sample or ("0000", "ffff")
    first = int(limits[0], 16)
    last = int(limits[1], 16)

    def work(batches: Iterator["pa.RecordBatch"]) -> Iterator["pa.RecordBatch"]:
        import pyarrow as pa

        start = time.monotonic()
        sums = BucketSums()
        for batch in batches:
            ids = batch.column("id").cast(pa.binary()).to_pylist()
            documents = batch.column("document").cast(pa.binary()).to_pylist()
            buckets = np.frombuffer(b"".join(map(bucket_digest, ids)), ">u2")
            hashes = np.frombuffer(b"".join(map(rules.row_digest, ids, documents)), ">u8")
            chosen = (first <= buckets) & (buckets <= last)
            sums.add(buckets[chosen], 1, hashes[chosen], hashes[chosen])
        used = np.flatnonzero(sums.rows)
        seconds = np.zeros(len(used))
        # The task's time goes with the first of its buckets.
        seconds[:1] = time.monotonic() - start
        yield pa.RecordBatch.from_arrays(
            [
                pa.array(np.full(len(used), side, "int32")),
                pa.array(used.astype("int32")),
                pa.array(sums.rows[used]),
                pa.array(sums.folded[used].view("int64")),
                pa.array(sums.total[used].view("int64")),
                pa.array(seconds),
            ],
            names=names_of(BUCKET_SUMS),
        )

    return work


def _compare_sums(sides: int) -> Work:
    """Build the function that compares the sums of each bucket: VERDICTS. A task has all sums of its
    buckets: a row for each side, and one for each bucket that differs, without a side.
    """

    def work(batches: Iterator["pa.RecordBatch"]) -> Iterator["pa.RecordBatch"]:
        sums = [BucketSums() for _ in range(sides)]
        seconds = np.zeros(sides)
        for batch in batches:
            side_numbers, *values, task_seconds = (
                column.to_numpy(zero_copy_only=False) for column in batch.columns
            )
            np.add.at(seconds, side_numbers, task_seconds)
            for side, side_sums in enumerate(sums):
                buckets, rows, folded, total = (value[side_numbers == side] for value in values)
                side_sums.add(buckets, rows, folded.view("uint64"), total.view("uint64"))
        counts = [
            (side, None, int(side_sums.rows.sum()), float(seconds[side]))
            for side, side_sums in enumerate(sums)
        ]
        differs = np.zeros(BUCKETS, "bool")
        for side_sums in sums[1:]:
            differs |= side_sums.differ(sums[0])
        differing = [(None, int(number), None, None) for number in np.flatnonzero(differs)]
        yield record_batch(VERDICTS, [*counts, *differing])

    return work


class BucketSums:
    """The sums of each bucket, as `RowSums` has them of a table; additions are modulo 2^64."""

    def __init__(self) -> None:
        self.rows = np.zeros(BUCKETS, "int64")
        self.folded = np.zeros(BUCKETS, "uint64")
        self.total = np.zeros(BUCKETS, "uint64")

    def add(self, buckets: Numbers, rows: Numbers | int, folded: Numbers, total: Numbers) -> None:
        """Add rows, or sums of them, each to its bucket."""
        np.add.at(self.rows, buckets, rows)
        np.bitwise_xor.at(self.folded, buckets, folded)
        np.add.at(self.total, buckets, total)

    def differ(self, source: "BucketSums") -> Numbers:
        """Say for each bucket whether it differs."""
        differs: Numbers = self.rows != source.rows
        differs |= self.folded != source.folded
        differs |= self.total != source.total
        return differs


def scan_buckets(
    sinks: Sequence[Sink], table: Table, spark: SparkSession, buckets: Sequence[str]
) -> dict[str, DataFrame]:
    """Read the rows of each view in these buckets, by sink. `bucket_digest` names buckets alike."""
    name = F.substring(F.md5(F.col("id").cast("binary")), 1, BUCKET_DIGITS)
    wanted = spark.createDataFrame([(bucket_name,) for bucket_name in buckets], "bucket string")
    return {
        sink.name: scan(sink, table, spark)
        .withColumn("bucket", name)
        .join(F.broadcast(wanted), "bucket", "left_semi")
        .drop("bucket")
        for sink in sinks
    }


def compare_rows(
    table: Table, source: DataFrame, views: Mapping[str, DataFrame], only: OnlyIds = ALL
) -> DataFrame:
    """Compare rows one by one, in one job. Returns `differences`."""
    sides = (
        frame.select(F.lit(side).alias("side"), "id", "document")
        for side, frame in {SOURCE: source, **views}.items()
    )
    grouped = reduce(DataFrame.union, sides).groupBy("id")
    of_sides = [
        expression
        for number, side in enumerate([SOURCE, *views])
        for expression in (
            F.max(F.when(F.col("side") == side, F.col("document"))).alias(f"document_{number}"),
            F.count_if(F.col("side") == side).cast("long").alias(f"copies_{number}"),
        )
    ]
    return grouped.agg(*of_sides).mapInArrow(
        _compare_sides(comparable(table), list(views), only), DIFFERENCES
    )


def _compare_sides(rules: Comparable, sinks: Sequence[str], only: OnlyIds) -> Work:
    """Build the function that compares the source's document of an id with the document and the number
    of copies that each view has. Both are pairs of columns, the source's first.
    """

    def work(batches: Iterator["pa.RecordBatch"]) -> Iterator["pa.RecordBatch"]:
        for batch in batches:
            ids, expected, source_copies, *of_views = column_values(batch)
            differences = []
            for number, sink in enumerate(sinks):
                wanted = only.get(sink)
                actual, copies = of_views[2 * number : 2 * number + 2]
                for row in zip(ids, expected, source_copies, actual, copies, strict=True):
                    if wanted is not None and row[0] not in wanted:
                        continue
                    if found := difference(rules, *row[1:]):
                        differences.append((sink, row[0], *found))
            yield record_batch(DIFFERENCES, differences)

    return work


def difference(
    rules: Comparable, expected: str | None, source_copies: int, actual: str | None, copies: int
) -> tuple[str, str | None, int, int | None] | None:
    """Return kind, column, count and seen of a row; None: it is equal, or on neither side.

    Two rows of the source can have one id, if their keys have the same text: then a view can't hold
    both.
    """
    column = None
    if copies < source_copies:
        kind = "missing"
        count = source_copies - copies
    elif copies > source_copies:
        kind = "duplicate" if source_copies else "extra"
        count = copies - source_copies
    elif expected is None or actual is None or rules.equals(expected, actual):
        return None
    else:
        kind = "different"
        count = 1
        column = rules.first_difference(expected, actual)
    return kind, column, count, None if actual is None else rules.state_hash(actual)


def confirmed_differences(
    frames: ExitStack,
    table: Table,
    sinks: Sequence[Sink],
    source: DataFrame,
    views: Mapping[str, DataFrame],
    only: OnlyIds = ALL,
) -> DataFrame | None:
    """Compare rows, and read those that a scan gave twice again, by id. None: all are equal.

    A scan may give a row twice while others write.
    """
    wrong = compare_rows(table, source, views, only).persist()
    frames.callback(wrong.unpersist)
    is_duplicate = F.col("kind") == "duplicate"
    (counts,) = wrong.agg(
        F.count("*").alias("wrong"), F.count_if(is_duplicate).alias("duplicate")
    ).collect()
    if not counts["wrong"]:
        return None
    if not counts["duplicate"]:
        return wrong
    duplicates: dict[str, list[str]] = {}
    rescanned: dict[str, DataFrame] = {}
    for sink in sinks:
        listed = wrong.where(is_duplicate & (F.col("sink") == sink.name)).select("id")
        if ids := [row["id"] for row in listed.limit(MAX_SUSPECTS).collect()]:
            duplicates[sink.name] = ids
            rescanned[sink.name] = scan(sink, table, source.sparkSession, ids)
    # Of more duplicates than are read again the others stay what they are.
    pairs = [(name, row_id) for name, ids in duplicates.items() for row_id in ids]
    replaced = F.broadcast(source.sparkSession.createDataFrame(pairs, "sink string, id string"))
    reread = compare_rows(
        table,
        source.join(replaced, "id", "left_semi"),
        rescanned,
        {name: frozenset(ids) for name, ids in duplicates.items()},
    )
    kept = wrong.join(replaced, ["sink", "id"], "left_anti")
    return persist(frames, kept.unionByName(reread))


def column_values(batch: "pa.RecordBatch") -> list[list[Any]]:
    return [column.to_pylist() for column in batch.columns]


def record_batch(schema: str, rows: Sequence[Sequence[Any]]) -> "pa.RecordBatch":
    """Build a batch of rows. `schema`: names and types as Spark has them."""
    import pyarrow as pa

    types = {"string": pa.string(), "int": pa.int32(), "long": pa.int64(), "double": pa.float64()}
    arrays = [
        pa.array([row[number] for row in rows], types[part.split()[1]])
        for number, part in enumerate(schema.split(", "))
    ]
    return pa.RecordBatch.from_arrays(arrays, names=names_of(schema))


def names_of(schema: str) -> list[str]:
    return [part.split()[0] for part in schema.split(", ")]


def persist(frames: ExitStack, frame: DataFrame) -> DataFrame:
    """Compute a frame now and keep it until `frames` closes."""
    frame = frame.persist()
    frames.callback(frame.unpersist)
    frame.count()
    return frame
