"""Parquet files in the place of a Delta table: written, measured, read.

Needs neither Spark nor the table's log, so executors use it too.
"""

import json
import secrets
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import date, datetime
from typing import TYPE_CHECKING, Any
from uuid import UUID, uuid4

import msgspec

from cdc.errors import SinkUnavailable
from cdc.sinks.delta.place import place

if TYPE_CHECKING:
    import pyarrow as pa

GROUP_ROWS, GROUP_BYTES = 100_000, 64 * 2**20
"""Limits of a row group: one is in memory at once."""
SAMPLE_ROWS = 10_000
"""By so many rows it is seen whether a column's values repeat."""
BOUND_CHARACTERS = 32
"""A longer text isn't stored as a bound of a file's values."""
ID = "_cdc_id"


class DataFile(msgspec.Struct, frozen=True):
    """A file by its name in a table's folder; it may be in no commit yet.

    size: in bytes; stats: the JSON text that Delta's log has for a file.
    """

    name: str
    size: int
    stats: str


class FileNames:
    """Names for the files of one batch: each is new, and all have a part in common.

    By it the files of a batch that failed are found.
    """

    def __init__(self) -> None:
        self.common = str(uuid4())[:-12]

    def generate(self) -> str:
        """Make the next name of a file of rows."""
        return f"part-{self.generate_id()}.parquet"

    def generate_id(self) -> UUID:
        """Make the next id, of a file of deletion vectors. Our clean-up knows names with a UUID."""
        return UUID(self.common + secrets.token_hex(6))


class FileWriter:
    """Writes a Parquet file, one row group a call. The file can be read once it is closed.

    Methods raise OSError; what was written of the file is removed then.
    """

    def __init__(self, folder: str, name: str) -> None:
        self.name, self.bytes = name, 0
        self._place = place(folder)
        self._file: Any = None
        self._metadata: list[Any] = []
        self._writer: Any = None

    def add(self, table: "pa.Table") -> None:
        """Write one more row group; `bytes` counts its size in memory."""
        import pyarrow.parquet as pq

        self.bytes += table.nbytes
        with self.remove_on_failure():
            if self._writer is None:
                self._file = self._place.create(self.name)
                self._writer = pq.ParquetWriter(
                    self._file,
                    table.schema,
                    metadata_collector=self._metadata,
                    use_dictionary=_repetitive(table),
                )
            self._writer.write_table(table, row_group_size=GROUP_ROWS)

    def close(self) -> DataFile | None:
        """End the file and return it; None when nothing was added, for there is no file then."""
        if self._writer is None:
            return None
        with self.remove_on_failure():
            self._writer.close()
            size = self._place.finish(self.name, self._file)
        return DataFile(self.name, size, json.dumps(_stats(self._metadata[0])))

    @contextmanager
    def remove_on_failure(self) -> Iterator[None]:
        """Remove the file when the block raises OSError: a partial file leaves nothing."""
        try:
            yield
        except OSError:
            if self._writer:
                with suppress(OSError):
                    self._writer.close()
            if self._file:
                with suppress(OSError):
                    self._file.close()
                remove_files(self._place.location, [self.name])
            raise


def write_file(folder: str, name: str, groups: Iterable["pa.Table"]) -> DataFile | None:
    """Write tables as one file, a row group each; return None when there are no tables.

    Raises OSError, and leaves no file then.
    """
    writer = FileWriter(folder, name)
    with writer.remove_on_failure():
        for group in groups:
            writer.add(group)
        return writer.close()


def row_groups(tables: Iterable["pa.Table"]) -> Iterator["pa.Table"]:
    """Put tables together to row groups within the limits. Readers start a thread for each group."""
    import pyarrow as pa

    group: list[Any] = []
    rows = 0
    size = 0
    for table in tables:
        group.append(table)
        rows += table.num_rows
        size += table.nbytes
        if rows >= GROUP_ROWS or size >= GROUP_BYTES:
            yield pa.concat_tables(group).combine_chunks()
            group = []
            rows = 0
            size = 0
    if rows:
        yield pa.concat_tables(group).combine_chunks()


