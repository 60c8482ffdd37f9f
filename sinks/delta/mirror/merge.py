"""Merge into a large mirror: changed rows are located once and marked as deleted, new rows added.

Where readers don't support deletion vectors, the files with changed rows are written again without
these rows.

Delta's MERGE reads all of the mirror three times: which files contain changed rows, where in them,
and what becomes of them. Here a change brings its row as a whole, so only the place has to be
found. Executors read nothing but ids, with Arrow, for a quarter of the CPU that Spark takes.
Delta's own code makes and stores the deletion vectors.

Each merge leaves some small files and some with fewer rows. Now and then a merge compacts them into
large ones.
"""

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple

from cdc.sink.lane_run import freeze_gc_after
from cdc.sinks.delta.files import parquet
from cdc.sinks.delta.files.columns import NO_COLUMNS, schema
from cdc.sinks.delta.files.failures import commit_conflict
from cdc.sinks.delta.files.parquet import ChangedRows, DataFile
from cdc.sinks.delta.log import add_files, jvm, spark_generations
from cdc.sinks.delta.log.commits import CommitInfo
from cdc.sinks.delta.mirror import frames

if TYPE_CHECKING:
    import deltalake
    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession

PLACE_COLUMNS = ["filePath", "rowIndexCol", "deletionVectorId"]
PLACES = "filePath string, rowIndexCol long, deletionVectorId string"
"""The columns in which Delta expects the places of deleted rows.

The first one has the number of a file among those that are searched: Delta only hands it back.
"""
SMALL_BYTES = 8 * 2**20
"""A file with less than this in rows that aren't deleted is to be compacted."""
SMALL_FILES = 32
"""So many small files start a compaction: every merge and every query opens each of them."""
COMPACTED_BYTES, COMPACTED_FILES = 64 * 2**20, 2
"""One merge compacts no more than this, in some seconds, into so many files."""


def merge(
    spark: "SparkSession",
    table: "deltalake.DeltaTable",
    folder: str,
    changed: ChangedRows,
    info: CommitInfo,
    deletion_vectors: bool = True,
) -> None:
    """Replace the rows that a batch changes, in one commit.

    table: as it was when the number of the commit was chosen.
    deletion_vectors: if false, the mirror has none afterwards and doesn't demand support of them.

    Raises:
        SinkUnavailable: another commit came in between.
    """
    version = table.version()
    enabled = add_files.DELETION_VECTORS in add_files.reader_features(table)
    if deletion_vectors and not enabled:
        spark_generations.enable_features(spark, folder, [add_files.DELETION_VECTORS])
        version += 1
    transaction = jvm.begin(spark, folder)
    if transaction.snapshot().version() != version:
        raise commit_conflict()
    files = _files(transaction)
    rewritten = _files_to_compact(files)
    searched = [file for file in files if file not in rewritten]
    ids = frames.read_files(spark, folder, changed.id_files, schema(NO_COLUMNS, "mirror")).select(
        "_cdc_id"
    )
    actions = _deletions(transaction, searched, ids) if deletion_vectors else []
    rewritten += [] if deletion_vectors else _files_with_changes(searched, ids)
    additions = [*changed.rows, *_rewrite(transaction, rewritten, ids, table)]
    actions += [file.action.remove() for file in rewritten]
    action = jvm.single(jvm.package(spark).actions, "Action")
    actions += [action.fromJson(_add_action(file)) for file in additions]
    operation = jvm.update(spark, info.checkpoint, info.number)
    jvm.commit(spark, transaction, actions, operation, info.number)
    if enabled and not deletion_vectors:
        spark_generations.drop_deletion_vectors(spark, folder, version + 1)


@dataclass(frozen=True, eq=False)
class _MirrorFile:
    """A file of the mirror.

    action: Delta's own object; path: a URI; vector: its deletion vector as text, None without one;
    deleted: how many rows that marks; live_bytes: estimated size of the other rows.
    """

    action: Any
    path: str
    vector: str | None
    deleted: int
    live_bytes: float


class _File(NamedTuple):
    """A file to search: its number as text, its URI, its deletion vector as text."""

    name: str
    path: str
    marks: str | None


def _files(transaction: Any) -> list[_MirrorFile]:
    files, log = [], transaction.deltaLog()
    for action in jvm.files(transaction.snapshot()):
        fields, vector = json.loads(action.json())["add"], action.deletionVector()
        deleted = vector.cardinality() if vector else 0
        live_bytes = fields["size"] * (1 - deleted / json.loads(fields["stats"])["numRecords"])
        path = action.absolutePath(log).toUri().toASCIIString()
        files.append(
            _MirrorFile(action, path, vector and vector.serializeToBase64(), deleted, live_bytes)
        )
    return files


