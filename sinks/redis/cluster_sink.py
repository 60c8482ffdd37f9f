"""A cluster of Redis or Valkey: a row per key, under <prefix>:<schema>.<table>@<name>:<id>.

No script reaches two slots there, and no database changes places with another. So generations lie
side by side under names of their own, and readers find the one to read in the catalog, which a switch
changes in one step. For positions see `cluster_scripts`: writing a row again changes nothing, and no
row is set back, whoever writes late.
"""

import itertools
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial

from cdc.errors import SinkUnavailable
from cdc.model.generation import new_generation
from cdc.model.outcome import Advance
from cdc.model.table import Table
from cdc.redis.checkpoint import checkpoint_of
from cdc.redis.server import CLUSTER_COMMANDS, view_key
from cdc.sink.contract import Batch, Outcome
from cdc.sink.fencing import mismatch
from cdc.sink.promotion import GenerationReplaced, wait_until_caught_up, would_go_back
from cdc.sinks.redis import health
from cdc.sinks.redis.catalog import (
    Catalog,
    Place,
    change,
    copy_key,
    read_catalog,
    removal,
    remove_places,
)
from cdc.sinks.redis.cluster_executor import ClusterWriter, Target
from cdc.sinks.redis.cluster_scripts import MOVE, READ, TAKE
from cdc.sinks.redis.database import Database
from cdc.sinks.redis.executor import ChunkWriter, PendingAdvance
from cdc.sinks.redis.positions import Positions
from cdc.sinks.redis.sink import Redis
from cdc.sinks.redis.slots import Call, Owned, call, owned
from cdc.sinks.redis.tables import list_keys, remove_keys

OWN_FIELDS = ("now", "history", "trusted")
"""Fields of a copy that are about its node."""
Copies = Mapping[int, Mapping[str, str]]
"""Fields of a position's copies, by slot."""


