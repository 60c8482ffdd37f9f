"""Compaction of Delta tables: each batch leaves small files, and in a mirror files with ever fewer rows.
Now and then executors write their rows again, in a commit that changes no rows.
"""

from collections.abc import Sequence
from contextlib import suppress
from itertools import accumulate
from typing import TYPE_CHECKING

from cdc.model.position import ViewCheckpoint
from cdc.sinks.delta.files import parquet
from cdc.sinks.delta.files.columns import to_arrow
from cdc.sinks.delta.files.failures import CommitConflict
from cdc.sinks.delta.files.parquet import DataFile, FileNames
from cdc.sinks.delta.log.actions import addition
from cdc.sinks.delta.log.table_log import File, Identity, TableLog, TableState, removal
from cdc.sinks.delta.mirror.marks import row_count
from cdc.sinks.delta.mirror.rewrite import Rewrite, rewrite, sources
from cdc.sinks.delta.place import Place

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

SMALL_BYTES = 8 * 2**20
"""A file with less than this in rows that aren't marked is small."""
SMALL_FILES = 32
"""So many small files are compacted: every batch and every query opens each of them."""
COMPACTED_BYTES = 64 * 2**20
"""No more than this at once, in some seconds."""
SPARSE = 0.5
"""A larger file is written again when no more than this share of its rows remains."""


def compact(spark: "SparkSession", logs: Sequence[TableLog]) -> None:
    """Compact those tables that need it, in one Spark job.

    Where another commit comes in between a table stays as it is.

    Raises SinkUnavailable: a folder can't be read, or takes no more.
    """
    names = FileNames()
    selections: list[tuple[TableLog, Identity, list[File]]] = []
    rewrites: list[Rewrite] = []
    for log in logs:
        state = log.refresh()
        if state and (files := select(log.place, state)):
            selections.append((log, state.identity, files))
            rewrites.append(request(log, state, files, names))
    results = rewrite(spark, rewrites)
    for (log, identity, files), result in zip(selections, results, strict=True):
        replace(log, identity, files, result)


def select(place: Place, state: TableState) -> list[File]:
    """Select the files that are to become one; none for most tables."""
    shares = {path: _remaining_share(place, file) for path, file in state.files.items()}
    sizes = {path: file["size"] * shares[path] for path, file in state.files.items()}
    small = sorted((path for path in sizes if sizes[path] < SMALL_BYTES), key=sizes.__getitem__)
    if len(small) >= SMALL_FILES:
        totals = accumulate(sizes[path] for path in small)
        chosen = [
            path for path, total in zip(small, totals, strict=True) if total < COMPACTED_BYTES
        ]
        return [state.files[path] for path in chosen]
    large = set(sizes).difference(small)
    return [file for path, file in state.files.items() if path in large and shares[path] <= SPARSE][
        :1
    ]


def _remaining_share(place: Place, file: File) -> float:
    if "deletionVector" not in file:
        return 1.0
    marked: int = file["deletionVector"]["cardinality"]
    return 1 - marked / row_count(place, file)


def request(log: TableLog, state: TableState, files: Sequence[File], names: FileNames) -> Rewrite:
    """Describe the rewrite of files of a version, without their marked rows."""
    columns = to_arrow(state.columns)
    return Rewrite(log.place.location, sources(log.place, files), columns, names.generate())


def replace(
    log: TableLog, identity: Identity, files: Sequence[File], result: DataFile | None
) -> None:
    """Commit a new file in the place of others, unless another commit came in between."""
    actions = [removal(file, data_change=False) for file in files]
    if result:
        actions.append(addition(result, data_change=False))
    # The position stays what it is. Where somebody else's commit is the newest one, it is found below.
    text = (log.state.info.get("userMetadata") or "") if log.state else ""
    is_ours = text.startswith(ViewCheckpoint.JSON_START)
    checkpoint = ViewCheckpoint.from_json(text) if is_ours else None
    with suppress(CommitConflict):
        log.commit(identity, actions, "OPTIMIZE", checkpoint)
        return
    if result:
        parquet.remove_files(log.place.location, [result.name])
