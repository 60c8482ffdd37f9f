"""What the executors do for the index: bulks made of bytes, sent to each table's alias; every item's answer is read."""

import re
import time
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from cdc.codec.forms import Documents
from cdc.codec.members import encode
from cdc.codec.record import Change
from cdc.errors import Fenced, SinkError, SinkUnavailable
from cdc.model.address import address
from cdc.model.outcome import Advance
from cdc.sink.lane import SUPERSEDED, ChunkLimits, Failure, FoldedRow, Part, Superseded, Verdicts
from cdc.sink.rejection import Source
from sinks.elasticsearch.client import GONE, HINTS, OVERTAKEN, answered, decoded, unavailable
from sinks.elasticsearch.documents import documents
from sinks.elasticsearch.ids import OWN_ID, document_id

CHUNK = ChunkLimits(rows=20_000, bytes=20_000_000)
"""Of memory, of which a quarter is what is sent: documents and records alike count."""
RETRY_S = (0.1, 0.3, 1.0, 3.0)
"""Pauses before items that the server had no room for (429, 503) are sent again; then the batch is."""
BUSY = (429, 502, 503, 504)
NOT_THERE, STALE = 404, 409
OF_THE_ROW = (400, 413)
"""What an item is answered that will never be taken; anything else is about the index."""
FIELDS = "errors,items.*.status,items.*.error.type,items.*.error.reason"


class Item(NamedTuple):
    """One row on its way."""

    row: FoldedRow
    part: int
    line: bytes
    """As the bulk has it: what is done, and with what document."""


@dataclass
class ElasticsearchWriter:
    """The way of rows into indices, through the alias of each table, by topic.

    A topic that is `fresh` has an index to which nothing had been sent before the batch: until the task sends something
    of a partition there is nothing that a delete of it could delete, and the server would remember each.
    """

    url: str
    aliases: Mapping[str, str]
    fresh: Set[str] = frozenset()
    form = Documents()
    limits = CHUNK
    archives = False
    _sent: set[tuple[str, int]] = field(default_factory=set)

    def start_offset(self, advance: Advance, partition: int) -> int:
        return advance.start_offsets[partition]

    def observe(self, part: Part, change: Change, source: Source, value: object) -> int:  # noqa: ARG002
        return 0

    def finish(self) -> Mapping[str, Sequence[str]]:
        return {}

    def read_stored(self, part: Part, rows: Sequence[FoldedRow]) -> Mapping[str, bytes | Superseded]:
        alias = self.aliases[part.topic]
        with _failing():
            held: dict[str, bytes | Superseded] = dict(self._documents(alias, rows))
            absent = [row for row in rows if row.id not in held]
            # A batch that ended early may have left a newer delete. There is nothing here that this one could delete.
            items = [Item(row, 0, _delete(alias, row)) for row in absent]
            for item, (_, answer) in self._answers(items):
                if answer["status"] == STALE:
                    held[item.row.id] = SUPERSEDED
                elif answer["status"] >= 300 and answer["status"] != NOT_THERE:
                    raise unavailable(f"The index {alias} can't be asked: {_reason(answer)}.")
        return held

    def write(self, parts: Sequence[Part]) -> Sequence[Verdicts]:
        refused: list[dict[str, str]] = [{} for _ in parts]
        stale: list[set[str]] = [set() for _ in parts]
        items = [item for at, part in enumerate(parts) for item in self._items(at, part)]
        with _failing():
            for item, (action, answer) in self._answers(items):
                status = answer["status"]
                if status == STALE:
                    stale[item.part].add(item.row.id)
                elif status in OF_THE_ROW:
                    refused[item.part][item.row.id] = _reason(answer)
                elif status >= 300 and not (action == "delete" and status == NOT_THERE):
                    alias = self.aliases[parts[item.part].topic]
                    raise unavailable(f"The index {alias} takes nothing: {_reason(answer)}.")
        self._sent.update((part.topic, part.partition) for part in parts if part.rows)
        return [Verdicts(*said) for said in zip(refused, map(frozenset, stale), strict=True)]

    def _items(self, at: int, part: Part) -> Iterator[Item]:
        alias = self.aliases[part.topic]
        for row in part.rows.values():
            if row.value is not None:
                yield Item(row, at, _index(alias, row))
            elif part.topic not in self.fresh or (part.topic, part.partition) in self._sent:
                yield Item(row, at, _delete(alias, row))

    def _documents(self, alias: str, rows: Sequence[FoldedRow]) -> Iterator[tuple[str, bytes]]:
        """What the view holds of these rows, each document as the text that was indexed."""
        body = {"docs": [{"_index": alias, "_id": document_id(row.id)} for row in rows]}
        for row, document in zip(rows, documents(self.url, "/_mget", body, len(rows)), strict=True):
            if document is not None:
                yield row.id, bytes(document.source)

    def _answers(self, items: Sequence[Item]) -> Iterator[tuple[Item, tuple[str, dict[str, Any]]]]:
        """Send items, again where the server had no room for them; what it says of each: action and answer."""
        due = list(items)
        for pause in (*RETRY_S, None):
            if not due:
                return
            busy = []
            for item, said in zip(due, self._post(due), strict=True):
                ((action, answer), *_) = said.items()
                if answer.get("error", {}).get("type") in GONE:
                    raise Fenced(OVERTAKEN, hint=HINTS["fenced"])
                if answer["status"] in BUSY:
                    busy.append(item)
                else:
                    yield item, (action, answer)
            due = busy
            if pause is None and due:
                raise unavailable(f"The index at {address(self.url)} has no room for {len(due)} writes.")
            if due:
                time.sleep(pause or 0)

    def _post(self, items: Sequence[Item]) -> list[dict[str, Any]]:
        """The items of one bulk's answer."""
        body = b"".join([item.line for item in items])
        response = answered(self.url, "POST", "/_bulk", body, {"filter_path": FIELDS, "require_alias": "true"})
        answers: list[dict[str, Any]] = decoded(response, self.url).get("items", [])
        if len(answers) != len(items):
            raise unavailable(f"The index at {address(self.url)} has answered for {len(answers)} of {len(items)} rows.")
        return answers


@contextmanager
def _failing() -> Iterator[None]:
    """What ends a task, as executors report it."""
    try:
        yield
    except Fenced as error:
        raise Failure("fenced", error.message) from None
    except SinkUnavailable as error:
        raise Failure("unavailable", error.message) from None
    except SinkError as error:
        raise Failure("rejected", error.message) from None


def _head(action: bytes, alias: str, row: FoldedRow) -> bytes:
    where = encode(alias), encode(document_id(row.id)), row.offset
    return b'{"%b":{"_index":%b,"_id":%b,"version":%d,"version_type":"external_gte"}}\n' % (action, *where)


def _delete(alias: str, row: FoldedRow) -> bytes:
    return _head(b"delete", alias, row)


def _index(alias: str, row: FoldedRow) -> bytes:
    document = row.value
    if document_id(row.id) != row.id:
        own = b'{"%b":%b' % (OWN_ID.encode(), encode(row.id))
        document = own + (b"," if document != b"{}" else b"") + document[1:]
    return b"%b%b\n" % (_head(b"index", alias, row), document)


def _reason(answer: Mapping[str, Any]) -> str:
    """The kind of an item's error. Its own reason quotes values; only the field's name may be told."""
    error = answer.get("error", {})
    named = re.search(r"field \[([^\]]+)\]", error.get("reason", ""))
    return f"{error.get('type', answer['status'])}" + (f", field {named[1]}" if named else "")
