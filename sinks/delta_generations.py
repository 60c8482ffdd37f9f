"""Generations of a Delta table: others lie in folders <folder>@<generation>, the live one is the table itself.

A switch is one commit of the live table: its files out, those of the other generation in, named where they lie. No data
is copied, and of two who commit at the same time one fails. What readers saw until then is kept as a table of the files
of the version before. So a generation may need files of another: `needed` tells which.
"""

from collections.abc import Iterable
from typing import Any
from urllib.parse import unquote

import deltalake
from pyspark.sql import SparkSession

from cdc.change import Stored
from cdc.errors import SinkUnavailable
from cdc.sink import behind
from sinks import delta_files, delta_vectors
from sinks.delta_commits import Commits

READ_HOURS = 2
"""How long a query may still read what has been replaced."""
SWITCHES = ("Manual Update", "SWITCH")
"""What a table's history calls a switch: the operation of one through Spark, the mark of another."""


def switch(spark: SparkSession, commits: Commits, live: str, other: str) -> bool:
    """Commit the files of `other` as those of `live`; false while the live table is ahead, or was changed meanwhile."""
    there, here = commits.found(other), commits.found(live)
    fresh, table = commits.opened(other), commits.opened(live)
    if there.stored is None or fresh is None:
        return False
    if table is None:
        _clone(spark, fresh, other, live, there.stored)
        return True
    if here.stored and behind(there.stored, here.stored):
        return False
    files, needed = delta_files.named(fresh), delta_files.features(fresh) - delta_files.features(table)
    try:
        if needed:
            # A commit by itself: the next try begins with what the table is after it.
            delta_vectors.ask(spark, live, needed)
        elif files is None:
            return delta_vectors.switch(spark, commits, live, other, there.stored)
        else:
            delta_files.commit(
                table, files, "overwrite", fresh.schema(), there.stored, here.number + 1, mark={"cdc": SWITCHES[1]}
            )
    except SinkUnavailable:
        return False
    return not needed


def keep(spark: SparkSession, commits: Commits, live: str, other: str) -> bool:
    """Make `other` what the live table was before its last switch; false when it was nothing."""
    history = commits.history(live)
    switched = [told["version"] for told in history if told["operation"] in SWITCHES or told.get("cdc") in SWITCHES]
    if not switched:
        return False
    before = max(switched) - 1
    told = (one.get("userMetadata") or "" for one in history if one["version"] <= before)
    stored = next((Stored.from_json(text) for text in told if text.startswith(Stored.MARK)), None)
    if stored is None or not stored.position.offsets:
        return False
    _clone(spark, deltalake.DeltaTable(live, version=before), live, other, stored)
    return True


def tidy(spark: SparkSession, table: deltalake.DeltaTable, folder: str) -> None:
    """Remove files that have been replaced; not while another generation may be made of them."""
    if not others(spark, folder):
        table.vacuum(READ_HOURS, dry_run=False, enforce_retention_duration=False)


def needed(spark: SparkSession, table: deltalake.DeltaTable, folder: str) -> set[str]:
    """The names of the folders outside of its own that a table has files in."""
    paths = delta_files.paths(table) if delta_files.unmarked(table) else delta_vectors.paths(spark, folder)
    return {unquote(one).rsplit("/", 2)[-2] for one in paths if delta_files.absolute(one)}


def others(spark: SparkSession, folder: str) -> list[str]:
    """The names of the other generations that have a folder, oldest first."""
    parent, _, name = folder.rpartition("/")
    files, path = _files(spark, parent)
    if not files.exists(path):
        return []
    found = (status.getPath().getName() for status in files.listStatus(path))
    return sorted(one.removeprefix(f"{name}@") for one in found if one.startswith(f"{name}@"))


def remove(spark: SparkSession, folders: Iterable[str]) -> None:
    for folder in folders:
        files, path = _files(spark, folder)
        files.delete(path, True)


def _clone(spark: SparkSession, source: deltalake.DeltaTable, folder: str, target: str, stored: Stored) -> None:
    """Make a table of the files that another has, in the version that it was opened in."""
    remove(spark, [target])
    files = delta_files.named(source)
    if files is None:
        delta_vectors.clone(spark, folder, source.version(), target, stored)
    else:
        delta_files.create(target, files, source.schema(), stored, 1)


def _files(spark: SparkSession, folder: str) -> tuple[Any, Any]:
    jvm: Any = spark._jvm
    path = jvm.org.apache.hadoop.fs.Path(folder)
    return path.getFileSystem(spark._jsparkSession.sessionState().newHadoopConf()), path
