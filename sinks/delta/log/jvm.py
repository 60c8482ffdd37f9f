"""Delta's own classes in Spark's Java process, for commits with deletion vectors.

deltalake doesn't write deletion vectors, so such commits go through Spark. Delta promises nothing
about these classes. So they are called here alone, by the members that `private_members` declares
and looks up before anything is written.

A snapshot is a version of a table, a file one that the log has (`AddFile`), an action what a commit
consists of.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from cdc.model.position import ViewCheckpoint
from cdc.sinks.delta.files import links
from cdc.sinks.delta.files.failures import commit_conflict, committing
from cdc.sinks.delta.log import private_members as members
from cdc.sinks.delta.log.commits import APPLICATION
from cdc.sinks.delta.log.private_members import FIELD, Member

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


def begin(spark: "SparkSession", folder: str) -> Any:
    """Begin a transaction that fails after any other commit to the table."""
    transaction = members.start_transaction(_log(spark, folder), *_none(spark, 2))
    members.read_whole_table(transaction)
    return transaction


def begin_upon(spark: "SparkSession", folder: str, version: int) -> Any:
    """Begin a transaction on a version that was read before.

    Raises SinkUnavailable when there is a newer one.
    """
    transaction = begin(spark, folder)
    if members.version(members.base_snapshot(transaction)) != version:
        raise commit_conflict()
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
    numbers = [] if number is None else [number]
    number_actions = [
        _new(spark, members.set_transaction, APPLICATION, value, *_none(spark, 1))
        for value in numbers
    ]
    with committing():
        members.commit(transaction, _seq(spark, [*actions, *number_actions]), operation)


def rows_operation(spark: "SparkSession", checkpoint: ViewCheckpoint, number: int) -> Any:
    """Make the name of a commit that brings rows.

    Not MERGE: Delta demands figures of it that only its own plan counts.
    """
    java: Any = spark._jvm
    update_mode = java.org.apache.spark.sql.streaming.OutputMode.Update()
    metadata = _some(spark, checkpoint.to_json())
    return _new(spark, members.streaming_update, update_mode, checkpoint.writer, number, metadata)


def switch_operation(spark: "SparkSession") -> Any:
    """Make the name of a commit that brings another generation."""
    return _object(spark, members.manual_update)


def base(transaction: Any) -> Any:
    """Return the snapshot that a transaction goes on from."""
    return members.base_snapshot(transaction)


def snapshot(spark: "SparkSession", folder: str) -> Any:
    """Load the newest version of a table."""
    return members.update(_log(spark, folder), False, *_none(spark, 2))


def snapshot_at(spark: "SparkSession", folder: str, version: int) -> Any:
    """Load a version of a table."""
    return members.snapshot_at(_log(spark, folder), version, *_none(spark, 2), False)


def files(snapshot: Any) -> list[Any]:
    """List a version's files."""
    return list(members.all_files(snapshot).collectAsList())


def folder_of(snapshot: Any) -> str:
    """Return where a table lies, as the operating system has it."""
    return links.local_path("", _uri(members.data_path(members.log_of(snapshot))))


def log_entry(file: Any) -> dict[str, Any]:
    """Return what the log has of a file."""
    entry: dict[str, Any] = json.loads(members.file_json(file))["add"]
    return entry


def file_uri(snapshot: Any, file: Any) -> str:
    """Tell where a file lies."""
    return _uri(members.file_path(file, members.log_of(snapshot)))


def vector_uri(snapshot: Any, file: Any) -> str | None:
    """Tell where the file of a file's deletion vector lies; None where there is none."""
    vector = members.file_vector(file)
    if vector is None or not members.is_on_disk(vector):
        return None
    return _uri(members.vector_path(vector, members.data_path(members.log_of(snapshot))))


def vector_text(file: Any) -> str:
    """Return the deletion vector that a file has, as `build_vectors` takes it."""
    return str(members.vector_text(members.file_vector(file)))


def build_vectors(transaction: Any, places: "DataFrame") -> Iterable[tuple[str, Any]]:
    """Write deletion vectors of these places; returns each with the path that names its file.

    places: the columns that Delta expects, see `mirror.merge.PLACES`.
    """
    spark, log = places.sparkSession, members.log_of(members.base_snapshot(transaction))
    generator = _object(spark, members.build_vectors)
    results = members.build_vectors(generator, spark._jsparkSession, places._jdf, log, 0)
    java: Any = spark._jvm
    for result in java.scala.jdk.javaapi.CollectionConverters.asJava(results):
        yield str(members.result_path(result)), members.result_vector(result)


def mark_rows(file: Any, deleted: int, vector: Any) -> list[Any]:
    """Make the actions that give a file another deletion vector.

    deleted: how many rows the present one marks. There are no actions where the other one marks no
    more, and none that keeps the file where it marks all of them.
    """
    marked = members.cardinality(vector)
    if marked == deleted:
        return []
    pair = members.remove_rows(file, vector, True, True)
    return [pair._2(), pair._1()] if members.physical_rows(file).get() > marked else [pair._2()]


