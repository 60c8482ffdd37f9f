"""Generations of a Delta table: others lie in folders <folder>@<generation>, the live one is the table itself.

A switch is one commit of the live table: its files out, those of the other generation in, which are linked into the
live table's folder before (`links`). No data is copied, and of two who commit at the same time one fails. What
readers saw until then is kept as a table of the files of the version before, linked likewise. So each can be read,
moved and removed by itself, but for those that earlier versions of this program have left: `needed` tells where these
name files.
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
from sinks.delta.files.failures import Contended
from sinks.delta.log import add_files, spark_generations
from sinks.delta.log.commits import Commits, Found
from sinks.delta.log.history import CLEARED

SWITCHES = ("Manual Update", "SWITCH")
"""What a table's history calls a switch: the operation of one through Spark, the mark of another."""
UUID = "[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}"
OURS = re.compile(rf"(^|/)(part-{UUID}\.parquet|deletion_vector_{UUID}\.bin)$")
"""Names of files that only merges leave: as `add_files` gives them, and those of marks."""
UNCOMMITTED_S = 7 * 24 * 3600.0
"""How long others may take from writing a file to committing it; VACUUM waits as long."""


def switch(spark: SparkSession, commits: Commits, live: str, other: str) -> bool:
    """Commit the files of `other` as those of `live`; false while the live table is ahead, or was changed meanwhile."""
    there, here = commits.found(other), commits.found(live)
    fresh, table = commits.opened(other), commits.opened(live)
    if fresh is None or there.trouble:
        return False
    # Of a source without records there is nothing to be behind of.
    stored = there.stored or replace(CLEARED, generation=other.rpartition("@")[2])
    if table is None:
        _clone(spark, fresh, other, live, stored)
        return True
    if lags(there, here):
        return False
    needed = add_files.features(fresh) - add_files.features(table)
    try:
        if needed:
            # A commit by itself: the next try begins with what the table is after it.
            spark_generations.ask(spark, live, needed)
        elif not add_files.unmarked(fresh):
            return spark_generations.switch(spark, commits, live, other, stored, partial(lags, there))
        else:
            files, mark = add_files.shared(fresh, other, live), {"cdc": SWITCHES[1]}
            add_files.commit(table, files, "overwrite", fresh.schema(), stored, here.number + 1, mark)
    except Contended:
        return False
    return not needed


def gather(spark: SparkSession, commits: Commits, live: str) -> None:
    """Give the live table links to the files that it names elsewhere, as earlier versions of this program did.

    When another commit comes in between it stays as it is: who needs it more is the writer.
    """
    found, table = commits.found(live), commits.opened(live)
    if table is None or found.stored is None or found.trouble:
        return
    if not any(map(links.absolute, add_files.paths(table))) or not links.can_link(live):
        # Copies would take room that nobody has asked for.
        return
    with suppress(SinkUnavailable):
        if add_files.unmarked(table):
            files = add_files.shared(table, live, live)
            add_files.commit(table, files, "overwrite", table.schema(), found.stored, found.number + 1)
        else:
            spark_generations.gather(spark, live, table.version(), found.stored, found.number + 1)


def unmark(spark: SparkSession, commits: Commits, live: str) -> bool:
    """Ask readers of the live table to know of marks no longer, if it has none; false when it was changed meanwhile."""
    table = commits.table(live)
    if table and add_files.MARKS in add_files.features(table) and add_files.unmarked(table):
        try:
            spark_generations.drop(spark, live, table.version())
        except Contended:
            return False
    return True


def lags(there: Found, here: Found) -> bool:
    """Whether readers who are shown `there` instead of `here` would go back in time."""
    if here.stored is None or here.trouble:
        return False
    gap = distance(there.stored, here.stored.position, here.stored.floor)
    return gap.comparable and not gap.reached


