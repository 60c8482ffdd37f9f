"""Files of a Delta table written by executors and committed by the driver: one Spark job, a commit of milliseconds.

A commit through Spark reads the table's log as a DataFrame first and starts a process for each file's permissions:
more CPU than a batch of some thousand rows takes otherwise. That way stays where deletion vectors are needed.
"""

import json
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from fnmatch import fnmatchcase
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

import deltalake
from deltalake import CommitProperties, Transaction
from deltalake.transaction import AddAction, create_table_with_add_actions

from cdc.model.position import ViewCheckpoint
from cdc.sink.lane_run import freeze_gc_after
from sinks.delta.files import links, parquet
from sinks.delta.files.failures import contended, refused, unwritable
from sinks.delta.files.parquet import GROUP_BYTES, GROUP_ROWS, File
from sinks.delta.log.commits import APPLICATION

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame

Mode = Literal["append", "overwrite"]
WRITTEN = "name string, size long, stats string"
MARKS = "deletionVectors"
"""What readers of a table have to know of whose rows may be marked as deleted."""
FULL = re.compile(r"OSError: \[Errno (5|13|27|28|30|122)\]")
"""What a worker's file system says when it takes no more: by the numbers of Linux."""


def create(
    folder: str, files: Sequence[AddAction], schema: deltalake.Schema, stored: ViewCheckpoint, number: int
) -> None:
    """As `begin`, of files that are written."""
    try:
        create_table_with_add_actions(folder, schema, list(files), commit_properties=_told(stored, number))
    except (deltalake.exceptions.DeltaError, OSError) as error:
        if not deltalake.DeltaTable.is_deltatable(folder):
            if isinstance(error, OSError) or refused(error):
                raise unwritable(folder, error) from None
            raise
        raise contended() from None


def written(folder: str, rows: "DataFrame", schema: deltalake.Schema) -> list[File]:
    """Rows as files in a table's folder, not yet part of it. Raises SinkUnavailable when that takes no more."""
    from pyspark.errors import PySparkException
    from pyspark.sql.types import StructType

    whole = rows.to(StructType.fromJson(json.loads(schema.to_json())))
    # By number: Spark takes a dot or a backtick in a name for its own.
    numbered = whole.toDF(*(f"c{number}" for number in range(len(whole.columns))))
    try:
        made = numbered.mapInArrow(freeze_gc_after(_writer(folder, whole.columns)), WRITTEN).collect()
    except PySparkException as error:
        if FULL.search(str(error)):
            raise unwritable(folder, error) from None
        raise
    return [File(file["name"], file["size"], file["stats"]) for file in made]


def actions(written: Iterable[File]) -> list[AddAction]:
    """What a commit says of files that it adds."""
    now = int(time.time() * 1000)
    return [AddAction(file.name, file.size, {}, now, True, file.stats) for file in written]