class ClusterPositions(Positions):
    """See `Positions`. The position is the least of its copies: what a node has lost is applied again."""

    def __init__(self, database: Database, generation_names: Mapping[str, str] | None) -> None:
        super().__init__(database, generation_names)
        self._owned: Sequence[Owned] = ()
        # By table, as they were read last.
        self._places: dict[str, Place] = {}
        self._copies: dict[str, Copies] = {}
        self._targets: dict[str, Target] = {}

    def create(self, table: Table) -> None:
        name = table.qualified
        catalog = read_catalog(self.database)
        if self.place(table, catalog):
            return
        place = Place.new(name, self.generation(table) or new_generation())
        changes = [(place.field, "", place.text)]
        if not self.generation(table):
            changes.append((name, "", view_key(self.database.prefix, place.name)))
        # If it isn't changed, another writer has created it just now.
        change(self.database, *changes)

    def place(self, table: Table, catalog: Catalog | None = None) -> Place | None:
        """Find where this generation of a table lies."""
        catalog = catalog or read_catalog(self.database)
        name = self.generation(table)
        live = catalog.live(self.database.prefix, table.qualified)
        if live and live.generation == name:
            raise GenerationReplaced(table.qualified, name, self.database.sink)
        place = catalog.places.get(f"{table.qualified}@{name}") if name else live
        if place:
            self._places[table.qualified] = place
        return place

    def last_place(self, table: Table) -> Place | None:
        """Return where the generation lay when it was last looked up."""
        return self._places.get(table.qualified)

    def name(self, table: Table) -> str:
        place = self.place(table)
        return place.generation if place else ""

    def read_all(self, tables: Sequence[Table]) -> list[dict[str, str]]:
        catalog = read_catalog(self.database)
        places = [self.place(table, catalog) for table in tables]
        calls = [
            Call(slot, [copy_key(self.database.prefix, place.name, slot)], [])
            for place in places
            if place
            for slot in place.copies
        ]
        answers = iter(self.database.ask(partial(call, source=READ, calls=calls)))
        positions = []
        for place in places:
            copies = {slot: _pairs(next(answers)) for slot in place.copies} if place else {}
            if place:
                self._copies[place.table] = copies
            positions.append(self._least(place, copies))
        return positions

    def _read(self, table: Table) -> dict[str, str]:
        return self.read_all([table])[0]

    def _least(self, place: Place | None, copies: Copies) -> dict[str, str]:
        """Merge the copies of a position. `unguarded` if a writer has to take over before it goes on."""
        if place is None:
            return {}
        newest = max(copies.values(), key=lambda at: int(at.get("takeovers", "0")), default={})
        fields = {"generation": place.generation, "takeovers": newest.get("takeovers", "0")}
        identities = {(at.get("topic_id"), at.get("partitions")) for at in copies.values()}
        if len(identities) != 1 or None in identities.pop():
            # One node at least has nothing yet, or nothing any more.
            return fields
        fields = {name: value for name, value in newest.items() if name not in OWN_FIELDS} | fields
        partitions = [str(partition) for partition in range(int(fields["partitions"]))]
        for partition in partitions:
            fields[partition] = str(min(int(at.get(partition, "0")) for at in copies.values()))
        is_guarded = all(
            at["now"] == at.get("history")
            and all(at.get(name, "0") == fields[name] for name in ("takeovers", *partitions))
            for at in copies.values()
        )
        if not is_guarded or (self._owned and set(copies) != self._lowest):
            fields["unguarded"] = "1"
        return fields

    @property
    def _lowest(self) -> set[int]:
        return {part.lowest for part in self._owned}

    def apply(
        self, batch: Batch, writer: Callable[[str, str, Mapping[str, PendingAdvance]], ChunkWriter]
    ) -> Outcome:
        self._owned = self.database.ask(owned)
        return super().apply(
            batch,
            lambda url, prefix, pending: self._aimed(writer(url, prefix, pending)),
        )

    def _aimed(self, writer: ChunkWriter) -> ChunkWriter:
        assert isinstance(writer, ClusterWriter)
        writer.targets = {
            topic: self._targets[pending.advance.table.qualified]
            for topic, pending in writer.pending.items()
        }
        return writer

    def take(self, advance: Advance, writer: str) -> PendingAdvance | None:
        pending = super().take(advance, writer)
        if pending:
            table = advance.table.qualified
            trusted = {slot: at["trusted"] for slot, at in self._copies[table].items()}
            self._targets[table] = Target(
                self._places[table].name,
                [part.start for part in self._owned],
                [trusted[part.lowest] for part in self._owned],
            )
        return pending

    def _take_over(self, pending: PendingAdvance, fields: Mapping[str, str]) -> int:
        """Take over each copy in turn, and make those that nodes lack. All are where the least is then."""
        table = pending.advance.table
        if not fields:
            # The catalog's node has lost that there is such a generation.
            raise mismatch(table, pending.advance.start, None, ours=True)
        place = self._places[table.qualified]
        copies = self._copies[table.qualified]
        # Later than any number that a node may have lost.
        epoch = max(int(fields.get("takeovers", "0")) + 1, time.time_ns() // 1000)
        kept = {
            name: value for name, value in fields.items() if name not in ("unguarded", "takeovers")
        }
        kept |= {"writer": pending.writer, "generation": place.generation}
        partitions = map(str, range(pending.advance.end.partition_count))
        compared = ["topic_id", "writer", *partitions]
        taken: dict[int, Mapping[str, str]] = {}
        for slot in sorted(self._lowest | set(copies)):
            read = copies.get(slot)
            expected = [(name, read.get(name, "")) for name in compared] if read else []
            words = [word for pair in expected for word in pair]
            stored = itertools.chain.from_iterable(kept.items())
            key = copy_key(self.database.prefix, place.name, slot)
            one = Call(slot, [key], [str(epoch), len(words), *words, *stored])
            (trusted,) = self.database.ask(partial(call, source=TAKE, calls=[one]))
            if trusted is None:
                raise mismatch(table, pending.advance.start, pending.advance.end, ours=False)
            taken[slot] = {"trusted": trusted, "rows": fields.get("rows", "0")}
        if set(place.copies) != self._lowest:
            moved = replace(place, copies=tuple(sorted(self._lowest)))
            if not change(self.database, (place.field, place.text, moved.text)):
                raise SinkUnavailable(
                    f"Where positions of {table.qualified} lie has changed meanwhile.",
                    hint="no action needed; retried automatically",
                    sink=self.database.sink,
                )
            self._places[table.qualified] = moved
        self._copies[table.qualified] = taken
        return epoch

    def finish(self, pending: PendingAdvance, moved: Iterable[str]) -> None:
        """Move all copies to the end of the batch: all of its rows are written.

        moved: what `ClusterWriter.finish` returns.
        """
        advance = pending.advance
        end = advance.end
        partitions = zip(range(len(end.offsets)), pending.offsets, end.offsets, strict=True)
        steps = list(itertools.chain.from_iterable(partitions))
        before = int(next(iter(self._copies[advance.table.qualified].values())).get("rows", "0"))
        rows = before + sum(map(int, moved))
        fields = ("topic_id", end.topic_id, "at", f"{time.time():.3f}", "rows", rows)
        count = end.partition_count
        arguments: list[str | int | bytes] = [pending.writer, str(pending.takeover), count, *steps]
        arguments += ["partitions", count, *fields, *pending.extra_fields]
        place = self._places[advance.table.qualified]
        calls = [
            Call(slot, [copy_key(self.database.prefix, place.name, slot)], arguments)
            for slot in place.copies
        ]
        answers = self.database.ask(partial(call, source=MOVE, calls=calls))
        if set(answers) != {"ok"}:
            has_lost = "fenced" not in answers
            raise mismatch(advance.table, end, None if has_lost else end, ours=has_lost)


def _pairs(words: Sequence[str]) -> dict[str, str]:
    return dict(zip(words[::2], words[1::2], strict=True))


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
