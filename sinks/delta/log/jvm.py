"""Commits to a Delta table through Spark's log: where rows are marked as deleted, which deltalake doesn't write."""

from collections.abc import Sequence
from typing import Any

from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from cdc.model.position import ViewCheckpoint
from sinks.delta.files.failures import conflicting, contended
from sinks.delta.log.commits import APPLICATION


def begin(spark: SparkSession, folder: str) -> Any:
    """A transaction that any other commit to the table makes fail."""
    transaction = log(spark, folder).startTransaction(*none(spark, 2))
    transaction.readWholeTable()
    return transaction


def commit(spark: SparkSession, transaction: Any, actions: Sequence[Any], operation: Any, number: int | None) -> None:
    """One commit, with our number unless it says nothing of rows. Raises SinkUnavailable when another came between."""
    import delta.exceptions  # noqa: F401  # gives conflicts classes of their own

    numbers = [] if number is None else [number]
    numbered = [package(spark).actions.SetTransaction(APPLICATION, one, *none(spark, 1)) for one in numbers]
    try:
        transaction.commit(seq(spark, [*actions, *numbered]), operation)
    except PySparkException as error:
        if not conflicting(error):
            raise
        raise contended() from None


def update(spark: SparkSession, stored: ViewCheckpoint, number: int) -> Any:
    """What a commit is called that brings rows. Not a MERGE, which has to tell figures that its own plan counts."""
    updated = spark._jvm.org.apache.spark.sql.streaming.OutputMode.Update()  # type: ignore[union-attr]
    told = some(spark, stored.to_json())
    return package(spark).DeltaOperations.StreamingUpdate(updated, stored.writer, number, told)


def switch(spark: SparkSession) -> Any:
    """What a commit is called that brings another generation."""
    return single(package(spark), "DeltaOperations$ManualUpdate")


def files(snapshot: Any) -> list[Any]:
    """A version's files (`AddFile`)."""
    return list(snapshot.allFiles().collectAsList())


def snapshot(spark: SparkSession, folder: str) -> Any:
    """The newest version."""
    return log(spark, folder).update(False, *none(spark, 2))


def log(spark: SparkSession, folder: str) -> Any:
    return package(spark).DeltaLog.forTable(spark._jsparkSession, folder)


def package(spark: SparkSession) -> Any:
    jvm: Any = spark._jvm
    return jvm.org.apache.spark.sql.delta


def single(package: Any, name: str) -> Any:
    """A Scala object of a package of Delta."""
    return getattr(getattr(package, f"{name}$"), "MODULE$")


def none(spark: SparkSession, times: int) -> list[Any]:
    jvm: Any = spark._jvm
    return [jvm.scala.Option.apply(None)] * times


def some(spark: SparkSession, value: Any) -> Any:
    jvm: Any = spark._jvm
    return jvm.scala.Option.apply(value)


def items(spark: SparkSession, values: Any) -> list[Any]:
    """What a Scala sequence holds."""
    jvm: Any = spark._jvm
    return list(jvm.scala.jdk.javaapi.CollectionConverters.asJava(values))


def seq(spark: SparkSession, values: Sequence[Any]) -> Any:
    jvm: Any = spark._jvm
    held = jvm.java.util.ArrayList()
    for value in values:
        held.add(value)
    return jvm.scala.jdk.javaapi.CollectionConverters.asScala(held).toSeq()
