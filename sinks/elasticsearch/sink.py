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

import json
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import structlog

from cdc.errors import Fenced, SinkBlocked, SinkError, SinkUnavailable
from cdc.model.finding import Finding, find
from cdc.model.generation import new_generation
from cdc.model.position import ViewCheckpoint
from cdc.model.table import Table
from cdc.sink.contract import Batch, Fault, Hold, ListIds, Outcome, ReadRows, SchemaMismatch
from cdc.sink.lane_run import run_on_executors
from cdc.sink.promotion import require_free_space, wait_until_caught_up, would_go_back
from cdc.sink.scan import GROUPED, pages, read_pages, scan_items
from cdc.sinks.elasticsearch import scan
from cdc.sinks.elasticsearch.client import (
    HINTS,
    SHARDS,
    WRITE,
    Refusal,
    Server,
    blocks_of,
    curl,
    group_names,
    ignoring_absent,
)
from cdc.sinks.elasticsearch.connection import forget
from cdc.sinks.elasticsearch.executor import ElasticsearchWriter
from cdc.sinks.elasticsearch.index import fields
from cdc.sinks.elasticsearch.index.indices import Indices, WriteBlock, generation_of, new_token
from cdc.sinks.elasticsearch.index.layout import (
    INDEX_SETTINGS,
    Layout,
    layout_error,
    outdated_error,
    require_same_fields,
)
from cdc.sinks.elasticsearch.positions import POSITIONS, PendingAdvance, Positions, Record

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

log = structlog.get_logger()


