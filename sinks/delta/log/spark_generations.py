"""Generations of a Delta table some of whose rows are marked as deleted, through Spark: only that knows the marks.

Slow beside `generations`: the log is read as a DataFrame.
"""

import re
from collections.abc import Callable, Iterable
from typing import Any

import delta.exceptions  # noqa: F401  # gives conflicts classes of their own
import deltalake
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from cdc.model.position import ViewCheckpoint
from sinks.delta.files import links
from sinks.delta.files.failures import conflicting, contended
from sinks.delta.log import add_files, jvm
from sinks.delta.log.add_files import MARKS
from sinks.delta.log.commits import Commits, Found, numbered
from sinks.delta.log.history import CLEARED

ASKED = {MARKS: ("delta.enableDeletionVectors", "true")}
"""Properties that ask readers for more than the name of a feature would."""
FILE = re.compile(r"deletion_vector_([0-9a-f-]+)\.bin$")
"""Of marks, by an id; it may lie deeper."""


def ask(spark: SparkSession, folder: str, features: Iterable[str]) -> None:
    """Ask readers of a table to know of these features from now on; of MARKS, so that it may have some.

    Not through deltalake, which would ask them to know of variants, too. Raises SinkUnavailable, see `contended`.
    """
    named = (ASKED.get(name, (f"delta.feature.{name}", "supported")) for name in features)
    properties = ", ".join(f"'{name}' = '{value}'" for name, value in named)
    try:
        spark.sql(f"ALTER TABLE delta.`{folder}` SET TBLPROPERTIES ({properties})")
    except PySparkException as error:
        if not conflicting(error):
            raise
        raise contended() from None


def drop(spark: SparkSession, folder: str, version: int) -> None:
    """Ask readers of a table to know of marks no longer; it has none in this version. Raises SinkUnavailable."""
    transaction, delta = _begin(spark, folder, version), jvm.package(spark)
    name, _ = ASKED[MARKS]
    own = transaction.metadata()
    transaction.updateMetadata(_changed(own, configuration=own.configuration().removed(name)), False)
    feature = jvm.single(delta, "DeletionVectorsTableFeature")
    transaction.updateProtocol(transaction.snapshot().protocol().removeFeature(feature))
    jvm.commit(spark, transaction, [], delta.DeltaOperations.DropTableFeature(MARKS, False), None)


def switch(
    spark: SparkSession, commits: Commits, live: str, other: str, stored: ViewCheckpoint, lags: Callable[[Found], bool]
) -> bool:
    """Commit the files of `other` as those of `live`; false while they lag behind that.

    Raises SinkUnavailable when another commit comes in between.
    """
    fresh, transaction = jvm.snapshot(spark, other), jvm.begin(spark, live)
    # Read after the transaction has begun: a newer version than its own makes it fail.
    here = commits.found(live)
    if lags(here):
        return False
    _take(spark, transaction, fresh, jvm.switch(spark), stored, here.number + 1)
    return True


def gather(spark: SparkSession, folder: str, version: int, stored: ViewCheckpoint, number: int) -> None:
    """Give a table links to all of its files, wherever they lie. Raises SinkUnavailable, see `switch`.

    `stored` and `number` are of this version: its files must not get the position of another's.
    """
    transaction = _begin(spark, folder, version)
    _take(spark, transaction, transaction.snapshot(), jvm.update(spark, stored, number), stored, number)


def clone(spark: SparkSession, source: deltalake.DeltaTable, folder: str, target: str, stored: ViewCheckpoint) -> None:
    """Make a table of the files that another, in `folder`, had in a version."""
    add_files.create(target, [], source.schema(), CLEARED, 1)
    ask(spark, target, add_files.features(source))
    fresh = jvm.log(spark, folder).getSnapshotAt(source.version(), *jvm.none(spark, 2), False)
    _take(spark, jvm.begin(spark, target), fresh, jvm.switch(spark), stored, 2)


def paths(spark: SparkSession, folder: str) -> list[str]:
    """Where the files of a table lie, and those of its marks."""
    snapshot = jvm.snapshot(spark, folder)
    log, found = snapshot.deltaLog(), []
    for file in jvm.files(snapshot):
        vector = file.deletionVector()
        found.append(file.absolutePath(log))
        if vector and vector.isOnDisk():
            found.append(vector.absolutePath(log.dataPath()))
    return [path.toUri().toString() for path in found]


def _begin(spark: SparkSession, folder: str, version: int) -> Any:
    """A transaction upon a version that was looked at. Raises SinkUnavailable when there is a newer one."""
    transaction = jvm.begin(spark, folder)
    if transaction.snapshot().version() != version:
        raise contended()
    return transaction


def _take(
    spark: SparkSession, transaction: Any, fresh: Any, operation: Any, stored: ViewCheckpoint, number: int
) -> None:
    """Commit the files of a version, of this table or another, in the place of all files. Raises SinkUnavailable."""
    if transaction.metadata().schemaString() != fresh.metadata().schemaString():
        schema = fresh.metadata().schemaString()
        transaction.updateMetadata(_changed(transaction.metadata(), schemaString=schema), False)
    source, target = (snapshot.deltaLog().dataPath() for snapshot in (fresh, transaction.snapshot()))
    actions = [file.remove() for file in jvm.files(transaction.snapshot())]
    actions += [_shared(spark, file, source, _local(target)) for file in jvm.files(fresh)]
    with numbered(spark, stored, number):
        jvm.commit(spark, transaction, actions, operation, number)


def _shared(spark: SparkSession, file: Any, source: Any, target: str) -> Any:
    """The same file with its marks, linked into another table's folder and named there."""
    name, vector = links.share(_local(source), file.path(), target), file.deletionVector()
    if vector is None or not vector.isOnDisk():
        return _changed(file, path=name)
    place = _local(vector.absolutePath(source))
    named = FILE.search(place)
    assert named
    links.share_as(place, f"{target}/{named[0]}", target)
    own = jvm.single(jvm.package(spark).actions, "DeletionVectorDescriptor").onDiskWithRelativePath(
        spark._jvm.java.util.UUID.fromString(named[1]),  # type: ignore[union-attr]
        "",
        vector.sizeInBytes(),
        vector.cardinality(),
        vector.offset(),
        vector.maxRowIndex(),
    )
    return _changed(file, path=name, deletionVector=own)


def _changed(record: Any, **values: Any) -> Any:
    """A Scala record with some other values."""
    names = [record.productElementName(at) for at in range(record.productArity())]
    fields = (values.get(name, record.productElement(at)) for at, name in enumerate(names))
    return record.copy(*fields)


def _local(path: Any) -> str:
    return str(path.toUri().getPath())
