"""What the executors do for the index: bulks of prepared items, and every item's answer read.

Bodies are built in the JVM; Python frames and sends them. Only a document that has to be completed with values of an
older one passes through Python, as text.
"""

import json
import re
import time
from collections.abc import Callable, Iterator, Set
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from cdc.address import address
from cdc.errors import Fenced, SinkError, SinkUnavailable
from cdc.patch import elements, members
from cdc.report import Report, Row, report, rows
from cdc.sink import UNKNOWN
from sinks.elasticsearch.client import HINTS, answered, decoded, unavailable

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import Column

BULK_BYTES = 5_000_000
RETRY_S = (0.1, 0.3, 1.0, 3.0)
"""Pauses before items that the server had no room for (429, 503) are sent again; then the batch is."""
BUSY = (429, 502, 503, 504)
OF_THE_ROW = (400, 413)
"""What an item is answered that will never be taken; anything else is about the index."""
FIELDS = "errors,items.*.status,items.*.error.type,items.*.error.reason"
LONGEST_ID = 512
HASHED = "sha256:"
DELETE = '{"delete"'
GONE = ("index_not_found_exception", "invalid_index_name_exception")
"""What an item is answered when the name is gone through which its writer writes: another has taken over."""
OVERTAKEN = "Another writer has taken over the view; this one stops."
OWN_ID = "_cdc_id"
"""The field that holds the id of a document whose `_id` can't: Elasticsearch takes 512 bytes."""


def document_id(row_id: "Column") -> "Column":
    """`_id`: the row's id, or its hash when that is too long, empty, or looks like such a hash."""
    from pyspark.sql import functions as F

    taken = ~F.octet_length(row_id).between(1, LONGEST_ID) | row_id.startswith(HASHED)
    return F.when(taken, F.concat(F.lit(HASHED), F.sha2(row_id.cast("binary"), 256))).otherwise(row_id)


@lru_cache(maxsize=8)
def bulk_item(aliases: tuple[tuple[str, str], ...]) -> tuple["Column", ...]:
    """Columns `target` (alias), `key` (`_id`) and `line`, the bulk item as text, of a folded change."""
    from pyspark.sql import functions as F

    by_topic, key = F.create_map(*(F.lit(text) for pair in aliases for text in pair)), document_id(F.col("id"))
    target = by_topic[F.col("topic")]
    head = F.struct(
        target.alias("_index"),
        key.alias("_id"),
        F.col("offset").alias("version"),
        F.lit("external_gte").alias("version_type"),
    )
    own = F.to_json(F.struct(F.col("id").alias(OWN_ID)))
    longer = F.concat(F.substring(own, F.lit(1), F.length(own) - 1), F.lit(","))
    document = F.when(key == F.col("id"), F.col("document")).otherwise(
        F.concat(longer, F.substring(F.col("document"), F.lit(2), F.length("document")))
    )
    delete = F.concat(F.to_json(F.struct(head.alias("delete"))), F.lit("\n"))
    index = F.concat(F.to_json(F.struct(head.alias("index"))), F.lit("\n"), document, F.lit("\n"))
    line = F.when(F.col("document").isNull(), delete).otherwise(index)
    return target.alias("target"), key.alias("key"), line.alias("line")


@dataclass
class Item:
    """One row on its way: where to, and as what."""

    target: str
    key: str
    line: str
    row: Row
    said: Report
    probe: bool = False
    """Sent only to learn whether the index has a newer version: see `_completed`."""


@dataclass
class Bulk:
    """The bulks of one task, one after the other; ends at the first failure of the server itself.

    A topic that is `fresh` has an index to which nothing has been sent yet: there is nothing that a delete could
    delete, and the server would remember each.
    """

    url: str
    fresh: Set[str] = frozenset()
    reports: dict[tuple[str, int], Report] = field(default_factory=dict)
    items: list[Item] = field(default_factory=list)
    size: int = 0

    def add(self, topic: str, partition: int, item: tuple[str, str, str], row: Row) -> None:
        said = self.reports.setdefault((topic, partition), Report(topic=topic, partition=partition))
        if not row.book(said):
            return
        if topic in self.fresh and item[2].startswith(DELETE):
            said.deleted += 1
            return
        self.items.append(Item(*item, row, said))
        self.size += len(item[2])
        if self.size >= BULK_BYTES:
            self.send()

    def send(self) -> None:
        """Send what there is and count each item's answer; what the server had no room for goes again."""
        due, self.items, self.size = self.items, [], 0
        if not due or any(said.failure for said in self.reports.values()):
            return
        first = due[0].said
        try:
            self._send(due, first)
        except SinkError as error:
            first.failure, first.message = _failure(error), error.message

    def _send(self, due: list[Item], first: Report) -> None:
        due = _completed(self.url, due)
        for pause in (*RETRY_S, None):
            if not due:
                return
            answers = _post(self.url, due, first)
            if first.failure:
                return
            due = [item for item, answer in zip(due, answers, strict=True) if _count(item, answer)]
            if pause is None and due:
                raise unavailable(f"The index at {address(self.url)} has no room for {len(due)} writes.")
            if due:
                time.sleep(pause or 0)


def _failure(error: SinkError) -> str:
    if isinstance(error, Fenced):
        return "fenced"
    return "unavailable" if isinstance(error, SinkUnavailable) else "rejected"


