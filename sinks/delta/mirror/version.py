"""Rows of a version of a mirror by their ids, on an executor: those that aren't marked as deleted."""

from collections.abc import Iterator
from functools import cached_property
from typing import TYPE_CHECKING, Any

import deltalake

from sinks.delta.files import links, parquet
from sinks.delta.log import add_files

if TYPE_CHECKING:
    import pyarrow as pa


class Mirror:
    """A version of a mirror, opened when it is first asked for a row."""

    def __init__(self, folder: str, version: int) -> None:
        self._folder, self._version = folder, version

    @cached_property
    def columns(self) -> frozenset[str]:
        return frozenset(field.name for field in self._table.schema().fields)

    def rows(self, ids: "pa.Array", schema: "pa.Schema") -> Iterator["pa.Table"]:
        """The rows of sorted ids, as the columns of a schema. Raises OSError, DeltaError."""
        for path in self._paths:
            yield from parquet.matching(path, ids, schema, self._unmarked.get(path))

    @cached_property
    def _table(self) -> deltalake.DeltaTable:
        return deltalake.DeltaTable(self._folder, version=self._version)

    @cached_property
    def _paths(self) -> list[str]:
        return add_files.places(self._table, self._folder)

    @cached_property
    def _unmarked(self) -> dict[str, Any]:
        """By file, of those that have marks: which of its rows are still there."""
        import pyarrow as pa

        marks = pa.table(self._table.deletion_vectors().read_all())
        paths = (links.place(self._folder, path) for path in marks["filepath"].to_pylist())
        return {path: marks["selection_vector"][at].values for at, path in enumerate(paths)}
