"""Elasticsearch: a document per row in the index behind the alias <pipeline>-<schema>.<table>.

Whole documents by `index` and `delete` with version_type=external_gte and version = Kafka offset, so an older change
never wins, whoever sends it. The executors make the bulks, send them, and read every item's answer.
Positions are documents of the index `cdc-position`, one for each index, changed by if_seq_no compare-and-set: before
the first bulk of a batch it says how far rows may be visible, after the last one how far they are.
A generation is an index <alias>@<generation>; the alias says which one readers see.
The versions of deleted documents are forgotten after `gc_deletes`, and by a node that restarts. So a bulk that comes
late must not be taken at all: each writer writes through an alias of its own, which whoever takes over removes. Its
name has capitals: a bulk creates an index that isn't there, but none of such a name.
"""

import json
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from cdc.errors import Fenced, SinkError, SinkUnavailable
from cdc.model.generation import new_generation
from cdc.model.outcome import Advance, Applied
from cdc.model.position import ViewCheckpoint
from cdc.model.table import RowFormat, Table
from cdc.sink.contract import (
    SWITCH_S,
    Batch,
    Outcome,
    checkpoint_after,
    mismatch,
    must_apply,
    require_free_space,
    wait_until_caught_up,
    would_go_back,
)
from cdc.sink.lane_run import run_on_executors
from sinks.elasticsearch.client import BLOCKED, HINTS, Refusal, forget, unavailable
from sinks.elasticsearch.executor import ElasticsearchWriter
from sinks.elasticsearch.fields import refusals
from sinks.elasticsearch.indices import Indices, Place
from sinks.elasticsearch.layout import INDEX_SETTINGS, Layout, refuse_other, refused, settled_otherwise
from sinks.elasticsearch.positions import POSITIONS, Moved, Positions, Record
from sinks.elasticsearch.scan import KEEP, SLICES, getter, group_reader, scanner
from sinks.elasticsearch.server import Server

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


