"""What the executors do for the index: bulks of prepared items, and every item's answer read.

Bodies are built in the JVM; Python frames and sends them. Only a document that has to be completed with values of an
older one passes through Python, as text.
"""

import json
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any

import httpx

from cdc.address import address
from cdc.patch import elements, members
from cdc.report import Report, Row, report, rows
from cdc.sink import UNKNOWN

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
OWN_ID = "_cdc_id"
"""The field that holds the id of a document whose `_id` can't: Elasticsearch takes 512 bytes."""

_clients: dict[str, httpx.Client] = {}


def client(url: str) -> httpx.Client:
    """The connections of this process; executors keep them across batches."""
    if url not in _clients:
        _clients[url] = httpx.Client(base_url=url, timeout=httpx.Timeout(60.0, connect=5.0))
    return _clients[url]


def forget(url: str) -> None:
    if connection := _clients.pop(url, None):
        connection.close()


def document_id(row_id: "Column") -> "Column":
    """`_id`: the row's id, or its hash when that is too long, empty, or looks like such a hash."""
    from pyspark.sql import functions as F

    taken = ~F.octet_length(row_id).between(1, LONGEST_ID) | row_id.startswith(HASHED)
    return F.when(taken, F.concat(F.lit(HASHED), F.sha2(row_id.cast("binary"), 256))).otherwise(row_id)


@cache
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
    """The bulks of one task, one after the other; ends at the first failure of the server itself."""

    url: str
    reports: dict[tuple[str, int], Report] = field(default_factory=dict)
    items: list[Item] = field(default_factory=list)
    size: int = 0

    def add(self, topic: str, partition: int, item: tuple[str, str, str], row: Row) -> None:
        said = self.reports.setdefault((topic, partition), Report(topic=topic, partition=partition))
        if not row.book(said):
            return
        self.items.append(Item(*item, row, said))
        self.size += len(item[2])
        if self.size >= BULK_BYTES:
            self.send()

    def send(self) -> None:
        """Send what there is and count each item's answer; what the server had no room for goes again."""
        left, self.items, self.size = self.items, [], 0
        if any(said.failure for said in self.reports.values()):
            return
        left = _completed(self.url, left)
        for pause in (*RETRY_S, None):
            if not left:
                return
            first = left[0].said
            answers = _post(self.url, left, first)
            if first.failure:
                return
            left = [item for item, answer in zip(left, answers, strict=True) if _count(item, answer)]
            if pause is None and left:
                first.failure, first.message = (
                    "unavailable",
                    f"The index at {address(self.url)} has no room for {len(left)} writes.",
                )
            elif left:
                time.sleep(pause or 0)


def sender(url: str, topics: set[str]) -> Callable[[Iterator["pa.RecordBatch"]], Iterator["pa.RecordBatch"]]:
    def apply(batches: Iterator["pa.RecordBatch"]) -> Iterator["pa.RecordBatch"]:
        bulk = Bulk(url)
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
    answer = client(url).post("/_mget", json=body).raise_for_status()
    found = {}
    for item, text in zip(items, elements(members(answer.text)["docs"]), strict=True):
        if source := members(text).get("_source"):
            found[item.target, item.key] = source
    return found


def _post(url: str, items: list[Item], said: Report) -> list[dict[str, Any]]:
    """The items of one bulk answer; `said` is told why there are none."""
    body = "".join(item.line for item in items).encode()
    headers = {"content-type": "application/x-ndjson"}
    query = {"filter_path": FIELDS, "require_alias": "true"}
    try:
        response = client(url).post("/_bulk", params=query, content=body, headers=headers)
    except httpx.TransportError:
        said.failure, said.message = "unavailable", f"The index at {address(url)} can't be reached."
        return []
    if response.status_code in BUSY:
        return [{"index": {"status": response.status_code}} for _ in items]
    if not response.is_success:
        said.failure, said.message = (
            "rejected",
            f"The index at {address(url)} refuses a bulk (status {response.status_code}).",
        )
        return []
    answers: list[dict[str, Any]] = response.json()["items"]
    return answers


def _count(item: Item, answers: dict[str, Any]) -> bool:
    """Book one item's answer; True when it has to be sent again."""
    (action, answer), *_ = answers.items()
    status, said = answer["status"], item.said
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
