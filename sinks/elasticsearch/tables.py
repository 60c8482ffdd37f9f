"""The indices of tables: made, given what they lack, emptied and removed."""

from collections.abc import Mapping, Sequence
from typing import Any

from cdc.model.generation import new_generation
from cdc.model.table import Table
from cdc.sink.contract import SchemaMismatch
from cdc.sinks.elasticsearch.client import Refusal, group_names, ignoring_absent
from cdc.sinks.elasticsearch.index.layout import (
    INDEX_SETTINGS,
    Layout,
    layout_error,
    require_same_fields,
)
from cdc.sinks.elasticsearch.positions import POSITIONS, Positions


class Tables:
    """The indices of a pipeline's tables, or of generations of them.

    sink: name of the sink in messages. Threads: of the sink's, see `cdc.sink.contract.Sink`.
    Errors: see `Server`.
    """

    def __init__(self, sink: str, positions: Positions) -> None:
        self._sink = sink
        self._positions = positions
        self._server = positions.server
        self._indices = positions.indices

    def create(self, table: Table) -> None:
        """Create the index of a table, or add missing fields to an existing one.

        Raises:
            SchemaMismatch: see `Sink.prepare`.
        """
        self._server.create(POSITIONS, {"mappings": {"dynamic": False}, "settings": INDEX_SETTINGS})
        if place := self._indices.find([table]).get(table.qualified):
            self._adapt(table, place.index)
        else:
            self._make(table)

    def require_fit(self, table: Table) -> None:
        """Raise SchemaMismatch when an existing index has other fields.

        Fields alone are compared. Which settings an open index takes only shows when the server
        takes them.
        """
        if place := self._indices.find([table]).get(table.qualified):
            require_same_fields(table, self._sink, Layout.of(table), self._layout(place.index))

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
            self.remove([place.index])

    def remove(self, indices: Sequence[str]) -> None:
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
            and not record.condition
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
        try:
            self._server.create(index, body)
        except Refusal as error:
            properties = body["mappings"]["properties"]
            raise layout_error(table, self._sink, error, properties) from None
        if live:
            self._server.switch(
                self._indices.switch_actions([table], live, {table.qualified: index})
            )

    def _adapt(self, table: Table, index: str) -> None:
        """Add the fields of new columns to an index, and settings that it takes while it is open.

        Raises:
            SchemaMismatch: it was made with others, and can't be changed.
        """
        layout = Layout.of(table)
        existing_mapping = self._mapping(index)
        existing = Layout.from_mapping(existing_mapping)
        require_same_fields(table, self._sink, layout, existing)
        if changed := layout.changed_settings(existing):
            settings = {f"index.{name}": value for name, value in changed.items()}
            try:
                self._server.client.indices.put_settings(index=index, settings=settings)
            except Refusal as error:
                if error.status != 400:
                    raise
                names = ", ".join(sorted(changed))
                raise SchemaMismatch(
                    table,
                    self._sink,
                    f"The index of {table.qualified} in {self._sink} was made with other settings: {names}.",
                ) from None
        try:
            mapping = layout.mapping(existing)
            self._server.client.indices.put_mapping(
                index=index, meta=mapping["_meta"], properties=mapping["properties"]
            )
        except Refusal as error:
            both = existing_mapping.get("properties", {}), mapping["properties"]
            raise layout_error(table, self._sink, error, *both) from None

    def _layout(self, index: str) -> Layout:
        return Layout.from_mapping(self._mapping(index))

    def _mapping(self, index: str) -> Mapping[str, Any]:
        mapping: Mapping[str, Any] = self._server.client.indices.get_mapping(index=index)[index]
        return mapping["mappings"]  # type: ignore[no-any-return]
