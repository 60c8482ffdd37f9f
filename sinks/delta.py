"""Delta Lake: per table a folder <path>/<schema>.<table> with `changes` (every event) and `mirror` (current rows).

Each of the two has its own position, in the metadata of the very commit that brought its rows; what lies below it is
filtered out before the write. The commit is a compare-and-set on a transaction number of the table: a second writer's
commit either conflicts or is skipped, and is told apart by reading the position again.
"""

import json
from collections.abc import Mapping
from dataclasses import replace
from functools import reduce
from pathlib import Path
from typing import TYPE_CHECKING

from cdc.change import Advance, Applied, Form, Position, Stored, Table
from cdc.errors import SinkRejected, SinkUnavailable
from cdc.sink import Batch, Misfit, mismatch, stored_after
from sinks.delta_commits import CLEARED, Commits, numbered
from sinks.delta_types import column_type, delta_type

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

PROPERTIES = {"delta.enableDeletionVectors": "true", "mergeSchema": "true"}
KINDS = ("changes", "mirror")
VECTORS = "spark.databricks.delta.merge.deletionVectors.persistent"
REWRITTEN_BYTES = 32 * 2**20
"""A mirror smaller than this is rewritten where a merge touches it: that costs two thirds of what deletion vectors do,
and leaves few files."""


