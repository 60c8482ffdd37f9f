"""Delta Lake: per table a folder <path>/<schema>.<table> with `changes` (every event) and `mirror` (current rows).

Each of the two has its own position, in the metadata of the very commit that brought its rows; what lies below it is
filtered out before the write. The commit is a compare-and-set on a transaction number of the table: a second writer's
commit either conflicts or is skipped, and is told apart by reading the position again.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import reduce
from pathlib import Path
from typing import TYPE_CHECKING

import deltalake

from cdc.change import Advance, Applied, Form, Position, Stored, Table
from cdc.errors import SinkRejected, SinkUnavailable
from cdc.sink import Batch, mismatch, stored_after

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

APPLICATION = "cdc"
"""The name under which our commits are numbered in a Delta table (its `txn` actions)."""
METADATA = "spark.databricks.delta.commitInfo.userMetadata"
NUMBER = ("spark.databricks.delta.write.txnAppId", "spark.databricks.delta.write.txnVersion")
PROPERTIES = {"delta.enableDeletionVectors": "true"}
KINDS = ("changes", "mirror")


@dataclass(frozen=True)
class Found:
    """What the last commit of ours says of one Delta table; number orders our commits."""

    stored: Stored | None
    number: int


class Delta:
    form: Form = "events"

    def __init__(self, name: str, path: str, pipeline: str) -> None:
        self.name, self.path, self.pipeline = name, path.rstrip("/"), pipeline
        self._open: dict[str, deltalake.DeltaTable] = {}
        self._left: dict[str, Stored | None] = {}

    def prepare(self, table: Table) -> None:
        """Refuse a folder that can't be written; the Delta tables themselves come with their first commit."""
        if "://" in self.path:
            return
        try:
            Path(self.path, table.qualified).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise SinkRejected(
                f"The warehouse folder {self.path} can't be written: {error.strerror}.",
                hint="see the sink's path",
            ) from None

    def position(self, table: Table) -> Stored | None:
        """The older of the two positions: where reading has to start again."""
        found = {kind: self._found(self.folder(table, kind)).stored for kind in KINDS}
        self._left |= {self.folder(table, kind): stored for kind, stored in found.items()}
        return _older(found["changes"], found["mirror"])

    def apply(self, batch: Batch) -> Mapping[str, Applied]:
        batch.events.persist()
        try:
            counts = _counts(batch)
            return {
                advance.table.qualified: self._apply_table(batch, advance, counts.get(advance.table.topic, Applied()))
                for advance in batch.advances
            }
        finally:
            batch.events.unpersist()

    def scan(self, table: Table, spark: "SparkSession") -> "DataFrame":
        from pyspark.sql import functions as F

        from cdc import rows

        folder = self.folder(table, "mirror")
        if self._found(folder).stored is None:
            return spark.createDataFrame([], "id string, document string")
        mirror = spark.read.format("delta").load(folder)
        return mirror.select(F.col("_cdc_id").alias("id"), rows.document_of_columns(table).alias("document"))

    def close(self) -> None:
        self._open.clear()

    def folder(self, table: Table, kind: str) -> str:
        return f"{self.path}/{table.qualified}/{kind}"

    def _apply_table(self, batch: Batch, advance: Advance, counted: Applied) -> Applied:
        """Append the events first, then merge the rows, so that the older position is never ahead of either."""
        table = advance.table
        found = {kind: self._found(self.folder(table, kind)) for kind in KINDS}
        due = [kind for kind in KINDS if not _left_by(batch.writer, found[kind].stored, advance.until)]
        if not due:
            return Applied()
        if self.folder(table, "mirror") not in self._left:
            self.position(table)
        expected = _older(*(self._left[self.folder(table, kind)] for kind in KINDS))
        if _position(expected) != advance.start:
            raise mismatch(table, advance.start, _position(expected), ours=False)
        for kind in due:
            folder, before = self.folder(table, kind), found[kind]
            self._unmoved(folder, advance, before.stored, batch.writer)
            stored = stored_after(advance, before.stored, counted, batch.writer)
            with _numbered(batch.events.sparkSession, stored, before.number + 1):
                write = self._append if kind == "changes" else self._merge
                write(folder, batch, advance, before.stored)
            after = self._found(folder).stored
            if after is None or not _left_by(batch.writer, after, advance.until):
                raise mismatch(table, advance.until, _position(after), ours=False)
            self._left[folder] = after
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
        own = ("id", "op", "partition", "offset", "lsn")
        named = [F.col(name).alias(f"_cdc_{name}") for name in own]
        events = _unseen(batch.events, advance, stored).where(F.col("op").isNotNull())
        # Of a deleted row only the key is known for sure.
        events = events.withColumn("row", F.coalesce("after", "key"))
        _write(events.select(*named, commit, *row), folder)

    def _merge(self, folder: str, batch: Batch, advance: Advance, stored: Stored | None) -> None:
        """Bring the rows in. A view without a position takes them as they are: nothing can match."""
        from delta.tables import DeltaTable
        from pyspark.sql import functions as F

        from cdc import rows

        named = [F.col(name).alias(f"_cdc_{name}") for name in ("id", "partition", "offset")]
        row = rows.columns(advance.table, "after")
        gone = F.col("after").isNull().alias("_cdc_gone")
        source = _unseen(batch.changes, advance, stored).select(*named, *row, gone)
        if stored is None:
            _write(source.where(~F.col("_cdc_gone")).drop("_cdc_gone"), folder)
            return
        values: dict[str, str | Column] = {
            rows.quoted(name): f"s.{rows.quoted(name)}" for name in source.columns if name != "_cdc_gone"
        }
        target = DeltaTable.forPath(source.sparkSession, folder)
        (
            target.alias("t")
            .merge(source.alias("s"), "t._cdc_id = s._cdc_id")
            .whenMatchedDelete("s._cdc_gone")
            .whenMatchedUpdate(set=values)
            .whenNotMatchedInsert("NOT s._cdc_gone", values=values)
            .execute()
        )

    def _found(self, folder: str) -> Found:
        """Our last commit; commits of others (OPTIMIZE, VACUUM) may lie above it."""
        table = self._table(folder)
        if table is None:
            return Found(None, 0)
        number = table.transaction_version(APPLICATION) or 0
        for depth in (1, 100, None):
            for commit in table.history(depth):
                text = commit.get("userMetadata") or ""
                if text.startswith(Stored.MARK):
                    return Found(Stored.from_json(text), number)
        if number == 0:
            return Found(None, 0)
        raise SinkRejected(
            f"The Delta table {folder} has lost the commit that held its position.",
            hint="rebuild it: move the folder away and start `cdc run` again",
            sink=self.name,
        )

    def _table(self, folder: str) -> deltalake.DeltaTable | None:
        try:
            if folder in self._open:
                self._open[folder].update_incremental()
            else:
                self._open[folder] = deltalake.DeltaTable(folder)
        except deltalake.exceptions.TableNotFoundError:
            self._open.pop(folder, None)
            return None
        return self._open[folder]


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


def _counts(batch: Batch) -> dict[str, Applied]:
    """Rows to write and to delete per topic; also fills the cache that the writes read."""
    from pyspark.sql import functions as F

    rows = batch.changes.groupBy("topic").agg(F.count("after"), F.count(F.when(F.col("after").isNull(), 1))).collect()
    return {topic: Applied(written=written, deleted=deleted) for topic, written, deleted in rows}


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


@contextmanager
def _numbered(spark: "SparkSession", stored: Stored, number: int) -> Iterator[None]:
    """Put the position and our number into the commits made inside.

    Session settings, because MERGE takes no options; so one batch writes its tables one after the other.
    """
    from delta.exceptions import DeltaConcurrentModificationException

    settings = {METADATA: stored.to_json(), NUMBER[0]: APPLICATION, NUMBER[1]: str(number)}
    for name, value in settings.items():
        spark.conf.set(name, value)
    try:
        yield
    except DeltaConcurrentModificationException:
        raise SinkUnavailable(
            "Somebody else committed to the Delta table at the same time.",
            hint="nothing to do: it is tried again",
        ) from None
    finally:
        for name in settings:
            spark.conf.unset(name)
