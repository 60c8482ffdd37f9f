"""How executors read many small mirrors: their files, without Spark's plan for each, and rows as Postgres writes them.

A value that this can't write (beyond the years of Python) leaves its mirror to be scanned by itself.
"""

import json
from base64 import b64encode
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import date, datetime
from decimal import Decimal
from functools import partial
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from cdc.change import Table
from sinks.delta import add_files, links
from sinks.delta.commits import Commits

if TYPE_CHECKING:
    import deltalake
    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession

GROUPED = ["table", "id", "document"]
BATCH_ROWS = 1000
Read = Callable[[Iterator["pa.RecordBatch"]], Iterator["pa.RecordBatch"]]


@dataclass(frozen=True)
class Mirror:
    """A mirror as it was opened.

    columns     (name, whether its text is JSON) of each column of the table, in the order of a document
    files       None where rows of them are marked as deleted: only Spark reads these
    """

    table: str
    columns: tuple[tuple[str, bool], ...]
    files: tuple[str, ...] | None


def frame(spark: "SparkSession", folders: Mapping[Table, str], commits: Commits) -> "DataFrame":
    """As `cdc.sink.Grouped` says, of the tables whose mirrors are in these folders."""
    mirrors = [_mirror(table, folder, commits.table(folder)) for table, folder in folders.items()]
    tasks = max(1, min(spark.sparkContext.defaultParallelism, len(mirrors)))
    read = _reader(mirrors, tasks)
    return spark.range(0, tasks, numPartitions=tasks).mapInArrow(read, "table string, id string, document string")


def _mirror(table: Table, folder: str, held: "deltalake.DeltaTable | None") -> Mirror:
    """One that isn't there has no rows."""
    from cdc import types

    shapes = ((column.name, types.kind(column.type).raw) for column in table.columns)
    columns = tuple(sorted(shapes, key=lambda shape: shape[1]))
    if held is None:
        return Mirror(table.qualified, columns, ())
    root = folder if "://" in folder else str(Path(folder).absolute())
    paths = (unquote(path) for path in add_files.paths(held))
    files = tuple(path if links.absolute(path) else f"{root}/{path}" for path in paths)
    return Mirror(table.qualified, columns, files if add_files.unmarked(held) else None)


def _reader(mirrors: Sequence[Mirror], tasks: int) -> Read:
    """Reads the mirrors of each share whose number it is given."""

    def read(parts: Iterator["pa.RecordBatch"]) -> Iterator["pa.RecordBatch"]:
        for number in (number for part in parts for number in part.column("id").to_pylist()):
            for mirror in mirrors[number::tasks]:
                yield from _rows(mirror)

    return read


def _rows(mirror: Mirror) -> Iterator["pa.RecordBatch"]:
    if mirror.files is None:
        yield _batch(mirror, [(None, None)])
        return
    try:
        for file in mirror.files:
            for part in _parts(file):
                yield _batch(mirror, [(row["_cdc_id"], document(mirror, row)) for row in part.to_pylist()])
    except (OSError, ValueError, OverflowError):
        yield _batch(mirror, [(None, None)])


def _parts(file: str) -> Iterator["pa.RecordBatch"]:
    import pyarrow.fs
    import pyarrow.parquet as pq

    files, path = pyarrow.fs.FileSystem.from_uri(file)
    with files.open_input_file(path) as held:
        yield from pq.ParquetFile(held).iter_batches(BATCH_ROWS)


def _batch(mirror: Mirror, rows: Sequence[tuple[str | None, str | None]]) -> "pa.RecordBatch":
    import pyarrow as pa

    columns = [[mirror.table] * len(rows), [key for key, _ in rows], [text for _, text in rows]]
    return pa.RecordBatch.from_arrays([pa.array(column, "string") for column in columns], names=GROUPED)


def document(mirror: Mirror, row: dict[str, Any]) -> str:
    """The row's document, in the words of `types.Kind.source`. Raises ValueError, OverflowError."""
    members = (f"{_quoted(name)}:{(_raw if raw else _json)(row.get(name))}" for name, raw in mirror.columns)
    return "{" + ",".join(members) + "}"


_quoted = partial(json.dumps, ensure_ascii=False)


def _raw(value: Any) -> str:
    """A value of json, or a list of such."""
    if value is None:
        return "null"
    return f"[{','.join(map(_raw, value))}]" if isinstance(value, list) else str(value)


def _json(value: Any) -> str:  # noqa: PLR0911  # one for each type of a column
    if value is None or isinstance(value, bool | int | str):
        return _quoted(value)
    if isinstance(value, float):
        return repr(value) if isfinite(value) else _quoted(str(value).replace("nan", "NaN").replace("inf", "Infinity"))
    if isinstance(value, Decimal):
        return _quoted(f"{value:f}")
    if isinstance(value, datetime):
        return _quoted(value.isoformat(timespec="microseconds").replace("+00:00", "Z"))
    if isinstance(value, date):
        return _quoted(value.isoformat())
    if isinstance(value, bytes):
        return _quoted(b64encode(value).decode())
    if isinstance(value, list):
        return f"[{','.join(map(_json, value))}]"
    if isinstance(value, dict):
        return "{" + ",".join(f"{_quoted(name)}:{_json(one)}" for name, one in value.items()) + "}"
    raise ValueError(type(value).__name__)