class Elasticsearch:
    """The index as a sink, see `cdc.sink.contract.Sink`."""

    promotes_all_tables = False

    def __init__(
        self, name: str, url: str, pipeline: str, generation_names: Mapping[str, str] | None = None
    ) -> None:
        self.name = name
        self.url = url
        self.pipeline = pipeline
        self._server = Server(name, self.url)
        self._indices = Indices(self._server, pipeline, generation_names)
        self._positions = Positions(self._server, self._indices)
        self._token = new_token()
        self._block = WriteBlock(self._server)
        self._points_in_time: list[str] = []

    def examine(self, tables: Sequence[Table]) -> list[Finding]:
        facts = read_cluster(self._server, [self._indices.alias(table) for table in tables])
        return list(check_cluster(self.name, facts))

    def faults(self, tables: Sequence[Table]) -> Mapping[str, Fault]:
        return {f"{self.name} write block": partial(self._block_writes, tables)}

    def _block_writes(self, tables: Sequence[Table], hold: Hold) -> None:
        """Set the block as an operator would, who hasn't set one yet."""
        places = list(self._indices.find(tables).values())
        self._block.require_unblocked(places)
        if any(place.promotions for place in places):
            raise SinkUnavailable(
                f"A promotion in {self.name} has blocked writes.",
                hint="run it again",
                sink=self.name,
            )
        indices = self._server.client.indices
        names = [place.index for place in places]
        try:
            for group in group_names(names):
                indices.put_settings(index=group, settings={WRITE: True})
            hold()
        finally:
            for group in group_names(names):
                indices.put_settings(index=group, settings={WRITE: None}, ignore_unavailable=True)

    def refusals(self, table: Table) -> list[str]:
        return fields.refusals(table)

    def prepare(self, table: Table) -> None:
        """Create the index, or add missing fields to an existing one."""
        self._server.create(POSITIONS, {"mappings": {"dynamic": False}, "settings": INDEX_SETTINGS})
        if place := self._indices.find([table]).get(table.qualified):
            self._adapt(table, place.index)
        else:
            self._make(table)

    def require_fit(self, table: Table) -> None:
        """Compare fields alone: which settings an open index takes shows when it is given them."""
        if place := self._indices.find([table]).get(table.qualified):
            require_same_fields(table, self.name, Layout.of(table), self._layout(place.index))

    def rehearse(self, table: Table) -> list[str]:
        """Make an index as the file asks for it, do to it what `prepare` would do to the one that is there,
        and delete it: the server has no other way to say whether it takes a mapping.
        """
        layout = Layout.of(table)
        place = self._indices.find([table]).get(table.qualified)
        mapping = self._mapping(place.index) if place else {}
        existing = Layout.from_mapping(mapping)
        changes = layout.changes(existing) if place else []
        is_asked_for = bool(layout.options or layout.settings)
        if changes or (is_asked_for and not place):
            index = self._indices.probe(table)
            try:
                self._create(table, index, layout.probe_body())
                if place:
                    require_same_fields(table, self.name, layout, existing)
                    self._change_settings(table, index, layout, existing)
                    # Fields of columns that are gone count, too.
                    former = {**existing.mapping(), "properties": mapping.get("properties", {})}
                    self._add_fields(table, index, layout.mapping(), former)
            finally:
                self._server.client.indices.delete(index=index, ignore_unavailable=True)
        return changes

    def position(self, table: Table) -> ViewCheckpoint | None:
        return self.positions([table])[table.qualified]

    def positions(self, tables: Sequence[Table]) -> dict[str, ViewCheckpoint | None]:
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
        """Replace the index by a new one, which has no position yet; a generation's is removed.

        One that would be made just the same stays: a run clears the views of all tables without
        records whenever it loads its plan, and an index takes the server a second where it is busy.
        """
        place = self._indices.find([table]).get(table.qualified)
        if place and self._is_like_new(table, place.index):
            return
        if self._indices.generation(table) is None:
            self._make(table)
        if place:
            self._delete([place.index])

    def scan(
        self, table: Table, spark: "SparkSession", ids: Sequence[str] | None = None
    ) -> "DataFrame":
        """Read a point in time in two tasks.

        The frame is valid until the next scan of all rows, or for two minutes.
        """
        index = self._indices.readable_name(table)
        if ids is not None:
            read = partial(scan.read_ids, self.url, index)
            return scan_items(spark, read, pages(ids, scan.PAGE_ROWS))
        # A point in time has what searches see.
        self._server.refresh([index])
        self._close_points_in_time()
        self._points_in_time.append(self._server.open_point_in_time(index, scan.KEEP))
        read = partial(scan.read_slice, self.url, self._points_in_time[-1])
        return scan_items(spark, read, range(scan.SLICES))

    def row_reader(self, table: Table) -> ReadRows:
        read = partial(scan.read_ids, self.url, self._indices.readable_name(table))
        return partial(read_pages, read, scan.PAGE_ROWS)

    def id_lister(self, table: Table) -> ListIds:
        return partial(scan.list_ids, self.url, self._indices.readable_name(table))

    def scan_group(self, tables: Sequence[Table], spark: "SparkSession") -> "DataFrame":
        """Read many small indices, each in one search."""
        indices = {table.qualified: self._indices.readable_name(table) for table in tables}
        self._server.refresh(indices.values(), {"ignore_unavailable": "true"})
        read = partial(scan.read_index, self.url, scan.GROUP_ROWS)
        # Searches of whole documents: not one on each core of a cluster.
        items = list(indices.items())
        return scan_items(spark, read, items, GROUPED, tasks_at_most=scan.SLICES)

    def refresh(self, table: Table) -> None:
        """Let searches see what is written; reads by id see it at once."""
        self._server.refresh([self.alias(table)])

    def close(self) -> None:
        with suppress(SinkError):
            self._close_points_in_time()
        forget(self.url)

    def _close_points_in_time(self) -> None:
        """Close those that are open: the server keeps what they may need."""
        while self._points_in_time:
            self._server.close_point_in_time(self._points_in_time.pop())

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
        require_capacity(self._server, self._indices, tables, self.name)

    def promote(self, tables: Sequence[Table], names: Mapping[str, str]) -> Mapping[str, str]:
        """Switch all aliases in one request.

        Meanwhile nobody writes to what readers see, so that it isn't ahead. A batch that is cut by
        this has shown some rows already: the new generation has to have them as well.
        """
        places = self._indices.find(tables)
        live_indices = {name: place.index for name, place in places.items()}
        new_indices = {
            table.qualified: self._indices.name(table, names[table.qualified]) for table in tables
        }
        switched = [
            table
            for table in tables
            if live_indices.get(table.qualified) != new_indices[table.qualified]
        ]
        if not switched:
            return {}
        replaced = [places[table.qualified] for table in switched if table.qualified in places]
        candidate = self.for_generation(names)._positions
        lagging: list[Table] = []

        def is_level(records: Mapping[str, Record]) -> bool:
            checkpoints = candidate.checkpoints(switched)
            lagging.clear()
            for table in switched:
                stored = checkpoints[table.qualified]
                seen = records.get(table.qualified, Record()).seen
                if seen and (stored is None or would_go_back(stored, seen)):
                    lagging.append(table)
            return not lagging

        wait_until_caught_up(
            lambda: is_level(self._positions.records(switched)), self.name, lagging
        )
        block = WriteBlock(self._server)
        block.require_unblocked(replaced)
        try:
            with ThreadPoolExecutor(1) as pool:
                # Most of the new rows become visible while the block is set: it takes some 250 ms under
                # load, and this up to as long. The rest follows below.
                refresh = pool.submit(self._server.refresh, list(new_indices.values()))
                block.set(replaced)
            refresh.result()
            wait_until_caught_up(
                partial(is_level, self._positions.records(switched)), self.name, lagging
            )
            _prepare_for_readers(self._server, switched, new_indices)
            self._server.switch(self._indices.switch_actions(switched, live_indices, new_indices))
        finally:
            block.release(replaced)
        return {
            table.qualified: generation_of(live_indices[table.qualified])
            for table in switched
            if table.qualified in live_indices
        }

    def generations(self, table: Table) -> list[str]:
        return self._indices.generations([table])[table.qualified]

    def drop_unreferenced(self, tables: Sequence[Table], keep: Mapping[str, str]) -> None:
        names = self._indices.generations(tables)
        self._delete(
            [
                self._indices.name(table, name)
                for table in tables
                for name in names[table.qualified][1:]
                if name != keep.get(table.qualified)
            ]
        )

    def remains(self, tables: Sequence[Table]) -> list[str]:
        return [f"index {index}" for index in self._indices.names(tables)]

    def remove(self, tables: Sequence[Table]) -> None:
        self._delete(self._indices.names(tables))

    def _delete(self, indices: Sequence[str]) -> None:
        """Delete positions, then indices: an index without its rows must not have a position."""
        self._positions.forget(indices)
        for group in group_names(indices):
            with ignoring_absent():
                self._server.client.indices.delete(index=group, ignore_unavailable=True)

    def _is_like_new(self, table: Table, index: str) -> bool:
        """Say whether an index has the layout of a new one, and was never written to.

        The record alone proves nothing: it is removed before its index.
        """
        layout = Layout.of(table)
        record = self._positions.records([table]).get(table.qualified)
        return (
            record is not None
            and record.fresh
            and self._layout(index) == layout
            and self._indices.last_changes(index) == [-1] * layout.shards
        )

    def _make(self, table: Table) -> None:
        """Create an index; readers see it unless it is of another generation."""
        generation = self._indices.generation(table)
        index = self._indices.name(table, generation or new_generation())
        body = Layout.of(table).body(is_live=generation is None)
        live: dict[str, str] = {}
        if generation is None:
            live = {name: place.index for name, place in self._indices.find([table]).items()}
            if not live:
                # Created with its alias: each change of the cluster's state costs as much as the
                # rest of a table's start.
                body["aliases"] = {self._indices.alias(table): {}}
        self._create(table, index, body)
        if live:
            self._server.switch(
                self._indices.switch_actions([table], live, {table.qualified: index})
            )

    def _create(self, table: Table, index: str, body: Mapping[str, Any]) -> None:
        try:
            self._server.create(index, body)
        except Refusal as error:
            properties = body["mappings"]["properties"]
            raise layout_error(table, self.name, error, properties) from None

    def _adapt(self, table: Table, index: str) -> None:
        """Add the fields of new columns to an index, and settings that it takes while it is open.

        If the file asks for what an open index can't take, the index stays as the file asked for it
        when it was made: readers get current rows until a rebuild replaces it.

        Raises:
            SchemaMismatch: the columns themselves need other fields.
        """
        layout = Layout.of(table)
        mapping = self._mapping(index)
        existing = Layout.from_mapping(mapping)
        try:
            require_same_fields(table, self.name, layout, existing)
            self._change_settings(table, index, layout, existing)
        except SchemaMismatch as error:
            if error.waits:
                raise
            if self._indices.generation(table) is None:
                log.warning(
                    "index_stays_as_made",
                    table=table.qualified,
                    error=error.message,
                    hint=error.hint,
                )
            layout = existing.as_made(table)
        try:
            self._add_fields(table, index, mapping, layout.mapping(existing))
        except SchemaMismatch:
            # Nothing of what the file asks for, rather than half of it.
            self._change_settings(table, index, existing, layout)
            raise

    def _change_settings(self, table: Table, index: str, layout: Layout, existing: Layout) -> None:
        changed = layout.changed_settings(existing)
        settings = {f"index.{name}": value for name, value in changed.items()}
        try:
            if settings:
                self._server.client.indices.put_settings(index=index, settings=settings)
        except Refusal as error:
            if error.status != 400:
                raise
            raise outdated_error(table, self.name, "settings", sorted(changed)) from None

    def _add_fields(
        self, table: Table, index: str, existing: Mapping[str, Any], added: Mapping[str, Any]
    ) -> None:
        """Add a mapping's fields, and its note, to an index that has another mapping."""
        try:
            self._server.client.indices.put_mapping(
                index=index, meta=added["_meta"], properties=added["properties"]
            )
        except Refusal as error:
            both = existing.get("properties", {}), added["properties"]
            raise layout_error(table, self.name, error, *both) from None

    def _layout(self, index: str) -> Layout:
        return Layout.from_mapping(self._mapping(index))

    def _mapping(self, index: str) -> Mapping[str, Any]:
        mapping: Mapping[str, Any] = self._server.client.indices.get_mapping(index=index)[index]
        return mapping["mappings"]  # type: ignore[no-any-return]

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


