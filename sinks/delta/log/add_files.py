"""Commits by deltalake: executors write the files, the driver adds them to a table's log.

That is one Spark job and a commit of milliseconds. A commit through Spark reads the table's log as
a DataFrame first and starts a process for each file's permissions: more CPU than a batch of some
thousand rows takes otherwise. Spark commits only where deletion vectors are needed.
"""

import json
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, Literal

import deltalake
from deltalake import CommitProperties, Transaction
from deltalake.transaction import AddAction, create_table_with_add_actions

from cdc.sink.lane_run import freeze_gc_after
from cdc.sinks.delta.files import links, parquet
from cdc.sinks.delta.files.columns import lacks
from cdc.sinks.delta.files.failures import commit_conflict, os_error_text, write_failure
from cdc.sinks.delta.files.parquet import GROUP_BYTES, GROUP_ROWS, DataFile
from cdc.sinks.delta.log.commits import APPLICATION, CommitInfo

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame

Mode = Literal["append", "overwrite"]
FILE_COLUMNS = "name string, size long, stats string"
DELETION_VECTORS = "deletionVectors"
"""The feature that readers must support of a table whose rows may be marked as deleted."""
WORKER_WRITE_ERROR = re.compile(r"OSError: \[Errno (5|13|27|28|30|122)\]")
"""How a worker's file system says that it takes no more: by Linux's numbers of errors."""


def create(
    folder: str, actions: Sequence[AddAction], schema: deltalake.Schema, info: CommitInfo
) -> None:
    """Create a table of files that are written, in one commit.

    Raises SinkUnavailable: somebody else has created it meanwhile, or the folder takes no more.
    """
    try:
        create_table_with_add_actions(
            folder, schema, list(actions), commit_properties=_properties(info)
        )
    except (deltalake.exceptions.DeltaError, OSError) as error:
        if not deltalake.DeltaTable.is_deltatable(folder):
            if isinstance(error, OSError) or os_error_text(error):
                raise write_failure(folder, error) from None
            raise
        raise commit_conflict() from None


def write_files(folder: str, rows: "DataFrame", schema: deltalake.Schema) -> list[DataFile]:
    """Write rows as files into a table's folder; they aren't part of the table yet.

    Raises SinkUnavailable when the folder takes no more.
    """
    from pyspark.errors import PySparkException
    from pyspark.sql.types import StructType

    typed = rows.to(StructType.fromJson(json.loads(schema.to_json())))
    # By number: Spark parses a dot or a backtick in a name.
    numbered = typed.toDF(*(f"c{number}" for number in range(len(typed.columns))))
    try:
        files = numbered.mapInArrow(
            freeze_gc_after(_writer(folder, typed.columns)), FILE_COLUMNS
        ).collect()
    except PySparkException as error:
        if WORKER_WRITE_ERROR.search(str(error)):
            raise write_failure(folder, error) from None
        raise
    return [DataFile(file["name"], file["size"], file["stats"]) for file in files]


def add_actions(files: Iterable[DataFile]) -> list[AddAction]:
    """Make the actions of a commit that adds files to a table."""
    now = int(time.time() * 1000)
    return [AddAction(file.name, file.size, {}, now, True, file.stats) for file in files]


def commit(
    table: deltalake.DeltaTable,
    actions: Sequence[AddAction],
    mode: Mode,
    schema: deltalake.Schema,
    info: CommitInfo,
) -> None:
    """Commit files upon the version in which a table is open.

    Raises SinkUnavailable: another commit came in between, or the folder takes no more.
    """
    with _committing(table):
        table.create_write_transaction(
            list(actions), mode, schema, commit_properties=_properties(info)
        )


@contextmanager
def _committing(table: deltalake.DeltaTable) -> Iterator[None]:
    """Raise SinkUnavailable where a commit that deltalake makes inside the block fails for another
    commit or for the folder.
    """
    try:
        yield
    except (deltalake.exceptions.DeltaError, OSError) as error:
        if deltalake.DeltaTable(table.table_uri).version() > table.version():
            raise commit_conflict() from None
        if isinstance(error, OSError) or os_error_text(error):
            raise write_failure(table.table_uri, error) from None
        raise


def _properties(info: CommitInfo) -> CommitProperties:
    metadata = {"userMetadata": info.checkpoint.to_json(), **info.properties}
    transaction = Transaction(APPLICATION, info.number)
    # No retries: the commit must follow the version that was read. A RESTORE in between has taken
    # back rows that the position counts.
    return CommitProperties(metadata, max_commit_retries=0, app_transactions=[transaction])


