"""Generations of a mirror: the live one is the table itself, others lie in <folder>@<generation>.

A switch is one commit of the live table: its files out, those of the other generation in. These are
linked into the live table's folder before (`links`). No data is copied, and of two processes that
commit at the same time one fails. The previous generation is retained as a table of the files of
the version before, linked likewise. So each generation can be read, moved and removed by itself.
Generations that earlier versions of this program have left are an exception:
`referenced_folders` tells where they name files.
"""

import re
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any
from urllib.parse import unquote

import deltalake
from pyspark.sql import SparkSession

from cdc.errors import SinkUnavailable
from cdc.model.position import ViewCheckpoint, distance
from sinks.delta.files import links
from sinks.delta.files.failures import CommitConflict
from sinks.delta.log import add_files, spark_generations
from sinks.delta.log.commits import CommitInfo, Commits, LastCommit
from sinks.delta.log.history import CLEARED

SWITCHES = ("Manual Update", "SWITCH")
"""How a table's history shows a switch: the operation of one through Spark, our mark of another."""
UUID = "[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}"
OUR_FILES = re.compile(rf"(^|/)(part-{UUID}\.parquet|deletion_vector_{UUID}\.bin)$")
"""Names of files that only merges write: as `add_files` names them, and deletion vectors."""
UNCOMMITTED_S = 7 * 24 * 3600.0
"""Seconds that others may take from writing a file to committing it; VACUUM waits as long."""


def switch(spark: SparkSession, commits: Commits, live: str, generation: str) -> bool:
    """Commit the files of the table in `generation` as those of `live`; return whether it was done.

    It isn't done while the live table is ahead, or when somebody else commits to it meanwhile.
    """
    source_commit, live_commit = commits.last_commit(generation), commits.last_commit(live)
    source, table = commits.opened_table(generation), commits.opened_table(live)
    if source is None or source_commit.trouble:
        return False
    # A source without records has no position, and a view of it can't be behind.
    checkpoint = source_commit.checkpoint or replace(
        CLEARED, generation=generation.rpartition("@")[2]
    )
    if table is None:
        _clone(spark, source, generation, live, checkpoint)
        return True
    if lags(source_commit, live_commit):
        return False
    features = add_files.reader_features(source) - add_files.reader_features(table)
    try:
        if features:
            # A commit by itself: the next try begins with the table as it leaves it.
            spark_generations.enable_features(spark, live, features)
        elif add_files.has_deleted_rows(source):
            behind = partial(lags, source_commit)
            return spark_generations.switch(spark, commits, live, generation, checkpoint, behind)
        else:
            files, mark = add_files.share_files(source, generation, live), {"cdc": SWITCHES[1]}
            number = live_commit.number + 1
            add_files.commit(
                table, files, "overwrite", source.schema(), CommitInfo(checkpoint, number, mark)
            )
    except CommitConflict:
        return False
    return not features


def link_foreign_files(spark: SparkSession, commits: Commits, live: str) -> None:
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


def drop_deletion_vectors(spark: SparkSession, commits: Commits, live: str) -> bool:
    """Stop demanding support of deletion vectors from readers of the live table, if it has none.

    Returns false when somebody else commits to it meanwhile.
    """
    table = commits.table(live)
    if table is None or add_files.DELETION_VECTORS not in add_files.reader_features(table):
        return True
    if not add_files.has_deleted_rows(table):
        try:
            spark_generations.drop_deletion_vectors(spark, live, table.version())
        except CommitConflict:
            return False
    return True


def lags(generation: LastCommit, live: LastCommit) -> bool:
    """Tell whether readers who are shown `generation` instead of `live` would go back in time."""
    if live.checkpoint is None or live.trouble:
        return False
    gap = distance(generation.checkpoint, live.checkpoint.position, live.checkpoint.floor)
    return gap.comparable and not gap.reached


def retain_previous(spark: SparkSession, commits: Commits, live: str, generation: str) -> bool:
    """Create a table in `generation` of what the live table was before its last switch.

    Returns false when there was nothing before, or its files have been removed.
    """
    history = commits.history(live)
    switches = [
        commit["version"]
        for commit in history
        if commit["operation"] in SWITCHES or commit.get("cdc") in SWITCHES
    ]
    if not switches:
        return False
    version = max(switches) - 1
    standing = commits.standing(
        live, [commit for commit in history if commit["version"] <= version]
    )
    if standing is None or standing.checkpoint is None or standing.trouble:
        return False
    try:
        source = deltalake.DeltaTable(live, version=version)
        _clone(spark, source, live, generation, standing.checkpoint)
    except links.FileMissing:
        # A process that was killed after the switch goes on whenever somebody starts it again. That
        # may be later than the clean-up of the files that the switch has replaced.
        remove_paths(spark, [generation])
        return False
    return True


