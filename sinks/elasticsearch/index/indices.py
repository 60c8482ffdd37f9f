"""Indices of a sink's tables: their names, which of them readers see, the alias that each is written
through, and blocks on writes.
"""

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote
from uuid import uuid4

from cdc.errors import SinkBlocked
from cdc.model.table import Table
from cdc.sink.promotion import SWITCH_S
from cdc.sinks.elasticsearch.client import (
    CLOSED_SETTING,
    WRITE,
    Server,
    block_message,
    blocks_of,
    group_names,
    ignoring_absent,
    join_names,
    lift_hint,
    open_hint,
)
from cdc.sinks.elasticsearch.connection import unavailable

WRITER_SEPARATOR = ".W."
"""Between an index' name and a writer's token. No index may have a capital in its name."""
PROMOTION_SEPARATOR = ".P."
"""Between an index' name and the token of a promotion that keeps writers away from it."""
PROBE_SEPARATOR = ".probe."
"""Between a table's alias and a token. No table captured has a dot in its name."""
INCLUDE_CLOSED = {"ignore_unavailable": "true", "expand_wildcards": "all"}


@dataclass(frozen=True)
class WritableIndex:
    """An index, and the aliases through which it is written: one, once a writer has taken it
    over.

    promotions: the aliases that mark it as blocked by promotions.
    """

    index: str
    writers: tuple[str, ...] = ()
    promotions: tuple[str, ...] = ()

    def writer(self, token: str) -> str:
        return f"{self.index}{WRITER_SEPARATOR}{token}"

    def promotion(self, token: str) -> str:
        return f"{self.index}{PROMOTION_SEPARATOR}{token}"


class Indices:
    """The indices of a pipeline, or of generations of it."""

    def __init__(
        self, server: Server, pipeline: str, generation_names: Mapping[str, str] | None
    ) -> None:
        self._server = server
        self._pipeline = pipeline
        self._generation_names = generation_names

    def alias(self, table: Table) -> str:
        return f"{self._pipeline}-{table.qualified}".lower()

    def name(self, table: Table, generation: str) -> str:
        return f"{self.alias(table)}@{generation}"

    def probe(self, table: Table) -> str:
        """Return a new name of an index that nobody reads. It is no generation's."""
        return f"{self.alias(table)}{PROBE_SEPARATOR}{new_token()}"

    def generation(self, table: Table) -> str | None:
        """Return this generation's name of a table; None for the live one, whatever its name."""
        names = self._generation_names
        return None if names is None else names[table.qualified]

    def readable_name(self, table: Table) -> str:
        """Return the name that a view is read by: the readers' alias, or a generation's index."""
        generation = self.generation(table)
        return self.alias(table) if generation is None else self.name(table, generation)

    def find(self, tables: Sequence[Table]) -> dict[str, WritableIndex]:
        """Find the index of each table; by table name, for the tables that have one."""
        by_name = {self.readable_name(table): table for table in tables}
        paths = list(join_names(by_name))
        # All of the pipeline's where these don't fit into one request.
        aliases_by_index = self._read_aliases(
            paths if len(paths) <= 1 else [self._pipeline_pattern]
        )
        return {
            by_name[name].qualified: _writable_index(index, aliases)
            for index, aliases in aliases_by_index.items()
            for name in (aliases if self._generation_names is None else [index])
            if name in by_name
        }

    def generations(self, tables: Sequence[Table]) -> dict[str, list[str]]:
        """List the names of all generations of each table, the live one first."""
        aliases = [self.alias(table) for table in tables]
        paths = (
            [f"{quote(aliases[0], safe='@')}@*"] if len(aliases) == 1 else [self._pipeline_pattern]
        )
        aliases_by_index = self._read_aliases(paths)
        names_by_table = {}
        for table, alias in zip(tables, aliases, strict=True):
            indices = sorted(
                index for index in aliases_by_index if index.rpartition("@")[0] == alias
            )
            live_first = sorted(indices, key=lambda index: alias not in aliases_by_index[index])
            names_by_table[table.qualified] = [index.rpartition("@")[2] for index in live_first]
        return names_by_table

    def names(self, tables: Sequence[Table]) -> list[str]:
        """List all indices of these tables: their generations, and probes that a killed process has left."""
        aliases = {self.alias(table) for table in tables}
        indices = self._read_aliases([self._pipeline_pattern]) if tables else {}
        return sorted(
            index
            for index in indices
            if aliases & {index.rpartition("@")[0], index.rpartition(PROBE_SEPARATOR)[0]}
        )

    def switch_actions(
        self, tables: Sequence[Table], live: Mapping[str, str], target: Mapping[str, str]
    ) -> Iterator[dict[str, Any]]:
        """Build the actions that move readers' aliases from live indices, if any, to new ones."""
        for table in tables:
            yield {"add": {"index": target[table.qualified], "alias": self.alias(table)}}
            if table.qualified in live:
                yield {"remove": {"index": live[table.qualified], "alias": self.alias(table)}}

    def bytes(self, indices: Sequence[str]) -> int:
        """Sum up the bytes of these indices, without replicas."""
        # The pipeline's, since one of these may be deleted meanwhile.
        answer = self._server.client.indices.stats(
            index=f"{self._pipeline.lower()}-*",
            metric="store",
            filter_path="indices.*.primaries.store.size_in_bytes",
        )
        stats = answer.body.get("indices", {})
        return sum(
            int(stats[index]["primaries"]["store"]["size_in_bytes"])
            for index in indices
            if index in stats
        )

    def last_changes(self, index: str) -> list[int]:
        """Read the number of the last change of each shard of an index: -1 for one that has had no
        change, neither a document nor a delete. A shard that is away isn't listed.
        """
        answer = self._server.client.indices.stats(
            index=index,
            metric="docs",
            level="shards",
            filter_path="indices.*.shards.*.seq_no.max_seq_no",
        )
        shards = answer.body.get("indices", {}).get(index, {}).get("shards", {})
        return [
            max(int(copy["seq_no"]["max_seq_no"]) for copy in copies) for copies in shards.values()
        ]

    @property
    def _pipeline_pattern(self) -> str:
        return f"{quote(self._pipeline.lower(), safe='')}-*"

    def _read_aliases(self, paths: Iterable[str]) -> dict[str, set[str]]:
        """Read the indices at these paths, each with its aliases; closed ones are included."""
        aliases_by_index: dict[str, set[str]] = {}
        for path in paths:
            answer = self._server.ask("GET", f"/{path}/_alias", query=INCLUDE_CLOSED)
            aliases_by_index |= {
                index: set(index_aliases["aliases"]) for index, index_aliases in answer.items()
            }
        return aliases_by_index


