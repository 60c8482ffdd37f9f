"""Parquet files in the place of a Delta table: written, measured, read."""

import json
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import date, datetime
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from cdc.errors import SinkUnavailable
from cdc.sinks.delta.log import File, new_file
from cdc.sinks.delta.place import place

GROUP_ROWS = 100_000
"""The most rows of a row group. One group is in memory at once."""
GROUP_BYTES = 64 * 2**20
"""The most bytes of a row group."""
SAMPLE_ROWS = 10_000
"""By so many rows it is seen whether a column's values repeat."""
BOUND_CHARACTERS = 32
"""A longer text isn't stored as a bound of a file's values."""
ID = "_cdc_id"
PLACE = ("_cdc_partition", "_cdc_offset")
"""Where the record of a row's last change is in the topic."""
OFFSET_BITS = 48
"""Of a place as one number, see `place_of`."""


class FileWriter:
    """Writes a Parquet file, one row group a call. The file can be read once it is closed.

    Methods raise OSError; what was written of the file is removed then.
    """

    def __init__(self, folder: str, name: str, sample: pa.Table) -> None:
        """sample: the first row group, which isn't written yet."""
        self.bytes = 0
        self._name = name
        self._place = place(folder)
        self._metadata: list[Any] = []
        self._file = self._place.create(name)
        self._writer = pq.ParquetWriter(
            self._file,
            sample.schema,
            metadata_collector=self._metadata,
            use_dictionary=_repetitive(sample),
        )

    def add(self, table: pa.Table) -> None:
        """Write one more row group; `bytes` counts its size in memory."""
        self.bytes += table.nbytes
        with self.remove_on_failure():
            self._writer.write_table(table, row_group_size=GROUP_ROWS)

    def close(self) -> File:
        with self.remove_on_failure():
            self._writer.close()
            size = self._place.finish(self._name, self._file)
        return new_file(self._name, size, json.dumps(_stats(self._metadata[0])))

    @contextmanager
    def remove_on_failure(self) -> Iterator[None]:
        """Remove the file when the block raises OSError: a partial file leaves nothing."""
        try:
            yield
        except OSError:
            for file in (self._writer, self._file):
                with suppress(OSError):
                    file.close()
            remove_files(self._place.location, [self._name])
            raise


def write_file(folder: str, name: str, groups: Iterable[pa.Table]) -> File | None:
    """Write tables as one file, a row group each; return None when there are no tables.

    Raises OSError, and leaves no file then.
    """
    remaining = iter(groups)
    if (first := next(remaining, None)) is None:
        return None
    writer = FileWriter(folder, name, first)
    with writer.remove_on_failure():
        for group in chain([first], remaining):
            writer.add(group)
        return writer.close()


def row_groups(tables: Iterable[pa.Table]) -> Iterator[pa.Table]:
    """Put tables together to row groups within the limits. Readers start a thread for each group."""
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
    path: str, ids: pa.Array, schema: pa.Schema, selection: Any = None
) -> Iterator[pa.Table]:
    """Read the rows of a file that have one of these ids, as the columns of a schema.

    ids: text, sorted. selection: by row, whether it still belongs to the table; None when all do.

    Raises:
        OSError: the file can't be read.
    """
    with open_file(path) as file:
        offset = 0
        texts = ids.to_pylist()
        for group in range(file.num_row_groups):
            metadata = file.metadata.row_group(group)
            if _may_contain(metadata, texts):
                group_ids = file.read_row_group(group, columns=[ID])[ID].cast(pa.string())
                mask = pc.is_in(group_ids, ids)
                if selection is not None:
                    selected = selection[offset : offset + metadata.num_rows]
                    mask = pc.and_(mask, pa.chunked_array([pa.array(selected)]))
                if pc.any(mask).as_py():
                    yield _read_group(file, group, schema).filter(mask)
            offset += metadata.num_rows


def read_rows(path: str, schema: pa.Schema) -> Iterator[pa.Table]:
    """Read all rows of a file, a row group at a time, as the columns of a schema.

    Raises OSError.
    """
    with open_file(path) as file:
        for group in range(file.num_row_groups):
            yield _read_group(file, group, schema)


def read_ids_within(path: str, low: str, high: str) -> Iterator[tuple[int, pa.Array]]:
    """Read the ids of those row groups of a file that may have one between two texts: the number of
    the group's first row, and the ids. Raises OSError.
    """
    with open_file(path) as file:
        start = 0
        for group in range(file.num_row_groups):
            metadata = file.metadata.row_group(group)
            bounds = _id_bounds(metadata)
            if bounds is None or (bounds[0] <= high and low <= bounds[1]):
                ids = file.read_row_group(group, columns=[ID], use_threads=False)[ID]
                # Files of another writer may store text as another Arrow type.
                yield start, ids.cast(pa.string()).combine_chunks()
            start += metadata.num_rows


class Group(NamedTuple):
    """A row group of a file.

    start           the number of its first row in the file
    oldest, newest  bounds of the places of its rows' last changes: see `place_of`
    """

    path: str
    number: int
    start: int
    oldest: int
    newest: int


