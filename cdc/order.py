"""One row per key and batch: the newest by offset. The only order there is, see DESIGN section 3."""

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

SMALL = 10_000
"""Records up to which one task folds a batch alone: cheaper than a shuffle's second stage."""


def fold(events: DataFrame, records: int, tasks: int) -> DataFrame:
    """Keep the newest change of each row in one batch.

    In:  `decode.events`; `records` bounds their number, `tasks` is how many a large batch is folded by
    Out: topic, partition, id, offset, after; at most one row per (topic, id). All rows of a Kafka partition are in
         one task, sorted by topic, partition, offset.
    Newest is the greatest offset: a key lives in one partition, and the offset is its only order.
    """
    # Both ways satisfy the grouping below, so Spark adds no further exchange.
    placed = events.coalesce(1) if records <= SMALL else events.repartition(tasks, "topic", "partition")
    newest = placed.groupBy("topic", "partition", "id").agg(
        F.max_by(F.struct("offset", "after"), F.col("offset")).alias("newest")
    )
    return newest.select("topic", "partition", "id", "newest.*").sortWithinPartitions("topic", "partition", "offset")
