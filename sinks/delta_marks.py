"""A merge into a large mirror: rows that are replaced are looked for once, and their places marked as deleted.

Delta's MERGE reads all of the mirror three times: which files hold such rows, where in them, what becomes of them. Here
a change brings its row as a whole, so the place is all there is to find. Marks are made and stored by Delta's own code.
"""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
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
    rows.persist()
    try:
        new = delta_files.written(table.table_uri, first(rows), table.schema())
        # Written first: by now Spark knows whether the ids are few enough to go to every task.
        with _set(spark):
            actions = _marked(transaction, folder, rows.select("_cdc_id"))
    finally:
        rows.unpersist()
    delta = delta_log.package(spark)
    actions += [delta_log.single(delta.actions, "Action").fromJson(_add(file)) for file in new]
    # Not a MERGE, which has to tell figures that its own plan counts.
    updated = spark._jvm.org.apache.spark.sql.streaming.OutputMode.Update()  # type: ignore[union-attr]
    told = delta_log.some(spark, stored.to_json())
    operation = delta.DeltaOperations.StreamingUpdate(updated, stored.writer, number, told)
    delta_log.commit(spark, transaction, actions, operation, number)


def _marked(transaction: Any, folder: str, ids: "DataFrame") -> list[Any]:
    """What a commit says of the files that hold rows of these ids: without those rows from now on."""
    from pyspark.sql import functions as F

    spark, log = ids.sparkSession, transaction.deltaLog()
    files = {file.absolutePath(log).toUri().toString(): file for file in delta_log.files(transaction.snapshot())}
    before = ((path, file.deletionVector()) for path, file in files.items())
    marks = spark.createDataFrame(
        [(path, vector.serializeToBase64()) for path, vector in before if vector], "path string, marks string"
    )
    mirror = spark.read.format("delta").load(folder).select("_cdc_id", "_metadata")
    found = mirror.join(ids, "_cdc_id", "left_semi").selectExpr("_metadata.file_path", "_metadata.row_index")
    # Names that Delta's own code goes by.
    places = found.join(F.broadcast(marks), found["file_path"] == marks["path"], "left").selectExpr(
        "file_path AS filePath", "row_index AS rowIndexCol", "marks AS deletionVectorId"
    )
    generator = delta_log.single(delta_log.package(spark).commands, "DeletionVectorBitmapGenerator")
    actions = []
    for one in delta_log.items(spark, generator.buildDeletionVectors(spark._jsparkSession, places._jdf, log, 0)):
        file, marked = files[one.filePath()], one.deletionVector()
        kept, gone = delta_log.items(spark, file.removeRows(marked, True, True).productIterator().toSeq())
        rows = file.numPhysicalRecords()
        nothing_left = rows.isDefined() and rows.get() == marked.cardinality()
        actions += [gone] if nothing_left else [gone, kept]
    return actions


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
