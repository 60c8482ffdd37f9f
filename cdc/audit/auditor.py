"""Audit: whether the log can still rebuild the views, and if not, for which keys.

In:  a table's topic, read once and folded as a rebuild would; the topic's settings; the views'
     positions.
Out: findings. Rows stay with Spark's executors, which assess each record by itself
(`cdc.codec.log_rows`); Spark folds the assessments by key. Only counts and keys come back.
"""

import itertools
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import reduce
from typing import Any

from pyspark.sql import Column, DataFrame, Observation, SparkSession
from pyspark.sql import functions as F

from cdc.codec import log_rows
from cdc.codec.decode_options import DecodeOptions
from cdc.codec.log_rows import FOREIGN, KEYLESS, ROW, TOMBSTONE, UNREADABLE, RecordClassifier
from cdc.config.settings import Pipeline
from cdc.control.control_topics import Control
from cdc.kafka.log_continuity import RETENTION, Continuity
from cdc.kafka.log_refusals import Discontinued, shape_errors
from cdc.kafka.topic_setup import COMPACTION_LAG, topic_specs
from cdc.kafka.topics import Topics
from cdc.model.finding import Finding, find
from cdc.model.position import Position, ViewCheckpoint
from cdc.model.table import Table
from cdc.postgres.schema_changes import last_silent_change_lsn
from cdc.sink.contract import Archive, Sink
from cdc.sink.lane_run import freeze_gc_after
from cdc.spark import kafka_source
from cdc.verify.backfill import backfill

IDS_PER_BACKFILL = 1000
UNMASKED = "unmasked"
COUNTED = {
    KEYLESS: "topic-unfit/keyless",
    FOREIGN: "topic-unfit/foreign",
    UNREADABLE: "records-unreadable",
    UNMASKED: "topic-unfit/unmasked",
}
"""What a record is said to be, with the key of its flaw."""
REPAIRABLE = (
    "records-incomplete/values",
    "records-incomplete/outdated",
    "records-incomplete/unmasked",
)
CONTROL_TABLES = ("cdc.truncation", "cdc.ddl")
"""Tables of the control schema whose topics a replay reads as well."""


MAX_KEYS = 100
"""Most keys that a finding lists; its count is of all."""
RENEW_HINT = "cdc -p FILE topics renew --table TABLE; then rebuild its views"
# The defect of the rows or records, and the next command. --repair mends the first three.
ROW_DEFECTS: Mapping[str, tuple[str, str]] = {
    "records-incomplete/values": (
        "rows have a value that no record carries any more",
        "cdc -p FILE topics audit --repair; REPLICA IDENTITY FULL keeps it from coming back",
    ),
    "records-incomplete/outdated": (
        "rows have no record since the table's definition changed what they hold",
        "cdc -p FILE topics audit --repair; a run has all rows sent again by itself",
    ),
    "records-incomplete/unmasked": (
        "rows have a newest record that isn't masked as the file says",
        "cdc -p FILE register, then cdc -p FILE topics audit --repair",
    ),
    "topic-unfit/unmasked": (
        "records have values that aren't masked as the file says, until Kafka compacts them away",
        RENEW_HINT,
    ),
    "topic-unfit/moved": (
        "keys have records in several partitions, so that these have no order",
        RENEW_HINT,
    ),
    "topic-unfit/keyless": (
        "records have no key: compaction drops them, no view can apply them",
        RENEW_HINT,
    ),
    "topic-unfit/foreign": ("records have another key than the table", RENEW_HINT),
    "records-unreadable": (
        "records are no changes that the views can hold",
        "a rebuild puts them into quarantine: cdc -p FILE quarantine list",
    ),
}
TOPIC_HINTS: Mapping[str, str] = {
    "topic-missing": "cdc -p FILE register",
    "topic-unfit/truncated": RENEW_HINT,
    f"setting-differs/{RETENTION}": "cdc -p FILE topics: it brings the topic up to the file",
    f"setting-differs/{COMPACTION_LAG}": "cdc -p FILE topics: it brings the topic up to the file",
    "changes-incomplete": "a longer changes_retention_hours in the pipeline file, then cdc -p FILE topics, "
    "keeps it from coming again",
}
"""The next command for a topic."""
WARNINGS = (
    "records-unreadable",
    "topic-unfit/unmasked",
    f"setting-differs/{RETENTION}",
    f"setting-differs/{COMPACTION_LAG}",
    "changes-incomplete",
)


