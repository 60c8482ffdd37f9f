"""Elasticsearch: a document per row in the index behind the alias <pipeline>-<schema>.<table>.

Whole documents by `index` and `delete` with version_type=external_gte and version = Kafka offset, so an older change
never wins, whoever sends it. The bulk bodies are built in the JVM; Python frames and sends them, and reads every item.
Positions are documents of the index `cdc-position`, one for each index, changed by if_seq_no compare-and-set after the
bulks are durable.
A generation is an index <alias>@<generation>; the alias says which one readers see. Writes go to an index by an alias
of its own, for a bulk creates an index that is not there, but never an alias.
"""

import json
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from cdc.address import address
from cdc.change import Advance, Applied, Form, Stored, Table, new_generation
from cdc.errors import SinkRejected, SinkUnavailable
from cdc.report import COMPLETING, Row, send
from cdc.sink import SWITCH_S, Batch, Misfit, check, level, mismatch, require, stored_after, wait_for
from sinks.elasticsearch_bulk import OWN_ID, bulk_item, document_id, forget, sender
from sinks.elasticsearch_fields import field
from sinks.elasticsearch_scan import KEEP, SLICES, getter, scanner
from sinks.elasticsearch_server import HINTS, Server

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

POSITIONS = "cdc-position"
INDEX_SETTINGS = {"number_of_shards": 1, "auto_expand_replicas": "0-1", "gc_deletes": "12h"}
"""gc_deletes: how long a delete's version is remembered, so that a late older write can't bring the row back."""
UNSEEN = {"refresh_interval": "-1", "auto_expand_replicas": False, "number_of_replicas": 0}
SEEN = {"refresh_interval": None, "auto_expand_replicas": INDEX_SETTINGS["auto_expand_replicas"]}
"""What makes a bulk load cheap while nobody reads, and takes it back."""
BLOCKED = "cluster_block_exception"
OWN_FIELDS = {OWN_ID: {"type": "keyword", "index": False, "doc_values": False}}


