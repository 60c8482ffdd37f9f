"""Quarantine: records that a sink can't apply, until they are settled.

The topic <pipeline>.quarantine holds them:

    key    JSON {sink, topic, partition, offset, id}: the place, and the row's id (null when the key
           can't be read)
    value  JSON {reason, at, key, value}: the record itself, its bytes in base64; null once the
           entry is settled
    A key that also has `redrive` is a request to redrive that entry.

Executors write entries (`cdc.sink.rejection`). A row with an entry is tainted: a change that
doesn't carry all its values can't be completed, and follows into quarantine. A newer change with
all values settles the entry, and so does a redrive that succeeds. Row values are in this topic
only.
"""

from collections.abc import Collection, Iterable, Mapping

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from cdc.config.settings import Pipeline
from cdc.kafka.topics import Topics
from cdc.quarantine.log import QuarantineKey, QuarantineLog, settle_entries
from cdc.sink.contract import Key
from cdc.sink.lane import COLUMNS, Entries


class SinkQuarantine:
    """The quarantine of one sink. `open` are its entries, `requests` those to redrive.

    One thread uses it.
    """

    def __init__(self, spark: SparkSession, sink: str, pipeline: Pipeline, kafka: Topics) -> None:
        self._spark, self._sink, self._pipeline, self._kafka = spark, sink, pipeline, kafka
        self._log = QuarantineLog(kafka, pipeline)
        self.open: set[QuarantineKey] = set()
        self.requests: set[QuarantineKey] = set()

    def has_changed(self) -> bool:
        """Whether the topic has new records since `refresh`."""
        return self._log.has_changed()

    def refresh(self) -> None:
        """Read new entries and requests. Raises ConnectorError."""
        entries = {record.entry for record in self._log.read() if record.entry.sink == self._sink}
        self.requests = {entry for entry in entries if entry.redrive}
        self.open = entries - self.requests

    def entries(self, topics: Iterable[str]) -> Entries:
        """Return the open entries of these topics: by partition, the row's id by offset."""
        topic_names, entries = set(topics), dict[tuple[str, int], dict[int, str | None]]()
        for entry in self.open:
            if entry.topic in topic_names:
                entries.setdefault((entry.topic, entry.partition), {})[entry.offset] = entry.id
        return entries

    def entries_cured_by(self, rows: Mapping[Key, int]) -> list[QuarantineKey]:
        """Select the entries that newer changes have cured; `rows`: see `Outcome.cured`."""
        return [entry for entry in self.open if entry.row and entry.offset < rows.get(entry.row, 0)]

    def settle(self, entries: Collection[QuarantineKey]) -> None:
        """Settle entries whose rows are right again, and requests that have been processed."""
        settle_entries(self._kafka, self._pipeline, entries)
        self.open -= set(entries)
        self.requests -= set(entries)

    def read_records(self, entries: Collection[QuarantineKey]) -> DataFrame:
        """Read the records of entries, in the form of Spark's Kafka source.

        Out: key, value, topic, partition, offset.
        """
        topic_records = (
            self._spark.read.format("kafka")
            .option("kafka.bootstrap.servers", self._pipeline.kafka)
            .option("subscribe", self._pipeline.quarantine_topic)
            .load()
        )
        place = F.from_json(
            F.col("key").cast("string"), "sink string, topic string, partition int, offset long"
        )
        note = F.from_json(F.col("value").cast("string"), "key string, value string")
        places = [(entry.topic, entry.partition, entry.offset) for entry in entries]
        listed = self._spark.createDataFrame(places, "topic string, partition int, offset long")
        opened = topic_records.where(F.col("value").isNotNull()).select(
            place.alias("place"), note.alias("note")
        )
        decoded = opened.where(F.col("place.sink") == self._sink).select(
            F.unbase64("note.key").alias("key"), F.unbase64("note.value").alias("value"), "place.*"
        )
        records = decoded.select(*COLUMNS)
        return records.join(F.broadcast(listed), ["topic", "partition", "offset"]).select(*COLUMNS)
