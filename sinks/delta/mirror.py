"""Changes of a mirror, a view's current rows. Rows that a batch supersedes are found by their ids and
marked as deleted in their files (deletion vectors). Compaction writes files again without such rows; for
readers that don't support deletion vectors every batch does.

Executors read and write the files, and the driver makes the actions of the commit.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyroaring import BitMap64

from cdc.errors import CdcError, SinkRejected, SinkUnavailable
from cdc.model.position import ViewCheckpoint
from cdc.sink.lane_run import freeze_gc, task_numbers
from cdc.sinks.delta import parquet, vectors
from cdc.sinks.delta.columns import to_arrow
from cdc.sinks.delta.log import (
    Action,
    File,
    FileNames,
    TableLog,
    TableState,
    removal,
)
from cdc.sinks.delta.parquet import ID
from cdc.sinks.delta.place import CommitConflict, Place, locate, reading, writing

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

FILES_A_TASK = 8
"""So many files are searched one after the other before another task pays."""
SMALL_BYTES = 8 * 2**20
"""A file with less than this in rows that aren't marked is small."""
SMALL_FILES = 32
"""So many small files are compacted: every batch and every query opens each of them."""
COMPACTED_BYTES = 64 * 2**20
"""No more than this at once, in some seconds."""
SPARSE = 0.5
"""A larger file is written again when no more than this share of its rows remains."""
Item = TypeVar("Item")
Result = TypeVar("Result")


class Undone(NamedTuple):
    """Why a share can't be done: an error's parts, which `collect` would put into a traceback."""

    kind: type[CdcError]
    message: str
    hint: str


def run_tasks(
    spark: "SparkSession", work: Callable[[Item], Iterable[Result]], items: Sequence[Item]
) -> list[Result]:
    """Do a work for each item, in one Spark job. Returns all that comes of them.

    Not by a DataFrame, which Spark plans each time: with that a batch of 200 changes took 0.31 s of CPU
    instead of 0.25. `work` and `items` are pickled.

    Raises SinkUnavailable, SinkRejected as `work` does.
    """
    if not items:
        return []
    context = spark.sparkContext
    tasks = min(len(items), context.defaultParallelism)
    shares = [items[task::tasks] for task in range(tasks)]
    results: list[Result] = []
    for result in (
        task_numbers(context, tasks).mapPartitions(partial(_work, work, shares)).collect()
    ):
        if isinstance(result, Undone):
            raise result.kind(result.message, hint=result.hint)
        results.append(result)
    return results


def _work(
    work: Callable[[Item], Iterable[Result]],
    shares: Sequence[Sequence[Item]],
    numbers: Iterable[int],
) -> Iterator[Result | Undone]:
    """Do the shares of a task, whose numbers come in."""
    for number in numbers:
        for item in shares[number]:
            try:
                yield from work(item)
            except (SinkUnavailable, SinkRejected) as error:
                yield Undone(type(error), error.message, error.hint)
    freeze_gc(getattr(work, "func", work).__qualname__)


class Search(NamedTuple):
    """What is searched for a table, or a part of it.

    table      its name
    folder     of the mirror
    files      paths of the mirror's files as its log has them
    rows       names of staged files with new rows
    deleted    names of staged files with ids of deleted rows
    repeated   whether a row may be in the staged files several times: these are searched, too
    """

    table: str
    folder: str
    files: Sequence[str]
    rows: Sequence[str]
    deleted: Sequence[str]
    repeated: bool = False


def find_superseded(
    spark: "SparkSession", searches: Sequence[Search]
) -> dict[str, dict[str, bytes]]:
    """Find the superseded rows of tables, in one Spark job. Returns by table, and by path of those files
    that have any, their bitmap.

    Raises SinkUnavailable: a file can't be read.
    """
    shares = [share for search in searches for share in _shares(search)]
    superseded: dict[str, dict[str, bytes]] = {}
    for table, path, rows in run_tasks(spark, _search_share, shares):
        superseded.setdefault(table, {})[path] = rows
    return superseded


def _shares(search: Search) -> Iterator[Search]:
    """Divide a search into parts for tasks; the staged files are searched in the first one."""
    starts = range(0, len(search.files), FILES_A_TASK) or ([0] if search.repeated else [])
    for start in starts:
        part = search.files[start : start + FILES_A_TASK]
        yield search._replace(files=part, repeated=search.repeated and start == 0)


def _search_share(share: Search) -> Iterator[tuple[str, str, bytes]]:
    """Search a share: the table, the path and the bitmap of each file that has superseded rows."""
    with reading(share.folder):
        for path, rows in search_files(share):
            yield share.table, path, rows


