"""Removal of files that no generation of a mirror has any more, and that no commit of a log of
changes has named.

Not by VACUUM. Neither deltalake's nor Spark's knows of other generations; the first doesn't know of
deletion vectors either, and the second takes half a minute.
"""

import re
import time
from contextlib import suppress
from typing import TYPE_CHECKING
from urllib.parse import unquote

import deltalake
import structlog

from cdc.errors import SinkUnavailable
from cdc.model.trace import kind, trace
from cdc.sinks.delta.files import links
from cdc.sinks.delta.folders import age_s, generation_names, live_folder, remove_paths
from cdc.sinks.delta.log import add_files, spark_generations
from cdc.sinks.delta.log.commits import CommitInfo, Commits

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

log = structlog.get_logger()
UUID = "[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}"
OUR_FILES = re.compile(rf"(^|/)(part-{UUID}\.parquet|deletion_vector_{UUID}\.bin)$")
"""Names of files that only merges write: as `add_files` names them, and deletion vectors."""
UNCOMMITTED_S = 7 * 24 * 3600.0
"""Seconds that others may take from writing a file to committing it; VACUUM waits as long."""
CLEANUP_S = 3600.0
"""Seconds between two removals of files that merges have replaced in a mirror.

A query may read a replaced file for as long.
"""


class Cleanups:
    """The removals of files of a sink's mirrors and logs of changes: batches have replaced them, or
    were killed.

    Threads: those that commit tables, each table's in one at a time.
    """

    def __init__(self, commits: Commits) -> None:
        self._commits = commits
        self._last_cleanups: dict[str, tuple[float, set[str]]] = {}

    def remove_replaced(self, spark: "SparkSession", folder: str) -> None:
        """Remove files that no generation has any more, every CLEANUP_S at most.

        A failure is logged: the batch is committed, and the next clean-up tries again.
        """
        now = time.monotonic()
        is_first = folder not in self._last_cleanups
        last_cleanup, candidates = self._last_cleanups.setdefault(folder, (now, set()))
        try:
            if is_first:
                link_foreign_files(spark, self._commits, folder)
            if now - last_cleanup >= CLEANUP_S:
                self._last_cleanups[folder] = now, candidates
                unused = remove_unreferenced(spark, self._commits, folder, candidates)
                self._last_cleanups[folder] = now, unused
        except Exception as error:
            log.warning(
                "files_not_removed", folder=folder, error=kind(error), exception=trace(error)
            )


def remove_unreferenced(
    spark: "SparkSession", commits: Commits, folder: str, candidates: set[str]
) -> set[str]:
    """Remove those of some files that still belong to no generation.

    Returns the candidates of the next call: the files that belong to none since then. So a query
    may read replaced files for as long as lies between two calls. A file that was never committed
    may be of somebody's OPTIMIZE at work: it stays longer, unless its name is one of ours. In a log
    of changes what was replaced stays as well, for as long as Delta's log names it: a week.
    """
    table = commits.opened_table(folder)
    if table is None:
        return set()
    used: set[str] = set()
    live = live_folder(folder)
    for generation in (live, *(f"{live}@{name}" for name in generation_names(live))):
        if generation_table := commits.table(generation):
            used |= {_split(path)[1] for path in list_paths(spark, generation_table, generation)}
    replaced = table.vacuum(0, dry_run=True, enforce_retention_duration=False, full=False)
    listing = table.vacuum(0, dry_run=True, enforce_retention_duration=False, full=True)
    unused = {path for path in listing if _split(path)[1] not in used}
    if live.endswith("/changes"):
        unused -= set(replaced)
    ours = {path for path in unused if path in replaced or OUR_FILES.search(path)}
    abandoned = (path for path in unused - ours if age_s(f"{folder}/{path}") > UNCOMMITTED_S)
    remove_paths(f"{folder}/{path}" for path in {*(ours & candidates), *abandoned})
    return ours - candidates


def link_foreign_files(spark: "SparkSession", commits: Commits, live: str) -> None:
    """Give the live table links to files that it names in other folders.

    Earlier versions of this program committed such paths. When another commit comes in between the
    table stays as it is, because that writer needs it more.
    """
    last_commit, table = commits.last_commit(live), commits.opened_table(live)
    checkpoint = last_commit.checkpoint
    if table is None or checkpoint is None or last_commit.trouble:
        return
    if not any(map(links.is_absolute, add_files.paths(table))) or not links.can_link(live):
        # Without links there would be copies, and nobody has asked for the space that they take.
        return
    number = last_commit.number + 1
    with suppress(SinkUnavailable):
        if add_files.has_deleted_rows(table):
            spark_generations.link_all_files(spark, live, table.version(), checkpoint, number)
        else:
            files = add_files.share_files(table, live, live)
            add_files.commit(
                table, files, "overwrite", table.schema(), CommitInfo(checkpoint, number)
            )


def referenced_folders(spark: "SparkSession", table: deltalake.DeltaTable, folder: str) -> set[str]:
    """Name the folders in which a table has files by absolute paths; its own may be among them."""
    return {_split(path)[0] for path in list_paths(spark, table, folder) if links.is_absolute(path)}


def list_paths(spark: "SparkSession", table: deltalake.DeltaTable, folder: str) -> list[str]:
    if add_files.has_deleted_rows(table):
        return spark_generations.paths(spark, folder)
    return add_files.paths(table)


def _split(path: str) -> tuple[str, str]:
    """Return the names of a file's folder and of the file."""
    folder, _, name = unquote(path).rpartition("/")
    return folder.rpartition("/")[2], name