def _prepare_for_readers(
    server: Server, tables: Sequence[Table], indices: Mapping[str, str]
) -> None:
    """Restore the settings that made the load cheap, and let searches see the rows.

    Indices with the same settings share requests. Where none differs, as after a rollback, none is
    sent: the server would rewrite its cluster's state while nobody can write to the view.
    """
    current: dict[str, Any] = {}
    for group in group_names(indices.values()):
        current |= server.client.indices.get_settings(index=group, flat_settings=True).body
    indices_by_settings: dict[str, list[str]] = {}
    for table in tables:
        index = indices[table.qualified]
        restored = Layout.of(table).restored_settings
        if not _has_settings(current[index]["settings"], restored):
            indices_by_settings.setdefault(json.dumps(restored), []).append(index)
    for settings, names in indices_by_settings.items():
        for group in group_names(names):
            server.client.indices.put_settings(index=group, settings=json.loads(settings))
    server.refresh(indices.values())


def _has_settings(current: Mapping[str, str], restored: Mapping[str, Any]) -> bool:
    """Whether an index has these settings; None is the server's default."""
    return all(
        current.get(f"index.{name}") == (None if value is None else str(value).lower())
        for name, value in restored.items()
    )


SUPPORTED = {"Elasticsearch": ("8", "9"), "OpenSearch": ("2", "3")}
"""Major versions by product."""
FULL_SHARES = 0.9
WATERMARK = "cluster.routing.allocation.disk.watermark"


