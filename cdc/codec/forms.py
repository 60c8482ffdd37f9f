"""Forms of a row in a view: a document, or the values of columns; and how a row is filled from an
older one.

A change need not carry every value of its row. A missing value is null and its column is named in
`missing`. An older change of the same row, or the view, supplies it. No other value of the older
row counts. A missing value is a large one, so it is never null: a null in the older row means
that it didn't know the column either.
"""

from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple, Protocol

from cdc.codec.members import NULL, joined, members
from cdc.codec.problem import Unreadable
from cdc.codec.table import codec
from cdc.model.table import Table


class FilledValue(NamedTuple):
    """A row in a form, and the names of the columns whose value it still misses."""

    value: Any
    missing: tuple[str, ...]


class Form(Protocol):
    """How a view holds a row. Stateless; can be pickled; any thread may use it.

    Called for every record.
    """

    def converter(self, table: Table) -> Callable[[bytes], Any]:
        """Return the conversion from the connector's JSON of a row; called once per partition and
        task.

        The conversion raises Unreadable for a row that a view can't hold.
        """

    def fill(
        self,
        table: Table,
        value: Any,
        missing: Sequence[str],
        older: Any,
        older_missing: Sequence[str],
    ) -> FilledValue:
        """Fill missing values of a row from an older state of it, which itself misses
        `older_missing`.
        """

    def size(self, value: Any) -> int:
        """Estimate the bytes of memory that a row takes."""


class Documents:
    """Rows as the JSON documents of a search index or a cache, in UTF-8."""

    def converter(self, table: Table) -> Callable[[bytes], bytes]:
        """Return `TableCodec.document`."""
        return codec(table).document

    def fill(
        self,
        table: Table,  # noqa: ARG002  # documents name their members
        value: bytes,
        missing: Sequence[str],
        older: bytes,
        older_missing: Sequence[str],
    ) -> FilledValue:
        """Copy missing members from the older document, as text; none if either can't be taken apart."""
        try:
            filled_members = members(value)
            older_members = members(older)
        except Unreadable:
            return FilledValue(value, tuple(missing))
        # A view that was made before the column was added doesn't hold it: its value is unknown.
        available = [
            name
            for name in missing
            if name not in older_missing and older_members.get(name, NULL) != NULL
        ]
        if not available:
            return FilledValue(value, tuple(missing))
        filled_members.update((name, older_members[name]) for name in available)
        return FilledValue(
            joined(filled_members), tuple(name for name in missing if name not in available)
        )

    def size(self, value: bytes) -> int:
        """Count the bytes of the document."""
        return len(value)


class Values:
    """Rows as the values of warehouse columns, in the table's order, as `pyarrow.array` takes
    them.
    """

    ROW_BYTES = 64
    VALUE_BYTES = 56

    def converter(self, table: Table) -> Callable[[bytes], tuple[Any, ...]]:
        """Return `TableCodec.values`."""
        return codec(table).values

    def fill(
        self,
        table: Table,
        value: tuple[Any, ...],
        missing: Sequence[str],
        older: tuple[Any, ...],
        older_missing: Sequence[str],
    ) -> FilledValue:
        """Copy missing values from the older row; a column that the table has no more is left
        out.
        """
        indices = {column.name: index for index, column in enumerate(table.columns)}
        filled = list(value)
        unknown = list[str]()
        for name in missing:
            index = indices.get(name)
            if name in older_missing or (index is not None and older[index] is None):
                unknown.append(name)
            elif index is not None:
                filled[index] = older[index]
        return FilledValue(tuple(filled), tuple(unknown))

    def size(self, value: tuple[Any, ...]) -> int:
        """Estimate the memory of the row: Python objects and the bytes of texts."""
        return self.ROW_BYTES + self._values_size(value)

    def _values_size(self, values: Collection[Any]) -> int:
        size = self.VALUE_BYTES * len(values)
        for value in values:
            kind = type(value)
            if kind is str or kind is bytes:
                size += len(value)
            elif kind is list:
                size += self._values_size(value)
            elif kind is dict:
                size += self._values_size(value.values())
        return size
