"""Merges into a large mirror: changed rows are located once and removed, new rows added.

There are two of them. `merge_marking` marks the changed rows as deleted, in deletion vectors.
`merge_rewriting` writes the files with changed rows again, for readers that don't support those.

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
from cdc.sinks.delta.files.parquet import ChangedRows, DataFile
from cdc.sinks.delta.log import add_files, jvm, spark_generations
from cdc.sinks.delta.log.add_files import DELETION_VECTORS
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


def merge_marking(
    spark: "SparkSession",
    table: "deltalake.DeltaTable",
    folder: str,
    changed: ChangedRows,
    info: CommitInfo,
) -> None:
    """Replace the rows that a batch changes, in one commit: mark them as deleted in their files.

    table: as it was when the number of the commit was chosen.

    Raises:
        SinkUnavailable: another commit came in between.
    """
    version = table.version()
    if DELETION_VECTORS not in add_files.reader_features(table):
        spark_generations.enable_features(spark, folder, [DELETION_VECTORS])
        version += 1
    transaction, ids = jvm.begin_upon(spark, folder, version), _changed_ids(spark, folder, changed)
    compacted, searched = _select_for_compaction(_files(transaction))
    marks = _marks(transaction, searched, ids)
    additions = [*changed.rows, *_rewrite(transaction, compacted, ids, table)]
    _commit(spark, transaction, [*marks, *_replace(spark, compacted, additions)], info)


def merge_rewriting(
    spark: "SparkSession",
    table: "deltalake.DeltaTable",
    folder: str,
    changed: ChangedRows,
    info: CommitInfo,
) -> None:
    """Replace them as `merge_marking` does, but write their files again, without them.

    So are files with marks of earlier merges. Readers needn't support deletion vectors afterwards.
    """
    version = table.version()
    transaction, ids = jvm.begin_upon(spark, folder, version), _changed_ids(spark, folder, changed)
    compacted, searched = _select_for_compaction(_files(transaction))
    rewritten = [*compacted, *_files_with_changes(searched, ids)]
    additions = [*changed.rows, *_rewrite(transaction, rewritten, ids, table)]
    _commit(spark, transaction, _replace(spark, rewritten, additions), info)
    if DELETION_VECTORS in add_files.reader_features(table):
        spark_generations.drop_deletion_vectors(spark, folder, version + 1)


def _changed_ids(spark: "SparkSession", folder: str, changed: ChangedRows) -> "DataFrame":
    columns = schema(NO_COLUMNS, "mirror")
    return frames.read_files(spark, folder, changed.id_files, columns).select("_cdc_id")


def _commit(
    spark: "SparkSession", transaction: Any, actions: Sequence[Any], info: CommitInfo
) -> None:
    operation = jvm.rows_operation(spark, info.checkpoint, info.number)
    jvm.commit(spark, transaction, actions, operation, info.number)


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
    snapshot = jvm.base(transaction)
    return [_mirror_file(snapshot, action) for action in jvm.files(snapshot)]


def _mirror_file(snapshot: Any, action: Any) -> _MirrorFile:
    entry, uri = jvm.log_entry(action), jvm.file_uri(snapshot, action)
    vector = entry.get("deletionVector")
    deleted = vector["cardinality"] if vector else 0
    live_bytes = entry["size"] * (1 - deleted / json.loads(entry["stats"])["numRecords"])
    return _MirrorFile(
        action, uri, jvm.vector_text(action) if vector else None, deleted, live_bytes
    )


def _select_for_compaction(
    files: Sequence[_MirrorFile],
) -> tuple[list[_MirrorFile], list[_MirrorFile]]:
    """Select small files, the smallest first, within the limit; none until there are many.

    Returns them, and all others.
    """
    small = sorted(
        (file for file in files if file.live_bytes < SMALL_BYTES), key=lambda file: file.live_bytes
    )
    if len(small) < SMALL_FILES:
        return [], list(files)
    totals = accumulate(file.live_bytes for file in small)
    selected = [file for file, total in zip(small, totals, strict=True) if total < COMPACTED_BYTES]
    return selected, [file for file in files if file not in selected]


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


def _marks(transaction: Any, files: Sequence[_MirrorFile], ids: "DataFrame") -> list[Any]:
    """Make the actions that mark the rows of these ids as deleted, in all of these files."""
    actions = []
    for number, vector in jvm.build_vectors(transaction, _places(files, ids)):
        file = files[int(number)]
        actions += jvm.mark_rows(file.action, file.deleted, vector)
    return actions


def _replace(
    spark: "SparkSession", replaced: Sequence[_MirrorFile], additions: Sequence[DataFile]
) -> list[Any]:
    """Make the actions that remove some files and add others."""
    now = int(time.time() * 1000)
    entries = [
        {"path": file.name, "partitionValues": {}, "size": file.size, "stats": file.stats}
        for file in additions
    ]
    return [jvm.remove(file.action) for file in replaced] + [
        jvm.add(spark, {**entry, "modificationTime": now, "dataChange": True}) for entry in entries
    ]


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
    actions = [file.action for file in files]
    rows = jvm.read_files(transaction, actions, ids.sparkSession).join(
        ids.hint("broadcast"), "_cdc_id", "left_anti"
    )
    tasks = max(COMPACTED_FILES, int(sum(file.live_bytes for file in files) / COMPACTED_BYTES))
    return add_files.write_files(table.table_uri, rows.coalesce(tasks), table.schema())
