"""Try rows in quarantine again: written as the log has them now, at the position where the view stands.

Each row is folded from its first record in quarantine up to that position, so whatever newer changes there are win.
"""

import json
from collections.abc import Callable, Mapping, Sequence

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F

from cdc import decode
from cdc.apply.batch import make_batch
from cdc.apply.views import Views
from cdc.change import Advance, Form, Position, Table
from cdc.held import Entry
from cdc.log import consumer
from cdc.quarantine import Quarantine, marked
from cdc.sink import Batch, Key, Refused

COLUMNS = ("key", "value", "topic", "partition", "offset")
Apply = Callable[[Batch], object]


def redrive(spark: SparkSession, kafka: str, quarantine: Quarantine, views: Views, form: Form, writer: str) -> None:
    """Answer one sink's requests: settle what can be written now, leave the rest with its newest reason.

    Raises what the sink raises; nobody else may move the positions meanwhile. What is kept beside the live views is
    given the same rows, as of where it stands.
    """
    asked = {entry.row or entry.place for entry in quarantine.requests}
    wanted = [entry for entry in quarantine.open if (entry.row or entry.place) in asked]
    sink = views.sink
    for table in views.plan.tables:
        for at, give in ((sink.standby_at, sink.write), (sink.live_at, sink.live.apply)):
            position = at.get(table.topic)
            mine = [entry for entry in wanted if entry.topic == table.topic and _passed(entry, position)]
            # What lies ahead of a view it meets by itself.
            if not mine or position is None:
                continue
            log = _log(spark, kafka, table, position, mine)
            both = quarantine.records(mine).select(*COLUMNS).unionByName(log.select(*COLUMNS))
            once = both.dropDuplicates(["topic", "partition", "offset"])
            decoded = decode.decoded(once, [table], form, views.reading.carefully())
            ids = [entry.id for entry in mine if entry.id is not None]
            records = decoded.where(F.col("id").isin(ids) | _at(mine)).persist()
            try:
                step = Advance(table, position, position, views.plan.floor(table))
                refused = _apply(records, step, form, writer, mine, give)
                if at is sink.live_at:
                    _settle(quarantine, marked(records, refused), mine)
            finally:
                records.unpersist()
    quarantine.settle(list(quarantine.requests))


def _passed(entry: Entry, position: Position | None) -> bool:
    return position is not None and entry.offset < position.offsets[entry.partition]


def _settle(quarantine: Quarantine, records: DataFrame, mine: Sequence[Entry]) -> None:
    wrong = records.where(_at(mine) & F.col("problem").isNotNull())
    left = {(row["partition"], row["offset"]) for row in wrong.select("partition", "offset").collect()}
    quarantine.put(wrong)
    quarantine.settle([entry for entry in mine if (entry.partition, entry.offset) not in left])


def _apply(
    records: DataFrame, step: Advance, form: Form, writer: str, wanted: Sequence[Entry], apply: Apply
) -> Mapping[Key, str]:
    """Write the rows that can be; the others with the reason."""
    refused: dict[Key, str] = {}
    # One record that can't be read keeps its whole row back: what the log has of it wouldn't be complete.
    unread = records.where(F.col("problem").isNotNull() & F.col("id").isNotNull())
    for row in unread.select("topic", "id", "problem").collect():
        refused[row["topic"], row["id"]] = row["problem"]
    while True:
        good = marked(records, refused).where(F.col("problem").isNull())
        batch = make_batch(writer, form, [step], good, 1)
        try:
            apply(Batch(batch.writer, batch.advances, good.where(_at(wanted)), batch.changes))
            return refused
        except Refused as error:
            if error.rows.keys() <= refused.keys():
                raise
            refused |= error.rows


def _log(spark: SparkSession, kafka: str, table: Table, at: Position, wanted: Sequence[Entry]) -> DataFrame:
    """What the topic has of the partitions concerned, from the first record in quarantine up to the position."""
    first = {str(e.partition): min(o.offset for o in wanted if o.partition == e.partition) for e in wanted}
    last = {partition: at.offsets[int(partition)] for partition in first}
    return (
        spark.read.format("kafka")
        .options(**consumer(kafka))
        .option("assign", json.dumps({table.topic: [int(partition) for partition in first]}))
        .option("startingOffsets", json.dumps({table.topic: first}))
        .option("endingOffsets", json.dumps({table.topic: last}))
        .load()
    )


def _at(entries: Sequence[Entry]) -> Column:
    places = F.array(*(F.lit(f"{entry.partition}/{entry.offset}") for entry in entries))
    return F.array_contains(places, F.concat_ws("/", "partition", "offset"))
