"""Files of mirrors that executors write again, without some of their rows."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from cdc.errors import SinkUnavailable
from cdc.sinks.delta.files import parquet
from cdc.sinks.delta.files.failures import WRITE_HINT, write_failure
from cdc.sinks.delta.files.parquet import DataFile
from cdc.sinks.delta.log import vectors
from cdc.sinks.delta.mirror.tasks import run_tasks

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import SparkSession


class Source(NamedTuple):
    """A file that is written again: its path, and a bitmap of the rows that are left out."""

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


def rewrite(spark: "SparkSession", rewrites: Sequence[Rewrite]) -> list[DataFile | None]:
    """Write files again, in one Spark job. Returns for each the new file; None where no row remains.

    Raises:
        SinkUnavailable: a folder takes no more.
    """
    results: dict[str, DataFile] = {}
    for name, outcome in run_tasks(spark, _rewrite, rewrites):
        if isinstance(outcome, str):
            raise SinkUnavailable(outcome, hint=WRITE_HINT)
        results[name] = outcome
    return [results.get(request.name) for request in rewrites]


def _rewrite(request: Rewrite) -> Iterator[tuple[str, DataFile | str]]:
    """Do a rewrite: the name, and the new file or a message that says why it can't be written."""
    try:
        if file := rewrite_files(request):
            yield request.name, file
    except OSError as error:
        yield request.name, write_failure(request.folder, error).message


def rewrite_files(request: Rewrite) -> DataFile | None:
    """Write the remaining rows of some files as one; None when none remain. Raises OSError."""
    return parquet.write_file(request.folder, request.name, parquet.row_groups(_remaining(request)))


def _remaining(request: Rewrite) -> Iterator["pa.Table"]:
    """Read the rows that remain, a row group of a file at a time."""
    import numpy as np

    for source in request.sources:
        left_out = vectors.bitmap(source.left_out)
        start = 0
        for table in parquet.read_rows(source.path, request.columns):
            end = start + len(table)
            within = left_out & vectors.span(start, end)
            if within:
                remains = np.ones(len(table), bool)
                remains[np.fromiter(within, np.int64, len(within)) - start] = False
                yield table.filter(remains)
            else:
                yield table
            start = end
