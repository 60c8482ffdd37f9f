"""Scans of mirrors as the documents that other views have, without the rows that are marked as deleted.

Tasks read the files of a small mirror themselves, and of any mirror in a bucket, where Spark's own source would need
Hadoop's connectors. A large mirror in a folder is read by Spark's source. Either way a library reads the log and the
deletion vectors, not our code: a comparison finds our mistakes in them.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, TypeVar

import deltalake
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from cdc.codec.table import codec
from cdc.model.table import Table
from cdc.sink.lane_run import freeze_gc_after
from cdc.sinks.delta import parquet
from cdc.sinks.delta.parquet import ID
from cdc.sinks.delta.place import locate, table_uri

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

SCANNED = "id string, document string"
GROUPED = f"table string, {SCANNED}"
BATCH_ROWS = 1000
LISTED_ROWS = 2000
SMALL_BYTES = 16 * 2**20
"""The largest mirror, in bytes of its files, that tasks read themselves. Spark's source reads the log in five jobs,
which took 24 of 70 s of CPU to compare the sample's five mirrors, of 28,000 rows at most. But it divides large files
between tasks.
"""
Item = TypeVar("Item")


class Mirror:
    """A version of a table's mirror. It is opened when the first row is read.

    Used by one task in its thread. Methods raise OSError, DeltaError.
    """

    def __init__(self, table: Table, folder: str, version: int) -> None:
        self.table = table
        self._folder = folder
        self._version = version

    @cached_property
    def columns(self) -> frozenset[str]:
        return frozenset(field.name for field in self._opened.schema().fields)

    def rows(self, ids: pa.Array, schema: pa.Schema) -> Iterator[pa.Table]:
        """Read the rows of sorted ids, as the columns of a schema."""
        for path in self._paths:
            yield from parquet.rows_with_ids(path, ids, schema, self._selections.get(path))

    def batches(self, share: int = 0, shares: int = 1) -> Iterator[pa.RecordBatch]:
        """Read all rows, with the columns that each file has; or the rows of one share of the files."""
        for path in self._paths[share::shares]:
            selection = self._selections.get(path)
            start = 0
            with parquet.open_file(path) as file:
                for batch in file.iter_batches(BATCH_ROWS):
                    end = start + batch.num_rows
                    if selection is None:
                        yield batch
                    else:
                        yield batch.filter(pa.array(selection[start:end]))
                    start = end

    def groups(self) -> list[parquet.Group]:
        """List the row groups of all files, by the oldest change that each may have."""
        groups = (group for path in self._paths for group in parquet.groups(path))
        return sorted(groups, key=lambda group: group.oldest)

    def places(self, group: parquet.Group) -> tuple[np.ndarray, np.ndarray]:
        """Read the place of the last change of each row of a group, and whether the row is deleted."""
        places = parquet.read_places(group)
        selection = self._selections.get(group.path)
        if selection is None:
            return places, np.zeros(len(places), bool)
        selected = selection[group.start : group.start + len(places)]
        return places, ~np.asarray(selected, bool)

    @cached_property
    def _opened(self) -> deltalake.DeltaTable:
        return deltalake.DeltaTable(table_uri(self._folder), version=self._version)

    @cached_property
    def _paths(self) -> list[str]:
        actions = pa.table(self._opened.get_add_actions())
        # Not `file_uris`, which puts the table's folder before absolute paths too.
        return [locate(self._folder, path) for path in actions["path"].to_pylist()]

    @cached_property
    def _selections(self) -> dict[str, Any]:
        """By path of those files that have deletion vectors: which of its rows aren't deleted."""
        vectors = pa.table(self._opened.deletion_vectors().read_all())
        paths = (locate(self._folder, path) for path in vectors["filepath"].to_pylist())
        selections = vectors["selection_vector"]
        return {path: selections[number].values for number, path in enumerate(paths)}


def scan_mirror(
    spark: "SparkSession", table: Table, folder: str, ids: Sequence[str] | None
) -> "DataFrame":
    """Read all rows of the mirror in a folder, or the rows with these ids: SCANNED."""
    from pyspark.sql import functions as F

    mirror = spark.read.format("delta").load(folder)
    if ids is not None:
        requested = spark.createDataFrame([(row_id,) for row_id in ids], f"{ID} string")
        mirror = mirror.join(F.broadcast(requested), ID, "left_semi")
    needed = {ID, *(column.name for column in table.columns)}
    names = {f"c{number}": name for number, name in enumerate(mirror.columns)}
    # By number: Spark parses a dot or a backtick in a name.
    columns = [number for number, name in names.items() if name in needed]
    rows = mirror.toDF(*names).select(*columns)
    return rows.mapInArrow(freeze_gc_after(partial(read_documents, table, names)), SCANNED)


def read_documents(
    table: Table, names: Mapping[str, str], batches: Iterable[pa.RecordBatch]
) -> Iterator[pa.RecordBatch]:
    """Turn a mirror's columns, ID among them, into SCANNED.

    names: the mirror's names of columns, by the names that the batches have.
    """
    for batch in batches:
        mirror = batch.rename_columns([names[column] for column in batch.schema.names])
        columns = [row_ids(mirror), documents(table, mirror)]
        yield pa.RecordBatch.from_arrays(columns, names=["id", "document"])


def row_ids(batch: pa.RecordBatch) -> pa.Array:
    return batch.column(ID).cast(pa.string())


