"""Delta's own classes in Spark's Java process, for commits with deletion vectors.

deltalake doesn't write deletion vectors, so such commits go through Spark.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from cdc.model.position import ViewCheckpoint
from cdc.sinks.delta.files.failures import commit_conflict, is_commit_conflict
from cdc.sinks.delta.log.commits import APPLICATION

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def begin(spark: "SparkSession", folder: str) -> Any:
    """Begin a transaction that fails after any other commit to the table."""
    transaction = log(spark, folder).startTransaction(*none(spark, 2))
    transaction.readWholeTable()
    return transaction


def commit(
    spark: "SparkSession",
    transaction: Any,
    actions: Sequence[Any],
    operation: Any,
    number: int | None,
) -> None:
    """Commit a transaction; number: ours, None for a commit that says nothing of rows.

    Raises SinkUnavailable when another commit came in between.
    """
    import delta.exceptions  # noqa: F401  # gives conflicts classes of their own
    from pyspark.errors import PySparkException

    numbers = [] if number is None else [number]
    number_actions = [
        package(spark).actions.SetTransaction(APPLICATION, value, *none(spark, 1))
        for value in numbers
    ]
    try:
        transaction.commit(seq(spark, [*actions, *number_actions]), operation)
    except PySparkException as error:
        if not is_commit_conflict(error):
            raise
        raise commit_conflict() from None


def update(spark: "SparkSession", checkpoint: ViewCheckpoint, number: int) -> Any:
    """Make the name of a commit that brings rows.

    Not MERGE: Delta demands figures of it that only its own plan counts.
    """
    update_mode = spark._jvm.org.apache.spark.sql.streaming.OutputMode.Update()  # type: ignore[union-attr]
    metadata = some(spark, checkpoint.to_json())
    return package(spark).DeltaOperations.StreamingUpdate(
        update_mode, checkpoint.writer, number, metadata
    )


def switch(spark: "SparkSession") -> Any:
    """Make the name of a commit that brings another generation."""
    return single(package(spark), "DeltaOperations$ManualUpdate")


def files(snapshot: Any) -> list[Any]:
    """List a version's files (`AddFile`)."""
    return list(snapshot.allFiles().collectAsList())


def snapshot(spark: "SparkSession", folder: str) -> Any:
    """Load the newest version of a table."""
    return log(spark, folder).update(False, *none(spark, 2))


def log(spark: "SparkSession", folder: str) -> Any:
    """Open the log (`DeltaLog`) of a table."""
    return package(spark).DeltaLog.forTable(spark._jsparkSession, folder)


def package(spark: "SparkSession") -> Any:
    """Return Delta's package of Scala classes."""
    jvm: Any = spark._jvm
    return jvm.org.apache.spark.sql.delta


def single(package: Any, name: str) -> Any:
    """Return a Scala object (not a class) of a package of Delta."""
    return getattr(getattr(package, f"{name}$"), "MODULE$")


def none(spark: "SparkSession", times: int) -> list[Any]:
    """Return Scala's None so many times, for optional arguments."""
    jvm: Any = spark._jvm
    return [jvm.scala.Option.apply(None)] * times


def some(spark: "SparkSession", value: Any) -> Any:
    """Wrap a value as Scala's Some."""
    jvm: Any = spark._jvm
    return jvm.scala.Option.apply(value)


def items(spark: "SparkSession", values: Any) -> list[Any]:
    """List what a Scala sequence contains."""
    jvm: Any = spark._jvm
    return list(jvm.scala.jdk.javaapi.CollectionConverters.asJava(values))


def seq(spark: "SparkSession", values: Sequence[Any]) -> Any:
    """Make a Scala sequence."""
    jvm: Any = spark._jvm
    array = jvm.java.util.ArrayList()
    for value in values:
        array.add(value)
    return jvm.scala.jdk.javaapi.CollectionConverters.asScala(array).toSeq()
