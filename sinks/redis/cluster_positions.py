"""Positions on a cluster: a copy on each node, moved once the rows of all nodes are written."""

import itertools
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial

from cdc.errors import SinkUnavailable
from cdc.model.generation import new_generation
from cdc.model.outcome import Advance
from cdc.model.table import Table
from cdc.redis.server import view_key
from cdc.sink.contract import Batch, Outcome
from cdc.sink.fencing import mismatch
from cdc.sink.promotion import GenerationReplaced
from cdc.sinks.redis.catalog import Catalog, Place, change, copy_key, read_catalog
from cdc.sinks.redis.cluster_executor import ClusterWriter, Target
from cdc.sinks.redis.cluster_scripts import MOVE, READ, TAKE
from cdc.sinks.redis.database import Database
from cdc.sinks.redis.executor import ChunkWriter, PendingAdvance
from cdc.sinks.redis.positions import Positions
from cdc.sinks.redis.slots import Call, Owned, call, owned

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
