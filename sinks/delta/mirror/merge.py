"""A merge into a large mirror: rows that are replaced are looked for once, and their places marked as deleted.

Where readers can't have marks, the files that hold such rows are written anew instead, without these.

Delta's MERGE reads all of the mirror three times: which files hold such rows, where in them, what becomes of them. Here
a change brings its row as a whole, so the place is all there is to find: executors read nothing but ids, with Arrow,
a quarter of the CPU that Spark takes. Marks are made and stored by Delta's own code. Each merge leaves some small
files and some with fewer rows: now and then one makes large ones of them.
"""

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from cdc.model.position import ViewCheckpoint
from cdc.sink.lane_run import freeze_gc_after
from sinks.delta.files import parquet
from sinks.delta.files.columns import NOTHING, schema
from sinks.delta.files.failures import contended
from sinks.delta.files.parquet import Changed, File
from sinks.delta.log import add_files, jvm, spark_generations
from sinks.delta.mirror import frames

if TYPE_CHECKING:
    import deltalake
    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession

PLACES = "filePath string, rowIndexCol long, deletionVectorId string"
"""What Delta calls them; what it means by the first is ours, for it only gives that back."""
SMALL_BYTES = 8 * 2**20
"""A file that has less than this in rows that aren't marked is one to be gathered."""
MANY = 32
"""So many of them are gathered: each is opened by every merge and every query."""
AT_ONCE_BYTES, LARGE = 64 * 2**20, 2
"""No more than this is gathered by one merge, in some seconds, to so many files."""


def merge(
    spark: "SparkSession",
    table: "deltalake.DeltaTable",
    folder: str,
    changed: Changed,
    stored: ViewCheckpoint,
    number: int,
    marks: bool = True,
) -> None:
    """Put changed rows in the place of those of the same id, in one commit with position and number.

    table is as it was when the number was taken; without `marks` it has none afterwards, and asks nobody to know of
    them. Raises SinkUnavailable when another commit comes in between.
    """
    version = table.version()
    asked = add_files.MARKS in add_files.features(table)
    if marks and not asked:
        spark_generations.ask(spark, folder, [add_files.MARKS])
        version += 1
    transaction = jvm.begin(spark, folder)
    if transaction.snapshot().version() != version:
        raise contended()
    held = _files(transaction)
    whole = _scattered(held)
    others = [file for file in held if file not in whole]
    ids = frames.read(spark, folder, changed.names, schema(NOTHING, "mirror")).select("_cdc_id")
    actions = _marked(transaction, others, ids) if marks else []
    whole += [] if marks else _concerned(others, ids)
    new = list(changed.rows)
    if whole:
        left = _read(transaction, whole, spark).join(ids.hint("broadcast"), "_cdc_id", "left_anti")
        tasks = max(LARGE, int(sum(file.left for file in whole) / AT_ONCE_BYTES))
        new += add_files.written(table.table_uri, left.coalesce(tasks), table.schema())
    actions += [file.action.remove() for file in whole]
    action = jvm.single(jvm.package(spark).actions, "Action")
    actions += [action.fromJson(_add(file)) for file in new]
    jvm.commit(spark, transaction, actions, jvm.update(spark, stored, number), number)
    if asked and not marks:
        spark_generations.drop(spark, folder, version + 1)


@dataclass(frozen=True, eq=False)
class _File:
    """A file of the mirror: Delta's own word for it, its URI, its marks as text, how many, the bytes of other rows."""

    action: Any
    path: str
    marks: str | None
    gone: int
    left: float


def _files(transaction: Any) -> list[_File]:
    held, log = [], transaction.deltaLog()
    for action in jvm.files(transaction.snapshot()):
        said, marks = json.loads(action.json())["add"], action.deletionVector()
        gone = marks.cardinality() if marks else 0
        left = said["size"] * (1 - gone / json.loads(said["stats"])["numRecords"])
        path = action.absolutePath(log).toUri().toASCIIString()
        held.append(_File(action, path, marks and marks.serializeToBase64(), gone, left))
    return held


