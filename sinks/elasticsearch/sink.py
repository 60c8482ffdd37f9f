"""Elasticsearch: a document per row in the index behind the alias <pipeline>-<schema>.<table>.

Whole documents by `index` and `delete` with version_type=external_gte and version = Kafka offset,
so an older change never wins, whoever sends it. The executors make the bulks, send them, and read
every item's answer. Positions are documents of the index `cdc-position`, one for each index,
changed by if_seq_no compare-and-set: before the first bulk of a batch it says how far rows may be
visible, after the last one how far they are. A generation is an index <alias>@<generation>; the
alias says which one readers see. The versions of deleted documents are forgotten after
`gc_deletes`, and by a node that restarts. So a bulk that comes late must not be taken at all: each
writer writes through an alias of its own, which whoever takes over removes. Its name has capitals:
a bulk creates an index that isn't there, but none of such a name.
"""

import json
import time
from collections.abc import Iterable, Mapping, Sequence
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
    require_free_space,
    wait_until_caught_up,
    would_go_back,
)
from cdc.sink.fencing import checkpoint_after, mismatch, must_apply
from cdc.sink.lane_run import run_on_executors
from sinks.elasticsearch.client import BLOCKED, HINTS, Refusal, forget, unavailable
from sinks.elasticsearch.executor import ElasticsearchWriter
from sinks.elasticsearch.fields import refusals
from sinks.elasticsearch.indices import Indices, WritableIndex, generation_of
from sinks.elasticsearch.layout import (
    INDEX_SETTINGS,
    Layout,
    layout_error,
    require_same_fields,
    settings_error,
)
from sinks.elasticsearch.positions import POSITIONS, Positions, Record, RecordChanged
from sinks.elasticsearch.scan import KEEP, SLICES, getter, group_reader, scanner
from sinks.elasticsearch.server import Server

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


