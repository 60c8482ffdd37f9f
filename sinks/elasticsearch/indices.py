"""Names: which indices a sink's tables have, which of them readers see, and through which alias each is written to."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from cdc.model.table import Table
from sinks.elasticsearch.client import grouped
from sinks.elasticsearch.server import Server

WRITER = ".W."
"""Between an index' name and a writer's token. No index may have a capital in its name."""
CLOSED_TOO = {"ignore_unavailable": "true", "expand_wildcards": "all"}


@dataclass(frozen=True)
class Place:
    """An index, and the aliases through which it is written to: one, as soon as somebody has begun."""

    index: str
    writers: tuple[str, ...] = ()

    def writer(self, token: str) -> str:
        return f"{self.index}{WRITER}{token}"


class Indices:
    """The indices of a pipeline, or of generations of it."""

    def __init__(self, server: Server, pipeline: str, beside: Mapping[str, str] | None) -> None:
        self._server, self._pipeline, self._beside = server, pipeline, beside

    def alias(self, table: Table) -> str:
        return f"{self._pipeline}-{table.qualified}".lower()

    def name(self, table: Table, generation: str) -> str:
        return f"{self.alias(table)}@{generation}"

    def of(self, tables: Sequence[Table]) -> dict[str, Place]:
        """The index of each table, by its name, for those that have one."""
        if self._beside is not None:
            wanted = {self.name(table, self._beside[table.qualified]): table for table in tables}
            there = self._aliases(wanted)
            return {wanted[index].qualified: _place(index, there[index]) for index in there if index in wanted}
        by_alias = {self.alias(table): table for table in tables}
        return {
            by_alias[alias].qualified: _place(index, aliases)
            for index, aliases in self._aliases(by_alias).items()
            for alias in aliases
            if alias in by_alias
        }

    def generations(self, tables: Sequence[Table]) -> dict[str, list[str]]:
        """The names of all that exist, of each table, the live one first."""
        wanted = [self.alias(table) for table in tables]
        few = [f"{quote(wanted[0], safe='@')}@*"] if len(wanted) == 1 else [self._all]
        there = self._asked(few)
        result = {}
        for table, alias in zip(tables, wanted, strict=True):
            named = sorted(index for index in there if index.rpartition("@")[0] == alias)
            ordered = sorted(named, key=lambda index: alias not in there[index])
            result[table.qualified] = [index.rpartition("@")[2] for index in ordered]
        return result

    def bytes(self, indices: Sequence[str]) -> int:
        """How much these take, without copies."""
        shown = {"filter_path": "indices.*.primaries.store.size_in_bytes", "ignore_unavailable": "true"}
        there: dict[str, Any] = {}
        for group in self._paths(indices):
            there |= self._server.ask("GET", f"/{group}/_stats/store", query=shown).get("indices", {})
        return sum(int(there[index]["primaries"]["store"]["size_in_bytes"]) for index in indices if index in there)

    @property
    def _all(self) -> str:
        return f"{quote(self._pipeline.lower(), safe='')}-*"

    def _paths(self, names: Iterable[str]) -> list[str]:
        """Of a request about these names: with all of the pipeline, and more, if they don't fit into one."""
        groups = list(grouped(names))
        return groups if len(groups) <= 1 else [self._all]

    def _aliases(self, names: Iterable[str]) -> dict[str, set[str]]:
        """The indices of these names, and perhaps others, each with its aliases; closed ones are there, too."""
        return self._asked(self._paths(names))

    def _asked(self, paths: Iterable[str]) -> dict[str, set[str]]:
        there: dict[str, set[str]] = {}
        for path in paths:
            answer = self._server.ask("GET", f"/{path}/_alias", query=CLOSED_TOO)
            there |= {index: set(held["aliases"]) for index, held in answer.items()}
        return there


def _place(index: str, aliases: Iterable[str]) -> Place:
    """Aliases that begin with the index' name are ours, also those of earlier versions."""
    return Place(index, tuple(sorted(alias for alias in aliases if alias.startswith(f"{index}."))))
