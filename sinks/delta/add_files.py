"""Files of a Delta table written by executors and committed by the driver: one Spark job, a commit of milliseconds.

A commit through Spark reads the table's log as a DataFrame first and starts a process for each file's permissions:
more CPU than a batch of some thousand rows takes otherwise. That way stays where deletion vectors are needed.
"""

import json
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import date, datetime
from fnmatch import fnmatchcase
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import unquote

import deltalake
from deltalake import CommitProperties, Transaction
from deltalake.transaction import AddAction, create_table_with_add_actions

from cdc.change import Stored
from cdc.report import lasting
from sinks.delta import links
from sinks.delta.commits import APPLICATION, contended, refused, unwritable

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession

Mode = Literal["append", "overwrite"]
WRITTEN = "path string, size long, stats string"
GROUP_ROWS, GROUP_BYTES = 100_000, 64 * 2**20
"""Of a row group, which is in a worker's memory at once."""
MARKS = "deletionVectors"
"""What readers of a table have to know of whose rows may be marked as deleted."""
FULL = re.compile(r"OSError: \[Errno (5|13|27|28|30|122)\]")
"""What a worker's file system says when it takes no more: by the numbers of Linux."""
LONGEST = 32
"""Characters of a text that may bound a file's values."""


def begin(folder: str, rows: "DataFrame", stored: Stored, number: int) -> None:
    """Make a table of rows, in one commit with position and number. Raises SinkUnavailable when there is one by now.

    It asks nothing special of its readers (protocol 1, 2, unless a column's type does).
    """
    if "://" not in folder:
        folder = str(Path(folder).absolute())
        Path(folder).mkdir(parents=True, exist_ok=True)
    found = deltalake.Schema.from_json(rows.schema.json())
    schema = deltalake.Schema([deltalake.Field(field.name, field.type, nullable=True) for field in found.fields])
    create(folder, written(folder, rows, schema), schema, stored, number)


def create(folder: str, files: Sequence[AddAction], schema: deltalake.Schema, stored: Stored, number: int) -> None:
    """As `begin`, of files that are written."""
    try:
        create_table_with_add_actions(folder, schema, list(files), commit_properties=_told(stored, number))
    except (deltalake.exceptions.DeltaError, OSError) as error:
        if not deltalake.DeltaTable.is_deltatable(folder):
            if isinstance(error, OSError) or refused(error):
                raise unwritable(folder, error) from None
            raise
        raise contended() from None


def write(table: deltalake.DeltaTable, rows: "DataFrame", mode: Mode, stored: Stored, number: int) -> None:
    """Add rows to a table, or put them in the place of all it has, in one commit with position and number.

    Columns that the table lacks are added to it before. Raises SinkUnavailable when another commit comes in between.
    """
    extend(table, rows)
    files = written(table.table_uri, rows, table.schema())
    commit(table, files, mode, table.schema(), stored, number)


def written(folder: str, rows: "DataFrame", schema: deltalake.Schema) -> list[AddAction]:
    """Rows as files in a table's folder, not yet part of it. Raises SinkUnavailable when that takes no more."""
    from pyspark.errors import PySparkException
    from pyspark.sql.types import StructType

    now = int(time.time() * 1000)
    whole = rows.to(StructType.fromJson(json.loads(schema.to_json())))
    # By number: Spark takes a dot or a backtick in a name for its own.
    numbered = whole.toDF(*(f"c{number}" for number in range(len(whole.columns))))
    try:
        files = numbered.mapInArrow(lasting(_writer(folder, whole.columns)), WRITTEN).collect()
    except PySparkException as error:
        if FULL.search(str(error)):
            raise unwritable(folder, error) from None
        raise
    return [AddAction(file["path"], file["size"], {}, now, True, file["stats"]) for file in files]


def commit(
    table: deltalake.DeltaTable,
    files: Sequence[AddAction],
    mode: Mode,
    schema: deltalake.Schema,
    stored: Stored,
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


def _told(stored: Stored, number: int, mark: Mapping[str, str] = MappingProxyType({})) -> CommitProperties:
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
            if (bound := _bound(value.as_py())) is not None:
                found[name] = bound
    return found


def plain(table: deltalake.DeltaTable, folder: str, spark: "SparkSession", marks: bool = True) -> "DataFrame | None":
    """A table's rows read from its files alone; None when some of their rows are marked as deleted.

    Also when some may be, and are not to be.
    """
    from pyspark.sql.types import StructType

    if not unmarked(table) or (not marks and MARKS in features(table)):
        return None
    schema = StructType.fromJson(json.loads(table.schema().to_json()))
    # `file_uris` puts the table's folder before all of them.
    files = [unquote(path) if links.absolute(path) else f"{folder}/{unquote(path)}" for path in paths(table)]
    return spark.read.schema(schema).parquet(*files) if files else spark.createDataFrame([], schema)


def extend(table: deltalake.DeltaTable, rows: "DataFrame") -> int:
    """Add the columns that rows have and a table lacks; the commits that took."""
    known = {field.name for field in table.schema().fields}
    new = [field for field in deltalake.Schema.from_json(rows.schema.json()).fields if field.name not in known]
    if new:
        table.alter.add_columns([deltalake.Field(field.name, field.type, nullable=True) for field in new])
        table.update_incremental()
    return int(bool(new))


def _writer(folder: str, names: Sequence[str]) -> "Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]":
    """Each task writes one file, if it has a row."""

    def write_file(parts: "Iterator[pa.RecordBatch]") -> "Iterator[pa.RecordBatch]":
        import pyarrow as pa
        import pyarrow.fs
        import pyarrow.parquet as pq

        files, root = pyarrow.fs.FileSystem.from_uri(folder)
        about: list[Any] = []
        name, writer = links.new_name(), None
        for group in (one.rename_columns(names) for one in _groups(parts)):
            writer = writer or pq.ParquetWriter(
                f"{root}/{name}", group.schema, filesystem=files, metadata_collector=about
            )
            writer.write_table(group, row_group_size=GROUP_ROWS)
        if writer is None:
            return
        writer.close()
        size = files.get_file_info(f"{root}/{name}").size
        yield pa.RecordBatch.from_pylist([{"path": name, "size": size, "stats": json.dumps(_stats(about[0]))}])

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


def _stats(file: Any) -> dict[str, Any]:
    """A file's rows, and the bounds of columns of numbers, texts, dates and times, as the Delta protocol has them."""
    found: dict[str, Any] = {"numRecords": file.num_rows, "minValues": {}, "maxValues": {}, "nullCount": {}}
    for at in range(file.num_columns):
        column = file.schema.column(at)
        groups = [file.row_group(group).column(at).statistics for group in range(file.num_row_groups)]
        if column.max_definition_level > 1 or not all(groups):
            continue
        found["nullCount"][column.path] = sum(group.null_count for group in groups)
        # A year that Python doesn't know has no bounds.
        with suppress(ValueError, OverflowError):
            filled = [group for group in groups if group.has_min_max]
            bounds = _bound(min(group.min for group in filled)), _bound(max(group.max for group in filled))
            if None not in bounds:
                found["minValues"][column.path], found["maxValues"][column.path] = bounds
    return found


def _bound(value: Any) -> Any:
    """As JSON; None for what can't be compared there."""
    if isinstance(value, datetime):
        return value.isoformat(timespec="microseconds").replace("+00:00", "Z")
    if isinstance(value, date):
        return value.isoformat()
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    return value if isinstance(value, str) and len(value) <= LONGEST else None
