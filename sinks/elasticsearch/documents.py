"""Documents of an index by `_id`, each as the text that was indexed: values untouched, no number is
rounded. The `_id` is the row's id, or a hash where the server doesn't take that.
"""

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from cdc.errors import Fenced, SinkError
from cdc.model.address import address
from cdc.sinks.elasticsearch.client import (
    ABSENT_TYPES,
    CLOSED,
    HINTS,
    TAKEN_OVER,
    closed_error,
    send_request,
    unavailable,
)

LONGEST_ID = 512
HASHED = "sha256:"
OWN_ID = "_cdc_id"
"""The field that holds the id of a document whose `_id` can't: Elasticsearch takes 512 bytes."""


class _Error(msgspec.Struct):
    type: str = "there is no answer"


class Document(msgspec.Struct):
    """An item of an `_mget`'s answer."""

    id: str = msgspec.field(name="_id", default="")
    found: bool | None = None
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
    if error.type in ABSENT_TYPES:
        return Fenced(TAKEN_OVER, hint=HINTS["fenced"])
    return unavailable(f"A row of the index can't be read: {error.type}.")