def groups(path: str) -> Iterator[Group]:
    """List the row groups of a mirror's file. Raises OSError."""
    with open_file(path) as file:
        start = 0
        for number in range(file.num_row_groups):
            group = file.metadata.row_group(number)
            columns = {
                column.path_in_schema: column.statistics
                for column in map(group.column, range(group.num_columns))
            }
            partitions, offsets = (columns[name] for name in PLACE)
            if partitions is None or offsets is None or not offsets.has_min_max:
                yield Group(path, number, start, 0, place_of(1 << 14, 0))
            else:
                oldest = place_of(partitions.min, offsets.min)
                newest = place_of(partitions.max, offsets.max)
                yield Group(path, number, start, oldest, newest)
            start += group.num_rows


def place_of(partition: Any, offset: Any) -> Any:
    """Write the place of a record as one number: by partition, then by offset."""
    return (partition << OFFSET_BITS) + offset


def are_below(places: np.ndarray, offsets: Sequence[int]) -> np.ndarray:
    """Say of each place whether it is below these offsets, by partition."""
    ends = np.asarray(offsets, np.int64)[places >> OFFSET_BITS]
    below: np.ndarray = (places & ((1 << OFFSET_BITS) - 1)) < ends
    return below


def read_places(group: Group) -> np.ndarray:
    """Read the places of the last changes of a group's rows. Raises OSError."""
    with open_file(group.path) as file:
        rows = file.read_row_group(group.number, columns=list(PLACE), use_threads=False)
    partitions, offsets = (rows[name].to_numpy().astype(np.int64) for name in PLACE)
    places: np.ndarray = place_of(partitions, offsets)
    return places


def read_ids(group: Group, numbers: np.ndarray) -> list[str]:
    """Read the ids of some rows of a group, by their numbers in it. Raises OSError."""
    with open_file(group.path) as file:
        ids = file.read_row_group(group.number, columns=[ID], use_threads=False)[ID]
    listed: list[str] = ids.cast(pa.string()).take(numbers).to_pylist()
    return listed


def read_versions(path: str) -> pa.Table:
    """Read the ids and the offsets of a file's rows, in the order of the rows. Raises OSError."""
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
    folder, _, name = path.rpartition("/")
    # Spark's files store a time stamp as a day and nanoseconds. Read as nanoseconds, time would end
    # in 2262.
    with place(folder).open(name) as file:
        yield pq.ParquetFile(file, coerce_int96_timestamp_unit="us")


def remove_files(folder: str, names: Sequence[str]) -> None:
    """Remove files as far as possible. A file that stays takes space and is in no commit."""
    with suppress(SinkUnavailable):
        place(folder).remove(names)


def remove_files_with(folder: str, text: str) -> None:
    """Remove a folder's files whose names have a text in them, as far as possible."""
    with suppress(SinkUnavailable):
        files = place(folder).files()
        place(folder).remove([file.path for file in files if text in file.path])


def _repetitive(table: pa.Table) -> list[str]:
    """Name the columns that a dictionary makes smaller: their values repeat. For others, and for lists
    and structs, it would be made for nothing, which takes as long as everything else of a file.
    """
    sample = table.slice(0, SAMPLE_ROWS)
    return [
        field.name
        for field in table.schema
        if not pa.types.is_nested(field.type)
        and 2 * pc.count_distinct(sample[field.name]).as_py() <= sample.num_rows
    ]


def fit_to_schema(table: pa.Table, schema: pa.Schema) -> pa.Table:
    """Give a table the columns of a schema, in its order; a column that it lacks is null."""
    present = set(table.column_names)
    columns = [
        table[field.name].cast(field.type)
        if field.name in present
        else pa.nulls(table.num_rows, field.type)
        for field in schema
    ]
    return pa.table(columns, schema=schema)


def _read_group(file: Any, group: int, schema: pa.Schema) -> pa.Table:
    names = [name for name in schema.names if name in file.schema_arrow.names]
    return fit_to_schema(file.read_row_group(group, columns=names), schema)


def _id_bounds(group: Any) -> tuple[str, str] | None:
    """Return the bounds of a row group's ids; None where they aren't known."""
    columns = (group.column(number) for number in range(group.num_columns))
    bounds = next(column for column in columns if column.path_in_schema == ID).statistics
    if bounds is None or not bounds.has_min_max or not isinstance(bounds.min, str):
        return None
    return bounds.min, bounds.max


def _may_contain(group: Any, ids: Sequence[str]) -> bool:
    """Return whether any of these sorted ids lies within the bounds of a row group."""
    if (bounds := _id_bounds(group)) is None:
        return True
    index = bisect_left(ids, bounds[0])
    return index < len(ids) and ids[index] <= bounds[1]


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
        # Parquet leaves out the bounds of a group with a text of more than 4096 bytes. The other
        # groups' bounds would hide its rows from filtered queries.
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
