"""Reading an index on executors: all documents of a point in time, or some by `_id`, each as the
text that was sent: values untouched, no number is rounded. The `_id` is the row's id, or a hash where the
server doesn't take that.
"""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import quote

import msgspec
from tenacity import Retrying, retry_if_exception_type, stop_after_delay, wait_exponential

from cdc.codec.members import members
from cdc.errors import Fenced, SinkError, SinkUnavailable
from cdc.model.address import address
from cdc.sink.scan import text_batch
from cdc.sinks.elasticsearch.client import (
    ABSENT_TYPES,
    CLOSED,
    FORBIDDEN,
    HINTS,
    SECURITY,
    TAKEN_OVER,
    Refusal,
    closed_error,
    forbidden_error,
    send_request,
)
from cdc.sinks.elasticsearch.connection import connections, unavailable

if TYPE_CHECKING:
    import pyarrow as pa

_Result = TypeVar("_Result")
PAGE_ROWS = 2000
GROUP_ROWS = 5000
"""Rows of an index that one search reads at most; the server allows 10,000 by default."""
SLICES = 2
KEEP = "2m"
"""How long a point in time waits for its next reader."""
PATIENCE_S = 10.0
"""Seconds for which a page is asked for again while the server is busy or away, or a shard moves. A
comparison of hours would have to start over.
"""
COMPLETE_RESULTS = {"allow_partial_search_results": "false"}
# A number may have more digits than Python takes for one; its value doesn't matter here.
_DECODER = json.JSONDecoder(parse_int=str, parse_float=str)
LONGEST_ID = 512
HASHED = "sha256:"
OWN_ID = "_cdc_id"
"""The field that holds the id of a document whose `_id` can't: Elasticsearch takes 512 bytes."""


class _Error(msgspec.Struct):
    type: str = "there is no answer"
    reason: str = ""


class Document(msgspec.Struct):
    """An item of an `_mget`'s answer."""

    id: str = msgspec.field(name="_id", default="")
    found: bool | None = None
    version: int = msgspec.field(name="_version", default=-1)
    error: _Error | None = None
    # Within a union Raw would be decoded.
    source: msgspec.Raw = msgspec.field(name="_source", default=msgspec.Raw(b""))


class _Answer(msgspec.Struct):
    docs: list[Document] = []


_decode = msgspec.json.Decoder(_Answer).decode


def document_id(row_id: str) -> str:
    """The row's id, or its hash when that is too long, empty, or looks like such a hash."""
    length = len(row_id.encode())
    if 0 < length <= LONGEST_ID and not row_id.startswith(HASHED):
        return row_id
    return HASHED + hashlib.sha256(row_id.encode()).hexdigest()


def documents(
    url: str, path: str, body: Mapping[str, Any], count: int
) -> Iterator[Document | None]:
    """Read so many documents by `_mget`, in its order; None only for those that the server says are
    absent.

    Raises:
        SinkUnavailable: one can't be read; SinkBlocked: the index is closed.
        Fenced: there is no such name any more.
    """
    try:
        items = _decode(send_request(url, "POST", path, body).body).docs
    except msgspec.DecodeError:
        items = []
    if len(items) != count:
        raise unavailable(
            f"The index at {address(url)} has answered for {len(items)} of {count} rows."
        )
    for item in items:
        if bytes(item.source):
            yield item
        elif item.found is False:
            yield None
        else:
            raise _read_error(url, item)


def _read_error(url: str, item: Document) -> SinkError:
    error = item.error or _Error()
    if error.type == CLOSED:
        return closed_error(url)
    if error.type == SECURITY:
        return forbidden_error(f"The index at {address(url)}", FORBIDDEN, error.reason)
    if error.type in ABSENT_TYPES:
        return Fenced(TAKEN_OVER, hint=HINTS["fenced"])
    return unavailable(f"A row of the index can't be read: {error.type}.")


def read_ids(url: str, index: str, ids: Sequence[str]) -> Iterator["pa.RecordBatch"]:
    """Read documents by row id; absent ones are left out."""
    yield _rows(_retry_while_away(_read_documents, url, index, [*map(document_id, ids)]))


def _retry_while_away(read: Callable[..., _Result], *arguments: object) -> _Result:
    attempts = Retrying(
        retry=retry_if_exception_type(SinkUnavailable),
        wait=wait_exponential(multiplier=0.1, max=1.0),
        stop=stop_after_delay(PATIENCE_S),
        reraise=True,
    )
    return attempts(read, *arguments)


def _read_documents(url: str, index: str, ids: Sequence[str]) -> list[tuple[str, str]]:
    """Read id and source of documents by `_id`; absent ones are left out."""
    items = documents(url, f"/{quote(index, safe='@')}/_mget", {"ids": ids}, len(ids))
    return [(item.id, bytes(item.source).decode()) for item in items if item]


