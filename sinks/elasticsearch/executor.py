"""The index's writer on executors: bulks of bytes to each writer's alias; every refused item counts."""

import json
import re
import time
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec

from cdc.codec.forms import Documents
from cdc.codec.members import encode, joined, members
from cdc.codec.problem import Unreadable
from cdc.errors import Fenced, SinkBlocked, SinkError, SinkUnavailable
from cdc.model.address import address
from cdc.model.outcome import Advance
from cdc.sink.lane import (
    SUPERSEDED,
    ChunkLimits,
    Failure,
    FoldedRow,
    Part,
    Superseded,
    Verdicts,
    Writer,
)
from cdc.sinks.elasticsearch.client import (
    ABSENT_TYPES,
    CLOSED,
    FORBIDDEN,
    HINTS,
    TAKEN_OVER,
    blocked_error,
    closed_error,
    decode_json,
    forbidden_error,
    is_blocked,
    send_request,
)
from cdc.sinks.elasticsearch.connection import UNAUTHORIZED, unavailable
from cdc.sinks.elasticsearch.scan import OWN_ID, document_id, documents

CHUNK = ChunkLimits(rows=20_000, bytes=20_000_000)
"""Memory of a chunk, of which a quarter is sent: records and documents both count."""
RETRY_S = (0.1, 0.3, 1.0, 3.0)
"""Pauses before items that the server had no room for (429, 503) are sent again; the first one is also
before a bulk is sent again for its answers.

After the last one the batch is repeated.
"""
BUSY = (429, 502, 503, 504)
STALE = 409
ROW_REJECTED = (400, 413)
"""Status of an item that will never be accepted; any other error concerns the index."""
KINDS = {Fenced: "fenced", SinkBlocked: "blocked", SinkUnavailable: "unavailable"}
"""Kinds of failures by the error that ends a task, where its hint isn't of a kind."""
KINDS_BY_HINT = {hint: kind for kind, hint in HINTS.items()}
FIELDS = "items.*.status,items.*.error.type,items.*.error.reason,items.*.error.caused_by.reason"
NUMBER_LENGTH = 1000
"""Characters that the server's parser allows in a number (Jackson's `StreamReadConstraints`)."""
CAUSES = {
    "Duplicate field '": "it has a key twice in an object",
    "Number value length (": f"it has a number of over {NUMBER_LENGTH:,} characters",
    "Document nesting depth (": "it is nested deeper than 1,000 levels",
    "The provided [flattened] field [": "it is nested deeper than 20 levels",
}
"""How the server's reasons begin, and what they mean. The reasons themselves quote the row."""
PLACE = re.compile(r"^(?:\[1:(\d+)\] )?(?:failed to parse: )?(?:\[1:\d+\] )?")
"""How a reason begins: with an offset in the document, counted from 1, at or after the name of the
member concerned."""
FIELD = re.compile(r"field \[([^\]]+)\]")
NAME_END = re.compile(rb"\s*:")
TOKEN = re.compile(rb'"(?:[^"\\]|\\.)*+"|[{}\[\]]')


class BulkItem(NamedTuple):
    row: FoldedRow
    part: int
    alias: str
    line: bytes
    """The item's bytes: the action, and the document if there is one."""