def search_files(search: Search) -> Iterator[tuple[str, bytes]]:
    """Find the superseded rows of files: each file that has any, and their bitmap. Raises OSError.

    A row of the mirror is superseded where its id is in a staged file, and so is a staged row of which a
    newer version was staged as well.
    """
    names = [*search.rows, *search.deleted]
    staged = {name: parquet.read_versions(f"{search.folder}/{name}") for name in names}
    if search.repeated:
        for name, rows in find_repeated(staged):
            if name in search.rows:
                yield name, _bits(rows)
    wanted = pc.unique(
        pa.chunked_array([c for t in staged.values() for c in t[ID].chunks], pa.string())
    )
    bounds = pc.min_max(wanted).as_py()
    if not len(wanted):
        return
    groups = [
        (path, start, ids)
        for path in search.files
        for start, ids in parquet.read_ids_within(
            locate(search.folder, path), bounds["min"], bounds["max"]
        )
    ]
    # One call for all groups: each makes a table of what is wanted, which takes longer than a group.
    is_wanted = pc.is_in(pa.chunked_array([ids for *_, ids in groups], pa.string()), wanted)
    numbers: dict[str, list[np.ndarray]] = {}
    position = 0
    for path, start, ids in groups:
        found = pc.indices_nonzero(is_wanted.slice(position, len(ids))).to_numpy()
        numbers.setdefault(path, []).append(found.astype(np.int64) + start)
        position += len(ids)
    for path, parts in numbers.items():
        if any(map(len, parts)):
            yield path, _bits(np.concatenate(parts))


def find_repeated(staged: Mapping[str, pa.Table]) -> Iterator[tuple[str, np.ndarray]]:
    """Find the rows of staged files of which a newer version was staged, or a later delete."""
    rows = pa.concat_tables(staged.values()).combine_chunks()
    ids = rows[ID].combine_chunks().dictionary_encode().indices.to_numpy()
    offsets = rows["_cdc_offset"].to_numpy()
    newest = np.zeros(int(ids.max(initial=-1)) + 1, np.int64)
    np.maximum.at(newest, ids, offsets)
    is_superseded = offsets < newest[ids]
    start = 0
    for name, table in staged.items():
        numbers = np.flatnonzero(is_superseded[start : start + len(table)])
        start += len(table)
        if len(numbers):
            yield name, numbers


def _bits(rows: np.ndarray) -> bytes:
    return BitMap64(rows.astype(np.uint64)).serialize()


def marked_rows(place: Place, file: File, superseded: bytes | None) -> BitMap64:
    """Add up a file's rows that are marked already, and those that a batch supersedes.

    superseded: a bitmap of their numbers; None for none. Raises SinkUnavailable.
    """
    rows = vectors.bitmap(superseded)
    if descriptor := file.get("deletionVector"):
        rows |= vectors.deleted_rows(descriptor, place)
    return rows


def row_count(place: Place, file: File) -> int:
    """Return the number of rows that a file has, marked ones among them. Raises SinkUnavailable."""
    stats = json.loads(file.get("stats", "{}"))
    if "numRecords" in stats:
        count: int = stats["numRecords"]
        return count
    # Others may write files, or a checkpoint, without statistics.
    with reading(place.location):
        return parquet.row_count(locate(place.location, file["path"]))


def mark(
    place: Place,
    state: TableState,
    rows: Sequence[File],
    superseded: Mapping[str, bytes],
    names: FileNames,
) -> list[Action]:
    """Make the actions that bring a batch's rows: new files are added, superseded rows are marked.
    Writes the deletion vectors, which are in no commit yet.

    rows: files that are written, in no commit yet. superseded: by path of a file, these among them, the
    bitmap of its superseded rows.

    Raises SinkUnavailable: the place can't be read or written.
    """
    vector_file = vectors.VectorFile(names.generate_id())
    actions: list[Action] = []
    staged = {file["path"]: file for file in rows}
    for path, file in {**state.files, **staged}.items():
        if path not in superseded:
            actions += [{"add": file}] if path in staged else []
            continue
        marked = marked_rows(place, file, superseded[path])
        if len(marked) == file.get("deletionVector", {}).get("cardinality", 0):
            # Rows that were marked before are found again.
            continue
        actions += [] if path in staged else [removal(file)]
        count = row_count(place, file)
        if len(marked) < count:
            # A bound may be a marked row's value.
            stats = json.loads(file.get("stats", "{}"))
            stats |= {"numRecords": count, "tightBounds": False}
            changed = {
                "dataChange": True,
                "stats": json.dumps(stats),
                "deletionVector": vector_file.add(marked),
            }
            actions.append({"add": {**file, **changed}})
    if vector_file.data:
        place.write(vector_file.name, vector_file.data)
    return actions


