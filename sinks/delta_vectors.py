"""Generations of a Delta table some of whose rows are marked as deleted, through Spark: only that knows the marks.

Slow beside `delta_generations`: the log is read as a DataFrame.
"""

from collections.abc import Callable, Iterable
from typing import Any

import delta.exceptions  # noqa: F401  # gives conflicts classes of their own
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from cdc.change import Stored
from sinks import delta_log
from sinks.delta_commits import METADATA, Commits, Found, conflicting, contended, numbered
from sinks.delta_files import MARKS

ASKED = {MARKS: ("delta.enableDeletionVectors", "true")}
"""Properties that ask readers for more than the name of a feature would."""


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


def switch(
    spark: SparkSession, commits: Commits, live: str, other: str, stored: Stored, lags: Callable[[Found], bool]
) -> bool:
    """Commit the files of `other` as those of `live`; false while they lag behind that.

    Raises SinkUnavailable when another commit comes in between.
    """
    fresh, transaction = delta_log.snapshot(spark, other), delta_log.begin(spark, live)
    # Read after the transaction has begun: a newer version than its own makes it fail.
    here = commits.found(live)
    if lags(here):
        return False
    _take_schema(transaction, fresh.metadata())
    actions = [file.remove() for file in delta_log.files(transaction.snapshot())]
    actions += [_absolute(file, fresh) for file in delta_log.files(fresh)]
    operation = delta_log.single(delta_log.package(spark), "DeltaOperations$ManualUpdate")
    with numbered(spark, stored, here.number + 1):
        delta_log.commit(spark, transaction, actions, operation, here.number + 1)
    return True


def clone(spark: SparkSession, source: str, version: int, target: str, stored: Stored) -> None:
    """Make a table of the files that another had at a version."""
    # Over an empty table: a clone that begins one has read version -1, which deltalake can't read.
    spark.range(0).write.format("delta").save(target)
    spark.conf.set(METADATA, stored.to_json())
    try:
        spark.sql(f"CREATE OR REPLACE TABLE delta.`{target}` SHALLOW CLONE delta.`{source}` VERSION AS OF {version}")
    finally:
        spark.conf.unset(METADATA)


def paths(spark: SparkSession, folder: str) -> list[str]:
    """Where the files of a table lie, and those of its marks."""
    snapshot = delta_log.snapshot(spark, folder)
    log, found = snapshot.deltaLog(), []
    for file in delta_log.files(snapshot):
        vector = file.deletionVector()
        found.append(file.absolutePath(log))
        if vector and vector.isOnDisk():
            found.append(vector.absolutePath(log.dataPath()))
    return [path.toUri().toString() for path in found]


def _take_schema(transaction: Any, other: Any) -> None:
    own = transaction.metadata()
    if own.schemaString() != other.schemaString():
        fields = [own.productElement(at) for at in range(own.productArity())]
        names = [own.productElementName(at) for at in range(own.productArity())]
        fields[names.index("schemaString")] = other.schemaString()
        transaction.updateMetadata(own.copy(*fields), False)


def _absolute(file: Any, snapshot: Any) -> Any:
    """The same file, named by where it lies."""
    names = [file.productElementName(at) for at in range(file.productArity())]
    fields = [file.productElement(at) for at in range(file.productArity())]
    log = snapshot.deltaLog()
    fields[names.index("path")] = file.absolutePath(log).toUri().toString()
    if (vector := file.deletionVector()) is not None:
        fields[names.index("deletionVector")] = vector.copyWithAbsolutePath(log.dataPath())
    return file.copy(*fields)