class Elasticsearch:
    row_format: RowFormat = "documents"
    promotes_all_tables = False

    def __init__(self, name: str, url: str, pipeline: str, beside: Mapping[str, str] | None = None) -> None:
        self.name, self.url, self.pipeline, self._beside = name, url.rstrip("/"), pipeline, beside
        self._server = Server(name, self.url)
        self._indices = Indices(self._server, pipeline, beside)
        self._positions = Positions(self._server)
        self._blocked_at = 0.0
        self._token = _token()
        self._scans: list[str] = []

    def refusals(self, table: Table) -> list[str]:
        return refusals(table)

    def prepare(self, table: Table) -> None:
        """Create the index, or give the one that is there the fields it lacks."""
        self._server.create(POSITIONS, {"mappings": {"dynamic": False}, "settings": INDEX_SETTINGS})
        if place := self._indices.of([table]).get(table.qualified):
            self._adapt(table, place.index)
        else:
            self._make(table)

    def require_fit(self, table: Table) -> None:
        """Of fields alone: which settings an open index takes only the server can tell, by taking them."""
        if place := self._indices.of([table]).get(table.qualified):
            refuse_other(table, self.name, Layout.of(table), self._noted(place.index))

    def clear(self, table: Table) -> None:
        """A new index, which has no position yet, in place of the one that is there."""
        place = self._indices.of([table]).get(table.qualified)
        if self._beside is None:
            self._make(table)
        if place:
            self._forget([place.index])

    def position(self, table: Table) -> ViewCheckpoint | None:
        return self.positions([table])[table.qualified]

    def positions(self, tables: Sequence[Table]) -> dict[str, ViewCheckpoint | None]:
        """In two requests, however many there are."""
        records = self._records(tables)
        return {table.qualified: records.get(table.qualified, Record()).stored for table in tables}

    def apply(self, batch: Batch) -> Outcome:
        places = self._indices.of([advance.table for advance in batch.advances])
        for advance in batch.advances:
            if advance.table.qualified not in places:
                raise mismatch(advance.table, advance.start, None, ours=True)
        indices = {name: place.index for name, place in places.items()}
        before = self._positions.read(indices)
        pending = [a for a in batch.advances if must_apply(a, before[a.table.qualified].stored, batch.writer)]
        if not pending:
            return Outcome()
        self._take(pending, places)
        records = [before[a.table.qualified] for a in pending]
        begins = [record.begins(a.end) for a, record in zip(pending, records, strict=True)]
        begun = self._store(pending, indices, begins, batch.writer)
        fresh = {a.table.topic for a, record in zip(pending, records, strict=True) if record.fresh}
        outcome = self._send(batch, pending, indices, fresh)
        self._commit(pending, indices, begun, outcome.applied, batch.writer)
        return outcome

    def scan(self, table: Table, spark: "SparkSession", ids: Sequence[str] | None = None) -> "DataFrame":
        """As the contract says; the frame is good until the next scan of all rows, or for two minutes."""
        url, row = self.url, "id string, document string"
        index = self._readable(table)
        if ids is not None:
            return spark.createDataFrame([(key,) for key in ids], "id string").mapInArrow(getter(url, index), row)
        self._server.refresh([index])
        self._unscan()
        (opened,) = self._server.each("POST", [index], "/_pit", query={"keep_alive": KEEP})
        self._scans.append(opened["id"])
        return spark.range(0, SLICES, numPartitions=SLICES).mapInArrow(scanner(url, opened["id"]), row)

    def scan_group(self, tables: Sequence[Table], spark: "SparkSession") -> "DataFrame":
        indices = {table.qualified: self._readable(table) for table in tables}
        self._server.refresh(indices.values(), {"ignore_unavailable": "true"})
        read, row = group_reader(self.url, list(indices.items())), "table string, id string, document string"
        return spark.range(0, SLICES, numPartitions=SLICES).mapInArrow(read, row)

    def _readable(self, table: Table) -> str:
        """The name under which all of its rows are found."""
        return self.alias(table) if self._beside is None else self._indices.name(table, self._beside[table.qualified])

    def refresh(self, table: Table) -> None:
        """Let searches see what is written; reads by id see it at once."""
        self._server.refresh([self.alias(table)])

    def close(self) -> None:
        with suppress(SinkError):
            self._unscan()
        forget(self.url)

    def alias(self, table: Table) -> str:
        return self._indices.alias(table)

    def for_generation(self, names: Mapping[str, str]) -> "Elasticsearch":
        made = Elasticsearch(self.name, self.url, self.pipeline, dict(names))
        made._scans = self._scans
        return made

    def check_capacity(self, tables: Sequence[Table]) -> None:
        places = self._indices.of(tables)
        needed = self._indices.bytes([place.index for place in places.values()])
        nodes = self._server.ask("GET", "/_nodes/stats/fs")["nodes"].values()
        free = max(int(node["fs"]["total"]["available_in_bytes"]) for node in nodes)
        require_free_space(needed, free, self._server.name, self.name)
        # A rebuild removes what else lies beside the live views before it makes anything.
        spare = sum(len(names[1:]) for names in self._indices.generations(tables).values())
        self._server.require_shards(sum(Layout.of(table).shards for table in tables) - spare)

    def promote(self, tables: Sequence[Table], names: Mapping[str, str]) -> Mapping[str, str]:
        """One request switches all aliases. Meanwhile nobody writes to what readers see, so that it isn't ahead.

        A batch that is cut by this has shown some rows already: the new generation has to have them as well.
        """
        live = {name: place.index for name, place in self._indices.of(tables).items()}
        fresh = {table.qualified: self._indices.name(table, names[table.qualified]) for table in tables}
        switched = [table for table in tables if live.get(table.qualified) != fresh[table.qualified]]
        if not switched:
            return {}
        old = [live[table.qualified] for table in switched if table.qualified in live]
        beside = self.for_generation(names)
        wait_until_caught_up(lambda: self._level(beside, switched, self._records(switched)), self.name)
        try:
            self._block(old)
            wait_until_caught_up(partial(self._level, beside, switched, self._records(switched)), self.name)
            self._show(switched, fresh)
            self._server.refresh(fresh.values())
            self._server.switch(self._switch(switched, live, fresh))
        finally:
            self._release(old)
        return {table.qualified: _generation(live[table.qualified]) for table in switched if table.qualified in live}

    def generations(self, table: Table) -> list[str]:
        return self._indices.generations([table])[table.qualified]

    def drop_unreferenced(self, tables: Sequence[Table], keep: Mapping[str, str]) -> None:
        there = self._indices.generations(tables)
        others = ((table, name) for table in tables for name in there[table.qualified][1:])
        self._forget([self._indices.name(t, name) for t, name in others if name != keep.get(t.qualified)])

    def _show(self, tables: Sequence[Table], indices: Mapping[str, str]) -> None:
        """Take back what made the load cheap; for all indices that are settled alike in as few requests as they fit."""
        alike: dict[str, list[str]] = {}
        for table in tables:
            alike.setdefault(json.dumps(Layout.of(table).shown), []).append(indices[table.qualified])
        for settings, those in alike.items():
            self._server.each("PUT", those, "/_settings", json.loads(settings))

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
            self._release(indices)

    def _block(self, indices: Iterable[str]) -> None:
        """No write is under way any more when this returns, and none begins."""
        for answer in self._server.each("PUT", indices, "/_block/write"):
            if not all(one.get("blocked") for one in answer["indices"]):
                raise unavailable(f"Not all of {self._server.name} has stopped taking writes.")

    def _release(self, indices: Iterable[str]) -> None:
        query = {"ignore_unavailable": "true"}
        self._server.each("PUT", indices, "/_settings", {"index.blocks.write": None}, query=query, absent={})

    def _records(self, tables: Sequence[Table]) -> dict[str, Record]:
        places = self._indices.of(tables)
        return self._positions.read({name: place.index for name, place in places.items()})

    def _level(self, beside: "Elasticsearch", tables: Sequence[Table], live: Mapping[str, Record]) -> bool:
        """Whether every view beside has what readers may have seen of the live one."""
        there = beside.positions(tables)
        pairs = [(one, there[name]) for name, one in live.items() if one.visible]
        return all(stored and not would_go_back(stored, _shown(one, stored)) for one, stored in pairs)

    def _make(self, table: Table) -> None:
        """An index; readers see it unless this sink is of another generation."""
        generation = new_generation() if self._beside is None else self._beside[table.qualified]
        index, body = self._indices.name(table, generation), Layout.of(table).body(seen=self._beside is None)
        if self._beside is not None:
            return self._create(table, index, body)
        old = {name: place.index for name, place in self._indices.of([table]).items()}
        if not old:
            # At once with its alias: each change of the cluster's state costs as much as all else of a table's start.
            return self._create(table, index, body | {"aliases": {self.alias(table): {}}})
        self._create(table, index, body)
        return self._server.switch(self._switch([table], old, {table.qualified: index}))

    def _create(self, table: Table, index: str, body: Mapping[str, Any]) -> None:
        try:
            self._server.create(index, body)
        except Refusal as error:
            raise refused(table, self.name, error) from None

    def _adapt(self, table: Table, index: str) -> None:
        """Give an index that is there the fields of new columns, and settings that it takes while it is open.

        Raises:
            SchemaMismatch: it was made with others, and can't be changed.
        """
        layout, made = Layout.of(table), self._noted(index)
        refuse_other(table, self.name, layout, made)
        if resettled := layout.resettled(made):
            settings = {f"index.{name}": value for name, value in resettled.items()}
            try:
                self._server.each("PUT", [index], "/_settings", settings)
            except Refusal as error:
                if error.status != 400:
                    raise
                raise settled_otherwise(table, self.name, resettled) from None
        try:
            self._server.each("PUT", [index], "/_mapping", layout.mapping(made))
        except Refusal as error:
            raise refused(table, self.name, error) from None

    def _noted(self, index: str) -> Layout:
        (there,) = self._server.each("GET", [index], "/_mapping")
        return Layout.noted(there[index]["mappings"])

    def _forget(self, indices: Sequence[str]) -> None:
        """The positions first: an index that has lost its rows must not have one."""
        self._positions.forget(indices)
        self._server.each("DELETE", indices, "", query={"ignore_unavailable": "true"}, absent={})

    def _unscan(self) -> None:
        """Close points in time, also of generations beside: the server holds on to all that they may need."""
        while self._scans:
            self._server.ask("DELETE", "/_pit", {"id": self._scans.pop()}, absent={})

    def _take(self, pending: Sequence[Advance], places: Mapping[str, Place]) -> None:
        """Let these indices be written to through this sink's aliases only, if nobody else has done so meanwhile.

        Raises:
            Fenced: somebody has.
        """
        actions: list[dict[str, Any]] = []
        for advance in pending:
            place = places[advance.table.qualified]
            mine, others = place.writer(self._token), set(place.writers)
            others.discard(mine)
            actions += [{"remove": {"index": place.index, "alias": one, "must_exist": True}} for one in sorted(others)]
            if mine not in place.writers:
                actions.append({"add": {"index": place.index, "alias": mine}})
        try:
            if actions:
                self._server.switch(actions)
        except Refusal as error:
            if error.status != 404:
                raise
            self._refuse_gone(pending)
            # Of two who take over at the same time, the other has been quicker.
            raise mismatch(pending[0].table, pending[0].start, pending[0].start, ours=False) from None

    def _send(self, batch: Batch, pending: Sequence[Advance], indices: Mapping[str, str], fresh: set[str]) -> Outcome:
        """Send the rows; when it isn't known what has become of some, nothing of this try may arrive later."""
        aliases = {a.table.topic: Place(indices[a.table.qualified]).writer(self._token) for a in pending}
        lane = batch.lane(ElasticsearchWriter(self.url, aliases, frozenset(fresh)), pending)
        try:
            outcome = run_on_executors(lane, batch.records, self.name, HINTS)
        except Exception as error:
            self._token = _token()
            if isinstance(error, SinkUnavailable):
                self._unblock(error, indices.values())
            if isinstance(error, Fenced):
                self._refuse_gone(pending)
            raise
        self._blocked_at = 0.0
        return outcome

    def _refuse_gone(self, pending: Sequence[Advance]) -> None:
        """An alias goes with its index, too: then it is the view that is gone, and nobody has taken over."""
        places = self._indices.of([advance.table for advance in pending])
        for advance in pending:
            if advance.table.qualified not in places:
                raise mismatch(advance.table, advance.start, None, ours=True)

    def _commit(
        self,
        pending: Sequence[Advance],
        indices: Mapping[str, str],
        begun: Sequence[Record],
        result: Mapping[str, Applied],
        writer: str,
    ) -> None:
        pairs = zip(pending, begun, strict=True)
        ended = [one.ends(checkpoint_after(a, one.stored, result[a.table.qualified], writer)) for a, one in pairs]
        self._store(pending, indices, ended, writer)

    def _store(
        self, pending: Sequence[Advance], indices: Mapping[str, str], records: Sequence[Record], writer: str
    ) -> list[Record]:
        """Write down how far the views are, or may be.

        Raises:
            Fenced: another writer has done so since they were read.
        """
        names = [indices[advance.table.qualified] for advance in pending]
        try:
            return self._positions.write(list(zip(names, records, strict=True)))
        except Moved as error:
            advance = pending[names.index(error.index)]
            now = self.position(advance.table)
            ours = now is not None and now.writer == writer
            raise mismatch(advance.table, advance.start, now.position if now else None, ours=ours) from None


def _shown(record: Record, other: ViewCheckpoint) -> ViewCheckpoint:
    """What readers may have seen, as if it was stored."""
    visible = record.visible or other.position
    return ViewCheckpoint(visible, floor=record.stored.floor if record.stored else 0)


def _token() -> str:
    return uuid4().hex[:12]


def _generation(index: str) -> str:
    return index.rsplit("@", 1)[1]
