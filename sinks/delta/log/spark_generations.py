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
from cdc.sinks.delta.files.failures import commit_conflict, is_commit_conflict
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
    import delta.exceptions  # noqa: F401  # gives conflicts classes of their own
    from pyspark.errors import PySparkException

    settings = (PROPERTIES.get(name, (f"delta.feature.{name}", "supported")) for name in features)
    properties = ", ".join(f"'{name}' = '{value}'" for name, value in settings)
    try:
        spark.sql(f"ALTER TABLE delta.`{folder}` SET TBLPROPERTIES ({properties})")
    except PySparkException as error:
        if not is_commit_conflict(error):
            raise
        raise commit_conflict() from None


def drop_deletion_vectors(spark: "SparkSession", folder: str, version: int) -> None:
    """Stop demanding support of deletion vectors from a table's readers.

    The table has none in this version. Raises SinkUnavailable: there is a newer version.
    """
    transaction, delta = _begin(spark, folder, version), jvm.package(spark)
    name, _ = PROPERTIES[DELETION_VECTORS]
    metadata = transaction.metadata()
    transaction.updateMetadata(
        _copy(metadata, configuration=metadata.configuration().removed(name)), False
    )
    feature = jvm.single(delta, "DeletionVectorsTableFeature")
    transaction.updateProtocol(transaction.snapshot().protocol().removeFeature(feature))
    jvm.commit(
        spark,
        transaction,
        [],
        delta.DeltaOperations.DropTableFeature(DELETION_VECTORS, False),
        None,
    )


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
    _replace_files(
        spark, transaction, source, jvm.switch(spark), checkpoint, live_commit.number + 1
    )
    return True


def link_all_files(
    spark: "SparkSession", folder: str, version: int, checkpoint: ViewCheckpoint, number: int
) -> None:
    """Give a table links to all of its files, wherever they lie.

    Raises SinkUnavailable, see `switch`.

    `checkpoint` and `number` are of this version: its files must not get the position of another.
    """
    transaction = _begin(spark, folder, version)
    operation = jvm.update(spark, checkpoint, number)
    _replace_files(spark, transaction, transaction.snapshot(), operation, checkpoint, number)


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
    snapshot = jvm.log(spark, folder).getSnapshotAt(source.version(), *jvm.none(spark, 2), False)
    _replace_files(spark, jvm.begin(spark, target), snapshot, jvm.switch(spark), checkpoint, 2)


def paths(spark: "SparkSession", folder: str) -> list[str]:
    """List where the files of a table lie, and those of its deletion vectors."""
    snapshot = jvm.snapshot(spark, folder)
    log, file_paths = snapshot.deltaLog(), []
    for file in jvm.files(snapshot):
        vector = file.deletionVector()
        file_paths.append(file.absolutePath(log))
        if vector and vector.isOnDisk():
            file_paths.append(vector.absolutePath(log.dataPath()))
    return [path.toUri().toString() for path in file_paths]


def _begin(spark: "SparkSession", folder: str, version: int) -> Any:
    """Begin a transaction on a version that was read before.

    Raises SinkUnavailable when there is a newer one.
    """
    transaction = jvm.begin(spark, folder)
    if transaction.snapshot().version() != version:
        raise commit_conflict()
    return transaction


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
    if transaction.metadata().schemaString() != source.metadata().schemaString():
        schema = source.metadata().schemaString()
        transaction.updateMetadata(_copy(transaction.metadata(), schemaString=schema), False)
    source_path = source.deltaLog().dataPath()
    target = _local(transaction.snapshot().deltaLog().dataPath())
    actions = [file.remove() for file in jvm.files(transaction.snapshot())]
    actions += [_share(spark, file, source_path, target) for file in jvm.files(source)]
    with number_commits(spark, checkpoint, number):
        jvm.commit(spark, transaction, actions, operation, number)


def _share(spark: "SparkSession", file: Any, source: Any, target: str) -> Any:
    """Link a file and its deletion vector into another table's folder; return the action for it."""
    name, vector = links.share(_local(source), file.path(), target), file.deletionVector()
    if vector is None or not vector.isOnDisk():
        return _copy(file, path=name)
    vector_path = _local(vector.absolutePath(source))
    match = VECTOR_FILE.search(vector_path)
    assert match
    links.share_as(vector_path, f"{target}/{match[0]}", target)
    descriptor = jvm.single(
        jvm.package(spark).actions, "DeletionVectorDescriptor"
    ).onDiskWithRelativePath(
        spark._jvm.java.util.UUID.fromString(match[1]),  # type: ignore[union-attr]
        "",
        vector.sizeInBytes(),
        vector.cardinality(),
        vector.offset(),
        vector.maxRowIndex(),
    )
    return _copy(file, path=name, deletionVector=descriptor)


def _copy(record: Any, **values: Any) -> Any:
    """Copy a Scala record with some other values."""
    names = [record.productElementName(number) for number in range(record.productArity())]
    fields = (values.get(name, record.productElement(number)) for number, name in enumerate(names))
    return record.copy(*fields)


def _local(path: Any) -> str:
    return str(path.toUri().getPath())
