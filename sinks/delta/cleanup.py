"""Housekeeping of Delta tables: small files are compacted, logs get checkpoints, and files are removed that
no generation of a mirror has any more, or that no commit of a log of changes has named.

Not by VACUUM. Neither deltalake's nor Spark's knows of other generations; the first doesn't know of
deletion vectors either, and the second takes half a minute.
"""

import re
import time
from typing import TYPE_CHECKING
from urllib.parse import unquote

import deltalake
import structlog

from cdc.model.trace import kind, trace
from cdc.sinks.delta.generations import generation_names
from cdc.sinks.delta.log import Logs, TableState
from cdc.sinks.delta.place import TEMPORARY, place, table_uri
from cdc.sinks.delta.vectors import vector_path

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

events = structlog.get_logger()
UUID = "[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}"
OUR_FILES = re.compile(rf"(^|/)(part-{UUID}\.parquet|deletion_vector_{UUID}\.bin)$")
"""Names of files that only we write: of rows, and deletion vectors."""
HIDDEN = re.compile(r"(^|/)(\.|_(?!change_data/))")
"""Names of files that are no files of a table's rows, or in a folder of such: of its log, checksums. Files of
Delta's change feed are in `_change_data`; VACUUM removes them, too.
"""
TEMPORARY_NAME = re.compile(rf"(^|/)\.{UUID}{re.escape(TEMPORARY)}$")
CHECKPOINT_COMMITS = 20
"""Commits between two checkpoints: a reader reads the files of so many, and a checkpoint takes 13 ms."""
ABANDONED_S = 24 * 3600.0
"""Seconds that we may take from writing a file to committing it: to copy a mirror in a bucket takes
longest.
"""
UNCOMMITTED_S = 7 * 24 * 3600.0
"""Seconds that others may take from writing a file to committing it; VACUUM waits as long."""
CLEANUP_S = 3600.0
"""Seconds between two removals of files that merges have replaced in a mirror.

A query may read a replaced file for as long.
"""


class Cleanups:
    """The housekeeping of a sink's mirrors and logs of changes. Used by the thread that commits them."""

    def __init__(self, logs: Logs) -> None:
        self._logs = logs
        self._last_cleanups: dict[str, tuple[float, set[str]]] = {}

    def tidy(self, spark: "SparkSession", folder: str) -> None:
        """Compact a table that needs it, write a checkpoint when it is due, and remove files that no
        generation has any more, every CLEANUP_S at most.

        A failure is logged: the batch is committed, and the next time tries again.
        """
        from cdc.sinks.delta.mirror import compact

        now = time.monotonic()
        last_cleanup, candidates = self._last_cleanups.setdefault(folder, (now, set()))
        try:
            log = self._logs[folder]
            compact(spark, log)
            state = log.refresh()
            if state and state.version - log.checkpoint_version >= CHECKPOINT_COMMITS:
                deltalake.DeltaTable(table_uri(folder)).create_checkpoint()
                log.checkpoint_version = state.version
            if now - last_cleanup >= CLEANUP_S:
                self._last_cleanups[folder] = now, candidates
                unused = remove_unreferenced(self._logs, folder, candidates)
                self._last_cleanups[folder] = now, unused
                if state and state.properties.get("delta.enableExpiredLogCleanup") != "false":
                    deltalake.DeltaTable(table_uri(folder)).cleanup_metadata()
        except Exception as error:
            events.warning("not_tidied", folder=folder, error=kind(error), exception=trace(error))


def remove_unreferenced(logs: Logs, folder: str, candidates: set[str]) -> set[str]:
    """Remove files that belong to no generation, if they belonged to none at the last call; and what a
    killed process has left of a file that it was about to name.

    Returns the candidates of the next call: the files that belong to none since then. So a query
    may read replaced files for the time between two calls. A file that was never committed
    may be of somebody's OPTIMIZE at work: it stays longer, unless its name is one of ours. In a log
    of changes what was replaced stays as well, for as long as Delta's log names it: a week.
    """
    if logs[folder].refresh() is None:
        return set()
    used: set[str] = set()
    parent, _, name = folder.rpartition("/")
    live = f"{parent}/{name.partition('@')[0]}"
    for generation in (live, *(f"{live}@{name}" for name in generation_names(live))):
        if state := logs[generation].refresh():
            used |= {_name(path) for path in list_paths(state)}
    table = deltalake.DeltaTable(table_uri(folder))
    listed = table.vacuum(0, dry_run=True, enforce_retention_duration=False, full=False)
    named = {_name(path) for path in listed}
    replaced: set[str] = set()
    abandoned: set[str] = set()
    now = time.time()
    for file in place(folder).files():
        if TEMPORARY_NAME.search(file.path):
            patience_s = CLEANUP_S
        elif HIDDEN.search(file.path) or _name(file.path) in used:
            continue
        elif _name(file.path) in named:
            replaced |= set() if live.endswith("/changes") else {file.path}
            continue
        else:
            patience_s = ABANDONED_S if OUR_FILES.search(file.path) else UNCOMMITTED_S
        if file.written_at < now - patience_s:
            abandoned.add(file.path)
    place(folder).remove({*(replaced & candidates), *abandoned})
    return replaced - candidates


def list_paths(state: TableState) -> list[str]:
    """List the files of a table, and of its deletion vectors, as its log names them."""
    vectors = (file["deletionVector"] for file in state.files.values() if "deletionVector" in file)
    return [*state.files, *(path for vector in vectors if (path := vector_path(vector)))]


def _name(path: str) -> str:
    return unquote(path).rpartition("/")[2]
