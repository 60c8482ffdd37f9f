"""Whether the log can still make the views again, and if not, for which keys.

In:  a table's topic, read once and folded as a rebuild would; the topic's settings; where the views stand.
Out: findings. Rows stay with Spark's executors, which look at each record by itself (`cdc.codec.log_rows`); Spark folds
     what they say of it. Only counts and keys come back.
"""

import itertools
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import reduce

from pyspark.sql import Column, DataFrame, Observation, SparkSession
from pyspark.sql import functions as F

from cdc.audit.finding import KEYS, REPAIRABLE, Audit, Finding, of_rows
from cdc.audit.topic_health import of_topics, of_views
from cdc.codec import log_rows
from cdc.codec.decode_options import DecodeOptions
from cdc.codec.log_rows import FOREIGN, KEYLESS, TOMBSTONE, UNREADABLE, RecordClassifier
from cdc.config.settings import Pipeline
from cdc.control.control_topics import Control
from cdc.kafka.topics import Topics
from cdc.model.table import Table
from cdc.postgres.schema_changes import last_silent_change_lsn
from cdc.sink.contract import Sink
from cdc.sink.lane_run import freeze_gc_after
from cdc.spark import kafka_source
from cdc.verify.backfill import backfill

IDS_AT_ONCE = 1000
COUNTED = (KEYLESS, FOREIGN, UNREADABLE)


@dataclass(frozen=True)
class Folded:
    """One pass over a topic.

    wrong   by kind, if there are any: id string, the rows that a rebuild would get wrong
    counts  records, tombstones, keys, and what is wrong with records by themselves: those of COUNTED
    """

    wrong: Mapping[str, DataFrame]
    counts: Mapping[str, int]


class Auditor:
    """Looks at one table's topic at a time. Every method raises ConnectorError where a topic can't be read."""

    def __init__(
        self, spark: SparkSession, pipeline: Pipeline, kafka: Topics, placeholder: str, sinks: Sequence[Sink]
    ) -> None:
        self._spark, self._pipeline, self._kafka, self._sinks = spark, pipeline, kafka, sinks
        self._placeholder = placeholder
        # What the warehouse can't hold doesn't matter where there is none.
        self._warehouse = any(sink.row_format == "events" for sink in sinks)

    def audit(self, table: Table, repair_s: float | None = None) -> Audit:
        """What a rebuild of the table's views would meet.

        With `repair_s`, seconds to wait, the rows that a new record makes right are sent again, and no others; then it
        is what is left.

        Raises:
            SinkError: a view can't say how far it is. SourceError, ConnectorError: see `reemit.reemit`.
        """
        found = of_topics(self._kafka, self._pipeline, table)
        if any(one.kind == "missing" for one in found):
            return Audit(table.qualified, table.topic, findings=tuple(found))
        found += of_views(self._kafka, self._pipeline, table, {sink.name: sink.position(table) for sink in self._sinks})
        with ExitStack() as kept:
            folded = self._folded(table, kept)
            damaged = [ids for kind, ids in folded.wrong.items() if kind in REPAIRABLE]
            sent = self._send(table, damaged, repair_s) if damaged and repair_s is not None else 0
            if not sent:
                found += [_of_keys(kind, ids) for kind, ids in folded.wrong.items()]
        if sent:
            return replace(self.audit(table), repaired=sent)
        found += [of_rows(kind, folded.counts[kind]) for kind in COUNTED if folded.counts[kind]]
        found = sorted((one.of(table.qualified) for one in found), key=lambda one: not one.defect)
        counts = (folded.counts[name] for name in ("records", "keys", "tombstones"))
        return Audit(table.qualified, table.topic, tuple(found), *counts)

    def _send(self, table: Table, damaged: Sequence[DataFrame], timeout_s: float) -> int:
        deadline, sent = time.monotonic() + timeout_s, 0
        listed = reduce(DataFrame.union, damaged).distinct().toLocalIterator()
        while ids := [row["id"] for row in itertools.islice(listed, IDS_AT_ONCE)]:
            left_s = deadline - time.monotonic()
            sent += backfill(self._pipeline, self._kafka, table, ids, timeout_s=left_s)
        return sent

    def _folded(self, table: Table, kept: ExitStack) -> Folded:
        end = self._kafka.ends([table.topic])[table.topic]
        control = Control(self._pipeline, self._kafka)
        control.read()
        floors = {table.topic: control.floors.lsn(table.qualified)}
        since = {table.topic: control.registration.start(table.topic, end.topic_id)}
        reading = DecodeOptions(self._placeholder, floors, since)
        looker = RecordClassifier(
            table, reading, self._warehouse, last_silent_change_lsn(control.definitions, table.qualified)
        )
        read = kafka_source.read_until(self._spark, self._pipeline.kafka, {table.topic: end}).select(*log_rows.RECORDS)
        said, seen = self._persisted(kept, read.mapInArrow(freeze_gc_after(looker.work), log_rows.SAID)), Observation()
        rows = self._persisted(kept, newest(said.observe(seen, *_counts())))
        (counts,) = rows.agg(
            F.count("*").alias("keys"),
            F.count_distinct("id").alias("ids"),
            F.count_if("outdated").alias("outdated"),
            F.count_if("partial").alias("partial"),
        ).collect()
        wrong = {}
        if counts["partial"]:
            wrong["unknown"] = self._persisted(kept, unknown(table, said, rows))
        if counts["outdated"]:
            wrong["outdated"] = rows.where("outdated").select("id")
        if counts["ids"] < counts["keys"]:
            wrong["moved"] = rows.groupBy("id").agg(F.count("*").alias("places")).where("places > 1").select("id")
        return Folded(
            {kind: ids for kind, ids in wrong.items() if not ids.isEmpty()}, {**seen.get, "keys": counts["keys"]}
        )

    def _persisted(self, kept: ExitStack, frame: DataFrame) -> DataFrame:
        kept.callback(frame.persist().unpersist)
        return frame