class Elasticsearch:
    form: Form = "documents"
    whole = False

    def __init__(self, name: str, url: str, pipeline: str, beside: Mapping[str, str] | None = None) -> None:
        self.name, self.url, self.pipeline, self._beside = name, url.rstrip("/"), pipeline, beside
        self._server = Server(name, self.url)
        self._blocked_at = 0.0

    def prepare(self, table: Table) -> None:
        """Create the index, or give the one that is there the fields it lacks."""
        self._server.create(POSITIONS, {"mappings": {"dynamic": False}, "settings": INDEX_SETTINGS})
        if index := self._indices([table]).get(table.qualified):
            try:
                self._server.ask("PUT", f"/{index}/_mapping", {"properties": _properties(table)})
            except SinkRejected:
                raise Misfit(table, self.name) from None
        else:
            self._make(table)

    def clear(self, table: Table) -> None:
        """A new index, which has no position yet, in place of the one that is there."""
        index = self._indices([table]).get(table.qualified)
        if self._beside is None:
            self._make(table)
        if index:
            self._forget(index)

    def position(self, table: Table) -> Stored | None:
        return self._stored(self._indices([table])).get(table.qualified, (None, {}))[0]

    def apply(self, batch: Batch) -> Mapping[str, Applied]:
        indices = self._indices([advance.table for advance in batch.advances])
        for advance in batch.advances:
            if advance.table.qualified not in indices:
                raise mismatch(advance.table, advance.start, None, ours=True)
        before = self._stored(indices)
        pending = [a for a in batch.advances if check(a, before[a.table.qualified][0], batch.writer)]
        if not pending:
            return {}
        lines = self._lines(batch, indices)
        try:
            sent = send(lines, sender(self.url, {a.table.topic for a in pending}), self.name, HINTS)
        except SinkUnavailable as error:
            self._unblock(error, indices.values())
            raise
        self._blocked_at = 0.0
        result = {a.table.qualified: sent.get(a.table.topic, Applied()) for a in pending}
        self._commit(pending, indices, before, result, batch.writer)
        return result

    def scan(self, table: Table, spark: "SparkSession", ids: Sequence[str] | None = None) -> "DataFrame":
        from pyspark.sql import functions as F

        url, row = self.url, "id string, document string"
        index = self.alias(table) if self._beside is None else self._index(table, self._beside[table.qualified])
        if ids is not None:
            keys = spark.createDataFrame([(key,) for key in ids], "id string")
            return keys.select(document_id(F.col("id")).alias("key")).mapInArrow(getter(url, index), row)
        self._server.ask("POST", f"/{index}/_refresh")
        pit = self._server.ask("POST", f"/{index}/_pit?keep_alive={KEEP}")["id"]
        return spark.range(0, SLICES, numPartitions=SLICES).mapInArrow(scanner(url, pit), row)

    def refresh(self, table: Table) -> None:
        """Let searches see what is written; reads by id see it at once."""
        self._server.ask("POST", f"/{quote(self.alias(table), safe='')}/_refresh")

    def close(self) -> None:
        forget(self.url)

    def alias(self, table: Table) -> str:
        return f"{self.pipeline}-{table.qualified}".lower()

    def beside(self, names: Mapping[str, str]) -> "Elasticsearch":
        return Elasticsearch(self.name, self.url, self.pipeline, dict(names))

    def require_room(self, tables: Sequence[Table]) -> None:
        stats = self._server.ask("GET", f"/{','.join(self._indices(tables).values()) or POSITIONS}/_stats/store")
        needed = int(stats["_all"]["primaries"].get("store", {}).get("size_in_bytes", 0))
        nodes = self._server.ask("GET", "/_nodes/stats/fs")["nodes"].values()
        free = max(int(node["fs"]["total"]["available_in_bytes"]) for node in nodes)
        require(needed, free, f"the index at {address(self.url)}", self.name)

    def promote(self, tables: Sequence[Table], names: Mapping[str, str]) -> Mapping[str, str]:
        """One request switches all aliases. Meanwhile nobody writes to what readers see, so that it isn't ahead."""
        live = self._indices(tables)
        fresh = {table.qualified: self._index(table, names[table.qualified]) for table in tables}
        switched = [table for table in tables if live.get(table.qualified) != fresh[table.qualified]]
        if not switched:
            return {}
        old = [live[table.qualified] for table in switched if table.qualified in live]
        there = partial(level, self, self.beside(names), switched)
        wait_for(there, self.name)
        try:
            for index in old:
                self._server.ask("PUT", f"/{index}/_block/write")
            wait_for(there, self.name)
            self._server.ask("PUT", f"/{','.join(fresh.values())}/_settings", SEEN)
            self._server.ask("POST", f"/{','.join(fresh.values())}/_refresh")
            self._server.ask("POST", "/_aliases", {"actions": list(self._switch(switched, live, fresh))})
        finally:
            for index in old:
                self._release(index)
        return {table.qualified: _generation(live[table.qualified]) for table in switched if table.qualified in live}

    def generations(self, table: Table) -> list[str]:
        found = self._server.ask("GET", f"/{quote(self.alias(table) + '@*', safe='@*')}/_alias", absent={})
        live = [name for name, told in found.items() if self.alias(table) in told["aliases"]]
        return [_generation(index) for index in (*live, *sorted(found.keys() - live))]

    def sweep(self, tables: Sequence[Table], keep: Mapping[str, str]) -> None:
        for table in tables:
            for generation in self.generations(table)[1:]:
                if generation != keep.get(table.qualified):
                    self._forget(self._index(table, generation))

    def _switch(
        self, tables: Sequence[Table], live: Mapping[str, str], fresh: Mapping[str, str]
    ) -> Iterator[dict[str, Any]]:
        for table in tables:
            yield {"add": {"index": fresh[table.qualified], "alias": self.alias(table)}}
            if table.qualified in live:
                yield {"remove": {"index": live[table.qualified], "alias": self.alias(table)}}

    def _unblock(self, error: SinkUnavailable, indices: Iterable[str]) -> None:
        """Release indices that a `promote` has left blocked: it has been killed if it takes so long."""
        if BLOCKED not in error.message:
            return
        self._blocked_at = self._blocked_at or time.monotonic()
        if time.monotonic() - self._blocked_at > 2 * SWITCH_S:
            for index in indices:
                self._release(index)

    def _release(self, index: str) -> None:
        self._server.ask("PUT", f"/{index}/_settings", {"index.blocks.write": None}, absent={})

    def _index(self, table: Table, generation: str) -> str:
        return f"{self.alias(table)}@{generation}"

    def _indices(self, tables: Sequence[Table]) -> dict[str, str]:
        """The index of each table, for those that have one."""
        aliases = {self.alias(table): table for table in tables}
        if self._beside is not None:
            wanted = {self._index(table, self._beside[table.qualified]): table for table in tables}
            found = self._server.ask(
                "GET", f"/{_names(map(own_alias, wanted))}/_alias?ignore_unavailable=true", absent={}
            )
            return {wanted[index].qualified: index for index in found}
        # With one of several names missing the answer is a 404 that has the others all the same.
        found = self._server.ask("GET", f"/_alias/{_names(aliases)}", partly=True)
        return {
            aliases[alias].qualified: index
            for index, told in found.items()
            if isinstance(told, dict)
            for alias in told["aliases"]
            if alias in aliases
        }

    def _make(self, table: Table) -> None:
        """An index that can be written to; readers see it unless this sink is of another generation."""
        generation = new_generation() if self._beside is None else self._beside[table.qualified]
        index = self._index(table, generation)
        settings = INDEX_SETTINGS if self._beside is None else INDEX_SETTINGS | UNSEEN
        # Not strict: the log may hold records from before a column was dropped.
        mappings = {"dynamic": False, "properties": _properties(table)}
        self._server.create(index, {"settings": settings, "mappings": mappings, "aliases": {own_alias(index): {}}})
        if self._beside is None:
            old = self._indices([table])
            actions = list(self._switch([table], old, {table.qualified: index}))
            self._server.ask("POST", "/_aliases", {"actions": actions})

    def _forget(self, index: str) -> None:
        """The position first: an index that has lost its rows must not have one."""
        self._server.ask("DELETE", f"/{POSITIONS}/_doc/{quote(index, safe='')}", absent={})
        self._server.ask("DELETE", f"/{index}", absent={})

    def _lines(self, batch: Batch, indices: Mapping[str, str]) -> "DataFrame":
        """Folded changes with the bulk item of each as the text that is sent."""
        targets = tuple((a.table.topic, own_alias(indices[a.table.qualified])) for a in batch.advances)
        told = [name for name in Row._fields if not batch.plain or name not in COMPLETING]
        return batch.changes.select("topic", "partition", *told, *bulk_item(targets))

    def _stored(self, indices: Mapping[str, str]) -> dict[str, tuple[Stored | None, dict[str, int]]]:
        """Per table what is stored, with the conditions under which it may be replaced."""
        ids = list(indices.values())
        nothing: dict[str, Any] = {"docs": [{} for _ in indices]}
        answer = self._server.ask("POST", f"/{POSITIONS}/_mget", {"ids": ids}, absent=nothing) if ids else nothing
        result: dict[str, tuple[Stored | None, dict[str, int]]] = {}
        for (table, index), found in zip(indices.items(), answer["docs"], strict=True):
            if found.get("found"):
                condition = {"if_seq_no": found["_seq_no"], "if_primary_term": found["_primary_term"]}
                stored = replace(Stored.from_mapping(found["_source"]), generation=_generation(index))
                result[table] = stored, condition
            else:
                result[table] = None, {}
        return result

    def _commit(
        self,
        pending: list[Advance],
        indices: Mapping[str, str],
        before: Mapping[str, tuple[Stored | None, dict[str, int]]],
        result: Mapping[str, Applied],
        writer: str,
    ) -> None:
        lines = []
        for advance in pending:
            stored, condition = before[advance.table.qualified]
            action = "index" if condition else "create"
            lines.append(
                json.dumps({action: {"_index": POSITIONS, "_id": indices[advance.table.qualified], **condition}})
            )
            lines.append(stored_after(advance, stored, result[advance.table.qualified], writer).to_json())
        answer = self._server.ask("POST", "/_bulk", "\n".join(lines) + "\n")
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


def own_alias(index: str) -> str:
    return f"{index}.write"


def _names(names: Iterable[str]) -> str:
    return ",".join(quote(name, safe="@") for name in names)


def _generation(index: str) -> str:
    return index.rsplit("@", 1)[1]


def _properties(table: Table) -> dict[str, Any]:
    return {column.name: field(column.type) for column in table.columns} | OWN_FIELDS
