"""Elasticsearch: a document per row in the index behind the alias <pipeline>-<schema>.<table>.

Whole documents by `index` and `delete` with version_type=external_gte and version = Kafka offset, so an older change
never wins, whoever sends it. The bulk bodies are built in the JVM; Python frames and sends them, and reads every item.
Positions are documents of the index `cdc-position`, changed by if_seq_no compare-and-set after the bulks are durable.
"""

import json
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import httpx

from cdc.change import Advance, Applied, Form, Stored, Table
from cdc.errors import SinkError, SinkRejected, SinkUnavailable
from cdc.produce import produced
from cdc.report import Row, send
from cdc.sink import Batch, Misfit, check, mismatch, stored_after
from sinks.elasticsearch_bulk import BUSY, HASHED, OWN_ID, bulk_item, client, forget, sender
from sinks.elasticsearch_fields import field

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession

POSITIONS = "cdc-position"
PAGE_ROWS = 2000
HINTS = {
    "unavailable": "it is tried again; is the server up?",
    "rejected": "repair the row or the index's mapping, then start `cdc run` again",
    "fenced": "run one `cdc run` per sink; start this one again when the other has ended",
}
INDEX_SETTINGS = {"number_of_shards": 1, "auto_expand_replicas": "0-1", "gc_deletes": "12h"}
"""gc_deletes: how long a delete's version is remembered, so that a late older write can't bring the row back."""
OWN_FIELDS = {OWN_ID: {"type": "keyword", "index": False, "doc_values": False}}


class Elasticsearch:
    form: Form = "documents"

    def __init__(self, name: str, url: str, pipeline: str) -> None:
        self.name, self.url, self.pipeline = name, url.rstrip("/"), pipeline

    def prepare(self, table: Table) -> None:
        """Create the index, or give the one that is there the fields it lacks."""
        self._create(POSITIONS, {"mappings": {"dynamic": False}, "settings": INDEX_SETTINGS})
        if index := self._index(table):
            try:
                self._ask("PUT", f"/{index}/_mapping", {"properties": _properties(table)})
            except SinkRejected:
                raise Misfit(table, self.name) from None
        else:
            self._make(table, 1, {self.alias(table): {}})

    def clear(self, table: Table) -> None:
        """A new index takes the alias in one step. The position goes last: until then this can be done again."""
        index = self._index(table)
        number = int(index.rsplit("@", 1)[1]) if index else 0
        fresh = f"{self.alias(table)}@{number + 1}"
        self._ask("DELETE", f"/{fresh}", absent={})
        self._make(table, number + 1, {})
        actions: list[dict[str, Any]] = [{"add": {"index": fresh, "alias": self.alias(table)}}]
        if index:
            actions.append({"remove_index": {"index": index}})
        self._ask("POST", "/_aliases", {"actions": actions})
        self._ask("DELETE", f"/{POSITIONS}/_doc/{quote(self.alias(table), safe='')}", absent={})

    def position(self, table: Table) -> Stored | None:
        return self._stored([table])[table.qualified][0]

    def apply(self, batch: Batch) -> Mapping[str, Applied]:
        before = self._stored([advance.table for advance in batch.advances])
        pending = [a for a in batch.advances if check(a, before[a.table.qualified][0], batch.writer)]
        if not pending:
            return {}
        sent = send(self._lines(batch), sender(self.url, {a.table.topic for a in pending}), self.name, HINTS)
        result = {a.table.qualified: sent.get(a.table.topic, Applied()) for a in pending}
        self._commit(pending, before, result, batch.writer)
        return result

    def scan(self, table: Table, spark: "SparkSession") -> "DataFrame":
        from pyspark.sql import functions as F

        from cdc.exact import marked, string, unmarked

        url, index = self.url, self.alias(table)
        self.refresh(table)

        def read() -> Iterator["pa.RecordBatch"]:
            import pyarrow as pa

            for page in _pages(url, index):
                yield pa.RecordBatch.from_pydict({"page": [page]})

        pages = produced(spark, read, "page string")
        # Marked, so that Spark's parser rounds no number on the way from the answer to a source.
        answer = F.from_json(marked(F.col("page")), "hits struct<hits array<struct<_id string, _source string>>>")
        hits, source = answer.getField("hits"), unmarked(F.col("hit._source"))
        found = string(F.col("hit._id"))
        own = F.when(found.startswith(HASHED), F.get_json_object(source, f"$.{OWN_ID}"))
        return pages.select(F.explode(hits.getField("hits")).alias("hit")).select(
            F.coalesce(own, found).alias("id"), source.alias("document")
        )

    def refresh(self, table: Table) -> None:
        """Let searches see what is written; reads by id see it at once."""
        self._ask("POST", f"/{quote(self.alias(table), safe='')}/_refresh")

    def close(self) -> None:
        forget(self.url)

    def alias(self, table: Table) -> str:
        return f"{self.pipeline}-{table.qualified}".lower()

    def _index(self, table: Table) -> str | None:
        """The index behind the alias."""
        found = self._ask("GET", f"/_alias/{quote(self.alias(table), safe='')}", absent={})
        return next(iter(found), None)

    def _make(self, table: Table, number: int, aliases: dict[str, dict[str, Any]]) -> None:
        # Not strict: the log may hold records from before a column was dropped.
        mappings = {"dynamic": False, "properties": _properties(table)}
        body = {"settings": INDEX_SETTINGS, "mappings": mappings, "aliases": aliases}
        self._create(f"{self.alias(table)}@{number}", body)

    def _lines(self, batch: Batch) -> "DataFrame":
        """Folded changes with the bulk item of each as the text that is sent."""
        aliases = tuple((table.topic, self.alias(table)) for table in (advance.table for advance in batch.advances))
        return batch.changes.select("topic", "partition", *Row._fields, *bulk_item(aliases))

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


def _properties(table: Table) -> dict[str, Any]:
    return {column.name: field(column.type) for column in table.columns} | OWN_FIELDS
