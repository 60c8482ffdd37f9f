"""Records that a sink can't apply: kept in the topic <pipeline>.quarantine until a person or a newer change helps.

    key    JSON {sink, topic, partition, offset, id}: the place, and the row's id (null when the key can't be read)
    value  JSON {reason, at, key, value}: the record itself, its bytes in base64; null once the entry is settled
    A key with `redrive` as well is a request to try that entry again.

While a row has an entry its key is tainted: a change that doesn't carry all its values can't be completed, and follows
into quarantine. A whole newer change settles the entry, so does a redrive that succeeds.
Row values are in this topic only.
"""

import time
from collections.abc import Collection, Iterable, Mapping

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from cdc.change import Table
from cdc.held import Entry, QuarantineLog, close
from cdc.settings import Pipeline
from cdc.sink import Key
from cdc.topics import MAX_MESSAGE_BYTES, Topics

TAINTED = "its row is in quarantine"


class Quarantine:
    """What one sink has in quarantine, and the way in and out. `open` are entries, `requests` those to try again."""

    def __init__(self, spark: SparkSession, sink: str, pipeline: Pipeline, kafka: Topics) -> None:
        self._spark, self._sink, self._pipeline, self._kafka = spark, sink, pipeline, kafka
        self._ledger = QuarantineLog(kafka, pipeline)
        self.open: set[Entry] = set()
        self.requests: set[Entry] = set()

    def moved(self) -> bool:
        """Whether somebody has written to the topic since `refresh`."""
        return self._ledger.moved()

    def refresh(self) -> None:
        """Take what has been written since the last time. Raises ConnectorError."""
        found = {held.entry for held in self._ledger.read() if held.entry.sink == self._sink}
        self.requests = {entry for entry in found if entry.redrive}
        self.open = found - self.requests

    def tainted(self, tables: Iterable[Table]) -> DataFrame | None:
        """Stand-ins for the records that are missing before a batch: nothing may be completed across them."""
        topics = {table.topic for table in tables}
        rows = {(e.topic, e.partition, e.id) for e in self.open if e.topic in topics and e.id is not None}
        if not rows:
            return None
        listed = self._spark.createDataFrame(list(rows), "topic string, partition int, id string")
        return listed.select(
            "*", F.lit(-1).cast("long").alias("offset"), F.lit(False).alias("dead"), F.lit(TAINTED).alias("problem")
        )

    def put(self, careful: DataFrame) -> None:
        """Make every record with a problem durable in the topic. In: `decode.decoded`, read carefully."""
        bad = careful.where(F.col("problem").isNotNull())
        places = bad.select("topic", "partition", "offset", "id").collect()
        if not places:
            return
        named = (F.lit(self._sink).alias("sink"), "topic", "partition", "offset", "id")
        whole = F.struct(
            F.col("problem").alias("reason"),
            F.lit(round(time.time(), 3)).alias("at"),
            F.regexp_replace(F.base64("record.key"), "[\r\n]", "").alias("key"),
            F.regexp_replace(F.base64("record.value"), "[\r\n]", "").alias("value"),
        )
        nulls = {"ignoreNullFields": "false"}
        self._write(bad.select(F.to_json(F.struct(*named), nulls).alias("key"), F.to_json(whole, nulls).alias("value")))
        self.open |= {Entry(self._sink, *place) for place in places}

    def settle(self, done: Collection[Entry]) -> None:
        """Close entries whose rows are right again, and requests that have been answered."""
        close(self._kafka, self._pipeline, done)
        self.open -= set(done)
        self.requests -= set(done)

    def cured(self, changes: DataFrame) -> list[Entry]:
        """The entries that newer changes have made void. In: `order.fold` of a batch that has been applied."""
        rows = {entry.row for entry in self.open if entry.row}
        if not rows:
            return []
        whole = changes.where(F.col("offset").isNotNull() & F.col("kept").isNull()).select("topic", "id", "offset")
        wanted = self._spark.createDataFrame(list(rows), "topic string, id string")
        newest = {(topic, key): offset for topic, key, offset in whole.join(wanted, ["topic", "id"]).collect()}
        return [entry for entry in self.open if entry.row in newest and newest[entry.row] > entry.offset]

    def records(self, wanted: Collection[Entry]) -> DataFrame:
        """The records of entries, as Spark's Kafka source gave them: key, value, topic, partition, offset."""
        read = (
            self._spark.read.format("kafka")
            .option("kafka.bootstrap.servers", self._pipeline.kafka)
            .option("subscribe", self._pipeline.quarantine_topic)
            .load()
        )
        place = F.from_json(F.col("key").cast("string"), "sink string, topic string, partition int, offset long")
        kept = F.from_json(F.col("value").cast("string"), "key string, value string")
        places = [(entry.topic, entry.partition, entry.offset) for entry in wanted]
        listed = self._spark.createDataFrame(places, "topic string, partition int, offset long")
        opened = read.where(F.col("value").isNotNull()).select(place.alias("place"), kept.alias("kept"))
        mine = opened.where(F.col("place.sink") == self._sink).select(
            F.unbase64("kept.key").alias("key"), F.unbase64("kept.value").alias("value"), "place.*"
        )
        named = mine.select("key", "value", "topic", "partition", "offset")
        return named.join(F.broadcast(listed), ["topic", "partition", "offset"]).select(named.columns)

    def _write(self, frame: DataFrame) -> None:
        # A record in base64 is a third longer than itself.
        (
            frame.write.format("kafka")
            .option("kafka.bootstrap.servers", self._pipeline.kafka)
            .option("kafka.max.request.size", 2 * MAX_MESSAGE_BYTES)
            .option("kafka.compression.type", "lz4")
            .option("topic", self._pipeline.quarantine_topic)
            .mode("append")
            .save()
        )


def marked(careful: DataFrame, refused: Mapping[Key, str]) -> DataFrame:
    """The same records, those of refused rows with the reason as their problem."""
    if not refused:
        return careful
    listed = [(topic, key, reason) for (topic, key), reason in refused.items()]
    reasons = careful.sparkSession.createDataFrame(listed, "topic string, id string, reason string")
    joined = careful.join(F.broadcast(reasons), ["topic", "id"], "left")
    return joined.withColumn("problem", F.coalesce("problem", "reason")).drop("reason")