class WriteBlock:
    """The write blocks of a sink's indices. A promotion blocks writes while it switches aliases, so
    that writers can't change what readers see. Anyone else's blocks stay.

    A promotion marks its indices by an alias before it blocks them, so the blocks that a killed one
    has left aren't taken for an operator's. The mark is an alias because every batch reads its
    indices' aliases anyway.

    Threads: of the sink's, see `cdc.sink.contract.Sink`. Errors: see `Server`.
    """

    def __init__(self, server: Server) -> None:
        self._server = server
        self._token = new_token()
        self._since_by_mark: dict[str, float] = {}

    def set(self, places: Sequence[WritableIndex]) -> None:
        """Mark indices, then block writes; on return none is under way, and none begins.

        Call `require_unblocked` before, and `release` whatever becomes of this.
        """
        if not places:
            return
        self._server.switch(
            {"add": {"index": place.index, "alias": place.promotion(self._token)}}
            for place in places
        )
        for group in group_names(place.index for place in places):
            answer = self._server.client.indices.add_block(index=",".join(group), block="write")
            if not all(index.get("blocked") for index in answer["indices"]):
                raise unavailable(f"Not all of {self._server.name} has stopped taking writes.")

    def release(self, places: Sequence[WritableIndex]) -> None:
        """Let writes in again that `set` has blocked, or an earlier promotion of these indices."""
        self._release(
            {
                place.index: sorted({*place.promotions, place.promotion(self._token)})
                for place in places
            }
        )

    def release_abandoned(self, places: Sequence[WritableIndex]) -> None:
        """Release indices that only killed promotions have marked: any other is done by then."""
        now = time.monotonic()
        for place in places:
            for mark in place.promotions:
                self._since_by_mark.setdefault(mark, now)
        self._release(
            {
                place.index: place.promotions
                for place in places
                if place.promotions
                and all(now - self._since_by_mark[mark] > 2 * SWITCH_S for mark in place.promotions)
            }
        )

    def require_unblocked(self, places: Iterable[WritableIndex], *others: str) -> None:
        """Raise SinkBlocked, with the command that lifts the block, when somebody has set one or has
        closed an index.

        The indices that a promotion has marked are passed over. others: names of further indices.
        """
        unmarked = [place.index for place in places if not place.promotions]
        for group in group_names([*others, *unmarked]):
            answer = self._server.client.indices.get_settings(
                index=group, flat_settings=True, ignore_unavailable=True
            )
            for index, body in answer.body.items():
                if body["settings"].get(CLOSED_SETTING) == "true":
                    raise SinkBlocked(f"The index {index} is closed.", hint=open_hint(index))
                for block in blocks_of(body["settings"]):
                    raise SinkBlocked(block_message(index, block), hint=lift_hint(index, block))

    def _release(self, marks_by_index: Mapping[str, Sequence[str]]) -> None:
        """Lift the blocks, then remove the marks: a block without one would stay for ever."""
        if not marks_by_index:
            return
        indices = self._server.client.indices
        for group in group_names(marks_by_index):
            with ignoring_absent():
                indices.put_settings(index=group, settings={WRITE: None}, ignore_unavailable=True)
        # An index' own marks alone: of thousands of indices, each with the marks of all, the server
        # would refuse the body.
        actions = [
            {"remove": {"index": index, "aliases": marks, "must_exist": False}}
            for index, marks in marks_by_index.items()
        ]
        # An index that is gone fails all of them; the next batches of the others remove their marks.
        with ignoring_absent():
            indices.update_aliases(actions=actions)


def _writable_index(index: str, aliases: Iterable[str]) -> WritableIndex:
    """Sort out its own aliases, which begin with its name; what isn't a promotion's is a writer's."""
    own = sorted(alias for alias in aliases if alias.startswith(f"{index}."))
    promotions = tuple(alias for alias in own if alias.startswith(f"{index}{PROMOTION_SEPARATOR}"))
    return WritableIndex(index, tuple(sorted({*own} - {*promotions})), promotions)


def new_token() -> str:
    """Name a writer or a promotion in aliases."""
    return uuid4().hex[:12]


def generation_of(index: str) -> str:
    return index.rsplit("@", 1)[1]
