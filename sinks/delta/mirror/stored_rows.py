"""What a warehouse has of rows whose changes don't carry every value: what a task has staged, then the mirror."""

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import deltalake

from cdc.codec.table import codec
from cdc.codec.types.arrow import countable
from cdc.model.table import Table
from cdc.sink.lane import Failure
from sinks.delta.files import parquet
from sinks.delta.files.failures import refused
from sinks.delta.files.parquet import ID, File
from sinks.delta.mirror.version import Mirror

if TYPE_CHECKING:
    import pyarrow as pa

Lacking = Mapping[str, Sequence[str]]
"""By id of a row: the columns whose values it misses."""


class Held:
    """One view's rows, as a task may ask for them; version: of the mirror that it goes on from, if that has rows."""

    def __init__(self, table: Table, folder: str, version: int | None) -> None:
        self._table, self._folder = table, folder
        self._mirror = None if version is None else Mirror(folder, version)
        self._seen: Any = None

    def meet(self, ids: Sequence[str]) -> bool:
        """Take note of the rows of a chunk; whether one was in an earlier one, or is in it twice."""
        import numpy as np

        met = np.sort(np.fromiter(map(hash, ids), np.int64, len(ids)))
        before, self._seen = self._seen, met
        if before is None:
            return bool((met[1:] == met[:-1]).any())
        # Sorted parts one after the other: a sort of this kind only merges them.
        self._seen = np.sort(np.concatenate([before, met]), kind="stable")
        return bool((self._seen[1:] == self._seen[:-1]).any())

    def met(self, ids: Sequence[str]) -> list[str]:
        """Those of some rows that earlier chunks may have."""
        import numpy as np

        if self._seen is None or not ids:
            return []
        there = np.isin(np.fromiter(map(hash, ids), np.int64, len(ids)), self._seen)
        return [key for key, met in zip(ids, there, strict=True) if met]

    def values(self, lacking: Lacking, rows: Sequence[File], gone: Sequence[File]) -> Mapping[str, tuple[Any, ...]]:
        """By id, of those rows that there are: the values of the columns that are missed, in the table's order.

        rows, gone: what the task has staged, of rows and of the ids of deleted ones.

        Raises:
            Failure: files can't be read.
        """
        try:
            return self._values(lacking, rows, gone)
        except (OSError, deltalake.exceptions.DeltaError) as error:
            said = refused(error) or type(error).__name__
            message = f"The warehouse folder {self._folder} can't be read: {said}."
            raise Failure("unavailable", message) from None

    def _values(self, lacking: Lacking, rows: Sequence[File], gone: Sequence[File]) -> dict[str, tuple[Any, ...]]:
        import pyarrow as pa

        names = {name for missing in lacking.values() for name in missing}
        wanted = [one for one in codec(self._table).schema if one.name in names]
        place = pa.schema([(ID, pa.string()), ("_cdc_offset", pa.int64())])
        schema = pa.schema([*place, *wanted])
        newest: dict[str, tuple[int, tuple[Any, ...] | None]] = {}
        if met := self.met(list(lacking)):
            for file in rows:
                self._note(newest, parquet.matching(f"{self._folder}/{file.name}", _sorted(met), schema))
            for file in gone:
                self._note(newest, parquet.matching(f"{self._folder}/{file.name}", _sorted(met), place))
        if self._mirror and (asked := self._asked(lacking, newest)):
            self._note(newest, self._mirror.rows(_sorted(asked), schema))
        return {key: values for key, (_, values) in newest.items() if values is not None}

    def _asked(self, lacking: Lacking, newest: Mapping[str, object]) -> list[str]:
        """Those rows that only the mirror can have."""
        assert self._mirror
        # A column that has been added since: nobody has ever seen its value.
        unknown = {column.name for column in self._table.columns} - self._mirror.columns
        return [key for key, names in lacking.items() if key not in newest and unknown.isdisjoint(names)]

    def _note(self, newest: dict[str, tuple[int, tuple[Any, ...] | None]], parts: Iterable["pa.Table"]) -> None:
        """Take note of rows by their ids, None for those of which there are no columns: they are deleted."""
        for part in parts:
            given = {name: part[name] for name in part.column_names}
            ids, offsets = given.pop(ID).to_pylist(), given.pop("_cdc_offset").to_pylist()
            there = {name: column.cast(countable(column.type)).to_pylist() for name, column in given.items()}
            nothing = [None] * part.num_rows
            rows = zip(*(there.get(column.name, nothing) for column in self._table.columns), strict=True)
            for key, offset, values in zip(ids, offsets, rows, strict=True):
                if key not in newest or newest[key][0] < offset:
                    newest[key] = offset, values if there else None


def _sorted(ids: Iterable[str]) -> "pa.Array":
    import pyarrow as pa

    return pa.array(sorted(ids), pa.string())