@dataclass(frozen=True)
class Flaw:
    """What a topic or a view lacks: a defect, or no more than a warning.

    `key` is its key in the catalogue of findings. `count` counts rows, keys, records, partitions or
    views: `what` says which. `sink`: whose view it is about.
    """

    key: str
    count: int
    what: str
    hint: str
    keys: tuple[str, ...] = ()
    sink: str | None = None

    def for_table(self, table: str) -> "Flaw":
        """Fill the table's name into the hint."""
        return replace(self, hint=self.hint.replace("--table TABLE", f"--table {table}"))

    def finding(self, table: str) -> Finding:
        """Make the finding on a table that every report shows."""
        message = f"{table}: {self.what.rstrip('.')}."
        made = find(self.key, table, message, self.hint, table=table, sink=self.sink)
        return replace(made, count=self.count, keys=self.keys)

    @property
    def defect(self) -> bool:
        """Whether a view is wrong, or one built from the log would be, or couldn't be built."""
        return self.key not in WARNINGS


@dataclass(frozen=True)
class Audit:
    """The audit of one table's topic. Records are those that a read_committed reader gets."""

    table: str
    topic: str
    flaws: tuple[Flaw, ...] = ()
    records: int = 0
    keys: int = 0
    tombstones: int = 0
    repaired: int = 0
    """Rows that were sent again before this audit."""

    @property
    def defects(self) -> list[Flaw]:
        """What is more than a warning."""
        return [flaw for flaw in self.flaws if flaw.defect]

    @property
    def findings(self) -> list[Finding]:
        return [flaw.finding(self.table) for flaw in self.flaws]

    @property
    def replayable(self) -> bool:
        """Whether a view that is built from the log now would be right."""
        return all(defect.key == "view-stopped" for defect in self.defects)

    @property
    def saved(self) -> int:
        """Records that a compaction would remove.

        Tombstones that it keeps for a while aren't among them.
        """
        return max(0, self.records - self.keys)

    @property
    def dirty_ratio(self) -> float:
        """The share of `saved` in all records, 0 to 1."""
        return round(self.saved / self.records, 4) if self.records else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Return the fields of a report, with those that are derived."""
        fields = asdict(replace(self, flaws=()))
        del fields["flaws"]
        findings = zip(self.findings, self.flaws, strict=True)
        return {
            **fields,
            "findings": [{**asdict(finding), "defect": flaw.defect} for finding, flaw in findings],
            "saved": self.saved,
            "dirty_ratio": self.dirty_ratio,
            "replayable": self.replayable,
        }


class Auditor:
    """Audits tables, one topic at a time.

    Every method raises ConnectorError where a topic can't be read.
    """

    def __init__(
        self,
        spark: SparkSession,
        pipeline: Pipeline,
        kafka: Topics,
        placeholder: str,
        sinks: Sequence[Sink],
    ) -> None:
        self._spark = spark
        self._pipeline = pipeline
        self._kafka = kafka
        self._sinks = sinks
        self._placeholder = placeholder

    def audit(self, table: Table, repair_s: float | None = None) -> Audit:
        """Audit a table's topic: find what would make a rebuild of its views wrong.

        With `repair_s`, the seconds to wait, the rows that a new record repairs are sent again; the
        audit is then made once more, and has the findings that remain.

        Raises:
            SinkError: a view's position can't be read. SourceError, ConnectorError: see
            `backfill.backfill`.
        """
        flaws = topic_flaws(self._kafka, self._pipeline, table)
        if any(flaw.key == "topic-missing" for flaw in flaws):
            return Audit(table.qualified, table.topic, flaws=tuple(flaws))
        checkpoints = {
            sink.name: sink.position(table) for sink in self._sinks if table.is_in(sink.name)
        }
        flaws += view_flaws(self._kafka, self._pipeline, table, checkpoints)
        with ExitStack() as frames:
            wrong, counts = self._fold_topic(table, frames)
            damaged = [ids for key, ids in wrong.items() if key in REPAIRABLE]
            repaired = 0
            if damaged and repair_s is not None:
                repaired = self._backfill_damaged(table, damaged, repair_s)
            if not repaired:
                flaws += [_key_flaw(key, ids) for key, ids in wrong.items()]
        if repaired:
            return replace(self.audit(table), repaired=repaired)
        flaws += [row_flaw(key, counts[kind]) for kind, key in COUNTED.items() if counts[kind]]
        flaws = [flaw.for_table(table.qualified) for flaw in flaws]
        flaws.sort(key=lambda flaw: not flaw.defect)
        numbers = (counts[name] for name in ("records", "keys", "tombstones"))
        return Audit(table.qualified, table.topic, tuple(flaws), *numbers)

    def _backfill_damaged(
        self, table: Table, damaged: Sequence[DataFrame], timeout_s: float
    ) -> int:
        deadline = time.monotonic() + timeout_s
        total = 0
        listed = reduce(DataFrame.union, damaged).distinct().toLocalIterator()
        while ids := [row["id"] for row in itertools.islice(listed, IDS_PER_BACKFILL)]:
            remaining_s = deadline - time.monotonic()
            total += backfill(self._pipeline, self._kafka, table, ids, timeout_s=remaining_s)
        return total

    def _fold_topic(
        self, table: Table, frames: ExitStack
    ) -> tuple[Mapping[str, DataFrame], Mapping[str, int]]:
        """Read a topic once. Returns by key of the flaw, where there are any, frames of id string: the rows that a
        rebuild would get wrong; and counts of records, tombstones and keys, and of records with a
        defect of their own, by COUNTED.
        """
        assessments = self._persist(frames, self._assess(table))
        observation = Observation()
        rows = self._persist(
            frames, newest_states(assessments.observe(observation, *_count_columns()))
        )
        (counts,) = rows.agg(
            F.count("*").alias("keys"),
            F.count_distinct("id").alias("ids"),
            F.count_if("outdated").alias("outdated"),
            F.count_if("partial").alias("partial"),
            F.count_if("unmasked").alias("unmasked"),
        ).collect()
        wrong = {}
        if counts["partial"]:
            wrong["records-incomplete/values"] = self._persist(
                frames, unrecoverable_ids(table, assessments, rows)
            )
        if counts["outdated"]:
            wrong["records-incomplete/outdated"] = rows.where("outdated").select("id")
        if counts["unmasked"]:
            wrong["records-incomplete/unmasked"] = rows.where("unmasked").select("id")
        if counts["ids"] < counts["keys"]:
            places = rows.groupBy("id").agg(F.count("*").alias("places"))
            wrong["topic-unfit/moved"] = places.where("places > 1").select("id")
        wrong = {key: ids for key, ids in wrong.items() if not ids.isEmpty()}
        return wrong, {**observation.get, "keys": counts["keys"]}

    def _assess(self, table: Table) -> DataFrame:
        """Assess each record of the topic by itself: `log_rows.SUMMARY`."""
        end = self._kafka.ends([table.topic])[table.topic]
        control = Control(self._pipeline, self._kafka)
        control.read()
        floors = {table.topic: control.floors.lsn(table.qualified)}
        start_offsets = {table.topic: control.registration.start(table.topic, end.topic_id)}
        reading = DecodeOptions(self._placeholder, floors, start_offsets)
        classifier = RecordClassifier(
            table,
            reading,
            # Values that only a warehouse can't hold are no defect where no warehouse has their column.
            tuple(
                table.for_sink(sink.name)
                for sink in self._sinks
                if isinstance(sink, Archive) and table.is_in(sink.name)
            ),
            last_silent_change_lsn(
                control.definitions,
                table.qualified,
                {
                    f"{table.qualified}.{column.name}": column.mask
                    for column in table.columns
                    if column.mask
                },
            ),
        )
        topic_records = kafka_source.read_until(
            self._spark, self._pipeline.kafka, {table.topic: end}
        )
        classify = freeze_gc_after(classifier.work)
        return topic_records.select(*log_rows.RECORDS).mapInArrow(classify, log_rows.SUMMARY)

    def _persist(self, frames: ExitStack, frame: DataFrame) -> DataFrame:
        frames.callback(frame.persist().unpersist)
        return frame


def _count_columns() -> list[Column]:
    """Columns that count records, over frames of `log_rows.SUMMARY`."""
    conditions = {"records": F.lit(True), f"{TOMBSTONE}s": F.col("says") == TOMBSTONE}
    conditions |= {kind: F.col("says") == kind for kind in COUNTED}
    # A record says something else, too.
    conditions[UNMASKED] = F.col("unmasked")
    return [F.count_if(condition).alias(name) for name, condition in conditions.items()]


def newest_states(assessments: DataFrame) -> DataFrame:
    """Fold assessments (`log_rows.SUMMARY`) to the state of the newest living record of each key.

    Out: id string, partition int, outdated boolean, partial boolean (it lacks a value), unmasked
    boolean (it has a value that the file masks). A key without a living record has a row, too. The
    offset is the only order: a key lives in one partition.
    """
    living = F.when(F.col("living"), F.col("offset"))
    states = {
        "outdated": F.col("outdated"),
        "partial": F.col("missing").isNotNull(),
        "unmasked": F.col("unmasked") & (F.col("says") == ROW),
    }
    columns = (
        F.coalesce(F.max_by(state, living), F.lit(False)).alias(name)
        for name, state in states.items()
    )
    return assessments.where("id IS NOT NULL").groupBy("id", "partition").agg(*columns)


def unrecoverable_ids(table: Table, assessments: DataFrame, rows: DataFrame) -> DataFrame:
    """Return the ids of partial rows that older records can't complete in an empty view.

    `rows` come from `newest_states`.
    """
    partial = rows.where("partial").select("id", "partition")
    changes = assessments.where((F.col("says") == UNREADABLE) | F.col("living"))
    chains = changes.join(partial, ["id", "partition"], "left_semi").repartition("id", "partition")
    ordered = chains.sortWithinPartitions("id", "partition", "offset")
    return ordered.mapInArrow(freeze_gc_after(log_rows.unknown(table)), "id string")


def row_flaw(key: str, count: int, keys: tuple[str, ...] = ()) -> Flaw:
    """Describe rows or records with one of ROW_DEFECTS."""
    what, hint = ROW_DEFECTS[key]
    return Flaw(key, count, f"{count:,} {what}", hint, keys)


def _key_flaw(key: str, ids: DataFrame) -> Flaw:
    listed = ids.orderBy("id").limit(MAX_KEYS).collect()
    return row_flaw(key, ids.count(), tuple(row["id"] for row in listed))


def topic_flaws(kafka: Topics, pipeline: Pipeline, table: Table) -> list[Flaw]:
    """Check the settings of a table's topic, and of the control topics that a replay needs."""
    topics = [table.topic, *map(pipeline.topic, CONTROL_TABLES)]
    existing = kafka.existing(topics)
    flaws = [
        _topic_flaw("topic-missing", 1, f"there is no topic {topic}")
        for topic in topics
        if topic not in existing
    ]
    present = [topic for topic in topics if topic in existing]
    settings = kafka.settings(present)
    starts = kafka.starts(present)
    specs = topic_specs(pipeline)
    for topic in present:
        flaws += _shape_flaws(topic, specs[topic], starts[topic], settings[topic]["cleanup.policy"])
    if table.topic in existing:
        sinks = [sink for sink in pipeline.sinks if table.is_in(sink)]
        requirements = (
            ("tombstones", RETENTION, pipeline.delete_retention_hours),
            ("superseded records", COMPACTION_LAG, pipeline.changes_kept_s(sinks) / 3600),
        )
        for subject, name, required_h in requirements:
            actual_h = int(settings[table.topic][name]) / 3_600_000
            if actual_h < required_h:
                what = f"{subject} are kept for {actual_h:g} h, the pipeline file says {required_h:g} h"
                flaws.append(_topic_flaw(f"setting-differs/{name}", 1, what))
    return flaws


