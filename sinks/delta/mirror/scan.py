"""What executors make of a mirror's columns: the documents that the other views hold."""

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

from cdc.codec.table import codec
from cdc.model.table import Table

if TYPE_CHECKING:
    import pyarrow as pa

Read = Callable[[Iterator["pa.RecordBatch"]], Iterator["pa.RecordBatch"]]
SCANNED = "id string, document string"
ROW_ID = "_cdc_id"


def reader(table: Table, names: Mapping[str, str]) -> Read:
    """SCANNED, of a mirror's columns as Arrow has them, ROW_ID among them; names: of the columns, by those given."""

    def read(parts: Iterator["pa.RecordBatch"]) -> Iterator["pa.RecordBatch"]:
        import pyarrow as pa

        for part in (one.rename_columns([names[column] for column in one.schema.names]) for one in parts):
            yield pa.RecordBatch.from_arrays([ids(part), documents(table, part)], names=["id", "document"])

    return read


def ids(part: "pa.RecordBatch") -> "pa.Array":
    import pyarrow as pa

    return part.column(ROW_ID).cast(pa.string())


def documents(table: Table, part: "pa.RecordBatch") -> "pa.Array":
    """A document per row; null for a column that the mirror hasn't: it is there once a row brings it.

    Raises ArrowInvalid, a ValueError, for a column of another type than the table's.
    """
    import pyarrow as pa

    there = set(part.schema.names)
    columns = [
        part.column(field.name) if field.name in there else pa.nulls(part.num_rows, field.type)
        for field in codec(table).schema
    ]
    # Whatever type they have: they are cast where a value is read.
    names = [column.name for column in table.columns]
    return codec(table).documents(pa.RecordBatch.from_arrays(columns, names=names))
