"""Elasticsearch: a document per row in the index behind the alias <pipeline>-<schema>.<table>.

Whole documents by `index` and `delete` with version_type=external_gte and version = Kafka offset, so an older change
never wins, whoever sends it. The bulk bodies are built in the JVM; Python frames and sends them, and reads every item.
Positions are documents of the index `cdc-position`, changed by if_seq_no compare-and-set after the bulks are durable.
"""

import json
import re
import time
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import httpx

from cdc.change import Advance, Applied, Form, Stored, Table
from cdc.errors import SinkError, SinkRejected, SinkUnavailable
from cdc.sink import Batch, Report, check, mismatch, report, send, stored_after
from sinks.elasticsearch_fields import bulk_item, field

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession

POSITIONS = "cdc-position"
BULK_BYTES = 5_000_000
PAGE_ROWS = 2000
RETRY_S = (0.1, 0.3, 1.0, 3.0)
"""Pauses before items that the server had no room for (429, 503) are sent again; then the batch is."""
BUSY = (429, 502, 503, 504)
FIELDS = "errors,items.*.status,items.*.error.type,items.*.error.reason"
HINTS = {
    "unavailable": "it is tried again; is the server up?",
    "rejected": "repair the row or the index's mapping, then start `cdc run` again",
    "fenced": "run one `cdc run` per sink; start this one again when the other has ended",
}
INDEX_SETTINGS = {"number_of_shards": 1, "auto_expand_replicas": "0-1", "gc_deletes": "12h"}
"""gc_deletes: how long a delete's version is remembered, so that a late older write can't bring the row back."""

_clients: dict[str, httpx.Client] = {}


def client(url: str) -> httpx.Client:
    """The connections of this process; executors keep them across batches."""
    if url not in _clients:
        _clients[url] = httpx.Client(base_url=url, timeout=httpx.Timeout(60.0, connect=5.0))
    return _clients[url]