def _scattered(held: Sequence[_File]) -> list[_File]:
    """The files to gather: none until there are many."""
    small = sorted((file for file in held if file.left < SMALL_BYTES), key=lambda file: file.left)
    upto = accumulate(file.left for file in small)
    return [file for file, sum_ in zip(small, upto, strict=True) if sum_ < AT_ONCE_BYTES] if len(small) >= MANY else []


def _places(held: Sequence[_File], ids: "DataFrame") -> "DataFrame":
    """Where in which of these files (by number) rows of these ids are: PLACES."""
    from pyspark.sql import functions as F

    spark, named = ids.sparkSession, [(str(at), file.path, file.marks) for at, file in enumerate(held)]
    tasks = min(len(named), spark.sparkContext.defaultParallelism)
    parts = spark.createDataFrame(
        [(named[at::tasks],) for at in range(tasks)], "files array<struct<name:string,path:string,marks:string>>"
    )
    wanted = ids.agg(F.collect_list("_cdc_id").alias("ids"))
    return parts.crossJoin(F.broadcast(wanted)).mapInArrow(freeze_gc_after(_found), PLACES)


def _concerned(held: Sequence[_File], ids: "DataFrame") -> list[_File]:
    """Those files that hold rows of these ids, or have marks."""
    named = {row["filePath"] for row in _places(held, ids).select("filePath").distinct().collect()}
    return [file for at, file in enumerate(held) if file.gone or str(at) in named]


def _marked(transaction: Any, held: Sequence[_File], ids: "DataFrame") -> list[Any]:
    """What a commit says of those files that hold rows of these ids: without those rows from now on."""
    spark, places = ids.sparkSession, _places(held, ids)
    generator = jvm.single(jvm.package(spark).commands, "DeletionVectorBitmapGenerator")
    made = generator.buildDeletionVectors(spark._jsparkSession, places._jdf, transaction.deltaLog(), 0)
    actions = []
    for one in jvm.items(spark, made):
        file, vector = held[int(one.filePath())], one.deletionVector()
        if file.gone == vector.cardinality():
            continue
        both = file.action.removeRows(vector, True, True)
        actions.append(both._2())
        if file.action.numPhysicalRecords().get() > vector.cardinality():
            actions.append(both._1())
    return actions


def _found(parts: "Iterator[pa.RecordBatch]") -> "Iterator[pa.RecordBatch]":
    """The places of ids in files. Also of rows that are marked already: what is marked twice is marked."""
    import pyarrow as pa
    import pyarrow.compute as pc

    columns = ["filePath", "rowIndexCol", "deletionVectorId"]
    for task in (one for part in parts for one in part.to_struct_array()):
        wanted = task["ids"].values
        for file in task["files"].as_py():
            before = 0
            for ids in parquet.ids(file["path"]):
                rows = pc.indices_nonzero(pc.is_in(ids, wanted))
                name, marks = (pa.repeat(pa.scalar(file[of], pa.string()), len(rows)) for of in ("name", "marks"))
                yield pa.RecordBatch.from_arrays([name, pc.add(rows.cast(pa.int64()), before), marks], columns)
                before += len(ids)


def _read(transaction: Any, of: Sequence[_File], spark: "SparkSession") -> "DataFrame":
    """The rows of some files as the transaction sees them."""
    from pyspark.sql import DataFrame

    named = jvm.seq(spark, [file.action for file in of])
    held = transaction.deltaLog().createDataFrame(transaction.snapshot(), named, False, *jvm.none(spark, 1))
    return DataFrame(held, spark)


def _add(file: File) -> str:
    named = {"path": file.name, "partitionValues": {}, "size": file.size, "stats": file.stats}
    return json.dumps({"add": {**named, "modificationTime": int(time.time() * 1000), "dataChange": True}})
