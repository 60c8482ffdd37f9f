"""A cluster of Redis or Valkey: a row per key, under <prefix>:<schema>.<table>@<name>:<id>.

No script reaches two slots there, and no database changes places with another. So generations lie
side by side under names of their own, and readers find the one to read in the catalog, which a switch
changes in one step. For positions see `cluster_scripts`: writing a row again changes nothing, and no
row is set back, whoever writes late.
"""

from collections.abc import Mapping, Sequence
from functools import partial

from cdc.errors import SinkUnavailable
from cdc.model.generation import new_generation
from cdc.model.table import Table
from cdc.redis.checkpoint import checkpoint_of
from cdc.redis.server import CLUSTER_COMMANDS, view_key
from cdc.sink.contract import Batch, Outcome
from cdc.sink.promotion import wait_until_caught_up, would_go_back
from cdc.sinks.redis import health
from cdc.sinks.redis.catalog import Place, change, read_catalog, removal, remove_places
from cdc.sinks.redis.cluster_executor import ClusterWriter
from cdc.sinks.redis.cluster_positions import ClusterPositions
from cdc.sinks.redis.database import Database
from cdc.sinks.redis.sink import Redis
from cdc.sinks.redis.tables import list_keys, remove_keys


class ClusterRedis(Redis):
    """See `Redis`. Each view can be switched by itself."""

    promotes_all_tables = False

    def __init__(
        self,
        name: str,
        url: str,
        prefix: str,
        generation_names: Mapping[str, str] | None = None,
        *,
        lifetimes_ms: Mapping[str, int] | None = None,
        hashes: frozenset[str] = frozenset(),
    ) -> None:
        super().__init__(name, url, prefix, lifetimes_ms=lifetimes_ms, hashes=hashes)
        self._database = Database(name, url, prefix, CLUSTER_COMMANDS)
        self._positions: ClusterPositions = ClusterPositions(self._database, generation_names)

    def prepare(self, table: Table) -> None:
        health.require_no_eviction(self._database, table.qualified)
        self._positions.create(table)

    def apply(self, batch: Batch) -> Outcome:
        writer = partial(ClusterWriter, lifetimes_ms=self.lifetimes_ms, hashes=self.hashes)
        return self._positions.apply(batch, writer)

    def clear(self, table: Table) -> None:
        """Give the view another, empty place, so that a writer that comes late writes to no rows that
        anybody reads.
        """
        former = self._positions.last_place(table)
        current = self._positions.place(table)
        former = former or current
        if former is None:
            return
        if current is None:
            # The catalog's node has lost where it lay. Its rows on other nodes are nobody's.
            change(self._database, removal(former)[1])
            self._positions.create(table)
            self._positions.place(table)
            remove_places(self._database, [former])
            return
        name = table.qualified
        is_live = not self._positions.generation(table)
        place = Place.new(name, new_generation() if is_live else former.generation)
        changes = [(former.field, former.text, "" if is_live else place.text)]
        changes.append(removal(former)[1])
        if is_live:
            begins = [view_key(self.prefix, at.name) for at in (former, place)]
            changes += [(place.field, "", place.text), (name, begins[0], begins[1])]
        if not change(self._database, *changes):
            raise SinkUnavailable(
                f"Generations of {name} have changed places while one was made empty.",
                hint="no action needed; retried automatically",
                sink=self.name,
            )
        self._positions.place(table)
        remove_places(self._database, [former])

    def key_prefix(self, table: Table) -> str:
        place = self._positions.place(table)
        # Without a place there are no rows.
        return view_key(self.prefix, place.name if place else f"{table.qualified}@")

    def for_generation(self, names: Mapping[str, str]) -> "ClusterRedis":
        return ClusterRedis(
            self.name,
            self.url,
            self.prefix,
            dict(names),
            lifetimes_ms=self.lifetimes_ms,
            hashes=self.hashes,
        )

    def check_capacity(self, tables: Sequence[Table]) -> None:  # noqa: ARG002  # it is always for all
        health.require_memory(self._database)

    def promote(self, tables: Sequence[Table], names: Mapping[str, str]) -> Mapping[str, str]:
        """Change in one step which generations readers find. A writer applies each batch to the other
        generation first, so one that isn't behind when it is compared isn't behind later either.
        """
        lagging: list[Table] = []
        replaced: dict[str, str] = {}

        def switch() -> bool:
            lagging.clear()
            replaced.clear()
            changes = []
            catalog = read_catalog(self._database)
            live = {table: catalog.live(self.prefix, table.qualified) for table in tables}
            switched = [
                table
                for table, place in live.items()
                if place is None or place.generation != names[table.qualified]
            ]
            candidate = ClusterPositions(self._database, names)
            # In this order: live views may go on meanwhile, after the others.
            before = self._positions.read_all(switched)
            others = candidate.read_all(switched)
            for table, *both in zip(switched, before, others, strict=True):
                stored, candidate_stored = map(checkpoint_of, both)
                place = catalog.places.get(f"{table.qualified}@{names[table.qualified]}")
                is_behind = stored and (
                    candidate_stored is None or would_go_back(candidate_stored, stored)
                )
                if place is None or is_behind:
                    lagging.append(table)
                    continue
                begin = catalog.begins.get(table.qualified, "")
                changes += [
                    (table.qualified, begin, view_key(self.prefix, place.name)),
                    (place.field, place.text, place.text),
                ]
                if former := live[table]:
                    replaced[table.qualified] = former.generation
            return not lagging and change(self._database, *changes)

        wait_until_caught_up(switch, self.name, lagging)
        return replaced

    def generations(self, table: Table) -> list[str]:
        catalog = read_catalog(self._database)
        live = catalog.live(self.prefix, table.qualified)
        others = [place for place in catalog.of(table.qualified) if place != live]
        return [place.generation for place in ([live] if live else []) + others]

    def drop_unreferenced(self, tables: Sequence[Table], keep: Mapping[str, str]) -> None:
        catalog = read_catalog(self._database)
        names = {table.qualified for table in tables}
        for place in catalog.places.values():
            is_live = view_key(self.prefix, place.name) == catalog.begins.get(place.table)
            is_kept = place.table not in names or keep.get(place.table) == place.generation
            if not is_live and not is_kept:
                # If it isn't changed, it is live by now.
                change(self._database, *removal(place))
        remove_places(self._database, read_catalog(self._database).removed)

    def remains(self, tables: Sequence[Table]) -> list[str]:  # noqa: ARG002  # all of its keys
        return list_keys(self._database)

    def remove(self, tables: Sequence[Table]) -> None:  # noqa: ARG002  # all of its keys
        remove_keys(self._database.own_keys(), self._database)
