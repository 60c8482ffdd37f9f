"""A merge into a large mirror: rows that are replaced are looked for once, and their places marked as deleted.

Delta's MERGE reads all of the mirror three times: which files hold such rows, where in them, what becomes of them. Here
a change brings its row as a whole, so the place is all there is to find. Marks are made and stored by Delta's own code.
Each merge leaves some small files and some with fewer rows: now and then one makes large ones of them.
"""

import json
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from cdc.change import Stored
from sinks import delta_files, delta_log, delta_vectors
from sinks.delta_commits import APPLICATION, contended
from sinks.delta_write import GONE, first

if TYPE_CHECKING:
    import deltalake
    from deltalake.transaction import AddAction
    from pyspark.sql import DataFrame, SparkSession

LOOKING = {
    # All ids are read: of ten million rows in a second when compiled.
    "spark.sql.codegen.wholeStage": "true",
    "spark.sql.codegen.factoryMode": "FALLBACK",
    # The ids of a batch's rows go to every task, else all of the mirror's would be sorted.
    "spark.sql.autoBroadcastJoinThreshold": str(64 * 2**20),
}
"""Session settings: a query takes no options."""
SMALL_BYTES = 8 * 2**20
"""A file that has less than this in rows that aren't marked is one to be gathered."""
MANY = 32
"""So many of them are gathered: each is opened by every merge and every query."""
AT_ONCE_BYTES, LARGE = 64 * 2**20, 2
"""No more than this is gathered by one merge, in some seconds, to so many files."""
_SETTINGS = threading.Lock()


def merge(table: "deltalake.DeltaTable", folder: str, rows: "DataFrame", stored: Stored, number: int) -> None:
    """Put rows (`delta_write.changed`) in the place of those of the same id, in one commit with position and number.

    Raises SinkUnavailable when another commit comes in between.
    """
    spark = rows.sparkSession
    delta_files.extend(table, rows.drop(GONE))
    if delta_files.MARKS not in delta_files.features(table):
        delta_vectors.ask(spark, folder, [delta_files.MARKS])
    transaction = delta_log.begin(spark, folder)
    if max(transaction.txnVersion(APPLICATION), 0) != number - 1:
        raise contended()
    files = _files(transaction)
    scattered = _scattered(files)
    rows.persist()
    try:
        # First, for then Spark knows whether the ids are few enough to go to every task.
        new = delta_files.written(table.table_uri, first(rows), table.schema())
        ids = rows.select("_cdc_id")
        with _set(spark):
            actions = _marked(transaction, [file for file in files if file not in scattered], ids)
            if scattered:
                left = _read(transaction, scattered, spark).join(ids, "_cdc_id", "left_anti")
                new += delta_files.written(table.table_uri, left.coalesce(LARGE), table.schema())
    finally:
        rows.unpersist()
    actions += [file.action.remove() for file in scattered]
    delta = delta_log.package(spark)
    actions += [delta_log.single(delta.actions, "Action").fromJson(_add(file)) for file in new]
    # Not a MERGE, which has to tell figures that its own plan counts.
    updated = spark._jvm.org.apache.spark.sql.streaming.OutputMode.Update()  # type: ignore[union-attr]
    told = delta_log.some(spark, stored.to_json())
    operation = delta.DeltaOperations.StreamingUpdate(updated, stored.writer, number, told)
    delta_log.commit(spark, transaction, actions, operation, number)


@dataclass(frozen=True, eq=False)
class _File:
    """A file of the mirror: Delta's own word for it, its URI, its marks as text, the bytes of the rows without one."""

    action: Any
    path: str
    marks: str | None
    left: float


def _files(transaction: Any) -> list[_File]:
    files, log = [], transaction.deltaLog()
    for action in delta_log.files(transaction.snapshot()):
        said, marks = json.loads(action.json())["add"], action.deletionVector()
        gone = marks.cardinality() / json.loads(said["stats"])["numRecords"] if marks else 0
        path = action.absolutePath(log).toUri().toString()
        files.append(_File(action, path, marks and marks.serializeToBase64(), said["size"] * (1 - gone)))
    return files


def _scattered(files: Sequence[_File]) -> list[_File]:
    """The files to gather: none until there are many."""
    small = sorted((file for file in files if file.left < SMALL_BYTES), key=lambda file: file.left)
    upto = accumulate(file.left for file in small)
    return [file for file, sum_ in zip(small, upto, strict=True) if sum_ < AT_ONCE_BYTES] if len(small) >= MANY else []


def _marked(transaction: Any, files: Sequence[_File], ids: "DataFrame") -> list[Any]:
    """What a commit says of those files that hold rows of these ids: without those rows from now on."""
    from pyspark.sql import functions as F

    spark = ids.sparkSession
    known = [(file.path, file.marks) for file in files if file.marks]
    marks = spark.createDataFrame(known, "path string, marks string")
    # Found by hash, a quarter sooner than by text; then compared, but not by `=`, which Spark would find them by.
    mirror = _read(transaction, files, spark).selectExpr("_cdc_id", "_metadata", "xxhash64(_cdc_id) AS hash").alias("t")
    wanted = ids.selectExpr("_cdc_id", "xxhash64(_cdc_id) AS hash").alias("s")
    same = F.expr("t.hash = s.hash AND t._cdc_id <= s._cdc_id AND t._cdc_id >= s._cdc_id")
    found = mirror.join(wanted, same, "left_semi").selectExpr("_metadata.file_path", "_metadata.row_index")
    # Names that Delta's own code goes by.
    places = found.join(F.broadcast(marks), found["file_path"] == marks["path"], "left").selectExpr(
        "file_path AS filePath", "row_index AS rowIndexCol", "marks AS deletionVectorId"
    )
    generator = delta_log.single(delta_log.package(spark).commands, "DeletionVectorBitmapGenerator")
    made = generator.buildDeletionVectors(spark._jsparkSession, places._jdf, transaction.deltaLog(), 0)
    named, actions = {file.path: file.action for file in files}, []
    for one in delta_log.items(spark, made):
        file, vector = named[one.filePath()], one.deletionVector()
        kept, gone = delta_log.items(spark, file.removeRows(vector, True, True).productIterator().toSeq())
        actions += [gone] if file.numPhysicalRecords().get() == vector.cardinality() else [gone, kept]
    return actions


def _read(transaction: Any, files: Sequence[_File], spark: "SparkSession") -> "DataFrame":
    """The rows of some files as the transaction sees them."""
    from pyspark.sql import DataFrame

    named = delta_log.seq(spark, [file.action for file in files])
    held = transaction.deltaLog().createDataFrame(transaction.snapshot(), named, False, *delta_log.none(spark, 1))
    return DataFrame(held, spark)


def _add(file: "AddAction") -> str:
    named = {"path": file.path, "partitionValues": {}, "size": file.size, "stats": file.stats}
    return json.dumps({"add": {**named, "modificationTime": file.modification_time, "dataChange": True}})


@contextmanager
def _set(spark: "SparkSession") -> Iterator[None]:
    with _SETTINGS:
        before = {name: str(spark.conf.get(name)) for name in LOOKING}
        try:
            for name, value in LOOKING.items():
                spark.conf.set(name, value)
            yield
        finally:
            for name, old in before.items():
                spark.conf.set(name, old)
