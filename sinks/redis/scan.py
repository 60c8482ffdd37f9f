"""Reading rows from the cache on executors: all of a table, some by id, or all of many tables in
one pass over all keys.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import redis

from cdc.errors import SinkRejected
from cdc.model.table import Table
from cdc.redis.server import Cluster, Switched, client, first_word, glob_literal, is_cluster
from cdc.sink.scan import text_batch
from cdc.sinks.redis import hashes
from cdc.sinks.redis.slots import ask, checked, primaries, slot_of

if TYPE_CHECKING:
    import pyarrow as pa

PAGE_ROWS = 2000
"""Keys of a page: one request reads, removes or copies so many rows."""


def read_rows(url: str, hashed: Table | None, key_prefix: str) -> Iterator["pa.RecordBatch"]:
    """Read all rows of a table, whose keys begin with its `view_key`. hashed: the table, if its rows are
    hashes.
    """
    for page in key_pages(url, key_prefix):
        yield _rows(url, hashed, key_prefix, page)


def read_ids(
    url: str, hashed: Table | None, key_prefix: str, ids: Sequence[str]
) -> Iterator["pa.RecordBatch"]:
    """Read rows by id; absent ones are left out."""
    yield _rows(url, hashed, key_prefix, [key_prefix + row_id for row_id in ids])


def list_ids(url: str, key_prefix: str, cursor: str | None) -> tuple[list[str], str | None]:
    """List ids of a table, as `cdc.sink.contract.ListIds` says."""
    server = client(url)
    known, _, place = (cursor or " 0").rpartition(" ")
    after, keys = server.scan(int(place), match=glob_literal(key_prefix) + "*", count=PAGE_ROWS)
    run = run_id(server)
    if run is None:
        raise SinkRejected(
            "The cache's user may not call INFO, so it isn't known whether the same server goes on with a scan.",
            hint="let the user call INFO: the documentation of the cache lists all commands",
        )
    present = str(run)
    if known != present:
        # A cursor means nothing to another server. The first page only notes which one it is.
        return [], f"{present} 0"
    ids = [str(key)[len(key_prefix) :] for key in keys]
    return ids, f"{present} {after}" if after else None


def read_tables(
    url: str, tables: Mapping[str, str], unread: Sequence[str], prefix: str
) -> Iterator["pa.RecordBatch"]:
    """Read the rows of tables: GROUPED. tables: by `view_key`, the name of each. unread: names of those
    that aren't read this way.
    """
    nothing = [None] * len(unread)
    yield text_batch(table=unread, id=nothing, document=nothing)

    def split(key: str) -> int:
        # `view_key` escapes colons in a table's name, so the id follows the next one.
        return key.find(":", len(prefix) + 1) + 1

    for page in key_pages(url, f"{prefix}:"):
        pairs = values(url, None, [key for key in page if key[: split(key)] in tables])
        names = [tables[key[: split(key)]] for key, _ in pairs]
        ids = [key[split(key) :] for key, _ in pairs]
        yield text_batch(table=names, id=ids, document=[value for _, value in pairs])


def key_pages(url: str, begin: str) -> Iterator[list[str]]:
    """Scan the keys that begin with a text, in pages of up to `PAGE_ROWS`; one may come twice.

    Raises:
        RedisError: `Switched` after the last page, if not all are of one server.
    """
    server = client(url)
    first = run_id(server)
    keys = server.scan_iter(match=glob_literal(begin) + "*", count=PAGE_ROWS)
    while page := list(itertools.islice(keys, PAGE_ROWS)):
        yield page
    if run_id(server) != first:
        raise Switched("another server has gone on with a scan")


def run_id(server: redis.Redis) -> object:
    """Return what is another one on each server, and after each start of it; None for a user without
    the right to INFO. Of a cluster see `primaries`.
    """
    if isinstance(server, Cluster):
        return primaries(server)
    try:
        return server.info("server").get("run_id")
    except redis.exceptions.NoPermissionError:
        return None


def _rows(url: str, hashed: Table | None, key_prefix: str, keys: Sequence[str]) -> "pa.RecordBatch":
    pairs = values(url, hashed, keys)
    ids = [key[len(key_prefix) :] for key, _ in pairs]
    return text_batch(id=ids, document=[value for _, value in pairs])


def read_hashes(url: str, table: Table, keys: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Read key and document of rows that are hashes. What isn't there, or is no hash, is left out."""
    answers = _answers(url, "HGETALL", keys)
    for key, answer in zip(keys, answers, strict=True):
        if isinstance(answer, redis.exceptions.RedisError):
            if first_word(answer) != "WRONGTYPE":
                raise answer
        elif answer:
            yield key, hashes.document(table, answer)


def values(url: str, hashed: Table | None, keys: Sequence[str]) -> list[tuple[str, str]]:
    """Read key and document of rows. hashed: the table, if its rows are hashes."""
    if hashed:
        return list(read_hashes(url, hashed, keys))
    is_single = keys and not is_cluster(url)
    texts: Any = client(url).mget(keys) if is_single else checked(_answers(url, "GET", keys))
    # A key that SCAN returned may have been deleted since.
    return [(key, text) for key, text in zip(keys, texts, strict=True) if text is not None]


def _answers(url: str, command: str, keys: Sequence[str]) -> list[Any]:
    """Ask for each key in one round trip, or one to each node. An answer may be an error."""
    server: Any = client(url)
    if is_cluster(url):
        return ask(server, [(slot_of(key), (command, key)) for key in keys])
    with server.pipeline(transaction=False) as pipeline:
        for key in keys:
            pipeline.execute_command(command, key)
        return list(pipeline.execute(raise_on_error=False))
