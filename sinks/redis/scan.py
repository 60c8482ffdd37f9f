"""How executors read the rows of many tables out of the cache: all of its keys are gone through once."""

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
    """Reads the rows of tables, which are given by `view_key`, among the keys that match, which have the prefix."""

    def table_of(key: str) -> str | None:
        # No name of a table has a colon there (`view_key`): what follows the next one is the id.
        return tables.get(key[: key.find(":", len(prefix) + 1) + 1])

    def rows(keys: list[str]) -> "pa.RecordBatch":
        import pyarrow as pa

        # A key that SCAN has named may be gone by now.
        values = client(url).mget(keys)
        pairs = [(key, value) for key, value in zip(keys, values, strict=True) if value is not None]
        ids = [key[key.find(":", len(prefix) + 1) + 1 :] for key, _ in pairs]
        columns = [[table_of(key) for key, _ in pairs], ids, [value for _, value in pairs]]
        return pa.RecordBatch.from_arrays([pa.array(column, "string") for column in columns], names=GROUPED)

    def read(parts: Iterator["pa.RecordBatch"]) -> Iterator["pa.RecordBatch"]:
        # Spark throws a worker away that hasn't read its input to the end: 0.7 s of imports.
        for _ in parts:
            pass
        keys = client(url).scan_iter(match=match, count=PAGE_ROWS)
        while page := list(itertools.islice(keys, PAGE_ROWS)):
            if matching := [key for key in page if table_of(key)]:
                yield rows(matching)

    return read
