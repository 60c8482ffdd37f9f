"""Records that a sink can't apply: kept in the topic <pipeline>.quarantine until a person or a newer change helps.

    key    JSON {sink, topic, partition, offset, id}: the place, and the row's id (null when the key can't be read)
    value  JSON {reason, at, key, value}: the record itself, its bytes in base64; null once the entry is settled
    A key with `redrive` as well is a request to try that entry again.

Executors write them there (`cdc.sink.rejection`). While a row has an entry its key is tainted: a change that doesn't
carry all its values can't be completed, and follows into quarantine. A whole newer change settles the entry, so does a
redrive that succeeds. Row values are in this topic only.
"""

from collections.abc import Collection, Iterable, Mapping

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from cdc.config.settings import Pipeline
from cdc.kafka.topics import Topics
from cdc.quarantine.log import Entry, QuarantineLog, close
from cdc.sink.contract import Key
from cdc.sink.lane import COLUMNS, Entries


class SinkQuarantine:
    """What one sink has in quarantine, and the way out. `open` are entries, `requests` those to try again."""

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
        entries = {held.entry for held in self._ledger.read() if held.entry.sink == self._sink}
        self.requests = {entry for entry in entries if entry.redrive}
        self.open = entries - self.requests

    def entries(self, topics: Iterable[str]) -> Entries:
        """What lies there of these topics."""
        wanted, entries = set(topics), dict[tuple[str, int], dict[int, str | None]]()
        for entry in self.open:
            if entry.topic in wanted:
                entries.setdefault((entry.topic, entry.partition), {})[entry.offset] = entry.id
        return entries

    def cured(self, rows: Mapping[Key, int]) -> list[Entry]:
        """The entries that changes have made void; rows: see `Outcome.cured`."""
        return [entry for entry in self.open if entry.row and entry.offset < rows.get(entry.row, 0)]

    def settle(self, done: Collection[Entry]) -> None:
        """Close entries whose rows are right again, and requests that have been answered."""
        close(self._kafka, self._pipeline, done)
        self.open -= set(done)
        self.requests -= set(done)

    def records(self, wanted: Collection[Entry]) -> DataFrame:
        """The records of entries, as Spark's Kafka source gave them: key, value, topic, partition, offset."""
        read = (
            self._spark.read.format("kafka")
            .option("kafka.bootstrap.servers", self._pipeline.kafka)
            .option("subscribe", self._pipeline.quarantine_topic)
            .load()
        )
        place = F.from_json(F.col("key").cast("string"), "sink string, topic string, partition int, offset long")
        note = F.from_json(F.col("value").cast("string"), "key string, value string")
        places = [(entry.topic, entry.partition, entry.offset) for entry in wanted]
        listed = self._spark.createDataFrame(places, "topic string, partition int, offset long")
        opened = read.where(F.col("value").isNotNull()).select(place.alias("place"), note.alias("note"))
        mine = opened.where(F.col("place.sink") == self._sink).select(
            F.unbase64("note.key").alias("key"), F.unbase64("note.value").alias("value"), "place.*"
        )
        named = mine.select(*COLUMNS)
        return named.join(F.broadcast(listed), ["topic", "partition", "offset"]).select(*COLUMNS)