def remove_unreferenced(
    spark: SparkSession, commits: Commits, folder: str, candidates: set[str]
) -> set[str]:
    """Remove those of some files that still belong to no generation.

    Returns the candidates of the next call: the files that belong to none since then. So a query
    may read replaced files for as long as lies between two calls. A file that was never committed
    may be of somebody's OPTIMIZE at work: it stays longer, unless its name is one of ours.

    Not by VACUUM. Neither deltalake's nor Spark's knows of other generations; the first doesn't
    know of deletion vectors either, and the second takes half a minute.
    """
    table = commits.opened_table(folder)
    if table is None:
        return set()
    used: set[str] = set()
    live = _live_folder(folder)
    for generation in (live, *(f"{live}@{name}" for name in names(spark, live))):
        if generation_table := commits.table(generation):
            used |= {_split(path)[1] for path in _paths(spark, generation_table, generation)}
    replaced = table.vacuum(0, dry_run=True, enforce_retention_duration=False, full=False)
    listing = table.vacuum(0, dry_run=True, enforce_retention_duration=False, full=True)
    unused = {path for path in listing if _split(path)[1] not in used}
    ours = {path for path in unused if path in replaced or OUR_FILES.search(path)}
    abandoned = (
        path for path in unused - ours if _age_s(spark, f"{folder}/{path}") > UNCOMMITTED_S
    )
    remove_paths(spark, (f"{folder}/{path}" for path in {*(ours & candidates), *abandoned}))
    return ours - candidates


def _live_folder(folder: str) -> str:
    """Return the folder of the live generation."""
    parent, _, name = folder.rpartition("/")
    return f"{parent}/{name.partition('@')[0]}"


def _age_s(spark: SparkSession, path: str) -> float:
    files, hadoop_path = _file_system(spark, path)
    return time.time() - float(files.getFileStatus(hadoop_path).getModificationTime()) / 1000


def referenced_folders(spark: SparkSession, table: deltalake.DeltaTable, folder: str) -> set[str]:
    """Name the folders in which a table has files by absolute paths; its own may be among them."""
    return {_split(path)[0] for path in _paths(spark, table, folder) if links.is_absolute(path)}


def names(spark: SparkSession, folder: str) -> list[str]:
    """List the generations that have a folder beside the live one, the oldest first."""
    parent, _, live = folder.rpartition("/")
    files, path = _file_system(spark, parent)
    if not files.exists(path):
        return []
    folders = (status.getPath().getName() for status in files.listStatus(path))
    return sorted(name.removeprefix(f"{live}@") for name in folders if name.startswith(f"{live}@"))


def remove_paths(spark: SparkSession, paths: Iterable[str]) -> None:
    """Remove files, and folders with all that they contain, of one file system."""
    files = None
    for path in paths:
        files = files or _file_system(spark, path)[0]
        files.delete(_path(spark, path), True)


def _clone(
    spark: SparkSession,
    source: deltalake.DeltaTable,
    folder: str,
    target: str,
    checkpoint: ViewCheckpoint,
) -> None:
    """Create a table of the files that the table in `folder` has in the version of `source`.

    Raises FileMissing.
    """
    remove_paths(spark, [target])
    if add_files.has_deleted_rows(source):
        spark_generations.clone(spark, source, folder, target, checkpoint)
    else:
        files = add_files.share_files(source, folder, target)
        add_files.create(target, files, source.schema(), CommitInfo(checkpoint, 1))


def _paths(spark: SparkSession, table: deltalake.DeltaTable, folder: str) -> list[str]:
    if add_files.has_deleted_rows(table):
        return spark_generations.paths(spark, folder)
    return add_files.paths(table)


def _split(path: str) -> tuple[str, str]:
    """Return the names of a file's folder and of the file."""
    folder, _, name = unquote(path).rpartition("/")
    return folder.rpartition("/")[2], name


def _file_system(spark: SparkSession, folder: str) -> tuple[Any, Any]:
    path = _path(spark, folder)
    return path.getFileSystem(spark._jsparkSession.sessionState().newHadoopConf()), path


def _path(spark: SparkSession, path: str) -> Any:
    jvm: Any = spark._jvm
    return jvm.org.apache.hadoop.fs.Path(path)