def _counts() -> list[Column]:
    """What `Folded` counts, of `log_rows.SAID`."""
    each = {f"{kind}s" if kind == TOMBSTONE else kind: F.col("says") == kind for kind in (TOMBSTONE, *COUNTED)}
    return [F.count_if(condition).alias(name) for name, condition in {"records": F.lit(True), **each}.items()]


def newest(said: DataFrame) -> DataFrame:
    """Of `log_rows.SAID` what the newest living record of each key makes of its row.

    Out: id string, partition int, outdated boolean, partial boolean (it lacks a value). A key of which nothing lives
         has a row all the same. The offset is the only order: a key lives in one partition.
    """
    living = F.when(F.col("living"), F.col("offset"))
    states = {"outdated": F.col("outdated"), "partial": F.col("missing").isNotNull()}
    folded = (F.coalesce(F.max_by(state, living), F.lit(False)).alias(name) for name, state in states.items())
    return said.where("id IS NOT NULL").groupBy("id", "partition").agg(*folded)


def unknown(table: Table, said: DataFrame, rows: DataFrame) -> DataFrame:
    """The ids of those partial rows of `newest` that a view which is empty couldn't complete, as `said` has them."""
    partial = rows.where("partial").select("id", "partition")
    changes = said.where((F.col("says") == UNREADABLE) | F.col("living"))
    chains = changes.join(partial, ["id", "partition"], "left_semi").repartition("id", "partition")
    ordered = chains.sortWithinPartitions("id", "partition", "offset")
    return ordered.mapInArrow(freeze_gc_after(log_rows.unknown(table)), "id string")


def _of_keys(kind: str, ids: DataFrame) -> Finding:
    named = ids.orderBy("id").limit(KEYS).collect()
    return of_rows(kind, ids.count(), tuple(row["id"] for row in named))
