"""Elasticsearch: a document per row in the index behind the alias <pipeline>-<schema>.<table>.

Whole documents by `index` and `delete` with version_type=external_gte and version = Kafka offset,
so an older change never wins, whoever sends it. The executors make the bulks and send them, and know
of every item that was refused. Positions are documents of the index `cdc-position`, one for each index,
changed by if_seq_no compare-and-set: before the first bulk of a batch it says how far rows may be
visible, after the last one how far they are. A generation is an index <alias>@<generation>; the
alias says which one readers see. The versions of deleted documents are forgotten after
`gc_deletes`, and by a node that restarts. So a bulk that comes late must not be taken at all: each
writer writes through an alias of its own, which whoever takes over removes. Its name has capitals:
a bulk creates an index that isn't there, but none of such a name.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from cdc.errors import Fenced, SinkBlocked, SinkError
from cdc.model.finding import Finding
from cdc.model.position import ViewCheckpoint
from cdc.model.table import Table
from cdc.sink.contract import Batch, Outcome
from cdc.sink.lane_run import run_on_executors
from cdc.sinks.elasticsearch import generations, health
from cdc.sinks.elasticsearch.client import HINTS, forget
from cdc.sinks.elasticsearch.executor import ElasticsearchWriter
from cdc.sinks.elasticsearch.index import fields
from cdc.sinks.elasticsearch.index.indices import Indices, new_token
from cdc.sinks.elasticsearch.index.write_block import WriteBlock
from cdc.sinks.elasticsearch.positions import POSITIONS, PendingAdvance, Positions
from cdc.sinks.elasticsearch.scan import (
    GROUPED,
    SCANNED,
    SLICES,
    PointsInTime,
    getter,
    group_reader,
    scanner,
)
from cdc.sinks.elasticsearch.server import Server
from cdc.sinks.elasticsearch.tables import Tables

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


class Elasticsearch:
    """The index as a sink, see `cdc.sink.contract.Sink`."""

    promotes_all_tables = False

    def __init__(
        self, name: str, url: str, pipeline: str, generation_names: Mapping[str, str] | None = None
    ) -> None:
        self.name = name
        self.url = url.rstrip("/")
        self.pipeline = pipeline
        self._server = Server(name, self.url)
        self._indices = Indices(self._server, pipeline, generation_names)
        self._positions = Positions(self._server, self._indices)
        self._tables = Tables(name, self._positions)
        self._token = new_token()
        self._block = WriteBlock(self._server)
        self._points_in_time = PointsInTime(self._server)

    def examine(self, tables: Sequence[Table]) -> list[Finding]:
        facts = health.read_cluster(self._server, [self._indices.alias(table) for table in tables])
        return list(health.check_cluster(self.name, facts))

    def refusals(self, table: Table) -> list[str]:
        return fields.refusals(table)

    def prepare(self, table: Table) -> None:
        """Create the index, or add missing fields to an existing one."""
        self._tables.create(table)

    def require_fit(self, table: Table) -> None:
        self._tables.require_fit(table)

    def position(self, table: Table) -> ViewCheckpoint | None:
        return self.positions([table])[table.qualified]

    def positions(self, tables: Sequence[Table]) -> dict[str, ViewCheckpoint | None]:
        """Read all records in two requests, however many there are."""
        return self._positions.checkpoints(tables)

    def apply(self, batch: Batch) -> Outcome:
        """Store how far rows may be visible, send them, then store the positions."""
        pending = self._positions.take(batch.advances, batch.writer)
        if not pending:
            return Outcome()
        self._block.release_abandoned([step.place for step in pending])
        try:
            self._positions.take_over(pending, self._token)
            started = self._positions.begin(pending, batch.writer)
            outcome = self._send(batch, pending)
            self._positions.finish(started, outcome.applied, batch.writer)
        except SinkBlocked:
            # Read again: a promotion may have begun since.
            places = self._indices.find([step.table for step in pending]).values()
            self._block.require_unblocked(places, POSITIONS)
            raise
        return outcome

    def clear(self, table: Table) -> None:
        """Replace the index by a new one, which has no position yet, unless it is like new."""
        self._tables.clear(table)

    def scan(
        self, table: Table, spark: "SparkSession", ids: Sequence[str] | None = None
    ) -> "DataFrame":
        """Read a point in time in two tasks.

        The frame is valid until the next scan of all rows, or for two minutes.
        """
        index = self._indices.readable_name(table)
        if ids is not None:
            requested = spark.createDataFrame([(key,) for key in ids], "id string")
            return requested.mapInArrow(getter(self.url, index), SCANNED)
        rows = scanner(self.url, self._points_in_time.open(index))
        return spark.range(0, SLICES, numPartitions=SLICES).mapInArrow(rows, SCANNED)

    def scan_group(self, tables: Sequence[Table], spark: "SparkSession") -> "DataFrame":
        """Read many small indices, each in one search."""
        indices = {table.qualified: self._indices.readable_name(table) for table in tables}
        self._server.refresh(indices.values(), {"ignore_unavailable": "true"})
        rows = group_reader(self.url, list(indices.items()))
        return spark.range(0, SLICES, numPartitions=SLICES).mapInArrow(rows, GROUPED)

    def refresh(self, table: Table) -> None:
        """Let searches see what is written; reads by id see it at once."""
        self._server.refresh([self.alias(table)])

    def close(self) -> None:
        """Close points in time and connections."""
        with suppress(SinkError):
            self._points_in_time.close()
        forget(self.url)

    def alias(self, table: Table) -> str:
        return self._indices.alias(table)

    def for_generation(self, names: Mapping[str, str]) -> "Elasticsearch":
        """Build a sink of other indices; it shares the points in time, and since when promotions
        have been seen, so that whoever builds it again and again gets to lift their blocks.
        """
        sink = Elasticsearch(self.name, self.url, self.pipeline, dict(names))
        sink._points_in_time = self._points_in_time
        sink._block = self._block
        return sink

    def check_capacity(self, tables: Sequence[Table]) -> None:
        """Compare disk and shards of the cluster with what the live indices take.

        Raises SinkBlocked, too: a promotion would, once all is built.
        """
        self._block.require_unblocked(self._indices.find(tables).values(), POSITIONS)
        health.require_capacity(self._server, self._indices, tables, self.name)

    def promote(self, tables: Sequence[Table], names: Mapping[str, str]) -> Mapping[str, str]:
        candidate = self.for_generation(names)._positions
        return generations.promote(self._positions, candidate, tables, names, self.name)

    def generations(self, table: Table) -> list[str]:
        return self._indices.generations([table])[table.qualified]

    def drop_unreferenced(self, tables: Sequence[Table], keep: Mapping[str, str]) -> None:
        """Delete the indices that are neither live nor kept, their positions first."""
        names = self._indices.generations(tables)
        unused = [
            self._indices.name(table, name)
            for table in tables
            for name in names[table.qualified][1:]
            if name != keep.get(table.qualified)
        ]
        self._tables.remove(unused)

    def remains(self, tables: Sequence[Table]) -> list[str]:
        return [f"index {index}" for index in self._indices.names(tables)]

    def remove(self, tables: Sequence[Table]) -> None:
        """Delete positions, then indices; their aliases go with them."""
        self._tables.remove(self._indices.names(tables))

    def _send(self, batch: Batch, pending: Sequence[PendingAdvance]) -> Outcome:
        """Send the rows.

        After a failure the writer's alias changes, so that nothing of this try can arrive later.
        """
        aliases = {step.table.topic: step.place.writer(self._token) for step in pending}
        fresh = frozenset(step.table.topic for step in pending if step.record.fresh)
        writer = ElasticsearchWriter(self.url, aliases, fresh)
        lane = batch.lane(writer, [step.advance for step in pending])
        try:
            return run_on_executors(lane, batch.records, self.name, HINTS)
        except Exception as error:
            self._token = new_token()
            if isinstance(error, Fenced):
                self._positions.require_indices(pending)
            raise
