"""Files of mirrors that executors write again, without some of their rows."""

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from cdc.sinks.delta.files import parquet
from cdc.sinks.delta.files.failures import writing
from cdc.sinks.delta.files.parquet import DataFile
from cdc.sinks.delta.log import vectors
from cdc.sinks.delta.log.table_log import File
from cdc.sinks.delta.mirror.marks import marked_rows
from cdc.sinks.delta.mirror.tasks import run_tasks
from cdc.sinks.delta.place import Place, locate

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import SparkSession


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
    columns: "pa.Schema"
    name: str


def sources(place: Place, files: Iterable[File]) -> list[Source]:
    """Describe files of a table, whose marked rows are left out. Raises SinkUnavailable."""
    return [
        Source(locate(place.location, file["path"]), marked_rows(place, file, None).serialize())
        for file in files
    ]


def rewrite(spark: "SparkSession", rewrites: Sequence[Rewrite]) -> list[DataFile | None]:
    """Write files again, in one Spark job. Returns for each the new file; None where no row remains.

    Raises:
        SinkUnavailable: a folder takes no more.
    """
    files = dict(run_tasks(spark, _rewrite, rewrites))
    return [files.get(request.name) for request in rewrites]


def _rewrite(request: Rewrite) -> Iterator[tuple[str, DataFile]]:
    """Do a rewrite: the name with the new file, if there is one."""
    with writing(request.folder):
        if file := rewrite_files(request):
            yield request.name, file


def rewrite_files(request: Rewrite) -> DataFile | None:
    """Write the remaining rows of some files as one; None when none remain. Raises OSError."""
    tables = (
        table for source in request.sources for table in remaining_rows(source, request.columns)
    )
    return parquet.write_file(request.folder, request.name, parquet.row_groups(tables))


def remaining_rows(source: Source, columns: "pa.Schema") -> Iterator["pa.Table"]:
    """Read the rows of a file that aren't left out, a row group at a time, as the columns of a schema.

    Raises OSError.
    """
    import numpy as np

    left_out = vectors.bitmap(source.left_out)
    start = 0
    for table in parquet.read_rows(source.path, columns):
        end = start + len(table)
        within = left_out & vectors.span(start, end)
        if within:
            remains = np.ones(len(table), bool)
            remains[np.fromiter(within, np.int64, len(within)) - start] = False
            yield table.filter(remains)
        else:
            yield table
        start = end