def add(spark: "SparkSession", entry: Mapping[str, Any]) -> Any:
    """Make the action that adds a file, of what the log shall have of it."""
    return members.action_of_json(
        _object(spark, members.action_of_json), json.dumps({"add": dict(entry)})
    )


def remove(file: Any) -> Any:
    """Make the action that removes a file."""
    return members.remove(file)


def add_again(file: Any, path: str) -> Any:
    """Make the action that adds a file under another path, with its deletion vector."""
    return _copy(members.copy_file, file, path=path)


def add_with_vector(spark: "SparkSession", file: Any, path: str, vector_id: str) -> Any:
    """Make the same action where the deletion vector's own file lies in the table's folder.

    vector_id: the UUID in that file's name.
    """
    vector, java = members.file_vector(file), spark._jvm
    descriptor = members.vector_on_disk(
        _object(spark, members.vector_on_disk),
        java.java.util.UUID.fromString(vector_id),  # type: ignore[union-attr]
        "",
        members.vector_size(vector),
        members.cardinality(vector),
        members.vector_offset(vector),
        members.last_row(vector),
    )
    return _copy(members.copy_file, file, path=path, deletionVector=descriptor)


def read_files(transaction: Any, files: Sequence[Any], spark: "SparkSession") -> "DataFrame":
    """Read the rows of some files as the transaction sees them."""
    from pyspark.sql import DataFrame

    snapshot, actions = members.base_snapshot(transaction), _seq(spark, files)
    frame = members.create_frame(
        members.log_of(snapshot), snapshot, actions, False, *_none(spark, 1)
    )
    return DataFrame(frame, spark)


def take_schema(transaction: Any, source: Any) -> None:
    """Give a table the columns of a snapshot of another one."""
    metadata, text = members.metadata(transaction), members.schema_text(members.metadata_of(source))
    if members.schema_text(metadata) != text:
        members.update_metadata(
            transaction, _copy(members.copy_metadata, metadata, schemaString=text), False
        )


def stop_deletion_vectors(spark: "SparkSession", transaction: Any, property_: str) -> None:
    """Take a property, and the feature of deletion vectors, out of a table."""
    metadata = members.metadata(transaction)
    configuration = members.configuration(metadata).removed(property_)
    members.update_metadata(
        transaction, _copy(members.copy_metadata, metadata, configuration=configuration), False
    )
    feature = _object(spark, members.vectors_feature)
    members.update_protocol(
        transaction,
        members.remove_feature(members.protocol_of(members.base_snapshot(transaction)), feature),
    )


def drop_operation(spark: "SparkSession", feature: str) -> Any:
    """Make the name of a commit that takes a feature out of a table."""
    return _new(spark, members.drop_feature, feature, False)


def temporary_folder(spark: "SparkSession") -> str:
    """Return the folder for temporary files of Spark's process."""
    java: Any = spark._jvm
    return str(java.System.getProperty("java.io.tmpdir"))


def _uri(path: Any) -> str:
    return str(path.toUri().toASCIIString())


def _log(spark: "SparkSession", folder: str) -> Any:
    # Delta's classes ask for the thread's session, which only an action of SQL would set:
    # DELTA_SPARK_SESSION_NOT_SET at the first commit after a checkpoint of the log.
    sessions = _named(spark, "org.apache.spark.sql.classic.SparkSession")
    sessions.setActiveSession(spark._jsparkSession)
    log_class = _named(spark, members.open_log.class_name)
    return members.open_log(log_class, spark._jsparkSession, folder)


def _named(spark: "SparkSession", name: str) -> Any:
    """Return a class, or a package, by its full name."""
    java: Any = spark._jvm
    for part in name.split("."):
        java = getattr(java, part)
    return java


def _object(spark: "SparkSession", member: Member) -> Any:
    """Return the Scala object that has a member, the only one of its class."""
    return getattr(_named(spark, member.class_name), FIELD)


def _new(spark: "SparkSession", constructor: Member, *arguments: Any) -> Any:
    package, _, _ = constructor.class_name.rpartition(".")
    return constructor(_named(spark, package), *arguments)


def _copy(copy: Member, record: Any, **values: Any) -> Any:
    """Copy a Scala record with some other values."""
    names = [record.productElementName(number) for number in range(record.productArity())]
    assert values.keys() <= set(names)
    fields = (values.get(name, record.productElement(number)) for number, name in enumerate(names))
    return copy(record, *fields)


def _none(spark: "SparkSession", times: int) -> list[Any]:
    """Return Scala's None so many times, for optional arguments."""
    return [_some(spark, None)] * times


def _some(spark: "SparkSession", value: Any) -> Any:
    """Wrap a value as Scala's Option."""
    java: Any = spark._jvm
    return java.scala.Option.apply(value)


def _seq(spark: "SparkSession", values: Sequence[Any]) -> Any:
    """Make a Scala sequence."""
    java: Any = spark._jvm
    array = java.java.util.ArrayList()
    for value in values:
        array.add(value)
    return java.scala.jdk.javaapi.CollectionConverters.asScala(array).toSeq()
