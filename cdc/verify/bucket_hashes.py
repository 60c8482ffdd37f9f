"""Compare two sets of rows by buckets of ids: equal buckets cost one pass over each side.

rows     id string, document string
sums     bucket string (four hex digits), rows long, and three sums over the rows' fingerprints
"""

from collections.abc import Sequence
from contextlib import ExitStack
from typing import NamedTuple

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F

from cdc.model.table import Table
from cdc.postgres.row_query import BUCKET_DIGITS
from cdc.sink.contract import Sink
from cdc.verify.canonical import canonical, fingerprint, first_difference

SUMS = ("rows", "folded", "low", "high")
MAX_SUSPECTS = 20_000
"""Keys per view that are compared again. Rows that differ beyond that number count as undecided."""


def bucket(row_id: Column) -> Column:
    """The bucket of a row's id; Postgres computes the same in `row_query.bucket`."""
    return F.substring(F.md5(row_id.cast("binary")), 1, BUCKET_DIGITS)


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


def bucket_sums(table: Table, rows: DataFrame) -> DataFrame:
    """Sum up the rows of each bucket.

    Returns a frame with one row per bucket; only sums are shuffled.

    The exclusive or of fingerprints alone would miss a row that is there twice, their sum alone two
    errors that cancel out. Each half of a fingerprint is summed by itself, so that nothing
    overflows.
    """
    hashed = rows.select(bucket(F.col("id")).alias("bucket"), fingerprint(table).alias("hash"))
    return hashed.groupBy("bucket").agg(
        F.count("*").alias("rows"),
        F.bit_xor("hash").alias("folded"),
        F.sum(F.col("hash").bitwiseAND(F.lit(0xFFFFFFFF))).alias("low"),
        F.sum(F.shiftrightunsigned("hash", 32)).alias("high"),
    )


class BucketComparison(NamedTuple):
    """How many rows each side has, and the buckets that differ."""

    source_rows: int
    view_rows: int
    differing: Sequence[str]


def compare_sums(source: DataFrame, view: DataFrame) -> BucketComparison:
    """Compare the sums of both sides, in one job."""
    source_sums, view_sums = (
        side.select("bucket", *(F.col(name).alias(f"{prefix}_{name}") for name in SUMS))
        for side, prefix in ((source, "source"), (view, "view"))
    )
    same = [F.col(f"source_{name}").eqNullSafe(F.col(f"view_{name}")) for name in SUMS]
    differs = ~(same[0] & same[1] & same[2] & same[3])
    (totals,) = (
        source_sums.join(view_sums, "bucket", "full_outer")
        .agg(
            F.sum("source_rows").alias("source_rows"),
            F.sum("view_rows").alias("view_rows"),
            F.collect_list(F.when(differs, F.col("bucket"))).alias("differing"),
        )
        .collect()
    )
    return BucketComparison(
        int(totals["source_rows"] or 0), int(totals["view_rows"] or 0), totals["differing"]
    )


def rows_in_buckets(rows: DataFrame, buckets: Sequence[str]) -> DataFrame:
    """Select the rows of these buckets."""
    return _semi_join(rows.withColumn("bucket", bucket(F.col("id"))), "bucket", buckets).drop(
        "bucket"
    )


def rows_with_ids(rows: DataFrame, ids: Sequence[str]) -> DataFrame:
    """Select the rows of these ids."""
    return _semi_join(rows, "id", ids)


def _semi_join(rows: DataFrame, name: str, values: Sequence[str]) -> DataFrame:
    listed = rows.sparkSession.createDataFrame([(value,) for value in values], f"{name} string")
    return rows.join(F.broadcast(listed), name, "left_semi")


def compare_rows(table: Table, source: DataFrame, view: DataFrame) -> DataFrame:
    """Compare rows one by one.

    Returns those that aren't equal: id, kind, column, count long, seen long.

    kind     missing, extra, duplicate or different
    count    how many rows are too many or wrong
    column   the first column that differs
    seen     a hash of the view's row: see `row_hash`
    """
    expected = source.select("id", canonical(table, "document").alias("expected"))
    actual = view.select("id", canonical(table, "document").alias("found"))
    actual = actual.groupBy("id").agg(F.max("found").alias("found"), F.count("*").alias("copies"))
    joined = expected.join(actual, "id", "full_outer")
    kind = (
        F.when(F.col("found").isNull(), "missing")
        .when(F.col("expected").isNull(), "extra")
        .when(F.col("copies") > 1, "duplicate")
        .when(F.col("expected") != F.col("found"), "different")
    )
    count = (
        F.when(kind == "extra", F.col("copies"))
        .when(kind == "duplicate", F.col("copies") - 1)
        .otherwise(F.lit(1))
    )
    column = F.when(kind == "different", first_difference(F.col("expected"), F.col("found")))
    return joined.select(
        "id",
        kind.alias("kind"),
        column.alias("column"),
        count.cast("long").alias("count"),
        _hash_of(F.col("found")).alias("seen"),
    ).where(F.col("kind").isNotNull())


def confirmed_differences(
    frames: ExitStack, table: Table, sink: Sink, expected: DataFrame, view: DataFrame
) -> DataFrame | None:
    """Compare rows, and read those that the scan gave twice again, by id. None: all are equal.

    A scan may give a row twice while others write.
    """
    wrong = compare_rows(table, expected, view).persist()
    frames.callback(wrong.unpersist)
    is_duplicate = F.col("kind") == "duplicate"
    (counts,) = wrong.agg(
        F.count("*").alias("wrong"), F.count_if(is_duplicate).alias("duplicate")
    ).collect()
    if not counts["wrong"]:
        return None
    if not counts["duplicate"]:
        return wrong
    duplicate_ids = [
        row["id"] for row in wrong.where(is_duplicate).select("id").limit(MAX_SUSPECTS).collect()
    ]
    source_rows = rows_with_ids(expected, duplicate_ids)
    view_rows = scan(sink, table, expected.sparkSession, duplicate_ids)
    rescanned = compare_rows(table, source_rows, view_rows)
    return persist(frames, wrong.where("kind <> 'duplicate'").unionByName(rescanned))


def row_hash(table: Table, document: str) -> Column:
    """Hash a document as `compare_rows` hashes the view's row; null for null."""
    return F.when(F.col(document).isNotNull(), _hash_of(canonical(table, document)))


def _hash_of(value: Column) -> Column:
    return F.when(value.isNotNull(), F.xxhash64(value))


def persist(frames: ExitStack, frame: DataFrame) -> DataFrame:
    """Compute a frame now and keep it until `frames` closes."""
    frame = frame.persist()
    frames.callback(frame.unpersist)
    frame.count()
    return frame