class Elasticsearch:
    form: Form = "documents"

    def __init__(self, name: str, url: str, pipeline: str) -> None:
        self.name, self.url, self.pipeline = name, url.rstrip("/"), pipeline

    def prepare(self, table: Table) -> None:
        index = self.index(table)
        self._create(POSITIONS, {"mappings": {"dynamic": False}, "settings": INDEX_SETTINGS})
        body = {
            "settings": INDEX_SETTINGS,
            "mappings": {
                "dynamic": "strict",
                "properties": {c.name: field(c.type) for c in table.columns},
            },
            "aliases": {self.alias(table): {}},
        }
        self._create(index, body)

    def position(self, table: Table) -> Stored | None:
        return self._stored([table])[table.qualified][0]

    def apply(self, batch: Batch) -> Mapping[str, Applied]:
        before = self._stored([advance.table for advance in batch.advances])
        pending = [a for a in batch.advances if check(a, before[a.table.qualified][0], batch.writer)]
        if not pending:
            return {}
        sent = send(
            self._lines(batch),
            _sender(self.url, {self.index(a.table): a.table.topic for a in pending}),
            HINTS,
        )
        result = {a.table.qualified: sent.get(a.table.topic, Applied()) for a in pending}
        self._commit(pending, before, result, batch.writer)
        return result

    def scan(self, table: Table, spark: "SparkSession") -> "DataFrame":
        from pyspark.sql import functions as F

        url, index = self.url, self.index(table)
        self._ask("POST", f"/{index}/_refresh")

        def read(_: Iterator["pa.RecordBatch"]) -> Iterator["pa.RecordBatch"]:
            import pyarrow as pa

            for page in _pages(url, index):
                yield pa.RecordBatch.from_pydict({"page": [page]})

        pages = spark.range(1, numPartitions=1).mapInArrow(read, "page string")
        # Parsed in the JVM, where a source keeps the very text that was indexed: no number is rounded.
        hits = F.from_json("page", "hits struct<hits array<struct<_id string, _source string>>>").getField("hits")
        return pages.select(F.explode(hits.getField("hits")).alias("hit")).select(
            F.col("hit._id").alias("id"), F.col("hit._source").alias("document")
        )

    def close(self) -> None:
        if connection := _clients.pop(self.url, None):
            connection.close()

    def alias(self, table: Table) -> str:
        return f"{self.pipeline}-{table.qualified}".lower()

    def index(self, table: Table) -> str:
        return f"{self.alias(table)}@1"

    def _lines(self, batch: Batch) -> "DataFrame":
        """One bulk item a row, as the text that is sent: action line and, but for a delete, source line."""
        indices = tuple((table.topic, self.index(table)) for table in (advance.table for advance in batch.advances))
        return batch.changes.select("topic", "partition", "id", bulk_item(indices))

    def _stored(self, tables: list[Table]) -> dict[str, tuple[Stored | None, dict[str, int]]]:
        """Per table what is stored, with the conditions under which it may be replaced."""
        ids = [self.alias(table) for table in tables]
        answer = self._ask("POST", f"/{POSITIONS}/_mget", {"ids": ids}, absent={"docs": [{} for _ in ids]})
        result: dict[str, tuple[Stored | None, dict[str, int]]] = {}
        for table, found in zip(tables, answer["docs"], strict=True):
            if found.get("found"):
                condition = {"if_seq_no": found["_seq_no"], "if_primary_term": found["_primary_term"]}
                result[table.qualified] = Stored.from_mapping(found["_source"]), condition
            else:
                result[table.qualified] = None, {}
        return result

    def _commit(
        self,
        pending: list[Advance],
        before: Mapping[str, tuple[Stored | None, dict[str, int]]],
        result: Mapping[str, Applied],
        writer: str,
    ) -> None:
        lines = []
        for advance in pending:
            stored, condition = before[advance.table.qualified]
            action = "index" if condition else "create"
            lines.append(json.dumps({action: {"_index": POSITIONS, "_id": self.alias(advance.table), **condition}}))
            lines.append(stored_after(advance, stored, result[advance.table.qualified], writer).to_json())
        answer = self._ask("POST", "/_bulk", "\n".join(lines) + "\n")
        for advance, item in zip(pending, answer["items"], strict=True):
            status = next(iter(item.values()))["status"]
            if status == 409:
                now = self.position(advance.table)
                ours = now is not None and now.writer == writer
                if not (now and ours and now.position == advance.until):
                    raise mismatch(advance.table, advance.start, now.position if now else None, ours=ours)
            elif status >= 400:
                raise SinkUnavailable(
                    f"The position of {advance.table.qualified} could not be stored (status {status}).",
                    hint=HINTS["unavailable"],
                    sink=self.name,
                )

    def _create(self, index: str, body: Mapping[str, Any]) -> None:
        try:
            self._ask("PUT", f"/{index}", body)
        except SinkRejected as error:
            if "resource_already_exists_exception" not in error.message:
                raise

    def _ask(self, method: str, path: str, body: object = None, absent: object = None) -> Any:
        """One request. A 404 answers `absent` when that is given."""
        content = body if isinstance(body, str) else json.dumps(body) if body is not None else None
        kind = "application/x-ndjson" if isinstance(body, str) else "application/json"
        try:
            response = client(self.url).request(method, path, content=content, headers={"content-type": kind})
        except httpx.TransportError:
            raise SinkUnavailable(
                f"The index at {self.url} can't be reached.", hint=HINTS["unavailable"], sink=self.name
            ) from None
        if response.status_code == 404 and absent is not None:
            return absent
        if response.is_success:
            return response.json()
        raise self._refused(response, path)

    def _refused(self, response: httpx.Response, path: str) -> SinkError:
        status, where = response.status_code, f"The index at {self.url}"
        if status in BUSY:
            return SinkUnavailable(f"{where} is busy (status {status}).", hint=HINTS["unavailable"], sink=self.name)
        if status in (401, 403):
            return SinkRejected(f"{where} refuses the user.", hint="see the sink's url", sink=self.name)
        error = response.json().get("error", {})
        kind = error.get("type", "?") if isinstance(error, dict) else str(error)
        return SinkRejected(f"{where} refuses {path} (status {status}): {kind}.", hint=HINTS["rejected"])