def _files_to_compact(files: Sequence[_MirrorFile]) -> list[_MirrorFile]:
    """Select small files, the smallest first, within the limit; none until there are many."""
    small = sorted(
        (file for file in files if file.live_bytes < SMALL_BYTES), key=lambda file: file.live_bytes
    )
    if len(small) < SMALL_FILES:
        return []
    totals = accumulate(file.live_bytes for file in small)
    return [file for file, total in zip(small, totals, strict=True) if total < COMPACTED_BYTES]


def _places(files: Sequence[_MirrorFile], ids: "DataFrame") -> "DataFrame":
    """Locate the rows of these ids in these files: PLACES, with the file's number as its path."""
    from pyspark.sql import functions as F

    spark = ids.sparkSession
    numbered = [_File(str(number), file.path, file.vector) for number, file in enumerate(files)]
    tasks = max(1, min(len(numbered), spark.sparkContext.defaultParallelism))
    shares = [numbered[task::tasks] for task in range(tasks)]
    id_list = ids.agg(F.collect_list("_cdc_id").alias("ids"))
    # Numbers of shares, not the shares: for a data frame of a list Spark starts other workers.
    numbers = spark.range(0, tasks, numPartitions=tasks).crossJoin(F.broadcast(id_list))
    return numbers.mapInArrow(freeze_gc_after(partial(_locate, shares)), PLACES)


def _files_with_changes(files: Sequence[_MirrorFile], ids: "DataFrame") -> list[_MirrorFile]:
    """Select the files that contain rows of these ids, or that have deletion vectors."""
    rows = _places(files, ids).select("filePath").distinct().collect()
    numbers = {row["filePath"] for row in rows}
    return [file for number, file in enumerate(files) if file.deleted or str(number) in numbers]


def _deletions(transaction: Any, files: Sequence[_MirrorFile], ids: "DataFrame") -> list[Any]:
    """Make the actions that mark the rows of these ids as deleted, in all of these files."""
    spark, places = ids.sparkSession, _places(files, ids)
    generator = jvm.single(jvm.package(spark).commands, "DeletionVectorBitmapGenerator")
    results = generator.buildDeletionVectors(
        spark._jsparkSession, places._jdf, transaction.deltaLog(), 0
    )
    actions = []
    for result in jvm.items(spark, results):
        file, vector = files[int(result.filePath())], result.deletionVector()
        if file.deleted == vector.cardinality():
            continue
        pair = file.action.removeRows(vector, True, True)
        actions.append(pair._2())
        if file.action.numPhysicalRecords().get() > vector.cardinality():
            actions.append(pair._1())
    return actions


def _locate(
    shares: Sequence[Sequence[_File]], batches: "Iterator[pa.RecordBatch]"
) -> "Iterator[pa.RecordBatch]":
    """Locate ids in files, on an executor: numbers of shares with ids in, PLACES out.

    Rows that are deleted already are among them: to mark them again changes nothing.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    for row in (row for batch in batches for row in batch.to_struct_array()):
        ids = row["ids"].values
        for file in shares[row["id"].as_py()]:
            start = 0
            for file_ids in parquet.read_ids(file.path):
                rows = pc.indices_nonzero(pc.is_in(file_ids, ids))
                indexes = pc.add(rows.cast(pa.int64()), start)
                name = pa.repeat(pa.scalar(file.name, pa.string()), len(rows))
                vector = pa.repeat(pa.scalar(file.marks, pa.string()), len(rows))
                yield pa.RecordBatch.from_arrays([name, indexes, vector], PLACE_COLUMNS)
                start += len(file_ids)


def _rewrite(
    transaction: Any, files: Sequence[_MirrorFile], ids: "DataFrame", table: "deltalake.DeltaTable"
) -> list[DataFile]:
    """Write the rows of some files again, without those of these ids, into fewer files."""
    if not files:
        return []
    rows = _read(transaction, files, ids.sparkSession).join(
        ids.hint("broadcast"), "_cdc_id", "left_anti"
    )
    tasks = max(COMPACTED_FILES, int(sum(file.live_bytes for file in files) / COMPACTED_BYTES))
    return add_files.write_files(table.table_uri, rows.coalesce(tasks), table.schema())


def _read(transaction: Any, files: Sequence[_MirrorFile], spark: "SparkSession") -> "DataFrame":
    """Read the rows of some files as the transaction sees them."""
    from pyspark.sql import DataFrame

    actions = jvm.seq(spark, [file.action for file in files])
    frame = transaction.deltaLog().createDataFrame(
        transaction.snapshot(), actions, False, *jvm.none(spark, 1)
    )
    return DataFrame(frame, spark)


def _add_action(file: DataFile) -> str:
    """Make the JSON of the action that adds a file."""
    now = int(time.time() * 1000)
    fields = {"path": file.name, "partitionValues": {}, "size": file.size, "stats": file.stats}
    return json.dumps({"add": {**fields, "modificationTime": now, "dataChange": True}})
