"""One row per key and batch, in offset order and column by column. The only order there is, see DESIGN section 3."""

from collections.abc import Sequence
from functools import cache

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from cdc.change import Form

COUNTED = ("topic", "partition", "id", "records", "dead", "quarantined")
"""What says which row it is, and how many records of the batch it stands for."""
LACKING = "cdc must look for older values"
"""What Spark reports as text of a plain fold that has met a change without a value; `cdc.apply` folds in full then."""
SMALL = 10_000
"""Records up to which one task folds a batch alone: cheaper than a shuffle's second stage."""


def fold(
    changes: DataFrame, form: Form, records: int, tasks: int, further: Sequence[str] = (), *, plain: bool = False
) -> DataFrame:
    """The newest change of each row in one batch, and what it has to be completed with.

    In:  `decode.decoded` in that form; `records` bounds their number, `tasks` is how many a large batch is folded by
    Out: topic, partition, id; at most one row per (topic, id)
         offset, after or document, kept   the newest living change; offset is null when all of the key's records are
                                           dead or have a problem
         older array<struct<row, kept>>    only with `kept`: where the missing values are, newest first. A last element
                                           whose row is null ends the search: no value is known. After a last element
                                           that lacks a value too, the view has it.
         places array<long>                their offsets
         first                             the least offset that the row is made from
         records, dead, quarantined        how many records of the batch the row stands for
         further columns                   of the newest living change
         All rows of a Kafka partition are in one task, sorted by topic, partition, first.
    A `plain` one, a quarter cheaper, has neither `kept` nor `older`, takes no `problem` and nothing `further`; a change
    without a value fails it.
    Newest is the greatest offset: a key lives in one partition, and the offset is its only order.
    """
    value = "after" if form == "events" else "document"
    # By id first: Spark sorts by them in this order, and compares the first bytes of the first one quickly.
    keys = ("id", "partition", "topic")
    # Both ways satisfy the grouping, so Spark adds no further exchange.
    if records <= SMALL:
        keyed = changes.coalesce(1).groupBy(*keys)
    else:
        # In turn: by a hash, which is what Spark does unasked, one of two tasks had three of four partitions.
        turn = F.pmod(F.col("partition") + F.hash("topic"), F.lit(tasks))
        keyed = changes.withColumn("task", turn).repartitionById(tasks, "task").groupBy(*keys, "task")
    if plain:
        return keyed.agg(*_newest(value)).drop("task").sortWithinPartitions("topic", "partition", "first")
    beyond, careful = tuple(further), "problem" in changes.columns
    grouped = keyed.agg(*_aggregates(value, beyond, careful=careful))
    chained = grouped.select(*_chained(value, beyond, careful=careful))
    return chained.select(*_completed(value, beyond)).sortWithinPartitions("topic", "partition", "first")


# Built once: the hundreds of calls into the JVM that it takes cost more than folding a small batch.
@cache
def _newest(value: str) -> tuple[Column, ...]:
    living = F.when(~F.col("dead"), F.col("offset"))
    return (
        F.count_if(F.col("offset") >= 0).alias("records"),
        F.count_if("dead").alias("dead"),
        F.lit(0).cast("long").alias("quarantined"),
        F.max(living).alias("offset"),
        F.max_by(whole(value), living).alias(value),
        F.max(living).alias("first"),
    )


def whole(value: str) -> Column:
    """The value of a change that has all of it; another one stops the batch."""
    return F.when(F.col("kept").isNull(), F.col(value)).otherwise(F.raise_error(F.lit(LACKING)).cast("string"))


@cache
def _aggregates(value: str, further: tuple[str, ...], *, careful: bool) -> tuple[Column, ...]:
    wrong = F.col("problem").isNotNull() if careful else F.lit(False)
    living = ~wrong & ~F.col("dead")
    partial = living & F.col("kept").isNotNull()
    change = F.struct("offset", F.when(~wrong, F.col(value)).alias("row"), "kept")
    # A list costs more than all else here, even an empty one.
    listed = (F.collect_list(F.when(wrong, F.col("offset"))).alias("wrong"),) if careful else ()
    return (
        F.max_by(change, F.when(living, F.col("offset"))).alias("newest"),
        *(F.max_by(F.col(name), F.when(living, F.col("offset"))).alias(name) for name in further),
        F.max_by(change, F.when(living & ~partial, F.col("offset"))).alias("whole"),
        *listed,
        F.collect_list(F.when(partial, change)).alias("partial"),
        F.count_if(F.col("offset") >= 0).alias("records"),
        F.count_if(F.col("dead") & ~wrong).alias("dead"),
        F.count_if(wrong & (F.col("offset") >= 0)).alias("quarantined"),
    )


@cache
def _chained(value: str, further: tuple[str, ...], *, careful: bool) -> tuple[Column, ...]:
    newest = F.col("newest")
    base = _walled(newest, F.col("whole")) if careful else F.col("whole")

    def chain(base: Column) -> Column:
        since = F.coalesce(base.offset, F.lit(-2))
        between = F.filter("partial", lambda one: (one.offset > since) & (one.offset < newest.offset))
        before = F.reverse(F.array_sort(between))
        return F.when(base.isNotNull() & (since < newest.offset), F.array_append(before, base)).otherwise(before)

    return (
        *(F.col(name) for name in (*COUNTED, *further)),
        newest.offset.alias("offset"),
        newest.row.alias(value),
        newest.kept.alias("kept"),
        # A list of one, so that the base is written once: Spark analyses and optimises each batch's plan anew.
        F.when(newest.kept.isNotNull(), F.get(F.transform(F.array(base), chain), F.lit(0))).alias("chain"),
    )


def _walled(newest: Column, whole: Column) -> Column:
    """Where a search for older values ends: at a record in quarantine too, as at a delete; what lay before is void."""
    wall = F.array_max(F.filter("wrong", lambda offset: offset < newest.offset))
    void = F.struct(
        wall.alias("offset"), F.lit(None).cast("string").alias("row"), F.lit(None).cast("array<string>").alias("kept")
    )
    return F.when(wall.isNotNull() & F.coalesce(wall > whole.offset, F.lit(True)), void).otherwise(whole)


@cache
def _completed(value: str, further: tuple[str, ...]) -> tuple[Column, ...]:
    older = F.transform("chain", lambda one: F.struct(one.row.alias("row"), one.kept.alias("kept")))
    lowest = F.array_min(F.transform("chain", lambda one: F.greatest(one.offset, F.lit(0))))
    names = (*COUNTED, *further, "offset", value, "kept")
    places = F.transform("chain", lambda one: one.offset)
    first = F.coalesce(lowest, F.col("offset"))
    return *(F.col(name) for name in names), older.alias("older"), places.alias("places"), first.alias("first")
