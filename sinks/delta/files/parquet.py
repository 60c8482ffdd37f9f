"""Parquet files in the folder of a Delta table: written, measured, read. Needs no Spark, and no log of the table."""

import json
import secrets
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import date, datetime
from typing import TYPE_CHECKING, Any, NamedTuple
from uuid import uuid4

import msgspec

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.fs

GROUP_ROWS, GROUP_BYTES = 100_000, 64 * 2**20
"""Of a row group, which is in memory at once."""
LONGEST = 32
"""Characters of a text that may bound a file's values."""
ID = "_cdc_id"


class File(msgspec.Struct, frozen=True):
    """A file by its name in the folder of a table; it may be in no commit yet. size in bytes, stats as Delta's JSON."""

    name: str
    size: int
    stats: str


class Changed(NamedTuple):
    """What a batch brings to a mirror: files with its rows, and the names of files with the ids of all changed rows."""

    rows: Sequence[File]
    names: Sequence[str]


class Name:
    """Names of files that are written for one purpose: new ones each time, and all found by their beginning."""

    def __init__(self) -> None:
        # The form of a UUID, as names of ours have; the rest of it is each file's own.
        self.beginning = f"part-{str(uuid4())[:-12]}"

    def new(self) -> str:
        return f"{self.beginning}{secrets.token_hex(6)}.parquet"


class Growing:
    """A file that is being written, a row group each time; it can be read once it is closed. Raises OSError."""

    def __init__(self, folder: str, name: str) -> None:
        self.name, self.bytes = name, 0
        self._files, root = location(folder)
        self._path = f"{root}/{name}"
        self._about: list[Any] = []
        self._writer: Any = None

    def add(self, table: "pa.Table") -> None:
        """One more row group; `bytes` counts those of memory."""
        import pyarrow.parquet as pq

        self.bytes += table.nbytes
        with self.removed_on_failure():
            self._writer = self._writer or pq.ParquetWriter(
                self._path, table.schema, filesystem=self._files, metadata_collector=self._about
            )
            self._writer.write_table(table, row_group_size=GROUP_ROWS)

    def close(self) -> File | None:
        """None when nothing was added: there is no file then."""
        if self._writer is None:
            return None
        with self.removed_on_failure():
            self._writer.close()
            size = self._files.get_file_info(self._path).size
        return File(self.name, size, json.dumps(_stats(self._about[0])))

    @contextmanager
    def removed_on_failure(self) -> Iterator[None]:
        """What is cut off leaves nothing."""
        try:
            yield
        except OSError:
            with suppress(OSError):
                self._files.delete_file(self._path)
            raise


def write(folder: str, name: str, groups: Iterable["pa.Table"]) -> File | None:
    """Tables as a file, a row group each; None when there is none. Raises OSError, and leaves nothing then."""
    file = Growing(folder, name)
    with file.removed_on_failure():
        for group in groups:
            file.add(group)
        return file.close()


def matching(path: str, wanted: "pa.Array", schema: "pa.Schema", keep: Any = None) -> Iterator["pa.Table"]:
    """The rows of a file that have one of these ids (text, sorted), as the columns of a schema.

    keep: by row, whether it is one of the table's still; None when all are.

    Raises:
        OSError: the file can't be read.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    with opened(path) as file:
        first, texts = 0, wanted.to_pylist()
        for group in range(file.num_row_groups):
            count = file.metadata.row_group(group).num_rows
            if _may_hold(file.metadata.row_group(group), texts):
                ids = file.read_row_group(group, columns=[ID])[ID].cast(pa.string())
                mask = pc.is_in(ids, wanted)
                if keep is not None:
                    mask = pc.and_(mask, pa.chunked_array([pa.array(keep[first : first + count])]))
                if pc.any(mask).as_py():
                    yield fitted(_columns(file, group, schema).filter(mask), schema)
            first += count


def rows(path: str, schema: "pa.Schema") -> Iterator["pa.Table"]:
    """All rows of a file, a row group at a time, as the columns of a schema. Raises OSError."""
    with opened(path) as file:
        for group in range(file.num_row_groups):
            yield fitted(_columns(file, group, schema), schema)


def ids(path: str) -> Iterator["pa.Array"]:
    """The ids of a file's rows. Raises OSError."""
    import pyarrow as pa

    with opened(path) as file:
        for batch in file.iter_batches(2**20, columns=[ID], use_threads=False):
            # Another writer's files may hold texts of another kind.
            yield batch[ID].cast(pa.string())


def opened(path: str) -> Any:
    """A Parquet file, to be closed."""
    import pyarrow.parquet as pq

    files, place = location(path)
    # Spark's own files hold time stamps as nanoseconds of a day, which would end in 2262.
    return pq.ParquetFile(place, filesystem=files, coerce_int96_timestamp_unit="us")


def location(path: str) -> "tuple[pa.fs.FileSystem, str]":
    """The file system of a path or URI, and the path in it."""
    import pyarrow.fs

    if "://" not in path and not path.startswith("file:"):
        return pyarrow.fs.LocalFileSystem(), path
    files, place = pyarrow.fs.FileSystem.from_uri(path)
    return files, place


def remove(folder: str, names: Sequence[str]) -> None:
    """Remove files, as far as that can be done: what stays takes room, and is in no commit."""
    files, root = location(folder)
    for name in names:
        with suppress(OSError):
            files.delete_file(f"{root}/{name}")


def beginning(folder: str, text: str) -> list[str]:
    """The names of a folder's files that begin so; none when it can't be listed."""
    import pyarrow.fs

    files, root = location(folder)
    try:
        listed = files.get_file_info(pyarrow.fs.FileSelector(root))
    except OSError:
        return []
    return [one.base_name for one in listed if one.base_name.startswith(text)]


def fitted(table: "pa.Table", schema: "pa.Schema") -> "pa.Table":
    """The columns of a schema, in its order: what a table lacks of them is null."""
    import pyarrow as pa

    there = set(table.column_names)
    columns = [
        table[field.name].cast(field.type) if field.name in there else pa.nulls(table.num_rows, field.type)
        for field in schema
    ]
    return pa.table(columns, schema=schema)


def _columns(file: Any, group: int, schema: "pa.Schema") -> "pa.Table":
    """A row group's columns, as far as it has those of a schema."""
    there = [name for name in schema.names if name in file.schema_arrow.names]
    return file.read_row_group(group, columns=there).select(there)


def _may_hold(group: Any, texts: Sequence[str]) -> bool:
    """Whether a row group's bounds leave room for one of some sorted ids."""
    column = next(column for at in range(group.num_columns) if (column := group.column(at)).path_in_schema == ID)
    bounds = column.statistics
    if bounds is None or not bounds.has_min_max or not isinstance(bounds.min, str):
        return True
    at = bisect_left(texts, bounds.min)
    return at < len(texts) and texts[at] <= bounds.max


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
            bounds = bound(min(group.min for group in filled)), bound(max(group.max for group in filled))
            if None not in bounds:
                found["minValues"][column.path], found["maxValues"][column.path] = bounds
    return found


def bound(value: Any) -> Any:
    """As JSON; None for what can't be compared there."""
    if isinstance(value, datetime):
        return value.isoformat(timespec="microseconds").replace("+00:00", "Z")
    if isinstance(value, date):
        return value.isoformat()
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    return value if isinstance(value, str) and len(value) <= LONGEST else None