@dataclass(frozen=True)
class IndexFacts:
    product: str
    versions: tuple[str, ...]
    """Of its nodes."""
    status: str
    shards: int
    shard_limit: int
    disk_used: Mapping[str, float]
    """By node: the share of its disk that is used."""
    watermark: float
    """The share from which a node gets no more shards."""
    blocked: tuple[str, ...]
    """Indices of the pipeline that have a block."""
    shadowed: tuple[str, ...]
    """Names of views that an index has which isn't the pipeline's."""


def read_cluster(server: Server, aliases: Sequence[str]) -> IndexFacts:
    """Read the facts. aliases: of the pipeline's views. Raises SinkUnavailable, SinkRejected."""
    client = server.client
    status, settings, shards, shard_limit = _read_state(server)
    nodes = client.nodes.stats(metric="fs")["nodes"]
    versions = client.nodes.info(filter_path="nodes.*.version")["nodes"]
    blocked = []
    shadowed = []
    for group in group_names(aliases):
        answer = client.indices.get_settings(
            index=group,
            # The uuid, so that an index without blocks is listed, too.
            name=["index.blocks.*", "index.uuid"],
            flat_settings=True,
            ignore_unavailable=True,
        )
        for index, body in answer.body.items():
            blocked += [index] if blocks_of(body["settings"]) else []
            shadowed += [index] if index in aliases else []
    return IndexFacts(
        server.product,
        tuple(sorted({node["version"] for node in versions.values()})),
        status,
        shards,
        shard_limit,
        {node["name"]: _used(node["fs"]["total"]) for node in nodes.values()},
        _share(str(settings.get(f"{WATERMARK}.low", "85%"))),
        tuple(blocked),
        tuple(shadowed),
    )


