"""A version of a mirror, read on an executor without the rows that are marked as deleted.

By deltalake's reading of the log and the marks, not ours.
"""

from collections.abc import Iterator
from functools import cached_property
from typing import TYPE_CHECKING, Any

import deltalake

from cdc.sinks.delta.files import parquet
from cdc.sinks.delta.place import locate, table_uri

if TYPE_CHECKING:
    import pyarrow as pa


class MirrorVersion:
    """A version of a mirror. It is opened when the first row is read.

    Used by one task in its thread. Methods raise OSError, DeltaError.
    """

    def __init__(self, folder: str, version: int) -> None:
        self._folder, self._version = folder, version

    @cached_property
    def columns(self) -> frozenset[str]:
        """The names of its columns."""
        return frozenset(field.name for field in self._table.schema().fields)

    def rows(self, ids: "pa.Array", schema: "pa.Schema") -> Iterator["pa.Table"]:
        """Read the rows of sorted ids, as the columns of a schema."""
        for path in self._paths:
            yield from parquet.rows_with_ids(path, ids, schema, self._selections.get(path))

    def batches(self, rows: int, share: int = 0, shares: int = 1) -> Iterator["pa.RecordBatch"]:
        """Read all rows, so many at once at most, with the columns that each file has; or the rows of one
        share of the files.
        """
        import pyarrow as pa

        for path in self._paths[share::shares]:
            selection = self._selections.get(path)
            start = 0
            with parquet.open_file(path) as file:
                for batch in file.iter_batches(rows):
                    end = start + batch.num_rows
                    if selection is None:
                        yield batch
                    else:
                        yield batch.filter(pa.array(selection[start:end]))
                    start = end

    @cached_property
    def _table(self) -> deltalake.DeltaTable:
        return deltalake.DeltaTable(table_uri(self._folder), version=self._version)

    @cached_property
    def _paths(self) -> list[str]:
        import pyarrow as pa

        actions = pa.table(self._table.get_add_actions())
        # Not `file_uris`, which puts the table's folder before absolute paths too.
        return [locate(self._folder, path) for path in actions["path"].to_pylist()]

    @cached_property
    def _selections(self) -> dict[str, Any]:
        """By path of those files that have deletion vectors: which of its rows aren't deleted."""
        import pyarrow as pa

        vectors = pa.table(self._table.deletion_vectors().read_all())
        paths = (locate(self._folder, path) for path in vectors["filepath"].to_pylist())
        selections = vectors["selection_vector"]
        return {path: selections[number].values for number, path in enumerate(paths)}
