"""Reading the rows of many tables from the cache on executors, in one pass over all of its keys."""

import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

from sinks.redis.server import client

if TYPE_CHECKING:
    import pyarrow as pa

PAGE_ROWS = 2000
GROUPED = ["table", "id", "document"]
Read = Callable[[Iterator["pa.RecordBatch"]], Iterator["pa.RecordBatch"]]


def group_reader(url: str, prefix: str, match: str, tables: Mapping[str, str]) -> Read:
    """Build a reader of the rows of tables: by `view_key`, the name of each. match: the pattern of
    keys to scan.
    """

    def table_of(key: str) -> str | None:
        # `view_key` escapes colons in a table's name, so the id follows the next one.
        return tables.get(key[: key.find(":", len(prefix) + 1) + 1])

    def rows(keys: list[str]) -> "pa.RecordBatch":
        import pyarrow as pa

        # A key that SCAN has named may be gone by now.
        values = client(url).mget(keys)
        pairs = [(key, value) for key, value in zip(keys, values, strict=True) if value is not None]
        ids = [key[key.find(":", len(prefix) + 1) + 1 :] for key, _ in pairs]
        columns = [[table_of(key) for key, _ in pairs], ids, [value for _, value in pairs]]
        return pa.RecordBatch.from_arrays(
            [pa.array(column, "string") for column in columns], names=GROUPED
        )

    def read(parts: Iterator["pa.RecordBatch"]) -> Iterator["pa.RecordBatch"]:
        # Spark throws a worker away that hasn't read its input to the end: 0.7 s of imports.
        for _ in parts:
            pass
        keys = client(url).scan_iter(match=match, count=PAGE_ROWS)
        while page := list(itertools.islice(keys, PAGE_ROWS)):
            if matching := [key for key in page if table_of(key)]:
                yield rows(matching)

    return read