def rows_with_ids(
    path: str, ids: "pa.Array", schema: "pa.Schema", selection: Any = None
) -> Iterator["pa.Table"]:
    """Read the rows of a file that have one of these ids, as the columns of a schema.

    ids: text, sorted. selection: by row, whether it still belongs to the table; None when all do.

    Raises:
        OSError: the file can't be read.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    with open_file(path) as file:
        offset, texts = 0, ids.to_pylist()
        for group in range(file.num_row_groups):
            metadata = file.metadata.row_group(group)
            if _may_contain(metadata, texts):
                group_ids = file.read_row_group(group, columns=[ID])[ID].cast(pa.string())
                mask = pc.is_in(group_ids, ids)
                if selection is not None:
                    selected = selection[offset : offset + metadata.num_rows]
                    mask = pc.and_(mask, pa.chunked_array([pa.array(selected)]))
                if pc.any(mask).as_py():
                    yield fit_to_schema(_columns(file, group, schema).filter(mask), schema)
            offset += metadata.num_rows


def read_rows(path: str, schema: "pa.Schema") -> Iterator["pa.Table"]:
    """Read all rows of a file, a row group at a time, as the columns of a schema.

    Raises OSError.
    """
    with open_file(path) as file:
        for group in range(file.num_row_groups):
            yield fit_to_schema(_columns(file, group, schema), schema)


def read_ids(path: str) -> Iterator["pa.Array"]:
    """Read the ids of a file's rows, in the order of the rows. Raises OSError."""
    import pyarrow as pa

    with open_file(path) as file:
        for batch in file.iter_batches(2**20, columns=[ID], use_threads=False):
            # Files of another writer may store text as another Arrow type.
            yield batch[ID].cast(pa.string())


def read_ids_within(path: str, low: str, high: str) -> "Iterator[tuple[int, pa.Array]]":
    """Read the ids of those row groups of a file that may have one between two texts: the number of
    the group's first row, and the ids. Raises OSError.
    """
    import pyarrow as pa

    with open_file(path) as file:
        start = 0
        for group in range(file.num_row_groups):
            metadata = file.metadata.row_group(group)
            if _overlaps(metadata, low, high):
                ids = file.read_row_group(group, columns=[ID], use_threads=False)[ID]
                yield start, ids.cast(pa.string()).combine_chunks()
            start += metadata.num_rows


def read_versions(path: str) -> "pa.Table":
    """Read the ids and the offsets of a file's rows, in the order of the rows. Raises OSError."""
    import pyarrow as pa

    schema = pa.schema([(ID, pa.string()), ("_cdc_offset", pa.int64())])
    with open_file(path) as file:
        return fit_to_schema(file.read(columns=schema.names, use_threads=False), schema)


def row_count(path: str) -> int:
    """Return the number of a file's rows. Raises OSError."""
    with open_file(path) as file:
        count: int = file.metadata.num_rows
        return count


@contextmanager
def open_file(path: str) -> Iterator[Any]:
    """Open the Parquet file of a location. Raises OSError."""
    import pyarrow.parquet as pq

    folder, _, name = path.rpartition("/")
    # Spark's files store a time stamp as a day and nanoseconds. Read as nanoseconds, time would end
    # in 2262.
    with place(folder).open(name) as file:
        yield pq.ParquetFile(file, coerce_int96_timestamp_unit="us")


def remove_files(folder: str, names: Sequence[str]) -> None:
    """Remove files as far as possible. A file that stays takes space and is in no commit."""
    with suppress(SinkUnavailable):
        place(folder).remove(names)


def names_with(folder: str, text: str) -> list[str]:
    """List a folder's files whose names have a text in them; none when it can't be listed."""
    try:
        return [file.path for file in place(folder).files() if text in file.path]
    except SinkUnavailable:
        return []


