"""One row per key and batch: the newest by offset. The only order there is, see DESIGN section 3."""

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from cdc.change import Form

SMALL = 10_000
"""Records up to which one task folds a batch alone: cheaper than a shuffle's second stage."""


def fold(changes: DataFrame, form: Form, records: int, tasks: int) -> DataFrame:
    """Keep the newest change of each row in one batch.

    In:  `decode.decoded` in that form; `records` bounds their number, `tasks` is how many a large batch is folded by
    Out: topic, partition, id, offset and after or document; at most one row per (topic, id). All rows of a Kafka
         partition are in one task, sorted by topic, partition, offset.
    Newest is the greatest offset: a key lives in one partition, and the offset is its only order.
    """
    # Both ways satisfy the grouping below, so Spark adds no further exchange.
    placed = changes.coalesce(1) if records <= SMALL else changes.repartition(tasks, "topic", "partition")
    row = F.struct("offset", "after" if form == "events" else "document")
    newest = placed.groupBy("topic", "partition", "id").agg(F.max_by(row, "offset").alias("newest"))
    return newest.select("topic", "partition", "id", "newest.*").sortWithinPartitions("topic", "partition", "offset")
