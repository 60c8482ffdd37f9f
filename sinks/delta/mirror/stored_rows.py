"""Stored rows of a warehouse: they complete changes that don't carry every value.

Executors look them up: in what the task has staged, then in the mirror.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import deltalake

from cdc.codec.table import codec
from cdc.codec.types.arrow import countable
from cdc.model.table import Table
from cdc.sink.lane import Failure
from cdc.sinks.delta.files import parquet
from cdc.sinks.delta.files.failures import read_failure
from cdc.sinks.delta.files.parquet import ID, DataFile
from cdc.sinks.delta.mirror.version import MirrorVersion

if TYPE_CHECKING:
    import pyarrow as pa

MissingColumns = Mapping[str, Sequence[str]]
"""By id of a row: the columns whose values its change doesn't carry."""
Newest = dict[str, tuple[int, tuple[Any, ...] | None]]
"""By id of a row: its newest offset, and the values there; None for a deleted row."""


class StoredRows:
    """The rows of one view, for one task in its thread.

    version: of the mirror that the batch goes on from; None while that has no rows.
    """

    def __init__(self, table: Table, folder: str, version: int | None) -> None:
        self._table, self._folder = table, folder
        self._mirror = None if version is None else MirrorVersion(folder, version)
        self._staged_hashes: Any = None

    def note_chunk(self, ids: Sequence[str]) -> bool:
        """Remember the rows of a chunk; return whether one of them is staged repeatedly now."""
        import numpy as np

        hashes = np.sort(np.fromiter(map(hash, ids), np.int64, len(ids)))
        earlier, self._staged_hashes = self._staged_hashes, hashes
        if earlier is None:
            return bool((hashes[1:] == hashes[:-1]).any())
        # Two sorted halves one after the other: a stable sort only merges them.
        self._staged_hashes = np.sort(np.concatenate([earlier, hashes]), kind="stable")
        return bool((self._staged_hashes[1:] == self._staged_hashes[:-1]).any())

    def staged_ids(self, ids: Sequence[str]) -> list[str]:
        """Select those ids that earlier chunks may contain (they have the same hash)."""
        import numpy as np

        if self._staged_hashes is None or not ids:
            return []
        staged = np.isin(np.fromiter(map(hash, ids), np.int64, len(ids)), self._staged_hashes)
        return [row_id for row_id, is_staged in zip(ids, staged, strict=True) if is_staged]

    def values(
        self, missing: MissingColumns, rows: Sequence[DataFile], deleted: Sequence[DataFile]
    ) -> Mapping[str, tuple[Any, ...]]:
        """Look up the values of missing columns, by id of those rows that exist.

        A row's values are in the order of the table's columns. rows, deleted: files that the task
        has staged, of rows and of the ids of deleted ones.

        Raises:
            Failure: files can't be read.
        """
        try:
            return self._values(missing, rows, deleted)
        except (OSError, deltalake.exceptions.DeltaError) as error:
            raise Failure("unavailable", read_failure(self._folder, error).message) from None

    def _values(
        self, missing: MissingColumns, rows: Sequence[DataFile], deleted: Sequence[DataFile]
    ) -> dict[str, tuple[Any, ...]]:
        import pyarrow as pa

        names = {name for columns in missing.values() for name in columns}
        fields = [field for field in codec(self._table).schema if field.name in names]
        key_schema = pa.schema([(ID, pa.string()), ("_cdc_offset", pa.int64())])
        schema = pa.schema([*key_schema, *fields])
        newest: Newest = {}
        if staged := self.staged_ids(list(missing)):
            for file in rows:
                self._collect(
                    newest,
                    parquet.rows_with_ids(f"{self._folder}/{file.name}", _sorted(staged), schema),
                )
            for file in deleted:
                path = f"{self._folder}/{file.name}"
                self._collect(newest, parquet.rows_with_ids(path, _sorted(staged), key_schema))
        if self._mirror and (ids := self._mirror_ids(missing, newest)):
            self._collect(newest, self._mirror.rows(_sorted(ids), schema))
        return {row_id: values for row_id, (_, values) in newest.items() if values is not None}

    def _mirror_ids(self, missing: MissingColumns, newest: Mapping[str, object]) -> list[str]:
        """Select the rows that only the mirror can have."""
        assert self._mirror
        # A column that the mirror doesn't have yet: no value of it was ever stored.
        absent = {column.name for column in self._table.columns} - self._mirror.columns
        return [
            row_id
            for row_id, names in missing.items()
            if row_id not in newest and absent.isdisjoint(names)
        ]

    def _collect(self, newest: Newest, tables: Iterable["pa.Table"]) -> None:
        """Add rows by their ids where they are newer; without columns of values they are
        deletes.
        """
        for table in tables:
            columns = {name: table[name] for name in table.column_names}
            ids = columns.pop(ID).to_pylist()
            offsets = columns.pop("_cdc_offset").to_pylist()
            lists = {
                name: column.cast(countable(column.type)).to_pylist()
                for name, column in columns.items()
            }
            nulls = [None] * table.num_rows
            rows = zip(
                *(lists.get(column.name, nulls) for column in self._table.columns), strict=True
            )
            for row_id, offset, values in zip(ids, offsets, rows, strict=True):
                if row_id not in newest or newest[row_id][0] < offset:
                    newest[row_id] = offset, values if lists else None


def _sorted(ids: Iterable[str]) -> "pa.Array":
    import pyarrow as pa

    return pa.array(sorted(ids), pa.string())
