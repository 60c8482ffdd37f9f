"""Generations of a Delta table with deletion vectors, committed through Spark.

deltalake can't write deletion vectors. This way is slow beside `generations`, because Spark reads
the log as a DataFrame.
"""

import re
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import deltalake

from cdc.model.position import ViewCheckpoint
from cdc.sinks.delta.files import links
from cdc.sinks.delta.files.failures import committing
from cdc.sinks.delta.log import add_files, jvm
from cdc.sinks.delta.log.add_files import DELETION_VECTORS
from cdc.sinks.delta.log.commits import CommitInfo, Commits, LastCommit, number_commits
from cdc.sinks.delta.log.history import CLEARED

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

PROPERTIES = {DELETION_VECTORS: ("delta.enableDeletionVectors", "true")}
"""Properties of features that the name of the feature alone wouldn't switch on."""
VECTOR_FILE = re.compile(r"deletion_vector_([0-9a-f-]+)\.bin$")
"""The name of a file of deletion vectors, with its id; it may lie in a folder below the table's."""


def enable_features(spark: "SparkSession", folder: str, features: Iterable[str]) -> None:
    """Demand features of a table's readers from now on.

    With DELETION_VECTORS the table may have some. Not through deltalake, which would demand support
    of variants too. Raises SinkUnavailable: another commit came in between.
    """
    settings = (PROPERTIES.get(name, (f"delta.feature.{name}", "supported")) for name in features)
    properties = ", ".join(f"'{name}' = '{value}'" for name, value in settings)
    with committing():
        spark.sql(f"ALTER TABLE delta.`{folder}` SET TBLPROPERTIES ({properties})")


def drop_deletion_vectors(spark: "SparkSession", folder: str, version: int) -> None:
    """Stop demanding support of deletion vectors from a table's readers.

    The table has none in this version. Raises SinkUnavailable: there is a newer version.
    """
    transaction = jvm.begin_upon(spark, folder, version)
    name, _ = PROPERTIES[DELETION_VECTORS]
    jvm.stop_deletion_vectors(spark, transaction, name)
    jvm.commit(spark, transaction, [], jvm.drop_operation(spark, DELETION_VECTORS), None)


def switch(
    spark: "SparkSession",
    commits: Commits,
    live: str,
    generation: str,
    checkpoint: ViewCheckpoint,
    lags: Callable[[LastCommit], bool],
) -> bool:
    """Commit the files of the table in `generation` as those of `live`; return whether it was done.

    lags: tells whether the generation is behind the live table; it isn't done then.

    Raises SinkUnavailable when another commit came in between.
    """
    source, transaction = jvm.snapshot(spark, generation), jvm.begin(spark, live)
    # Read after the transaction has begun: a version that is newer than its own makes it fail.
    live_commit = commits.last_commit(live)
    if lags(live_commit):
        return False
    operation = jvm.switch_operation(spark)
    _replace_files(spark, transaction, source, operation, checkpoint, live_commit.number + 1)
    return True


def link_all_files(
    spark: "SparkSession", folder: str, version: int, checkpoint: ViewCheckpoint, number: int
) -> None:
    """Give a table links to all of its files, wherever they lie.

    Raises SinkUnavailable, see `switch`.

    `checkpoint` and `number` are of this version: its files must not get the position of another.
    """
    transaction = jvm.begin_upon(spark, folder, version)
    operation = jvm.rows_operation(spark, checkpoint, number)
    _replace_files(spark, transaction, jvm.base(transaction), operation, checkpoint, number)


def clone(
    spark: "SparkSession",
    source: deltalake.DeltaTable,
    folder: str,
    target: str,
    checkpoint: ViewCheckpoint,
) -> None:
    """Create a table of the files that the table in `folder` had in a version (`source`)."""
    add_files.create(target, [], source.schema(), CommitInfo(CLEARED, 1))
    enable_features(spark, target, add_files.reader_features(source))
    snapshot = jvm.snapshot_at(spark, folder, source.version())
    operation = jvm.switch_operation(spark)
    _replace_files(spark, jvm.begin(spark, target), snapshot, operation, checkpoint, 2)


def paths(spark: "SparkSession", folder: str) -> list[str]:
    """List where the files of a table lie, and those of its deletion vectors."""
    snapshot, uris = jvm.snapshot(spark, folder), list[str | None]()
    for file in jvm.files(snapshot):
        uris += [jvm.file_uri(snapshot, file), jvm.vector_uri(snapshot, file)]
    return [uri for uri in uris if uri]


def _replace_files(
    spark: "SparkSession",
    transaction: Any,
    source: Any,
    operation: Any,
    checkpoint: ViewCheckpoint,
    number: int,
) -> None:
    """Commit the files of a version, of this table or another, in the place of all files.

    Raises SinkUnavailable when another commit came in between.
    """
    jvm.take_schema(transaction, source)
    target = jvm.base(transaction)
    target_folder = jvm.folder_of(target)
    actions = [jvm.remove(file) for file in jvm.files(target)]
    actions += [_share(spark, source, file, target_folder) for file in jvm.files(source)]
    with number_commits(spark, checkpoint, number):
        jvm.commit(spark, transaction, actions, operation, number)


def _share(spark: "SparkSession", source: Any, file: Any, target: str) -> Any:
    """Link a file and its deletion vector into another table's folder; return the action for it."""
    name = links.share(jvm.folder_of(source), jvm.log_entry(file)["path"], target)
    uri = jvm.vector_uri(source, file)
    if uri is None:
        return jvm.add_again(file, name)
    vector = links.local_path("", uri)
    match = VECTOR_FILE.search(vector)
    assert match
    links.share_as(vector, f"{target}/{match[0]}", target)
    return jvm.add_with_vector(spark, file, name, match[1])
