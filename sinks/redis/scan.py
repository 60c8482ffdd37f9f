"""Reading rows from the cache on executors: all of a table, some by id, or all of many tables in
one pass over all keys.
"""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from cdc.redis.server import client, glob_literal

if TYPE_CHECKING:
    import pyarrow as pa

PAGE_ROWS = 2000
SCANNED = "id string, document string"
GROUPED = "table string, id string, document string"
Read = Callable[[Iterator["pa.RecordBatch"]], Iterator["pa.RecordBatch"]]


def scanner(url: str, key_prefix: str) -> Read:
    """Build a reader of all rows of a table, whose keys begin with its `view_key`: SCANNED."""

    def read(parts: Iterator["pa.RecordBatch"]) -> Iterator["pa.RecordBatch"]:
        _skip(parts)
        for page in _pages(url, key_prefix):
            yield _rows(url, key_prefix, page)

    return read


def getter(url: str, key_prefix: str) -> Read:
    """Build a reader of rows by id: SCANNED. Input: ids, as `key`; absent ones are left out."""

    def read(parts: Iterator["pa.RecordBatch"]) -> Iterator["pa.RecordBatch"]:
        for part in parts:
            keys = [key_prefix + key for key in part.column("key").to_pylist()]
            yield _rows(url, key_prefix, keys)

    return read


def group_reader(url: str, prefix: str, tables: Mapping[str, str]) -> Read:
    """Build a reader of the rows of tables: GROUPED. tables: by `view_key`, the name of each."""

    def split(key: str) -> int:
        # `view_key` escapes colons in a table's name, so the id follows the next one.
        return key.find(":", len(prefix) + 1) + 1

    def read(parts: Iterator["pa.RecordBatch"]) -> Iterator["pa.RecordBatch"]:
        _skip(parts)
        for page in _pages(url, f"{prefix}:"):
            pairs = _values(url, [key for key in page if key[: split(key)] in tables])
            names = [tables[key[: split(key)]] for key, _ in pairs]
            ids = [key[split(key) :] for key, _ in pairs]
            yield _batch(table=names, id=ids, document=[value for _, value in pairs])

    return read


def _skip(parts: Iterator["pa.RecordBatch"]) -> None:
    # Spark throws a worker away that hasn't read its input to the end: 0.7 s of imports.
    for _ in parts:
        pass


def _pages(url: str, key_prefix: str) -> Iterator[list[str]]:
    keys = client(url).scan_iter(match=glob_literal(key_prefix) + "*", count=PAGE_ROWS)
    while page := list(itertools.islice(keys, PAGE_ROWS)):
        yield page


def _rows(url: str, key_prefix: str, keys: Sequence[str]) -> "pa.RecordBatch":
    pairs = _values(url, keys)
    ids = [key[len(key_prefix) :] for key, _ in pairs]
    return _batch(id=ids, document=[value for _, value in pairs])


def _batch(**columns: Sequence[str]) -> "pa.RecordBatch":
    import pyarrow as pa

    arrays = [pa.array(column, "string") for column in columns.values()]
    return pa.RecordBatch.from_arrays(arrays, names=list(columns))


def _values(url: str, keys: Sequence[str]) -> list[tuple[str, str]]:
    # A key that SCAN returned may have been deleted since; MGET needs one key at least.
    values: Any = client(url).mget(keys) if keys else []
    return [(key, value) for key, value in zip(keys, values, strict=True) if value is not None]