class Delta:
    form: Form = "events"

    def __init__(self, name: str, path: str, pipeline: str) -> None:
        self.name, self.path, self.pipeline = name, path.rstrip("/"), pipeline
        self._commits = Commits(name)
        self._left: dict[str, Stored | None] = {}

    def prepare(self, table: Table) -> None:
        """Refuse a folder that can't be written; the Delta tables themselves come with their first commit."""
        try:
            if "://" not in self.path:
                Path(self.path, table.qualified).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise SinkRejected(
                f"The warehouse folder {self.path} can't be written: {error.strerror}.",
                hint="see the sink's path",
            ) from None
        if any(self._misfits(table, kind) for kind in KINDS):
            raise Misfit(table, self.name)

    def position(self, table: Table) -> Stored | None:
        """The older of the two positions: where reading has to start again."""
        found = {kind: self._commits.found(self.folder(table, kind)).stored for kind in KINDS}
        self._left |= {self.folder(table, kind): stored for kind, stored in found.items()}
        return _older(found["changes"], found["mirror"])

    def apply(self, batch: Batch) -> Mapping[str, Applied]:
        batch.events.persist()
        try:
            counts = _counts(batch)
            return {
                advance.table.qualified: self._apply_table(batch, advance, *counts.get(advance.table.topic, NOTHING))
                for advance in batch.advances
            }
        finally:
            batch.events.unpersist()

    def clear(self, table: Table) -> None:
        """Empty the mirror in one commit. The log of changes stays, unless its columns can't take the table's."""
        from pyspark.errors import PySparkException
        from pyspark.sql import SparkSession

        spark = SparkSession.active()
        for kind in KINDS:
            folder = self.folder(table, kind)
            if self._commits.table(folder) is None or (kind == "changes" and not self._misfits(table, kind)):
                continue
            self._left.pop(folder, None)
            empty = spark.read.format("delta").load(folder).limit(0).select("_cdc_id")
            try:
                with numbered(spark, CLEARED, self._commits.found(folder).number + 1):
                    empty.write.format("delta").mode("overwrite").option("overwriteSchema", "true").save(folder)
            except (SinkUnavailable, PySparkException):
                # A running stream that finds a view without a position clears it as well; either will do.
                if self._commits.found(folder).stored is not None:
                    raise

    def scan(self, table: Table, spark: "SparkSession") -> "DataFrame":
        from pyspark.sql import functions as F

        from cdc import rows

        folder = self.folder(table, "mirror")
        if self._commits.found(folder).stored is None:
            return spark.createDataFrame([], "id string, document string")
        mirror = spark.read.format("delta").load(folder)
        # A column that has been added since is there once a row brings it.
        later = [column.name for column in table.columns if column.name not in mirror.columns]
        mirror = mirror.select("*", *(F.lit(None).cast(column_type(table, name)).alias(name) for name in later))
        return mirror.select(F.col("_cdc_id").alias("id"), rows.document_of_columns(table).alias("document"))

    def close(self) -> None:
        self._commits.close()

    def folder(self, table: Table, kind: str) -> str:
        return f"{self.path}/{table.qualified}/{kind}"

    def _apply_table(self, batch: Batch, advance: Advance, counted: Applied, partial: bool) -> Applied:
        """Append the events first, then merge the rows, so that the older position is never ahead of either."""
        table = advance.table
        found = {kind: self._commits.found(self.folder(table, kind)) for kind in KINDS}
        due = [
            kind for kind in KINDS if advance.repairs or not _left_by(batch.writer, found[kind].stored, advance.until)
        ]
        if not due:
            return Applied()
        if self.folder(table, "mirror") not in self._left:
            self.position(table)
        expected = _older(*(self._left[self.folder(table, kind)] for kind in KINDS))
        if _position(expected) != advance.start:
            raise mismatch(table, advance.start, _position(expected), ours=False)
        rows = self._rows(batch, advance, found["mirror"].stored, partial)
        for kind in due:
            folder, before = self.folder(table, kind), found[kind]
            self._unmoved(folder, advance, before.stored, batch.writer)
            stored = stored_after(advance, before.stored, counted, batch.writer)
            # A repair leaves no trace in the position: the stream that owns it goes on undisturbed.
            stored = before.stored if advance.repairs and before.stored else stored
            with numbered(batch.events.sparkSession, stored, before.number + 1):
                if kind == "changes":
                    self._append(folder, batch, advance, before.stored)
                else:
                    self._merge(folder, rows, before.stored, rewrite=self._commits.bytes(folder) < REWRITTEN_BYTES)
            after = self._commits.found(folder)
            if after.stored is None or (after.number, after.stored.position) != (before.number + 1, stored.position):
                raise mismatch(table, advance.until, _position(after.stored), ours=False)
            self._left[folder] = after.stored
        return counted

    def _unmoved(self, folder: str, advance: Advance, stored: Stored | None, writer: str) -> None:
        left = self._left[folder]
        if stored != left:
            ours = stored is None or stored.writer == writer
            raise mismatch(advance.table, _position(left), _position(stored), ours=ours)

    def _append(self, folder: str, batch: Batch, advance: Advance, stored: Stored | None) -> None:
        from pyspark.sql import functions as F

        from cdc import rows

        row = rows.columns(advance.table, "row")
        commit = F.timestamp_micros("commit_us").alias("_cdc_commit")
        own = ("id", "op", "partition", "offset", "lsn", "kept")
        named = [F.col(name).alias(f"_cdc_{name}") for name in own]
        events = _unseen(batch.events, advance, stored).where(F.col("op").isNotNull())
        # Of a deleted row only the key is known for sure.
        events = events.withColumn("row", F.coalesce("after", "key"))
        _write(events.select(*named, commit, *row), folder)

    def _rows(self, batch: Batch, advance: Advance, stored: Stored | None, partial: bool) -> "DataFrame":
        """What to merge: `_cdc_id`, `_cdc_partition`, `_cdc_offset`, the columns, `_cdc_gone` and `_cdc_view`."""
        from pyspark.sql import functions as F

        from cdc import rows
        from sinks import delta_partial

        table = advance.table
        changes = _unseen(batch.changes, advance, stored).where(F.col("offset").isNotNull())
        if partial:
            folder = None if stored is None else self.folder(table, "mirror")
            return delta_partial.completed(changes, table, folder, self.name)
        named = [F.col(name).alias(f"_cdc_{name}") for name in ("id", "partition", "offset")]
        return changes.select(
            *named,
            *rows.columns(table, "after"),
            F.col("after").isNull().alias("_cdc_gone"),
            F.lit(None).cast("array<string>").alias("_cdc_view"),
        )

    def _merge(self, folder: str, source: "DataFrame", stored: Stored | None, *, rewrite: bool) -> None:
        """Bring the rows in; `rewrite` files that hold them before, or else mark their rows as deleted.

        A view without a position takes them as they are: nothing can match.
        """
        from delta.tables import DeltaTable
        from pyspark.sql import functions as F

        from cdc.rows import quoted

        if stored is None:
            _write(source.where(~F.col("_cdc_gone")).drop("_cdc_gone", "_cdc_view"), folder)
            return
        target = DeltaTable.forPath(source.sparkSession, folder)
        names = [name for name in source.columns if name not in ("_cdc_gone", "_cdc_view")]
        inserted: dict[str, str | Column] = {quoted(name): f"s.{quoted(name)}" for name in names}
        known = set(target.toDF().columns)
        updated: dict[str, str | Column] = {
            quoted(name): F.when(F.array_contains("s._cdc_view", name), F.col(f"t.{quoted(name)}")).otherwise(
                F.col(f"s.{quoted(name)}")
            )
            if name in known and not name.startswith("_cdc_")
            else f"s.{quoted(name)}"
            for name in names
        }
        source.sparkSession.conf.set(VECTORS, str(not rewrite).lower())
        (
            target.alias("t")
            .merge(source.alias("s"), "t._cdc_id = s._cdc_id")
            .withSchemaEvolution()
            .whenMatchedDelete("s._cdc_gone")
            .whenMatchedUpdate(set=updated)
            .whenNotMatchedInsert("NOT s._cdc_gone", values=inserted)
            .execute()
        )

    def _misfits(self, table: Table, kind: str) -> bool:
        """Whether a Delta table holds a column of another type than the source's has now."""
        found = self._commits.table(self.folder(table, kind))
        if found is None:
            return False
        held = {field.name: json.loads(field.type.to_json()) for field in found.schema().fields}
        wanted = {column.name: delta_type(column_type(table, column.name)) for column in table.columns}
        return any(type_ and held.get(name, type_) != type_ for name, type_ in wanted.items())