def documents(table: Table, batch: pa.RecordBatch) -> pa.Array:
    """Make a document of each row.

    A column that the mirror lacks is null: it is added once a row brings it. Raises ArrowInvalid, a
    ValueError, for a column of another type than the table's.
    """
    present = set(batch.schema.names)
    columns = [
        batch.column(field.name) if field.name in present else pa.nulls(batch.num_rows, field.type)
        for field in codec(table).schema
    ]
    # Whatever type they have: the codec casts them where it reads a value.
    names = [column.name for column in table.columns]
    return codec(table).documents(pa.RecordBatch.from_arrays(columns, names=names))


def scan_files(spark: "SparkSession", mirror: Mirror, ids: Sequence[str] | None) -> "DataFrame":
    """Read the files of a mirror, the rows of all ids or of some: SCANNED."""
    shares = spark.sparkContext.defaultParallelism
    wanted = None if ids is None else pa.array(ids, pa.string())
    read = partial(read_share, mirror, shares, wanted)
    return _scan(spark, read, range(shares)).select("id", "document")


def scan_mirrors(spark: "SparkSession", mirrors: Sequence[Mirror]) -> "DataFrame":
    """Scan some mirrors, as `cdc.sink.contract.GroupScanner` says."""
    return _scan(spark, read_mirror, mirrors)


def _scan(
    spark: "SparkSession",
    read: Callable[[Item], Iterator[pa.RecordBatch]],
    items: Sequence[Item],
) -> "DataFrame":
    """Read something of each item, in the tasks of one job: GROUPED."""
    tasks = max(1, min(spark.sparkContext.defaultParallelism, len(items)))
    work = partial(_read_items, read, [items[task::tasks] for task in range(tasks)])
    return spark.range(tasks, numPartitions=tasks).mapInArrow(freeze_gc_after(work), GROUPED)


def _read_items(
    read: Callable[[Item], Iterator[pa.RecordBatch]],
    shares: Sequence[Sequence[Item]],
    batches: Iterator[pa.RecordBatch],
) -> Iterator[pa.RecordBatch]:
    """Read the items of a task: numbers of shares in, GROUPED out."""
    for number in (number for batch in batches for number in batch.column("id").to_pylist()):
        for item in shares[number]:
            yield from read(item)


def read_share(
    mirror: Mirror, shares: int, wanted: pa.Array | None, share: int
) -> Iterator[pa.RecordBatch]:
    """Read the rows of one share of a mirror's files, of all ids or of some: GROUPED."""
    for batch in mirror.batches(share, shares):
        rows = batch if wanted is None else batch.filter(pc.is_in(row_ids(batch), wanted))
        if rows.num_rows:
            yield _batch(mirror, row_ids(rows), documents(mirror.table, rows))


def read_ids(mirror: Mirror | None, ids: Sequence[str]) -> Iterator[pa.RecordBatch]:
    """Read rows by id: SCANNED. A mirror that isn't there has none."""
    if mirror is None:
        return
    schema = pa.schema([(ID, pa.string()), *codec(mirror.table).schema])
    for rows in mirror.rows(pa.array(sorted(ids), pa.string()), schema):
        for batch in rows.to_batches():
            columns = [row_ids(batch), documents(mirror.table, batch)]
            yield pa.RecordBatch.from_arrays(columns, names=["id", "document"])


def list_ids(
    mirror: Mirror, offsets: Sequence[int], cursor: str | None
) -> tuple[list[str], str | None]:
    """List ids of a mirror, as `cdc.sink.contract.ListIds` says.

    In the order of the rows' last changes, which compaction doesn't change, up to the mirror's position at the
    beginning: `offsets`. Rows that come after it have changed since.
    """
    after, ends = json.loads(cursor) if cursor else (-1, offsets)
    found: list[tuple[np.ndarray, parquet.Group, np.ndarray]] = []
    count = 0
    last = -1
    for group in mirror.groups():
        if group.newest <= after:
            continue
        if count >= LISTED_ROWS and group.oldest > last:
            break
        places, is_deleted = mirror.places(group)
        wanted = (places > after) & ~is_deleted & parquet.are_below(places, ends)
        numbers = np.flatnonzero(wanted)
        found.append((places[numbers], group, numbers))
        count += len(numbers)
        if count >= LISTED_ROWS:
            listed = np.concatenate([own for own, _, _ in found])
            last = int(np.partition(listed, LISTED_ROWS - 1)[LISTED_ROWS - 1])
    is_end = count < LISTED_ROWS
    ids: list[str] = []
    for places, group, numbers in found:
        chosen = numbers if is_end else numbers[places <= last]
        if len(chosen):
            ids += parquet.read_ids(group, chosen)
    return ids, None if is_end else json.dumps([last, list(ends)])


def list_no_ids(_: str | None) -> tuple[list[str], str | None]:
    """List the ids of a mirror that isn't there."""
    return [], None


def read_mirror(mirror: Mirror) -> Iterator[pa.RecordBatch]:
    """Read all rows of a mirror: GROUPED, or one row without id and document where it can't be read."""
    try:
        yield from read_share(mirror, 1, None, 0)
    except (
        deltalake.exceptions.DeltaError,
        OSError,
        ValueError,
        KeyError,
        NotImplementedError,
    ):
        yield _batch(mirror, pa.nulls(1, pa.string()), pa.nulls(1, pa.string()))


def _batch(mirror: Mirror, ids: pa.Array, texts: pa.Array) -> pa.RecordBatch:
    names = pa.array([mirror.table.qualified] * len(ids), pa.string())
    return pa.RecordBatch.from_arrays([names, ids, texts], names=["table", "id", "document"])