def _repetitive(table: "pa.Table") -> list[str]:
    """Name the columns that a dictionary makes smaller: their values repeat. For others, and for lists
    and structs, it would be made for nothing, which takes as long as everything else of a file.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    sample = table.slice(0, SAMPLE_ROWS)
    return [
        field.name
        for field in table.schema
        if not pa.types.is_nested(field.type)
        and 2 * pc.count_distinct(sample[field.name]).as_py() <= sample.num_rows
    ]


def fit_to_schema(table: "pa.Table", schema: "pa.Schema") -> "pa.Table":
    """Give a table the columns of a schema, in its order; a column that it lacks is null."""
    import pyarrow as pa

    present = set(table.column_names)
    columns = [
        table[field.name].cast(field.type)
        if field.name in present
        else pa.nulls(table.num_rows, field.type)
        for field in schema
    ]
    return pa.table(columns, schema=schema)


def _columns(file: Any, group: int, schema: "pa.Schema") -> "pa.Table":
    """Read those columns of a schema that a row group has."""
    names = [name for name in schema.names if name in file.schema_arrow.names]
    return file.read_row_group(group, columns=names).select(names)


def _may_contain(group: Any, ids: Sequence[str]) -> bool:
    """Tell whether one of some sorted ids lies within the bounds of a row group."""
    columns = (group.column(number) for number in range(group.num_columns))
    bounds = next(column for column in columns if column.path_in_schema == ID).statistics
    if bounds is None or not bounds.has_min_max or not isinstance(bounds.min, str):
        return True
    index = bisect_left(ids, bounds.min)
    return index < len(ids) and ids[index] <= bounds.max


def _overlaps(group: Any, low: str, high: str) -> bool:
    """Whether the bounds of a row group's ids reach into a span of texts."""
    columns = (group.column(number) for number in range(group.num_columns))
    bounds = next(column for column in columns if column.path_in_schema == ID).statistics
    if bounds is None or not bounds.has_min_max or not isinstance(bounds.min, str):
        return True
    return bool(bounds.min <= high and low <= bounds.max)


def _stats(metadata: Any) -> dict[str, Any]:
    """Count a file's rows and nulls, and collect bounds, in the form of the Delta protocol.

    Columns of numbers, texts, dates and times have bounds.
    """
    stats: dict[str, Any] = {
        "numRecords": metadata.num_rows,
        "minValues": {},
        "maxValues": {},
        "nullCount": {},
    }
    for number in range(metadata.num_columns):
        column = metadata.schema.column(number)
        row_groups = (metadata.row_group(group) for group in range(metadata.num_row_groups))
        groups = [row_group.column(number).statistics for row_group in row_groups]
        if column.max_definition_level > 1 or not all(groups):
            continue
        stats["nullCount"][column.path] = sum(group.null_count for group in groups)
        # Parquet leaves out the bounds of a group with a text of more than 4096 bytes. Those of the
        # other groups would hide its rows from filtered queries.
        if any(group.num_values and not group.has_min_max for group in groups):
            continue
        # A year that Python can't represent has no bounds.
        with suppress(ValueError, OverflowError):
            bounded = [group for group in groups if group.has_min_max]
            lowest = json_bound(min(group.min for group in bounded))
            highest = json_bound(max(group.max for group in bounded))
            if lowest is not None and highest is not None:
                stats["minValues"][column.path] = lowest
                stats["maxValues"][column.path] = highest
    return stats


def json_bound(value: Any) -> Any:
    """Return a bound as JSON has it; None for a value that can't be compared there."""
    if isinstance(value, datetime):
        return value.isoformat(timespec="microseconds").replace("+00:00", "Z")
    if isinstance(value, date):
        return value.isoformat()
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    return value if isinstance(value, str) and len(value) <= BOUND_CHARACTERS else None
