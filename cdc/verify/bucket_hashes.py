"""Two sets of rows compared by buckets of ids: equal buckets cost one pass over each side.

rows     id string, document string
leaves   bucket string (four hex digits), rows long, and three sums over the rows' fingerprints
"""

from collections.abc import Sequence

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from cdc.model.table import Table
from cdc.verify.canonical import canonical, fingerprint, first_difference
from cdc.verify.source_rows import BUCKET_DIGITS

SUMS = ("rows", "folded", "low", "high")


def bucket(row_id: Column) -> Column:
    """The twin of `source_rows.bucket`."""
    return F.substring(F.md5(row_id.cast("binary")), 1, BUCKET_DIGITS)


def leaves(table: Table, rows: DataFrame) -> DataFrame:
    """One row per bucket; no row leaves its partition.

    The fingerprints' exclusive or alone would lose what is there twice, their sum what makes up for something else;
    each half is summed, so that nothing overflows.
    """
    hashed = rows.select(bucket(F.col("id")).alias("bucket"), fingerprint(table).alias("hash"))
    return hashed.groupBy("bucket").agg(
        F.count("*").alias("rows"),
        F.bit_xor("hash").alias("folded"),
        F.sum(F.col("hash").bitwiseAND(F.lit(0xFFFFFFFF))).alias("low"),
        F.sum(F.shiftrightunsigned("hash", 32)).alias("high"),
    )


def paired(source: DataFrame, view: DataFrame) -> DataFrame:
    """Leaves of both sides: bucket, source_rows, view_rows, differs."""
    mine, theirs = (
        side.select("bucket", *(F.col(name).alias(f"{prefix}_{name}") for name in SUMS))
        for side, prefix in ((source, "source"), (view, "view"))
    )
    same = [F.col(f"source_{name}").eqNullSafe(F.col(f"view_{name}")) for name in SUMS]
    return mine.join(theirs, "bucket", "full_outer").select(
        "bucket",
        F.coalesce("source_rows", F.lit(0)).alias("source_rows"),
        F.coalesce("view_rows", F.lit(0)).alias("view_rows"),
        (~(same[0] & same[1] & same[2] & same[3])).alias("differs"),
    )


def within(rows: DataFrame, buckets: Sequence[str]) -> DataFrame:
    """The rows of these buckets."""
    return _chosen(rows.withColumn("bucket", bucket(F.col("id"))), "bucket", buckets).drop("bucket")


def of(rows: DataFrame, ids: Sequence[str]) -> DataFrame:
    """The rows of these ids."""
    return _chosen(rows, "id", ids)


def _chosen(rows: DataFrame, name: str, values: Sequence[str]) -> DataFrame:
    wanted = rows.sparkSession.createDataFrame([(one,) for one in values], f"{name} string")
    return rows.join(F.broadcast(wanted), name, "left_semi")


def differing(table: Table, source: DataFrame, view: DataFrame) -> DataFrame:
    """Rows compared one by one, those that aren't equal: id, kind, column, count long, seen long.

    kind is missing, extra, duplicate or different; count how many rows are too many or wrong; column the first one
    that differs; seen a hash of what the view holds.
    """
    expected = source.select("id", canonical(table, "document").alias("expected"))
    found = view.select("id", canonical(table, "document").alias("found"))
    found = found.groupBy("id").agg(F.max("found").alias("found"), F.count("*").alias("copies"))
    joined = expected.join(found, "id", "full_outer")
    kind = (
        F.when(F.col("found").isNull(), "missing")
        .when(F.col("expected").isNull(), "extra")
        .when(F.col("copies") > 1, "duplicate")
        .when(F.col("expected") != F.col("found"), "different")
    )
    count = F.when(kind == "extra", F.col("copies")).when(kind == "duplicate", F.col("copies") - 1).otherwise(F.lit(1))
    column = F.when(kind == "different", first_difference(F.col("expected"), F.col("found")))
    return joined.select(
        "id",
        kind.alias("kind"),
        column.alias("column"),
        count.cast("long").alias("count"),
        _hashed(F.col("found")).alias("seen"),
    ).where(F.col("kind").isNotNull())


def seen(table: Table, document: str) -> Column:
    """What `differing` gives as seen, of a document."""
    return F.when(F.col(document).isNotNull(), _hashed(canonical(table, document)))


def _hashed(held: Column) -> Column:
    return F.when(held.isNotNull(), F.xxhash64(held))