class Elasticsearch:
    """The index as a sink, see `cdc.sink.contract.Sink`."""

    row_format: RowFormat = "documents"
    promotes_all_tables = False

    def __init__(
        self, name: str, url: str, pipeline: str, generation_names: Mapping[str, str] | None = None
    ) -> None:
        self.name, self.url, self.pipeline, self._generation_names = (
            name,
            url.rstrip("/"),
            pipeline,
            generation_names,
        )
        self._server = Server(name, self.url)
        self._indices = Indices(self._server, pipeline, generation_names)
        self._positions = Positions(self._server)
        self._blocked_at = 0.0
        self._token = _token()
        self._scans: list[str] = []

    def refusals(self, table: Table) -> list[str]:
        """See `fields.refusals`."""
        return refusals(table)

    def prepare(self, table: Table) -> None:
        """Create the index, or add missing fields to an existing one."""
        self._server.create(POSITIONS, {"mappings": {"dynamic": False}, "settings": INDEX_SETTINGS})
        if place := self._indices.find([table]).get(table.qualified):
            self._adapt(table, place.index)
        else:
            self._make(table)

    def require_fit(self, table: Table) -> None:
        """Compare fields alone: only the server can tell which settings an open index takes, by
        taking them.
        """
        if place := self._indices.find([table]).get(table.qualified):
            require_same_fields(table, self.name, Layout.of(table), self._read_layout(place.index))

    def clear(self, table: Table) -> None:
        """Replace the index by a new one, which has no position yet."""
        place = self._indices.find([table]).get(table.qualified)
        if self._generation_names is None:
            self._make(table)
        if place:
            self._forget([place.index])

    def position(self, table: Table) -> ViewCheckpoint | None:
        """Read the record of one view."""
        return self.positions([table])[table.qualified]

    def positions(self, tables: Sequence[Table]) -> dict[str, ViewCheckpoint | None]:
        """Read all records in two requests, however many there are."""
        records = self._records(tables)
        return {table.qualified: records.get(table.qualified, Record()).stored for table in tables}

    def apply(self, batch: Batch) -> Outcome:
        """Store how far rows may be visible, send them, then store the positions."""
        writable_indices = self._indices.find([advance.table for advance in batch.advances])
        for advance in batch.advances:
            if advance.table.qualified not in writable_indices:
                raise mismatch(advance.table, advance.start, None, ours=True)
        indices = {name: place.index for name, place in writable_indices.items()}
        records_by_table = self._positions.read(indices)
        pending = [
            advance
            for advance in batch.advances
            if must_apply(advance, records_by_table[advance.table.qualified].stored, batch.writer)
        ]
        if not pending:
            return Outcome()
        self._take_over(pending, writable_indices)
        records = [records_by_table[advance.table.qualified] for advance in pending]
        visible_records = [
            record.begins(advance.end) for advance, record in zip(pending, records, strict=True)
        ]
        begun_records = self._store(pending, indices, visible_records, batch.writer)
        fresh = {
            advance.table.topic
            for advance, record in zip(pending, records, strict=True)
            if record.fresh
        }
        outcome = self._send(batch, pending, indices, fresh)
        self._commit(pending, indices, begun_records, outcome.applied, batch.writer)
        return outcome

    def scan(
        self, table: Table, spark: "SparkSession", ids: Sequence[str] | None = None
    ) -> "DataFrame":
        """Read a point in time in two tasks.

        The frame is valid until the next scan of all rows, or for two minutes.
        """
        url, schema = self.url, "id string, document string"
        index = self._readable(table)
        if ids is not None:
            return spark.createDataFrame([(key,) for key in ids], "id string").mapInArrow(
                getter(url, index), schema
            )
        self._server.refresh([index])
        self._unscan()
        (point_in_time,) = self._server.ask_groups(
            "POST", [index], "/_pit", query={"keep_alive": KEEP}
        )
        self._scans.append(point_in_time["id"])
        return spark.range(0, SLICES, numPartitions=SLICES).mapInArrow(
            scanner(url, point_in_time["id"]), schema
        )

    def scan_group(self, tables: Sequence[Table], spark: "SparkSession") -> "DataFrame":
        """Read many small indices, each in one search."""
        indices = {table.qualified: self._readable(table) for table in tables}
        self._server.refresh(indices.values(), {"ignore_unavailable": "true"})
        read, schema = (
            group_reader(self.url, list(indices.items())),
            "table string, id string, document string",
        )
        return spark.range(0, SLICES, numPartitions=SLICES).mapInArrow(read, schema)

    def _readable(self, table: Table) -> str:
        """Return the name under which a view is read: the readers' alias, or a generation's
        index.
        """
        return (
            self.alias(table)
            if self._generation_names is None
            else self._indices.name(table, self._generation_names[table.qualified])
        )

    def refresh(self, table: Table) -> None:
        """Let searches see what is written; reads by id see it at once."""
        self._server.refresh([self.alias(table)])

    def close(self) -> None:
        """Close points in time and connections."""
        with suppress(SinkError):
            self._unscan()
        forget(self.url)

    def alias(self, table: Table) -> str:
        """Return the alias under which readers find the view."""
        return self._indices.alias(table)

    def for_generation(self, names: Mapping[str, str]) -> "Elasticsearch":
        """Build a sink of other indices; it shares the points in time."""
        sink = Elasticsearch(self.name, self.url, self.pipeline, dict(names))
        sink._scans = self._scans
        return sink

    def check_capacity(self, tables: Sequence[Table]) -> None:
        """Compare disk and shards of the cluster with what the live indices take."""
        places = self._indices.find(tables)
        needed = self._indices.bytes([place.index for place in places.values()])
        nodes = self._server.ask("GET", "/_nodes/stats/fs")["nodes"].values()
        free = max(int(node["fs"]["total"]["available_in_bytes"]) for node in nodes)
        require_free_space(needed, free, self._server.name, self.name)
        # A rebuild removes what else lies beside the live views before it makes anything.
        spare = sum(len(names[1:]) for names in self._indices.generations(tables).values())
        self._server.require_shards(sum(Layout.of(table).shards for table in tables) - spare)

    def promote(self, tables: Sequence[Table], names: Mapping[str, str]) -> Mapping[str, str]:
        """One request switches all aliases. Meanwhile nobody writes to what readers see, so that it
        isn't ahead.

        A batch that is cut by this has shown some rows already: the new generation has to have them
        as well.
        """
        live = {name: place.index for name, place in self._indices.find(tables).items()}
        new_indices = {
            table.qualified: self._indices.name(table, names[table.qualified]) for table in tables
        }
        switched = [
            table for table in tables if live.get(table.qualified) != new_indices[table.qualified]
        ]
        if not switched:
            return {}
        live_indices = [live[table.qualified] for table in switched if table.qualified in live]
        candidate = self.for_generation(names)
        wait_until_caught_up(
            lambda: self._is_caught_up(candidate, switched, self._records(switched)), self.name
        )
        try:
            self._block(live_indices)
            wait_until_caught_up(
                partial(self._is_caught_up, candidate, switched, self._records(switched)), self.name
            )
            self._show(switched, new_indices)
            self._server.refresh(new_indices.values())
            self._server.switch(self._indices.switch_actions(switched, live, new_indices))
        finally:
            self._release(live_indices)
        return {
            table.qualified: generation_of(live[table.qualified])
            for table in switched
            if table.qualified in live
        }

    def generations(self, table: Table) -> list[str]:
        """List the indices of a table by generation."""
        return self._indices.generations([table])[table.qualified]

    def drop_unreferenced(self, tables: Sequence[Table], keep: Mapping[str, str]) -> None:
        """Delete the indices that are neither live nor kept, their positions first."""
        names_by_table = self._indices.generations(tables)
        candidates = (
            (table, name) for table in tables for name in names_by_table[table.qualified][1:]
        )
        self._forget(
            [
                self._indices.name(table, name)
                for table, name in candidates
                if name != keep.get(table.qualified)
            ]
        )

    def _show(self, tables: Sequence[Table], indices: Mapping[str, str]) -> None:
        """Restore the settings that made the load cheap; indices with the same settings share
        requests.
        """
        indices_by_settings: dict[str, list[str]] = {}
        for table in tables:
            indices_by_settings.setdefault(
                json.dumps(Layout.of(table).restored_settings), []
            ).append(indices[table.qualified])
        for settings, group in indices_by_settings.items():
            self._server.ask_groups("PUT", group, "/_settings", json.loads(settings))

    def _unblock(self, error: SinkUnavailable, indices: Iterable[str]) -> None:
        """Release indices that a killed `promote` has left blocked: a running one is done by
        then.
        """
        if BLOCKED not in error.message:
            return
        self._blocked_at = self._blocked_at or time.monotonic()
        if time.monotonic() - self._blocked_at > 2 * SWITCH_S:
            self._release(indices)

    def _block(self, indices: Iterable[str]) -> None:
        """Block writes; on return none is under way, and none begins."""
        for answer in self._server.ask_groups("PUT", indices, "/_block/write"):
            if not all(index.get("blocked") for index in answer["indices"]):
                raise unavailable(f"Not all of {self._server.name} has stopped taking writes.")

    def _release(self, indices: Iterable[str]) -> None:
        query = {"ignore_unavailable": "true"}
        self._server.ask_groups(
            "PUT", indices, "/_settings", {"index.blocks.write": None}, query=query, absent={}
        )

    def _records(self, tables: Sequence[Table]) -> dict[str, Record]:
        places = self._indices.find(tables)
        return self._positions.read({name: place.index for name, place in places.items()})

    def _is_caught_up(
        self, candidate: "Elasticsearch", tables: Sequence[Table], live: Mapping[str, Record]
    ) -> bool:
        """Say whether every view of the candidate has what readers may have seen of the live
        one.
        """
        checkpoints = candidate.positions(tables)
        pairs = [(record, checkpoints[name]) for name, record in live.items() if record.visible]
        return all(
            stored and not would_go_back(stored, record.visible_checkpoint(stored.position))
            for record, stored in pairs
        )

    def _make(self, table: Table) -> None:
        """Create an index; readers see it unless this sink is of another generation."""
        generation = (
            new_generation()
            if self._generation_names is None
            else self._generation_names[table.qualified]
        )
        index, body = (
            self._indices.name(table, generation),
            Layout.of(table).body(is_live=self._generation_names is None),
        )
        if self._generation_names is not None:
            return self._create(table, index, body)
        live = {name: place.index for name, place in self._indices.find([table]).items()}
        if not live:
            # Created with its alias: each change of the cluster's state costs as much as the rest
            # of a table's start.
            return self._create(table, index, body | {"aliases": {self.alias(table): {}}})
        self._create(table, index, body)
        return self._server.switch(
            self._indices.switch_actions([table], live, {table.qualified: index})
        )

    def _create(self, table: Table, index: str, body: Mapping[str, Any]) -> None:
        try:
            self._server.create(index, body)
        except Refusal as error:
            raise layout_error(table, self.name, error) from None

    def _adapt(self, table: Table, index: str) -> None:
        """Add the fields of new columns to an index, and settings that it takes while it is open.

        Raises:
            SchemaMismatch: it was made with others, and can't be changed.
        """
        layout, existing = Layout.of(table), self._read_layout(index)
        require_same_fields(table, self.name, layout, existing)
        if changed := layout.changed_settings(existing):
            settings = {f"index.{name}": value for name, value in changed.items()}
            try:
                self._server.ask_groups("PUT", [index], "/_settings", settings)
            except Refusal as error:
                if error.status != 400:
                    raise
                raise settings_error(table, self.name, changed) from None
        try:
            self._server.ask_groups("PUT", [index], "/_mapping", layout.mapping(existing))
        except Refusal as error:
            raise layout_error(table, self.name, error) from None

    def _read_layout(self, index: str) -> Layout:
        (mappings,) = self._server.ask_groups("GET", [index], "/_mapping")
        return Layout.from_mapping(mappings[index]["mappings"])

    def _forget(self, indices: Sequence[str]) -> None:
        """Delete positions, then indices: an index without its rows must not have a position."""
        self._positions.forget(indices)
        self._server.ask_groups(
            "DELETE", indices, "", query={"ignore_unavailable": "true"}, absent={}
        )

    def _unscan(self) -> None:
        """Close points in time, also those of other generations: the server keeps all that they may
        need.
        """
        while self._scans:
            self._server.ask("DELETE", "/_pit", {"id": self._scans.pop()}, absent={})

    def _take_over(self, pending: Sequence[Advance], places: Mapping[str, WritableIndex]) -> None:
        """Replace the writers' aliases of these indices by this sink's, if no other writer has done
        so meanwhile.

        Raises:
            Fenced: somebody has.
        """
        actions: list[dict[str, Any]] = []
        for advance in pending:
            target = places[advance.table.qualified]
            own_alias, other_aliases = target.writer(self._token), set(target.writers)
            other_aliases.discard(own_alias)
            actions += [
                {"remove": {"index": target.index, "alias": alias, "must_exist": True}}
                for alias in sorted(other_aliases)
            ]
            if own_alias not in target.writers:
                actions.append({"add": {"index": target.index, "alias": own_alias}})
        try:
            if actions:
                self._server.switch(actions)
        except Refusal as error:
            if error.status != 404:
                raise
            self._refuse_missing(pending)
            # Of two who take over at the same time, the other has been quicker.
            raise mismatch(
                pending[0].table, pending[0].start, pending[0].start, ours=False
            ) from None

    def _send(
        self, batch: Batch, pending: Sequence[Advance], indices: Mapping[str, str], fresh: set[str]
    ) -> Outcome:
        """Send the rows.

        After a failure the writer's alias changes, so that nothing of this try can arrive later.
        """
        aliases = {
            advance.table.topic: WritableIndex(indices[advance.table.qualified]).writer(self._token)
            for advance in pending
        }
        lane = batch.lane(ElasticsearchWriter(self.url, aliases, frozenset(fresh)), pending)
        try:
            outcome = run_on_executors(lane, batch.records, self.name, HINTS)
        except Exception as error:
            self._token = _token()
            if isinstance(error, SinkUnavailable):
                self._unblock(error, indices.values())
            if isinstance(error, Fenced):
                self._refuse_missing(pending)
            raise
        self._blocked_at = 0.0
        return outcome

    def _refuse_missing(self, pending: Sequence[Advance]) -> None:
        """Raise PositionLost for a deleted index: its alias went with it, and no other writer has
        taken over.
        """
        places = self._indices.find([advance.table for advance in pending])
        for advance in pending:
            if advance.table.qualified not in places:
                raise mismatch(advance.table, advance.start, None, ours=True)

    def _commit(
        self,
        pending: Sequence[Advance],
        indices: Mapping[str, str],
        begun_records: Sequence[Record],
        result: Mapping[str, Applied],
        writer: str,
    ) -> None:
        pairs = zip(pending, begun_records, strict=True)
        final_records = []
        for advance, record in pairs:
            applied = result[advance.table.qualified]
            final_records.append(
                record.ends(checkpoint_after(advance, record.stored, applied, writer))
            )
        self._store(pending, indices, final_records, writer)

    def _store(
        self,
        pending: Sequence[Advance],
        indices: Mapping[str, str],
        records: Sequence[Record],
        writer: str,
    ) -> list[Record]:
        """Store how far the views are, or may be.

        Raises:
            Fenced: another writer has done so since they were read.
        """
        names = [indices[advance.table.qualified] for advance in pending]
        try:
            return self._positions.write(list(zip(names, records, strict=True)))
        except RecordChanged as error:
            advance = pending[names.index(error.index)]
            checkpoint = self.position(advance.table)
            ours = checkpoint is not None and checkpoint.writer == writer
            raise mismatch(
                advance.table, advance.start, checkpoint.position if checkpoint else None, ours=ours
            ) from None


def _token() -> str:
    return uuid4().hex[:12]