def sender(
    url: str, topics: Set[str], fresh: Set[str] = frozenset()
) -> Callable[[Iterator["pa.RecordBatch"]], Iterator["pa.RecordBatch"]]:
    """Writes the rows of these topics; `fresh`: see `Bulk`."""

    def apply(batches: Iterator["pa.RecordBatch"]) -> Iterator["pa.RecordBatch"]:
        bulk = Bulk(url, fresh)
        for batch in batches:
            columns = (batch.column(name).to_pylist() for name in ("topic", "partition", "target", "key", "line"))
            for row, (topic, partition, *item) in zip(rows(batch), zip(*columns, strict=True), strict=True):
                if topic in topics:
                    bulk.add(topic, partition, tuple(item), row)
        bulk.send()
        yield report(bulk.reports.values())

    return apply


def _completed(url: str, items: list[Item]) -> list[Item]:
    """The items with documents made whole; those with an unknown value are refused."""
    asking = [item for item in items if item.row.asks_view]
    viewed = _viewed(url, asking) if asking else {}
    ready = []
    for item in items:
        if item.row.kept is None:
            ready.append(item)
        elif document := item.row.complete(viewed.get((item.target, item.key))):
            action, _ = item.line.split("\n", 1)
            item.line = f"{action}\n{_with_own_id(document, item)}\n"
            ready.append(item)
        elif item.row.asks_view and (item.target, item.key) not in viewed:
            # A batch that ended early may have left a newer delete. There is nothing here that this one could delete.
            action, _ = item.line.split("\n", 1)
            item.line, item.probe = '{"delete"' + action.removeprefix('{"index"') + "\n", True
            ready.append(item)
        else:
            item.said.refused.append((item.row.id, UNKNOWN))
    return ready


def _with_own_id(document: str, item: Item) -> str:
    own = "" if item.key == item.row.id else f"{json.dumps(OWN_ID)}:{json.dumps(item.row.id)},"
    return "{" + own + document[1:]


def _viewed(url: str, items: list[Item]) -> dict[tuple[str, str], str]:
    """What the view holds of these rows, each document as the text that was indexed."""
    body = {"docs": [{"_index": item.target, "_id": item.key} for item in items]}
    viewed = {}
    for item, document in zip(items, documents(url, "/_mget", body, len(items)), strict=True):
        if document is not None:
            viewed[item.target, item.key] = document["_source"]
    return viewed


def documents(url: str, path: str, body: object, count: int) -> Iterator[dict[str, str] | None]:
    """Answers of an `_mget`, each member as its own text; None only for what the server says isn't there.

    Raises:
        SinkUnavailable: one can't be read.
        Fenced: there is no such name any more.
    """
    text = answered(url, "POST", path, body).text
    try:
        items = [members(item) for item in elements(members(text)["docs"])]
    except (KeyError, ValueError):
        items = []
    if len(items) != count:
        raise unavailable(f"The index at {address(url)} has answered for {len(items)} of {count} rows.")
    for item in items:
        if "_source" in item:
            yield item
        elif item.get("found") == "false":
            yield None
        else:
            raise _unread(item)


def _unread(item: dict[str, str]) -> SinkError:
    kind = json.loads(item.get("error", "{}")).get("type", "there is no answer")
    if kind in GONE:
        return Fenced(OVERTAKEN, hint=HINTS["fenced"])
    return unavailable(f"A row of the index can't be read: {kind}.")


def _post(url: str, items: list[Item], said: Report) -> list[dict[str, Any]]:
    """The items of one bulk answer; `said` is told why there are none."""
    body = "".join(item.line for item in items).encode()
    try:
        response = answered(url, "POST", "/_bulk", body, {"filter_path": FIELDS, "require_alias": "true"})
        answers: list[dict[str, Any]] = decoded(response, url).get("items", [])
    except SinkError as error:
        said.failure, said.message = _failure(error), error.message
        return []
    if len(answers) != len(items):
        said.failure = "unavailable"
        said.message = f"The index at {address(url)} has answered for {len(answers)} of {len(items)} rows."
        return []
    return answers


def _count(item: Item, answers: dict[str, Any]) -> bool:
    """Book one item's answer; True when it has to be sent again."""
    (action, answer), *_ = answers.items()
    status, said = answer["status"], item.said
    if answer.get("error", {}).get("type") in GONE:
        said.failure, said.message = "fenced", OVERTAKEN
        return False
    if status in BUSY:
        return True
    if status == 409:
        said.stale += 1
    elif item.probe and (status < 300 or status == 404):
        said.refused.append((item.row.id, UNKNOWN))
    elif action == "delete" and (status < 300 or status == 404):
        said.deleted += 1
    elif status < 300:
        said.written += 1
    elif status in OF_THE_ROW:
        said.refused.append((item.row.id, _reason(answer, status)))
    else:
        said.failure, said.message = "unavailable", f"The index {item.target} takes nothing: {_reason(answer, status)}."
    return False


def _reason(answer: dict[str, Any], status: int) -> str:
    """The kind of an item's error. Its own reason quotes values; only the field's name may be told."""
    error = answer.get("error", {})
    named = re.search(r"field \[([^\]]+)\]", error.get("reason", ""))
    return f"{error.get('type', status)}" + (f", field {named[1]}" if named else "")