class Source(NamedTuple):
    """A file that is read: its location, and a bitmap of the rows that are left out."""

    path: str
    left_out: bytes | None


class Rewrite(NamedTuple):
    """Some files of a folder that become one.

    columns: of the new file; one that a file lacks is null there. name: of the new file.
    """

    folder: str
    sources: Sequence[Source]
    columns: pa.Schema
    name: str


def source(place: Place, file: File, superseded: bytes | None = None) -> Source:
    """Describe a file of a table, whose marked and superseded rows are left out. Raises SinkUnavailable."""
    rows = marked_rows(place, file, superseded)
    return Source(locate(place.location, file["path"]), rows.serialize())


def rewrite(spark: "SparkSession", rewrites: Sequence[Rewrite]) -> list[File | None]:
    """Write files again, in one Spark job. Returns for each the new file; None where no row remains.

    Raises SinkUnavailable: a folder takes no more.
    """
    files = {file["path"]: file for file in run_tasks(spark, rewrite_files, rewrites)}
    return [files.get(request.name) for request in rewrites]


def rewrite_files(request: Rewrite) -> Iterator[File]:
    """Write the remaining rows of some files as one, if there are any. Raises SinkUnavailable."""
    tables = (
        table for source in request.sources for table in remaining_rows(source, request.columns)
    )
    groups = parquet.row_groups(tables)
    with writing(request.folder):
        if file := parquet.write_file(request.folder, request.name, groups):
            yield file


def remaining_rows(source: Source, columns: pa.Schema) -> Iterator[pa.Table]:
    """Read the rows of a file that aren't left out, a row group at a time, as the columns of a schema.

    Raises OSError.
    """
    bitmap = vectors.bitmap(source.left_out)
    left_out = np.fromiter(bitmap, np.int64, len(bitmap))
    start = 0
    for table in parquet.read_rows(source.path, columns):
        of_group = slice(*np.searchsorted(left_out, [start, start + len(table)]))
        remains = np.ones(len(table), bool)
        remains[left_out[of_group] - start] = False
        start += len(table)
        yield table if remains.all() else table.filter(remains)


def compact(spark: "SparkSession", log: TableLog) -> None:
    """Compact a table that needs it: each batch leaves small files, and files with ever fewer rows. Where
    another commit comes in between it stays as it is.

    Raises SinkUnavailable: a folder can't be read, or takes no more.
    """
    state = log.refresh()
    if state and (files := select(log.place, state)):
        (result,) = rewrite(spark, [request(log, state, files, FileNames())])
        replace(log, state, files, result)


def select(place: Place, state: TableState) -> list[File]:
    """Select the files that are to become one; none for most tables."""
    shares = {path: _remaining_share(place, file) for path, file in state.files.items()}
    sizes = {path: file["size"] * shares[path] for path, file in state.files.items()}
    small = sorted((path for path in sizes if sizes[path] < SMALL_BYTES), key=sizes.__getitem__)
    if len(small) >= SMALL_FILES:
        totals = accumulate(sizes[path] for path in small)
        return [
            state.files[path]
            for path, total in zip(small, totals, strict=True)
            if total < COMPACTED_BYTES
        ]
    sparse = (path for path in sizes if path not in small and shares[path] <= SPARSE)
    return [state.files[path] for path in sparse][:1]


def _remaining_share(place: Place, file: File) -> float:
    if "deletionVector" not in file:
        return 1.0
    marked: int = file["deletionVector"]["cardinality"]
    return 1 - marked / row_count(place, file)


def request(log: TableLog, state: TableState, files: Sequence[File], names: FileNames) -> Rewrite:
    """Describe the rewrite of files of a version, without their marked rows."""
    sources = [source(log.place, file) for file in files]
    return Rewrite(log.place.location, sources, to_arrow(state.columns), names.generate())


def replace(log: TableLog, state: TableState, files: Sequence[File], result: File | None) -> None:
    """Commit a new file in the place of others, unless another commit came in between."""
    actions = [removal(file, data_change=False) for file in files]
    if result:
        actions.append({"add": {**result, "dataChange": False}})
    # The position stays what it is. Where somebody else's commit is the newest one, it is found below.
    text = state.info.get("userMetadata") or ""
    is_ours = text.startswith(ViewCheckpoint.JSON_START)
    checkpoint = ViewCheckpoint.from_json(text) if is_ours else None
    with suppress(CommitConflict):
        log.commit(state.identity, actions, "OPTIMIZE", checkpoint)
        return
    if result:
        parquet.remove_files(log.place.location, [result["path"]])