def _pages(url: str, index: str) -> Iterator[str]:
    """Every document of an index, as the text of search answers: one point in time, in the order of the shards."""
    server = client(url)
    pit = server.post(f"/{index}/_pit", params={"keep_alive": "2m"}).raise_for_status().json()["id"]
    after: list[Any] | None = None
    try:
        while True:
            query: dict[str, Any] = {
                "size": PAGE_ROWS,
                "pit": {"id": pit, "keep_alive": "2m"},
                "sort": ["_shard_doc"],
                "track_total_hits": False,
            }
            if after:
                query["search_after"] = after
            answer = server.post("/_search", json=query).raise_for_status()
            hits = answer.json()["hits"]["hits"]
            if not hits:
                return
            after = hits[-1]["sort"]
            yield answer.text
    finally:
        server.request("DELETE", "/_pit", json={"id": pit})


def _sender(url: str, topics: Mapping[str, str]) -> Callable[[Iterator["pa.RecordBatch"]], Iterator["pa.RecordBatch"]]:
    wanted = set(topics.values())

    def apply(batches: Iterator["pa.RecordBatch"]) -> Iterator["pa.RecordBatch"]:
        reports: dict[str, Report] = {}
        bulk: list[tuple[str, str, str]] = []
        size = 0
        for batch in batches:
            for row in zip(*(batch.column(name).to_pylist() for name in ("topic", "id", "line")), strict=True):
                if row[0] in wanted:
                    bulk.append(row)
                    size += len(row[2])
                if size >= BULK_BYTES:
                    _bulk(url, bulk, reports)
                    bulk, size = [], 0
        if bulk:
            _bulk(url, bulk, reports)
        yield report(reports.values())

    return apply


def _bulk(url: str, rows: list[tuple[str, str, str]], reports: dict[str, Report]) -> None:
    """Send rows of (topic, id, line) and count each item's answer; what the server had no room for goes again."""
    if any(found.failure for found in reports.values()):
        return
    for pause in (*RETRY_S, None):
        first = reports.setdefault(rows[0][0], Report(rows[0][0], 0))
        items = _post(url, rows, first)
        if first.failure:
            return
        rows = [row for row, item in zip(rows, items, strict=True) if _count(row, item, reports)]
        if not rows:
            return
        if pause is None:
            first.failure, first.message = "unavailable", f"The index at {url} has no room for {len(rows)} writes."
        else:
            time.sleep(pause)


def _post(url: str, rows: list[tuple[str, str, str]], said: Report) -> list[dict[str, Any]]:
    """The items of one bulk answer; `said` is told why there are none."""
    body = "".join(line for _, _, line in rows).encode()
    headers = {"content-type": "application/x-ndjson"}
    try:
        response = client(url).post("/_bulk", params={"filter_path": FIELDS}, content=body, headers=headers)
    except httpx.TransportError:
        said.failure, said.message = "unavailable", f"The index at {url} can't be reached."
        return []
    if response.status_code in BUSY:
        return [{"index": {"status": response.status_code}} for _ in rows]
    if not response.is_success:
        said.failure, said.message = "rejected", f"The index at {url} refuses a bulk (status {response.status_code})."
        return []
    items: list[dict[str, Any]] = response.json()["items"]
    return items


def _count(row: tuple[str, str, str], item: dict[str, Any], reports: dict[str, Report]) -> bool:
    """Book one item's answer; True when it has to be sent again."""
    topic, key, _ = row
    found = reports.setdefault(topic, Report(topic, 0))
    (action, answer), *_ = item.items()
    status = answer["status"]
    if status in BUSY:
        return True
    if status == 409:
        found.stale += 1
    elif action == "delete" and (status < 300 or status == 404):
        found.deleted += 1
    elif status < 300:
        found.written += 1
    elif found.failure is None:
        error = answer.get("error", {})
        # The reason quotes values; only the field's name may be told.
        field = re.search(r"field \[([^\]]+)\]", error.get("reason", ""))
        place = f", field {field[1]}" if field else ""
        found.failure = "rejected"
        found.message = f"The index refuses the row with id {key} of {topic}: {error.get('type', status)}{place}."
    return False