def view_flaws(
    kafka: Topics, pipeline: Pipeline, table: Table, views: Mapping[str, ViewCheckpoint | None]
) -> list[Flaw]:
    """Find views that the log can't continue, or that may have missed deletes."""
    continuity = Continuity(pipeline, kafka).read([table.topic])
    continuity.load_next_records((table, checkpoint) for checkpoint in views.values())
    flaws = [
        _topic_flaw(
            "changes-incomplete",
            1,
            f"the log of changes in {name} may lack superseded records: {hole}",
            name,
        )
        for name in views
        for hole in continuity.ledger.holes(name, table.topic)
        if hole.end.topic_id == continuity.logs[table.topic].end.topic_id
    ]
    for name, checkpoint in views.items():
        if checkpoint is None:
            continue
        try:
            continuity.refuse(name, table, checkpoint)
        except Discontinued as error:
            what = f"view {name}: {error.message}"
            flaws.append(Flaw(error.kind, 1, what, error.hint, sink=name))
    return flaws


def _shape_flaws(topic: str, partitions: int, start: Position, policy: str) -> Iterator[Flaw]:
    for error in shape_errors(topic, partitions, start.partition_count, policy):
        yield Flaw(str(error.finding_key), 1, error.message, error.hint)
    if lost := sum(offset > 0 for offset in start.offsets):
        what = f"{lost} partitions of {topic} no longer hold their first records"
        yield _topic_flaw("topic-unfit/truncated", lost, what)


def _topic_flaw(key: str, count: int, what: str, sink: str | None = None) -> Flaw:
    return Flaw(key, count, what, TOPIC_HINTS[key], sink=sink)
