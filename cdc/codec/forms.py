"""The forms in which views take rows: documents, or values of columns; and how one is filled from an older one.

A change need not carry every value of its row. What it lacks is null in it and named in `missing`; an older change of
the same row, or the view, gives these values. Nothing else of the older one counts.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from cdc.codec.members import joined, members
from cdc.codec.table import codec
from cdc.model.table import Table


class FilledValue(NamedTuple):
    """A value of a form, and the names of the columns that it still lacks."""

    value: Any
    missing: tuple[str, ...]


class Form(Protocol):
    """What a view holds of a row."""

    def converter(self, table: Table) -> Callable[[bytes], Any]:
        """From the connector's JSON of a row; raises Unreadable for what a view can't hold."""

    def fill(
        self, table: Table, value: Any, missing: Sequence[str], older: Any, older_missing: Sequence[str]
    ) -> FilledValue:
        """A value with what it misses, as far as an older one of the same row, itself `lacking` some, has it."""

    def size(self, value: Any) -> int:
        """Bytes of memory, roughly."""


class Documents:
    """Rows as the JSON documents of a search index or a cache, in UTF-8."""

    def converter(self, table: Table) -> Callable[[bytes], bytes]:
        return codec(table).document

    def fill(
        self,
        table: Table,  # noqa: ARG002  # documents name their members
        value: bytes,
        missing: Sequence[str],
        older: bytes,
        older_missing: Sequence[str],
    ) -> FilledValue:
        filled_members, older_members = members(value), members(older)
        # A view made before the column was added doesn't hold it: nobody has ever seen its value.
        available = [name for name in missing if name in older_members and name not in older_missing]
        if not available:
            return FilledValue(value, tuple(missing))
        filled_members.update((name, older_members[name]) for name in available)
        return FilledValue(joined(filled_members), tuple(name for name in missing if name not in available))

    def size(self, value: bytes) -> int:
        return len(value)


class Values:
    """Rows as the values of warehouse columns, in the table's order, as `pyarrow.array` takes them."""

    ROW_BYTES, VALUE_BYTES = 64, 56

    def converter(self, table: Table) -> Callable[[bytes], tuple[Any, ...]]:
        return codec(table).values

    def fill(
        self,
        table: Table,
        value: tuple[Any, ...],
        missing: Sequence[str],
        older: tuple[Any, ...],
        older_missing: Sequence[str],
    ) -> FilledValue:
        indices = {column.name: index for index, column in enumerate(table.columns)}
        filled = list(value)
        for name in missing:
            if name in indices and name not in older_missing:
                filled[indices[name]] = older[indices[name]]
        return FilledValue(tuple(filled), tuple(name for name in missing if name in older_missing))

    def size(self, value: tuple[Any, ...]) -> int:
        texts = sum(len(item) for item in value if isinstance(item, str | bytes))
        return self.ROW_BYTES + len(value) * self.VALUE_BYTES + texts
