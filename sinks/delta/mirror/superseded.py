"""Which rows of a mirror a batch supersedes: found on the executors, by their ids alone.

A batch stages files of new rows and files of the ids of deleted rows. A row of the mirror is superseded
where its id is in one of them, and so is a staged row of which a newer version was staged as well. The
driver marks both in the commit that adds the new rows, so nothing is written twice.
"""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from cdc.sinks.delta.files import parquet
from cdc.sinks.delta.files.failures import reading
from cdc.sinks.delta.mirror.tasks import run_tasks
from cdc.sinks.delta.place import locate

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

FILES_A_TASK = 8
"""So many files are searched one after the other before another task pays."""
Bitmaps = dict[str, bytes]
"""By path of a file: the bitmap of its superseded rows."""


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


def find_superseded(spark: "SparkSession", searches: Sequence[Search]) -> dict[str, Bitmaps]:
    """Find the superseded rows of tables, in one Spark job. Returns by table those files that have any.

    Raises:
        SinkUnavailable: a file can't be read.
    """
    shares = [share for search in searches for share in _shares(search)]
    superseded: dict[str, Bitmaps] = {}
    for table, path, rows in run_tasks(spark, _search_share, shares):
        superseded.setdefault(table, {})[path] = rows
    return superseded


def _shares(search: Search) -> Iterator[Search]:
    """Divide a search into parts for tasks; the staged files are searched in the first one."""
    files = list(search.files)
    starts = range(0, len(files), FILES_A_TASK) or ([0] if search.repeated else [])
    for start in starts:
        part = files[start : start + FILES_A_TASK]
        yield search._replace(files=part, repeated=search.repeated and start == 0)


def _search_share(share: Search) -> Iterator[tuple[str, str, bytes]]:
    """Search a share: the table, the path and the bitmap of each file that has superseded rows."""
    with reading(share.folder):
        for path, rows in search_files(share):
            yield share.table, path, rows


def search_files(search: Search) -> Iterator[tuple[str, bytes]]:
    """Find the superseded rows of files: each file that has any, and their bitmap. Raises OSError."""
    import numpy as np
    import pyarrow as pa
    import pyarrow.compute as pc
    from pyroaring import BitMap64

    if search.repeated:
        yield from find_repeated(search)
    staged = [*search.rows, *search.deleted]
    parts = [ids for name in staged for ids in parquet.read_ids(f"{search.folder}/{name}")]
    if not parts:
        return
    wanted = pc.unique(pa.chunked_array(parts))
    bounds = pc.min_max(wanted).as_py()
    groups = [
        (path, start, ids)
        for path in search.files
        for start, ids in parquet.read_ids_within(
            locate(search.folder, path), bounds["min"], bounds["max"]
        )
    ]
    # One call for all groups: each makes a table of what is wanted, which takes longer than a group.
    is_wanted = pc.is_in(pa.chunked_array([ids for *_, ids in groups], pa.string()), wanted)
    found = pc.indices_nonzero(is_wanted).to_numpy().astype(np.int64)
    bitmaps: dict[str, BitMap64] = {}
    position = 0
    for path, start, ids in groups:
        of_group = slice(*np.searchsorted(found, [position, position + len(ids)]))
        rows = found[of_group] - position + start
        if len(rows):
            bitmaps[path] = bitmaps.get(path, BitMap64()) | BitMap64(rows.astype(np.uint64))
        position += len(ids)
    for path, bitmap in bitmaps.items():
        yield path, bitmap.serialize()


def find_repeated(search: Search) -> Iterator[tuple[str, bytes]]:
    """Find the staged rows of which a newer version was staged, or a later delete."""
    import numpy as np
    import pyarrow as pa
    from pyroaring import BitMap64

    names = [*search.rows, *search.deleted]
    tables = [parquet.read_versions(f"{search.folder}/{name}") for name in names]
    staged = pa.concat_tables(tables).combine_chunks()
    ids = staged["_cdc_id"].combine_chunks().dictionary_encode().indices.to_numpy()
    offsets = staged["_cdc_offset"].to_numpy()
    newest = np.zeros(int(ids.max(initial=-1)) + 1, np.int64)
    np.maximum.at(newest, ids, offsets)
    is_superseded = offsets < newest[ids]
    start = 0
    for name, table in zip(names, tables, strict=True):
        rows = np.flatnonzero(is_superseded[start : start + len(table)])
        start += len(table)
        if len(rows) and name in search.rows:
            yield name, BitMap64(rows.astype(np.uint64)).serialize()
