"""Generations of a mirror: the live one is the table itself, others lie in <folder>@<generation>.

A switch is one commit of the live table: its files out, those of the other generation in. These are
linked into the live table's folder before (`links`). No data is copied, and of two processes that
commit at the same time one fails. The previous generation is retained as a table of the files of
the version before, linked likewise. So each generation can be read, moved and removed by itself.
Generations that earlier versions of this program have left are an exception:
`cleanup.referenced_folders` tells where they name files.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import deltalake

from cdc.model.generation import new_generation
from cdc.model.position import ViewCheckpoint, distance
from cdc.model.table import Table
from cdc.sink.promotion import wait_until_caught_up
from cdc.sinks.delta.cleanup import referenced_folders
from cdc.sinks.delta.files import links
from cdc.sinks.delta.files.failures import CommitConflict
from cdc.sinks.delta.folders import generation_names, remove_paths
from cdc.sinks.delta.log import add_files, spark_generations
from cdc.sinks.delta.log.commits import CommitInfo, Commits, LastCommit
from cdc.sinks.delta.log.history import CLEARED
from cdc.sinks.delta.tables import Tables

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

SWITCHES = ("Manual Update", "SWITCH")
"""How a table's history shows a switch: the operation of one through Spark, our mark of another."""


def promote(views: Tables, tables: Sequence[Table], names: Mapping[str, str]) -> dict[str, str]:
    """Make generations live in one commit a view; returns the names of the previous ones by table.

    None is switched before each can be: half of them would show another generation than the rest.
    The previous ones are retained after all of the commits.
    """
    from pyspark.sql import SparkSession

    spark, commits, retained = SparkSession.active(), views.commits, {}
    folders = {
        table: (live := views.folder(table, "mirror"), f"{live}@{names[table.qualified]}")
        for table in tables
    }
    pending = [table for table in tables if not is_live(commits, *folders[table])]
    lagging = list(pending)

    def is_caught_up() -> bool:
        lagging[:] = [table for table in lagging if not can_switch(commits, *folders[table])]
        return not lagging

    wait_until_caught_up(is_caught_up, views.sink, lagging)
    for table in tables:
        views.repair_changes(table)
        if table in pending:
            attempt = partial(switch, spark, commits, *folders[table])
            wait_until_caught_up(attempt, views.sink, [table])
    for table in tables:
        live, name = views.folder(table, "mirror"), new_generation()
        if not views.may_have_deletion_vectors(table.qualified):
            wait_until_caught_up(partial(drop_deletion_vectors, spark, commits, live), views.sink)
        if retain_previous(spark, commits, live, f"{live}@{name}"):
            retained[table.qualified] = name
    return retained


def list_names(views: Tables, table: Table) -> list[str]:
    """List the generations of a view, the live one first.

    Without folders that have no table: a killed command had linked files into them, no more.
    """
    live = views.folder(table, "mirror")
    checkpoint = views.commits.last_commit(live).checkpoint
    live_name = [checkpoint.generation] if checkpoint else []
    names = [name for name in generation_names(live) if views.commits.table(f"{live}@{name}")]
    return live_name + [name for name in names if name not in live_name]


def drop_unreferenced(views: Tables, tables: Sequence[Table], keep: Mapping[str, str]) -> None:
    """Remove the folders of generations that are neither live nor in `keep`.

    A folder in which a remaining generation names files, as earlier versions did, stays until it
    names none there.
    """
    from pyspark.sql import SparkSession

    # Not the commits of a stream at work: the versions that it has opened mustn't move on.
    spark, commits = SparkSession.active(), Commits()
    for table in tables:
        live = views.folder(table, "mirror")
        folders = {f"{live}@{name}" for name in generation_names(live)}
        remaining = (live, f"{live}@{keep.get(table.qualified)}")
        opened = {folder: commits.table(folder) for folder in remaining}
        used = {folder: delta_table for folder, delta_table in opened.items() if delta_table}
        referenced = {
            f"{views.path}/{table.qualified}/{name}"
            for folder, delta_table in used.items()
            for name in referenced_folders(spark, delta_table, folder)
        }
        remove_paths(folders - used.keys() - referenced)


def is_live(commits: Commits, live: str, generation: str) -> bool:
    """Tell whether readers see this generation."""
    checkpoint = commits.last_commit(live).checkpoint
    return checkpoint is not None and f"{live}@{checkpoint.generation}" == generation


def can_switch(commits: Commits, live: str, generation: str) -> bool:
    """Tell whether there is such a generation, and readers who are shown it don't go back."""
    source_commit, live_commit = commits.last_commit(generation), commits.last_commit(live)
    exists = commits.opened_table(generation) is not None
    return exists and not source_commit.trouble and not lags(source_commit, live_commit)


def switch(spark: "SparkSession", commits: Commits, live: str, generation: str) -> bool:
    """Commit the files of the table in `generation` as those of `live`; return whether it was done.

    It isn't done while the live table is ahead, or when somebody else commits to it meanwhile.
    """
    source_commit, live_commit = commits.last_commit(generation), commits.last_commit(live)
    source, table = commits.opened_table(generation), commits.opened_table(live)
    if source is None or source_commit.trouble:
        return False
    # A source without records has no position, and a view of it can't be behind. The name is the
    # folder's: a retained generation has its former one until a batch reaches it.
    checkpoint = replace(
        source_commit.checkpoint or CLEARED, generation=generation.rpartition("@")[2]
    )
    if table is None:
        clone(spark, source, generation, live, checkpoint)
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


def drop_deletion_vectors(spark: "SparkSession", commits: Commits, live: str) -> bool:
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


def retain_previous(spark: "SparkSession", commits: Commits, live: str, generation: str) -> bool:
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
        clone(spark, source, live, generation, standing.checkpoint)
    except links.FileMissing:
        # A process that was killed after the switch goes on whenever somebody starts it again. That
        # may be later than the clean-up of the files that the switch has replaced.
        remove_paths([generation])
        return False
    return True


def clone(
    spark: "SparkSession",
    source: deltalake.DeltaTable,
    folder: str,
    target: str,
    checkpoint: ViewCheckpoint,
) -> None:
    """Create a table of the files that the table in `folder` has in the version of `source`.

    Raises FileMissing.
    """
    remove_paths([target])
    if add_files.has_deleted_rows(source):
        spark_generations.clone(spark, source, folder, target, checkpoint)
    else:
        files = add_files.share_files(source, folder, target)
        add_files.create(target, files, source.schema(), CommitInfo(checkpoint, 1))