def read_index(url: str, limit: int, index: tuple[str, str]) -> Iterator["pa.RecordBatch"]:
    """Read an index in one search: GROUPED. index: the table's name, and the index'.

    An index that is absent, or doesn't have fewer documents than `limit`, has a row without an id.
    """
    table, name = index
    rows = _retry_while_away(_read_index, url, name, limit)
    ids = [row_id for row_id, _ in rows]
    yield text_batch(table=[table] * len(rows), id=ids, document=[text for _, text in rows])


def _read_index(url: str, index: str, limit: int) -> Sequence[tuple[str | None, str | None]]:
    """Read id and source of all documents, as of one moment; one row without an id if it fails."""
    query = {"size": limit, "sort": ["_doc"], "track_total_hits": False}
    try:
        text = _search(url, f"/{quote(index, safe='@')}/_search", query)
    except Refusal:
        return [(None, None)]
    hits = list(_hits(text))
    if len(hits) >= limit:
        return [(None, None)]
    return [(_id(key, source), source) for key, source in hits]


def read_slice(url: str, pit: str, number: int) -> Iterator["pa.RecordBatch"]:
    """Read one of the SLICES of a point in time."""
    is_opensearch = connections(url).is_opensearch()
    query: dict[str, Any] = {
        "size": PAGE_ROWS,
        "pit": {"id": pit, "keep_alive": KEEP},
        "slice": {"id": number, "max": SLICES},
        # OpenSearch 2 has no `_shard_doc`. Each shard counts its changes by itself, so that as many
        # documents as there are shards may have one number.
        "sort": ["_seq_no" if is_opensearch else "_shard_doc"],
        "track_total_hits": False,
    }
    last_ids: set[str] = set()
    while True:
        text = _retry_while_away(_search, url, "/_search", query)
        found = list(_hits(text))
        hits = [hit for hit in found if hit[0] not in last_ids]
        if not hits:
            return
        yield _rows(hits)
        last_sort, _ = _DECODER.raw_decode(text, text.rindex('"sort":') + len('"sort":'))
        query["search_after"] = [int(sort_value) for sort_value in last_sort]
        if is_opensearch:
            # From this number on, once more: what else has it may be on the next page.
            query["search_after"] = [int(last_sort[0]) - 1]
            last_ids = {key for key, _ in found}


def list_ids(url: str, index: str, cursor: str | None) -> tuple[list[str], str | None]:
    """List ids of an index, as `cdc.sink.contract.ListIds` says.

    In the order of changes: a document that changes gets a higher number. So those above the highest one at
    the beginning have changed since. Each shard counts by itself: documents may share a number.
    """
    path = f"/{quote(index, safe='@')}/_search"
    query = {"size": PAGE_ROWS, "sort": ["_seq_no"], "track_total_hits": False, "_source": [OWN_ID]}
    if cursor is None:
        newest = {**query, "size": 1, "sort": [{"_seq_no": "desc"}]}
        text = _retry_while_away(_search, url, path, newest)
        if not any(_hits(text)):
            return [], None
        cursor = f"-1 {_last_number(text)}"
    after, highest = map(int, cursor.split())
    query["query"] = {"range": {"_seq_no": {"gt": after, "lte": highest}}}
    text = _retry_while_away(_search, url, path, query)
    ids = [_id(key, source) for key, source in _hits(text)]
    if len(ids) < PAGE_ROWS:
        return ids, None
    return ids, f"{_last_number(text) - 1} {highest}"


def _last_number(text: str) -> int:
    """Read by what the last hit is sorted."""
    sort_values, _ = _DECODER.raw_decode(text, text.rindex('"sort":') + len('"sort":'))
    return int(sort_values[0])


def _search(url: str, path: str, query: Mapping[str, Any]) -> str:
    answer = send_request(url, "POST", path, query, COMPLETE_RESULTS)
    return answer.body.decode(errors="replace")


def _hits(text: str) -> Iterator[tuple[str, str]]:
    """`_id` and source of each hit. What is looked for is in no string: quotes there are escaped."""
    index = text.index('"hits":[')
    while (index := text.find('"_id":', index)) >= 0:
        key, index = _DECODER.raw_decode(text, index + len('"_id":'))
        index = text.index('"_source":', index) + len('"_source":')
        _, end = _DECODER.raw_decode(text, index)
        yield key, text[index:end]
        index = end


def _rows(hits: Sequence[tuple[str, str]]) -> "pa.RecordBatch":
    ids = [_id(key, source) for key, source in hits]
    return text_batch(id=ids, document=[source for _, source in hits])


def _id(key: str, source: str) -> str:
    if key.startswith(HASHED):
        return str(json.loads(bytes(members(source.encode())[OWN_ID])))
    return key
