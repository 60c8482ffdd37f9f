"""Whether the log can still make the views again, and if not, for which keys.

In:  a table's topic, read once and folded as a rebuild would; the topic's settings; where the views stand.
Out: findings. Rows stay with Spark's executors: only counts and keys come back.
"""

import itertools
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import reduce

from pyspark.sql import Column, DataFrame, Observation, SparkSession
from pyspark.sql import functions as F

from cdc import decode, log, order
from cdc.change import Form, Table
from cdc.control import Control
from cdc.ddl import unsent_below
from cdc.decode import Reading
from cdc.finding import KEYS, REPAIRABLE, Audit, Finding, of_rows
from cdc.reemit import reemit
from cdc.settings import Pipeline
from cdc.sink import Sink
from cdc.topic_state import of_topics, of_views
from cdc.topics import Topics
from cdc.unknown import unknown

IDS_AT_ONCE = 1000
COUNTED = ("keyless", "foreign", "unreadable")


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
        self._holds: Form = "events" if any(sink.form == "events" for sink in sinks) else "documents"

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
            sent += reemit(self._pipeline, self._kafka, table, ids, timeout_s=left_s)
        return sent

    def _folded(self, table: Table, kept: ExitStack) -> Folded:
        end = self._kafka.ends([table.topic])[table.topic]
        control = Control(self._pipeline, self._kafka)
        control.read()
        floors = {table.topic: control.floors.lsn(table.qualified)}
        since = {table.topic: control.registration.start(table.topic, end.topic_id)}
        reading = Reading(self._placeholder, floors, since, careful=True, holds=self._holds)
        read = log.records(self._spark, self._pipeline.kafka, {table.topic: end})
        changes, seen = decode.decoded(read, [table], "events", reading), Observation()
        own = changes.observe(seen, *_counts(table)).where(_own_key(table))
        rows = self._persisted(kept, _rows(own, sum(end.offsets), unsent_below(control.definitions, table.qualified)))
        (counts,) = rows.agg(
            F.count("*").alias("keys"),
            F.count_distinct("id").alias("ids"),
            F.count_if("outdated").alias("outdated"),
            F.count("incomplete").alias("incomplete"),
        ).collect()
        wrong = {}
        if counts["incomplete"]:
            incomplete = rows.where("incomplete IS NOT NULL").select("id", "incomplete.*")
            wrong["unknown"] = self._persisted(kept, incomplete.mapInArrow(unknown, "id string"))
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


def _own_key(table: Table) -> Column:
    """Whether a key holds the columns that identify a row of the table, and no others."""
    names = F.array_sort(F.json_object_keys("key")) == F.array(*(F.lit(name) for name in sorted(table.key)))
    return F.coalesce(names & F.col("id").isNotNull(), F.lit(False))


def _counts(table: Table) -> list[Column]:
    """What `Folded` counts, of `decode.decoded`, read carefully."""
    own, whole = _own_key(table), F.col("problem").isNull()
    counted = {
        "records": F.lit(True),
        "tombstones": own & whole & F.col("op").isNull(),
        "keyless": F.col("key").isNull(),
        "foreign": F.col("key").isNotNull() & ~own,
        "unreadable": own & ~whole,
    }
    return [F.count_if(condition).alias(name) for name, condition in counted.items()]


def _rows(changes: DataFrame, records: int, below: int) -> DataFrame:
    """The newest of each key: id string, outdated boolean, incomplete struct<after, kept, older>, see `order.fold`.

    `below` is the LSN from which on records are what the table's definition makes of them.
    """
    tasks = int(changes.sparkSession.conf.get("spark.sql.shuffle.partitions") or 1)
    folded = order.fold(changes, "events", records, tasks, further=["lsn"])
    lives = F.col("after").isNotNull()
    return folded.select(
        "id",
        (lives & F.coalesce(F.col("lsn") < below, F.lit(False))).alias("outdated"),
        F.when(lives & F.col("kept").isNotNull(), F.struct("after", "kept", "older")).alias("incomplete"),
    )


def _of_keys(kind: str, ids: DataFrame) -> Finding:
    named = ids.orderBy("id").limit(KEYS).collect()
    return of_rows(kind, ids.count(), tuple(row["id"] for row in named))