@dataclass
class ElasticsearchWriter(Writer):
    """Writes rows into indices. aliases: by topic, the alias through which this writer writes.

    fresh: topics whose index had received nothing before the batch. Until the task has sent
    something of a partition, deletes are skipped: they could delete nothing, and the server would
    remember each.
    """

    url: str
    aliases: Mapping[str, str]
    fresh: Set[str] = frozenset()
    form = Documents()
    limits = CHUNK
    _sent_partitions: set[tuple[str, int]] = field(default_factory=set)

    def start_offset(self, advance: Advance, partition: int) -> int:
        """Return the step's start: the position moves on the driver, when all rows are durable."""
        return advance.start_offsets[partition]

    def read_stored(
        self, part: Part, rows: Sequence[FoldedRow]
    ) -> Mapping[str, bytes | Superseded]:
        """Read documents by `_mget`; of absent ones a delete asks for a newer delete. A batch that ended early may
        have left either.
        """
        alias = self.aliases[part.topic]
        with _reporting_failures():
            body = {"docs": [{"_index": alias, "_id": document_id(row.id)} for row in rows]}
            found = documents(self.url, "/_mget", body, len(rows))
            stored_rows: dict[str, bytes | Superseded] = {
                row.id: SUPERSEDED if document.version > row.offset else bytes(document.source)
                for row, document in zip(rows, found, strict=True)
                if document is not None
            }
            absent = [row for row in rows if row.id not in stored_rows]
            # There is nothing here that this one could delete.
            items = [BulkItem(row, 0, alias, _head(b"delete", alias, row)) for row in absent]
            for item, answer in self._refusals(items):
                if answer["status"] == STALE:
                    stored_rows[item.row.id] = SUPERSEDED
                else:
                    raise unavailable(f"The index {alias} can't be asked: {_reason(answer, item)}.")
        return stored_rows

    def write(self, parts: Sequence[Part]) -> Sequence[Verdicts]:
        """Send a bulk. An older version is stale, a document that isn't accepted is named."""
        reasons: list[dict[str, str]] = [{} for _ in parts]
        stale: list[set[str]] = [set() for _ in parts]
        items = [item for index, part in enumerate(parts) for item in self._items(index, part)]
        with _reporting_failures():
            for item, answer in self._lasting_refusals(items):
                status = answer["status"]
                if status == STALE:
                    stale[item.part].add(item.row.id)
                elif status in ROW_REJECTED:
                    reasons[item.part][item.row.id] = _reason(answer, item)
                else:
                    raise unavailable(
                        f"The index {item.alias} takes nothing: {_reason(answer, item)}."
                    )
        self._sent_partitions.update((part.topic, part.partition) for part in parts if part.rows)
        return [Verdicts(*verdict) for verdict in zip(reasons, map(frozenset, stale), strict=True)]

    def _items(self, part_index: int, part: Part) -> Iterator[BulkItem]:
        alias = self.aliases[part.topic]
        for row in part.rows.values():
            if row.value is not None:
                yield BulkItem(row, part_index, alias, _index(alias, row, row.value))
            elif (
                part.topic not in self.fresh
                or (part.topic, part.partition) in self._sent_partitions
            ):
                yield BulkItem(row, part_index, alias, _head(b"delete", alias, row))

    def _lasting_refusals(
        self, items: Sequence[BulkItem]
    ) -> Iterator[tuple[BulkItem, dict[str, Any]]]:
        """Send items; a refused document in which something can be repaired is sent once more."""
        repaired_items = []
        for item, answer in self._refusals(items):
            if answer["status"] in ROW_REJECTED and item.row.value is not None:
                document = repair(item.row.value)
                if document is not None:
                    line = _index(item.alias, item.row, document)
                    repaired_items.append(item._replace(line=line))
                    continue
            yield item, answer
        yield from self._refusals(repaired_items)

    def _refusals(
        self, items: Sequence[BulkItem], pauses_s: Sequence[float] = RETRY_S
    ) -> Iterator[tuple[BulkItem, dict[str, Any]]]:
        """Send items, again after each pause where the server has no room; yields the refused ones,
        each with its answer. A delete that finds nothing isn't refused.
        """
        busy = []
        index_name = f"The index at {address(self.url)}"
        for item, answer in self._post(items) if items else ():
            status = answer["status"]
            error = answer["error"]
            error_type = error.get("type")
            if error_type in ABSENT_TYPES:
                raise Fenced(TAKEN_OVER, hint=HINTS["fenced"])
            if is_blocked(status, error_type):
                raise blocked_error(index_name, error.get("reason", ""))
            if error_type == CLOSED:
                # It has the status of a document that will never be accepted.
                raise closed_error(self.url)
            if status in (UNAUTHORIZED, FORBIDDEN):
                raise forbidden_error(index_name, status, error.get("reason", ""))
            if status in BUSY:
                busy.append(item)
            else:
                yield item, answer
        if busy and not pauses_s:
            raise unavailable(f"{index_name} has no room for {len(busy)} writes.")
        if busy:
            time.sleep(pauses_s[0])
            yield from self._refusals(busy, pauses_s[1:])

    def _post(self, items: Sequence[BulkItem]) -> Iterator[tuple[BulkItem, dict[str, Any]]]:
        """Send one bulk; yields the refused items, each with its answer.

        The server is asked whether it refused any, and only then what became of each, by the same
        bulk again: to index a version twice changes nothing. The answers of all items took a tenth
        of a bulk's time.
        """
        body = b"".join([item.line for item in items])
        if self._send(body, "errors").get("errors") is False:
            return
        # It may have no room.
        time.sleep(RETRY_S[0])
        answers = self._send(body, FIELDS).get("items", [])
        if len(answers) != len(items):
            raise unavailable(
                f"The index at {address(self.url)} has answered for {len(answers)} of {len(items)} rows."
            )
        for item, answer_by_action in zip(items, answers, strict=True):
            (answer,) = answer_by_action.values()
            if "error" in answer:
                yield item, answer

    def _send(self, body: bytes, fields: str) -> dict[str, Any]:
        query = {"filter_path": fields, "require_alias": "true"}
        answer: dict[str, Any] = decode_json(
            send_request(self.url, "POST", "/_bulk", body, query), self.url
        )
        return answer