def _read_state(server: Server) -> tuple[str, Mapping[str, Any], int, int]:
    """Read the cluster's status and settings, how many shards it holds, and how many it takes."""
    health = server.client.cluster.health()
    listed = server.client.cluster.get_settings(include_defaults=True, flat_settings=True)
    settings = {**listed["defaults"], **listed["persistent"], **listed["transient"]}
    used = sum(int(health[f"{state}_shards"]) for state in ("active", "initializing", "unassigned"))
    limit = int(settings.get(SHARDS, 1000)) * int(health["number_of_data_nodes"])
    return health["status"], settings, used, limit


def _used(total: Mapping[str, Any]) -> float:
    size = int(total.get("total_in_bytes", 0))
    return 1 - int(total.get("available_in_bytes", size)) / size if size else 0.0


def _share(text: str) -> float:
    """Read a watermark; one that is given in bytes isn't compared."""
    return float(text.rstrip("%")) / 100 if text.endswith("%") else 1.0


def check_cluster(sink: str, facts: IndexFacts) -> Iterator[Finding]:
    """Judge the cluster. Pure."""

    def finding(code: str, subject: str, message: str, fix: str) -> Finding:
        return find(code, subject, f"{sink}: {message}", fix, sink=sink)

    majors = SUPPORTED[facts.product]
    unsupported = [version for version in facts.versions if version.split(".")[0] not in majors]
    if unsupported:
        message = (
            f"a node has version {unsupported[0]} of {facts.product};"
            f" {' and '.join(majors)} are supported."
        )
        yield finding(
            "sink-unfit/elasticsearch",
            "version",
            message,
            curl("/_nodes?filter_path=nodes.*.version"),
        )
    if facts.status == "red":
        message = "the cluster is red: some shards are nowhere."
        yield finding("index-red", "cluster", message, curl("/_cluster/health?level=indices"))
    if facts.shards > FULL_SHARES * facts.shard_limit:
        message = f"{facts.shards} of {facts.shard_limit} shards are in use: a rebuild needs more."
        yield finding("index-shards-full", SHARDS, message, curl("/_cat/shards?v"))
    for node, share in facts.disk_used.items():
        if share >= facts.watermark:
            message = (
                f"the disk of node {node} is {share:.0%} full, above the limit for new shards."
            )
            yield finding("disk-low/index", node, message, curl("/_cat/allocation?v"))
    for index in facts.blocked:
        message = f"index {index} is blocked."
        yield finding("index-blocked", index, message, curl(f"/{index}/_settings/index.blocks.*"))
    for name in facts.shadowed:
        message = f"an index is called {name}, which has to be the name of the view's alias."
        yield finding("index-shadows-alias", name, message, curl(f"/{name}"))


def require_capacity(server: Server, indices: Indices, tables: Sequence[Table], sink: str) -> None:
    """Raise SinkRejected when disk or shards don't suffice for as much as the live indices take: the
    cluster would refuse half-way.
    """
    places = indices.find(tables)
    needed = indices.bytes([place.index for place in places.values()])
    nodes = server.client.nodes.stats(metric="fs")["nodes"].values()
    free = max(int(node["fs"]["total"]["available_in_bytes"]) for node in nodes)
    require_free_space(needed, free, server.name, sink)
    # A rebuild removes what else lies beside the live views before it makes anything.
    spare = sum(len(names[1:]) for names in indices.generations(tables).values())
    needed_shards = sum(Layout.of(table).shards for table in tables) - spare
    _, _, used, limit = _read_state(server)
    if needed_shards > 0 and used + needed_shards > limit:
        raise server.full(needed_shards)