def commit(
    table: deltalake.DeltaTable,
    files: Sequence[AddAction],
    mode: Mode,
    schema: deltalake.Schema,
    stored: ViewCheckpoint,
    number: int,
    mark: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """One commit with position and number; `mark` goes beside them. Raises SinkUnavailable, see `write`."""
    try:
        table.create_write_transaction(list(files), mode, schema, commit_properties=_told(stored, number, mark))
    except (deltalake.exceptions.DeltaError, OSError) as error:
        if deltalake.DeltaTable(table.table_uri).version() > table.version():
            raise contended() from None
        if isinstance(error, OSError) or refused(error):
            raise unwritable(table.table_uri, error) from None
        raise


def _told(stored: ViewCheckpoint, number: int, mark: Mapping[str, str] = MappingProxyType({})) -> CommitProperties:
    told = {"userMetadata": stored.to_json(), **mark}
    # Never upon a version that hasn't been looked at: a RESTORE in between has taken back what the position counts.
    return CommitProperties(told, max_commit_retries=0, app_transactions=[Transaction(APPLICATION, number)])


def named(table: str, patterns: Iterable[str]) -> bool:
    """Whether the name of a table is one of these; * in them stands for any text."""
    return any(fnmatchcase(table, one) for one in patterns)


def size(table: deltalake.DeltaTable) -> int:
    """How large a table's files are, in bytes."""
    return sum(_actions(table)["size_bytes"].to_pylist())


def features(table: deltalake.DeltaTable) -> set[str]:
    """What a table's readers have to know of; `commit` doesn't ask it of them, even when it brings such columns."""
    return set(table.protocol().reader_features or ())


def unmarked(table: deltalake.DeltaTable) -> bool:
    """Whether none of the rows in a table's files is marked as deleted."""
    return not table.deletion_vectors().read_all().num_rows


def paths(table: deltalake.DeltaTable) -> list[str]:
    """A table's files as its log names them: within its folder; as a whole where earlier versions did."""
    return [str(path) for path in _actions(table)["path"].to_pylist()]


def shared(table: deltalake.DeltaTable, folder: str, target: str) -> list[AddAction]:
    """The files of a table in `folder`, of which no rows are marked, to be added to the one in `target`.

    They are there by now. Raises Lost, SinkUnavailable: see `links`.
    """
    now, found, actions = int(time.time() * 1000), [], _actions(table)
    for at, path in enumerate(paths(table)):
        stats = {
            "numRecords": actions["num_records"][at].as_py(),
            "nullCount": _plain(actions["null_count"][at]),
            "minValues": _plain(actions["min"][at]),
            "maxValues": _plain(actions["max"][at]),
        }
        name, size = links.share(folder, path, target), actions["size_bytes"][at].as_py()
        found.append(AddAction(name, size, {}, now, True, json.dumps(stats)))
    return found


def _actions(table: deltalake.DeltaTable) -> "pa.Table":
    import pyarrow as pa

    return pa.table(table.get_add_actions())


def _plain(values: "pa.StructScalar") -> dict[str, Any]:
    """What can be said in JSON of a struct's values; a year that Python doesn't know can't."""
    found = {}
    for name, value in values.items() if values.is_valid else ():
        with suppress(ValueError, OverflowError):
            if (bound := parquet.bound(value.as_py())) is not None:
                found[name] = bound
    return found


def plain(table: deltalake.DeltaTable, marks: bool) -> bool:
    """Whether a table's rows are those of its files: none is marked as deleted, nor may be when `marks` may not be."""
    return unmarked(table) and (marks or MARKS not in features(table))


def places(table: deltalake.DeltaTable, folder: str) -> list[str]:
    """Where a table's files lie."""
    # `file_uris` puts the table's folder before all of them.
    return [links.place(folder, path) for path in paths(table)]


def extend(table: deltalake.DeltaTable, columns: deltalake.Schema) -> None:
    """Add the columns that a table lacks. Raises SinkUnavailable when another commit comes in between."""
    known = {field.name for field in table.schema().fields}
    new = [field for field in columns.fields if field.name not in known]
    if new:
        version = table.version()
        table.alter.add_columns([deltalake.Field(field.name, field.type, nullable=True) for field in new])
        table.update_incremental()
        if table.version() != version + 1:
            raise contended()


def _writer(folder: str, names: Sequence[str]) -> "Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]":
    """Each task writes one file, if it has a row."""

    def write_file(parts: "Iterator[pa.RecordBatch]") -> "Iterator[pa.RecordBatch]":
        import pyarrow as pa

        groups = (one.rename_columns(names) for one in _groups(parts))
        if file := parquet.write(folder, links.new_name(), groups):
            yield pa.RecordBatch.from_pylist([{"name": file.name, "size": file.size, "stats": file.stats}])

    return write_file


def _groups(parts: "Iterator[pa.RecordBatch]") -> "Iterator[pa.Table]":
    import pyarrow as pa

    held: list[Any] = []
    rows = size = 0
    for part in parts:
        held.append(part)
        rows, size = rows + part.num_rows, size + part.nbytes
        if rows >= GROUP_ROWS or size >= GROUP_BYTES:
            yield pa.Table.from_batches(held)
            held, rows, size = [], 0, 0
    if rows:
        yield pa.Table.from_batches(held)