def matches_any(table: str, patterns: Iterable[str]) -> bool:
    """Tell whether the name of a table matches one of these; * in a pattern stands for any text."""
    return any(fnmatchcase(table, pattern) for pattern in patterns)


def size_bytes(table: deltalake.DeltaTable) -> int:
    """Add up the sizes of a table's files."""
    return sum(_actions(table)["size_bytes"].to_pylist())


def reader_features(table: deltalake.DeltaTable) -> set[str]:
    """Name the features that a table demands of its readers.

    `commit` doesn't add to them, even when it brings columns that need one.
    """
    return set(table.protocol().reader_features or ())


def has_deleted_rows(table: deltalake.DeltaTable) -> bool:
    """Tell whether some rows in a table's files are marked as deleted (deletion vectors)."""
    return bool(table.deletion_vectors().read_all().num_rows)


def paths(table: deltalake.DeltaTable) -> list[str]:
    """List a table's files as its log names them.

    They are relative to its folder; absolute where earlier versions of this program put them so.
    """
    return [str(path) for path in _actions(table)["path"].to_pylist()]


def share_files(table: deltalake.DeltaTable, folder: str, target: str) -> list[AddAction]:
    """Link the files of the table in `folder` into `target`, and return the actions that add them.

    Only for a table without deleted rows. Raises FileMissing, SinkUnavailable: see `links`.
    """
    now, shared_files, actions = int(time.time() * 1000), [], _actions(table)
    for number, path in enumerate(paths(table)):
        stats = {
            "numRecords": actions["num_records"][number].as_py(),
            "nullCount": _json_values(actions["null_count"][number]),
            "minValues": _json_values(actions["min"][number]),
            "maxValues": _json_values(actions["max"][number]),
        }
        name, size = links.share(folder, path, target), actions["size_bytes"][number].as_py()
        shared_files.append(AddAction(name, size, {}, now, True, json.dumps(stats)))
    return shared_files


def _actions(table: deltalake.DeltaTable) -> "pa.Table":
    import pyarrow as pa

    return pa.table(table.get_add_actions())


def _json_values(values: "pa.StructScalar") -> dict[str, Any]:
    """Return those of a struct's values that JSON can express.

    A year that Python can't represent is left out.
    """
    bounds: dict[str, Any] = {}
    if not values.is_valid:
        return bounds
    for name, value in values.items():
        with suppress(ValueError, OverflowError):
            if (bound := parquet.json_bound(value.as_py())) is not None:
                bounds[name] = bound
    return bounds


def local_paths(table: deltalake.DeltaTable, folder: str) -> list[str]:
    """List where a table's files lie, as the operating system has it."""
    # Not `file_uris`, which puts the table's folder before absolute paths too.
    return [links.local_path(folder, path) for path in paths(table)]


def add_columns(table: deltalake.DeltaTable, columns: deltalake.Schema) -> None:
    """Add the columns that a table lacks, and the fields that its structs lack, in a commit of its
    own.

    Raises SinkUnavailable: another commit came in between, or the folder takes no more.
    """
    present = {field.name: json.loads(field.type.to_json()) for field in table.schema().fields}
    missing = [
        field
        for field in columns.fields
        if field.name not in present or lacks(present[field.name], json.loads(field.type.to_json()))
    ]
    if missing:
        version = table.version()
        with _committing(table):
            table.alter.add_columns(
                [deltalake.Field(field.name, field.type, nullable=True) for field in missing]
            )
        table.update_incremental()
        if table.version() != version + 1:
            raise commit_conflict()


def _writer(
    folder: str, names: Sequence[str]
) -> "Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]":
    """Make the function of a task: it writes one file, if it has a row."""

    def write_file(batches: "Iterator[pa.RecordBatch]") -> "Iterator[pa.RecordBatch]":
        import pyarrow as pa

        groups = (group.rename_columns(names) for group in row_groups(batches))
        if file := parquet.write_file(folder, links.new_file_name(), groups):
            yield pa.RecordBatch.from_pylist(
                [{"name": file.name, "size": file.size, "stats": file.stats}]
            )

    return write_file


def row_groups(batches: "Iterator[pa.RecordBatch]") -> "Iterator[pa.Table]":
    """Put batches together to row groups within the limits."""
    import pyarrow as pa

    group: list[Any] = []
    rows = size = 0
    for batch in batches:
        group.append(batch)
        rows += batch.num_rows
        size += batch.nbytes
        if rows >= GROUP_ROWS or size >= GROUP_BYTES:
            yield pa.Table.from_batches(group)
            group, rows, size = [], 0, 0
    if rows:
        yield pa.Table.from_batches(group)