def _position(stored: Stored | None) -> Position | None:
    return stored.position if stored else None


def _left_by(writer: str, stored: Stored | None, position: Position) -> bool:
    return stored is not None and stored.writer == writer and stored.position == position


def _older(changes: Stored | None, mirror: Stored | None) -> Stored | None:
    """Where reading has to start so that neither misses a record."""
    if changes is None or mirror is None:
        return None
    if changes.position.topic_id != mirror.position.topic_id:
        return mirror
    offsets = tuple(map(min, changes.position.offsets, mirror.position.offsets))
    return replace(mirror, position=Position(mirror.position.topic_id, offsets))


NOTHING = (Applied(), False)


def _counts(batch: Batch) -> dict[str, tuple[Applied, bool]]:
    """What becomes of each topic's records, and whether some lack values; fills the cache that the writes read."""
    from pyspark.sql import functions as F

    newest = F.col("offset").isNotNull()
    counted = batch.changes.groupBy("topic").agg(
        *(F.sum(name).alias(name) for name in ("records", "dead", "quarantined")),
        F.count_if(newest & F.col("after").isNotNull()).alias("written"),
        F.count_if(newest & F.col("after").isNull()).alias("deleted"),
        F.count("kept").alias("partial"),
    )
    result = {}
    for row in counted.collect():
        written, deleted, dead, quarantined = (row[name] for name in ("written", "deleted", "dead", "quarantined"))
        folded = row["records"] - written - deleted - dead - quarantined
        applied = Applied(row["records"], written, deleted, folded, dead, quarantined)
        result[row["topic"]] = applied, row["partial"] > 0
    return result


def _unseen(frame: "DataFrame", advance: Advance, stored: Stored | None) -> "DataFrame":
    """The table's rows that lie at or above a position of its own."""
    from pyspark.sql import functions as F

    mine = frame.where(F.col("topic") == advance.table.topic)
    if stored is None or stored.position == advance.start:
        return mine
    above = [(F.col("partition") != p) | (F.col("offset") >= at) for p, at in enumerate(stored.position.offsets)]
    return mine.where(reduce(lambda a, b: a & b, above))


def _write(frame: "DataFrame", folder: str) -> None:
    frame.write.format("delta").mode("append").options(**PROPERTIES).save(folder)