@contextmanager
def _reporting_failures() -> Iterator[None]:
    """Turn errors that end a task into `Failure`, as executors report them."""
    try:
        yield
    except SinkError as error:
        kind = KINDS_BY_HINT.get(error.hint) or next(
            (kind for cls, kind in KINDS.items() if isinstance(error, cls)), "rejected"
        )
        raise Failure(kind, error.message) from None


def _head(action: bytes, alias: str, row: FoldedRow) -> bytes:
    values = action, encode(alias), encode(document_id(row.id)), row.offset
    return b'{"%b":{"_index":%b,"_id":%b,"version":%d,"version_type":"external_gte"}}\n' % values


def _index(alias: str, row: FoldedRow, document: bytes) -> bytes:
    if document_id(row.id) != row.id:
        own_id = b'{"%b":%b' % (OWN_ID.encode(), encode(row.id))
        document = own_id + (b"," if document != b"{}" else b"") + document[1:]
    return b"%b%b\n" % (_head(b"index", alias, row), document)


def _reason(answer: Mapping[str, Any], item: BulkItem) -> str:
    """Describe an item's error. The server's own reason quotes values."""
    error = answer.get("error", {})
    _, _, document = item.line.partition(b"\n")
    return describe(document, {"type": answer["status"], **error})


def describe(document: bytes, error: Mapping[str, Any]) -> str:
    """Say why a document was refused: the error's type, the field, and the cause if CAUSES has it.

    error: the item's, with its `caused_by`. document: as it was sent.
    """
    reasons = [error.get("reason") or "", error.get("caused_by", {}).get("reason") or ""]
    plain_reasons = [PLACE.sub("", reason, count=1) for reason in reasons]
    causes = [
        words
        for start, words in CAUSES.items()
        if any(reason.startswith(start) for reason in plain_reasons)
    ]
    name = _field(document, reasons[0], plain_reasons[0])
    subject = f", field {name}" if name else ""
    return f"{error.get('type')}{subject}{': ' + causes[0] if causes else ''}"


def _field(document: bytes, reason: str, plain_reason: str) -> str | None:
    """Return the name of the field that a reason is about.

    A value that the reason quotes may look like a field, so only members of the document count.
    """
    places = dict(_places(document))
    quoted = None if plain_reason.startswith(tuple(CAUSES)) else FIELD.search(reason)
    if quoted and any(f"{quoted[1]}.".startswith(f"{name}.") for name in places):
        return quoted[1]
    place = PLACE.match(reason)
    if place is None or place[1] is None:
        return None
    before = [name for name, start in places.items() if start < int(place[1])]
    return before[-1] if before else None


def _places(document: bytes) -> Iterator[tuple[str, int]]:
    """List the members of a document, each with the offset of its name.

    Doesn't use a parser, since the document may exceed a parser's limits.
    """
    depth = 0
    for token in TOKEN.finditer(document):
        if token[0] in b"{[":
            depth += 1
        elif token[0] in b"}]":
            depth -= 1
        elif depth == 1 and NAME_END.match(document, token.end()):
            yield json.loads(token[0]), token.start()


def repair(document: bytes) -> bytes | None:
    """Return a document that the index accepts, or None if there is nothing to repair.

    If an object has a key twice, the last value counts, as in jsonb. A number that is too long
    becomes a string. `verify` treats both as equal to Postgres, see `cdc.verify.row_equality`.
    """
    try:
        values = {name: bytes(value) for name, value in members(document).items()}
    except Unreadable:
        return None
    repaired = {name: _repair(value) for name, value in values.items()}
    return joined(repaired) if repaired != values else None


def _repair(value: bytes) -> bytes:
    """Return a value as it is, unless something in it has to be changed."""
    is_changed = False

    def number(text: str) -> Any:
        nonlocal is_changed
        if len(text) <= NUMBER_LENGTH:
            return msgspec.Raw(text.encode())
        is_changed = True
        return text

    def object_of(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        nonlocal is_changed
        parsed = dict(pairs)
        is_changed |= len(parsed) < len(pairs)
        return parsed

    decoder = json.JSONDecoder(
        object_pairs_hook=object_of, parse_int=number, parse_float=number, strict=False
    )
    try:
        parsed = decoder.decode(value.decode())
        return encode(parsed) if is_changed else value
    except (ValueError, RecursionError):
        # Nested deeper than Python's limit, or half of a surrogate pair.
        return value