def keep(spark: SparkSession, commits: Commits, live: str, other: str) -> bool:
    """Make `other` what the live table was before its last switch; false when that was nothing, or is gone by now."""
    history = commits.history(live)
    switched = [told["version"] for told in history if told["operation"] in SWITCHES or told.get("cdc") in SWITCHES]
    if not switched:
        return False
    before = max(switched) - 1
    standing = commits.standing(live, [told for told in history if told["version"] <= before])
    if standing is None or standing.stored is None or standing.trouble:
        return False
    try:
        _clone(spark, deltalake.DeltaTable(live, version=before), live, other, standing.stored)
    except links.Lost:
        # Whoever was killed after the switch goes on whenever somebody asks for it, maybe later than `tidy`.
        remove(spark, [other])
        return False
    return True


def tidy(spark: SparkSession, commits: Commits, folder: str, unused: set[str]) -> set[str]:
    """Remove those of `unused` that still belong to no generation; the names of the files that don't since then.

    So a query may read what has been replaced for as long as lies between two calls. What was never committed may be
    of somebody's OPTIMIZE that is at work: that stays longer, unless its name is one of ours. Not by VACUUM: neither
    deltalake's nor Spark's knows of other generations, the first not of marks either, and the second takes half a
    minute.
    """
    table = commits.opened(folder)
    if table is None:
        return set()
    used: set[str] = set()
    live = _live(folder)
    for one in (live, *(f"{live}@{name}" for name in others(spark, live))):
        if opened := commits.table(one):
            used |= {_place(path)[1] for path in _paths(spark, opened, one)}
    replaced, listed = (
        table.vacuum(0, dry_run=True, enforce_retention_duration=False, full=full) for full in (False, True)
    )
    free = {path for path in listed if _place(path)[1] not in used}
    ours = {path for path in free if path in replaced or OURS.search(path)}
    old = (path for path in free - ours if _age_s(spark, f"{folder}/{path}") > UNCOMMITTED_S)
    remove(spark, (f"{folder}/{path}" for path in {*(ours & unused), *old}))
    return ours - unused


def _live(folder: str) -> str:
    """The folder of the live generation."""
    parent, _, name = folder.rpartition("/")
    return f"{parent}/{name.partition('@')[0]}"


def _age_s(spark: SparkSession, path: str) -> float:
    files, named = _files(spark, path)
    return time.time() - float(files.getFileStatus(named).getModificationTime()) / 1000


def needed(spark: SparkSession, table: deltalake.DeltaTable, folder: str) -> set[str]:
    """The names of the folders that a table has files in; its own may be among them."""
    return {_place(path)[0] for path in _paths(spark, table, folder) if links.absolute(path)}


def others(spark: SparkSession, folder: str) -> list[str]:
    """The names of the other generations that have a folder, oldest first."""
    parent, _, name = folder.rpartition("/")
    files, path = _files(spark, parent)
    if not files.exists(path):
        return []
    found = (status.getPath().getName() for status in files.listStatus(path))
    return sorted(one.removeprefix(f"{name}@") for one in found if one.startswith(f"{name}@"))


def remove(spark: SparkSession, paths: Iterable[str]) -> None:
    """Remove files, and folders with all that is in them, of one file system."""
    files = None
    for one in paths:
        files = files or _files(spark, one)[0]
        files.delete(_path(spark, one), True)


def _clone(spark: SparkSession, source: deltalake.DeltaTable, folder: str, target: str, stored: ViewCheckpoint) -> None:
    """Make a table of the files that another has, in the version that it was opened in. Raises Lost."""
    remove(spark, [target])
    if add_files.unmarked(source):
        add_files.create(target, add_files.shared(source, folder, target), source.schema(), stored, 1)
    else:
        spark_generations.clone(spark, source, folder, target, stored)


def _paths(spark: SparkSession, table: deltalake.DeltaTable, folder: str) -> list[str]:
    return add_files.paths(table) if add_files.unmarked(table) else spark_generations.paths(spark, folder)


def _place(path: str) -> tuple[str, str]:
    """The names of a file's folder and of the file."""
    folder, _, name = unquote(path).rpartition("/")
    return folder.rpartition("/")[2], name


def _files(spark: SparkSession, folder: str) -> tuple[Any, Any]:
    path = _path(spark, folder)
    return path.getFileSystem(spark._jsparkSession.sessionState().newHadoopConf()), path


def _path(spark: SparkSession, path: str) -> Any:
    jvm: Any = spark._jvm
    return jvm.org.apache.hadoop.fs.Path(path)
