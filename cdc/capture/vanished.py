"""Delete from the log the rows that vanished from Postgres while the connector had no slot.

A new snapshot sends all rows that there are, so that readers keep each of them meanwhile. No event says
which rows are gone: it is those that the snapshot hasn't sent.

In:  the ledger, which has where topics ended before the snapshot. Out: a tombstone for each such row.
Invariant: a tombstone is committed only if the log has no row of its id between the start of the
snapshot and the tombstone. So a removal may be killed, repeated or run twice at once.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import structlog
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from cdc.codec.decode_options import DecodeOptions
from cdc.codec.record import RecordDecoder
from cdc.config.settings import Pipeline
from cdc.connectors.client import Connect, takes_snapshot
from cdc.control import registrations
from cdc.kafka.ledger import Ledger
from cdc.kafka.records import Records
from cdc.kafka.topics import Topics
from cdc.kafka.transactions import writing_records
from cdc.model.position import Position
from cdc.model.table import Table
from cdc.postgres import source, table_survey
from cdc.sink.lane_run import freeze_gc_after
from cdc.spark.kafka_source import read_until

if TYPE_CHECKING:
    import pyarrow as pa

PENDING_S = 30.0
"""The longest time that tombstones may wait for their check. The table's views wait as long."""
READERS = 2
"""Tasks that read a topic."""
# One removal at a time: two would end each other's transactions.
LOCK = "SELECT pg_try_advisory_xact_lock(hashtextextended('cdc.vanished.' || %s, 0))"
RECORDS = "id string, key binary, offset long, sent boolean, lives boolean"
log = structlog.get_logger()


def remove_vanished(spark: SparkSession, pipeline: Pipeline) -> None:
    """Delete the rows that new snapshots haven't sent, once these have ended. Does nothing if none is
    in the ledger, while the connector takes one, or while another run does it.

    Raises ConnectorError, SourceError; also what Spark raises.
    """
    with Topics(pipeline.kafka) as kafka:
        # Before the connector is asked: it begins each of these snapshots after it is in the ledger.
        ledger = Ledger(pipeline, kafka).read()
        if not ledger.snapshots:
            return
        with Connect(pipeline.connect) as connect:
            if takes_snapshot(connect.offsets(pipeline.pipeline)):
                return
        registration = registrations.read(kafka, pipeline)
        captured = registration.tables if registration else {}
        with source.connect_to_read(pipeline.source) as conn, conn.transaction():
            if conn.execute(LOCK, [pipeline.pipeline]).fetchone() != (True,):
                return
            described = table_survey.survey(conn, pipeline.with_tables(captured)).tables
            # What isn't captured now gets a floor once it is captured again.
            tables = {table.topic: table for table in described if table.qualified in captured}
            for name, starts in ledger.snapshots.items():
                ends = kafka.ends([topic for topic in starts if topic in tables])
                removals = [
                    Removal(pipeline.kafka, pipeline.pipeline, tables[topic], starts[topic], end)
                    for topic, end in ends.items()
                    # A topic that was created again has only what was sent since.
                    if end.topic_id == starts[topic].topic_id
                ]
                # Such a table is captured, but can't be described as it is now.
                topics = set(map(pipeline.topic, captured))
                undescribed = topics.intersection(starts).difference(tables)
                # Each has its turn, also after one that is busy.
                removed = [removal.run(spark) for removal in removals]
                if all(removed) and not undescribed:
                    ledger.end_snapshot(name)
                    log.info("vanished_rows_removed", topics=sorted(starts))


