"""When records of topics were written, by their own times. The clock is the bench machine's."""

from collections.abc import Mapping
from datetime import datetime
from functools import reduce
from operator import or_

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from bench.documents.flights import Flights
from bench.stage import Stage
from cdc.kafka.topics import Topics
from cdc.model.position import Position
from cdc.model.table import Table
from cdc.spark.kafka_source import read_until

Starts = Mapping[str, Position | None]
"""By topic, where to read from; None is offset zero."""


def view_of(stage: Stage, flights: Flights) -> Table:
    """Return the view of their documents."""
    return next(view for view in stage.context.views if view.name == flights.view)


def flight_ends(stage: Stage, flights: Flights) -> Starts:
    """Return the end of the flights' topic, then the end of their documents' topic."""
    table = next(table for table in stage.tables if table.qualified == flights.table)
    topics = [table.topic, view_of(stage, flights).topic]
    with Topics(stage.pipeline.kafka) as kafka:
        ends = kafka.ends(topics)
    return {topic: ends[topic] for topic in topics}


def records(stage: Stage, starts: Starts) -> DataFrame:
    """The records of topics from these positions on, None for offset zero."""
    with Topics(stage.pipeline.kafka) as kafka:
        ends = kafka.ends(list(starts))
    wanted = [
        (F.col("topic") == topic) & (F.col("partition") == partition) & (F.col("offset") >= first)
        for topic, start in starts.items()
        for partition, first in enumerate(
            start.offsets if start else [0] * ends[topic].partition_count
        )
    ]
    return read_until(stage.spark, stage.pipeline.kafka, ends).where(reduce(or_, wanted))


def span(stage: Stage, starts: Starts) -> tuple[float, float]:
    """When the first and the last record was written, Unix seconds."""
    timestamp = F.col("timestamp").cast("double")
    first, last = records(stage, starts).agg(F.min(timestamp), F.max(timestamp)).collect()[0]
    return first, last


def arrivals(stage: Stage, starts: Starts) -> dict[tuple[str, datetime], float]:
    """By topic and `updated_at`: when the first record with it was written, Unix seconds."""
    updated = F.get_json_object(F.col("value").cast("string"), "$.after.updated_at")
    by_time = (
        records(stage, starts)
        .groupBy("topic", updated.alias("updated"))
        .agg(F.min("timestamp").cast("double").alias("arrival"))
        .where("updated IS NOT NULL")
    )
    return {
        (topic, datetime.fromisoformat(text)): arrival for topic, text, arrival in by_time.collect()
    }