@dataclass(frozen=True)
class Removal:
    """Deletes the vanished rows of one topic. Can be pickled.

    kafka     the broker's address
    pipeline  the pipeline's name
    start     where the topic ended before the snapshot
    end       where it ends now; before that, rows are looked for
    """

    kafka: str
    pipeline: str
    table: Table
    start: Position
    end: Position

    def run(self, spark: SparkSession) -> bool:
        """Delete the rows. Returns whether all are deleted; the others have been sent meanwhile, and
        have to be looked for again.
        """
        # One task, because a transaction has one writer.
        rows = self._rows(spark).repartition(1)
        answers = rows.mapInArrow(freeze_gc_after(self._work), "done boolean")
        return not answers.where("NOT done").count()

    def _rows(self, spark: SparkSession) -> DataFrame:
        """Return id, keys of the rows that the topic has, and of which nothing was sent since the start.
        Keys are the records' keys, as bytes: two if the key's type has changed.
        """
        starts = F.array(*map(F.lit, self.start.offsets))
        records = read_until(spark, self.kafka, {self.table.topic: self.end}).select(
            "key",
            "offset",
            (F.col("offset") >= F.get(starts, F.col("partition"))).alias("sent"),
            F.col("value").isNotNull().alias("lives"),
        )
        # Not a task for each partition: streams need tasks meanwhile.
        records = records.coalesce(READERS)
        return (
            records.mapInArrow(freeze_gc_after(self._identify), RECORDS)
            .where("id IS NOT NULL")
            .groupBy("id", "key")
            .agg(F.max_by("lives", "offset").alias("lives"), F.max("sent").alias("sent"))
            .groupBy("id")
            .agg(
                F.max("sent").alias("sent"),
                F.collect_list(F.when(F.col("lives"), F.col("key"))).alias("keys"),
            )
            .where(~F.col("sent") & (F.size("keys") > 0))
            .select("id", "keys")
        )

    def _identify(self, batches: Iterator["pa.RecordBatch"]) -> Iterator["pa.RecordBatch"]:
        import pyarrow as pa

        decoder = RecordDecoder([self.table], DecodeOptions().placeholder)
        for batch in batches:
            keys = batch.column("key").to_pylist()
            ids = pa.array([decoder.row_id(self.table.topic, key) for key in keys], pa.string())
            names = ["id", *batch.schema.names]
            yield pa.RecordBatch.from_arrays([ids, *batch.columns], names=names)

    def _work(self, batches: Iterator["pa.RecordBatch"]) -> Iterator["pa.RecordBatch"]:
        import pyarrow as pa

        checked = self.end.offsets
        sent: set[str] = set()
        for batch in batches:
            # Most of what has come since is read before the transaction, which has to be short.
            ids, checked = self._read_sent(checked)
            sent |= ids
            keys = dict(
                zip(batch.column("id").to_pylist(), batch.column("keys").to_pylist(), strict=True)
            )
            vanished = {row_id: own for row_id, own in keys.items() if row_id not in sent}
            is_deleted = not vanished or self.delete(vanished, checked)
            yield pa.RecordBatch.from_pydict({"done": [is_deleted and len(vanished) == len(keys)]})

    def delete(self, vanished: Mapping[str, Sequence[bytes]], checked: Sequence[int]) -> bool:
        """Write tombstones of rows, by id their keys. False: one of them was sent meanwhile, and nothing is written.

        checked: offsets up to which none of the rows was sent, by partition
        """
        topic = self.table.topic
        # By its name the next removal ends one that a killed run left open.
        name = f"{self.pipeline}.vanished"
        tombstones = [(key, None) for keys in vanished.values() for key in keys]
        try:
            with writing_records(self.kafka, name, topic, tombstones, PENDING_S):
                # The tombstones are in the log now, and what came before them is as well.
                sent, _ = self._read_sent(checked)
                if sent & vanished.keys():
                    raise _SentMeanwhileError
        except _SentMeanwhileError:
            return False
        return True

    def _read_sent(self, start: Sequence[int]) -> tuple[set[str], tuple[int, ...]]:
        """Return the ids of rows that the log has from there on, and where it ends. A transaction that isn't
        complete counts.
        """
        topic = self.table.topic
        decoder = RecordDecoder([self.table], DecodeOptions().placeholder)
        with Topics(self.kafka) as kafka:
            last = kafka.log_ends([topic])[topic]
        records = Records(self.kafka, "read_uncommitted")
        ids: set[str] = set()
        try:
            for partition, first in enumerate(start):
                for record in records.read(topic, first, last.offsets[partition], partition):
                    row_id = decoder.row_id(topic, record.key) if record.value else None
                    if row_id is not None:
                        ids.add(row_id)
        finally:
            records.close()
        return ids, last.offsets


class _SentMeanwhileError(Exception):
    """A row that was taken for vanished has been sent."""
