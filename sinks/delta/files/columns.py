"""The type of a warehouse column as Spark writes it, and as a Delta table's schema does; names that none can have."""

import json
import re
from collections.abc import Iterable
from functools import cache
from typing import TYPE_CHECKING

from cdc.model.table import Table

if TYPE_CHECKING:
    import deltalake
    import pyarrow as pa

NAMES = {"smallint": "short", "int": "integer", "bigint": "long"}
UNFIT = " ,;{}()\n\t="
"""Characters that Delta refuses in the name of a column: its files are Parquet, which readers may not find it in."""
MIRROR = {"_cdc_id": "string", "_cdc_partition": "int", "_cdc_offset": "bigint"}
CHANGES = {
    **MIRROR,
    "_cdc_op": "string",
    "_cdc_topic": "string",
    "_cdc_lsn": "bigint",
    "_cdc_kept": "array<string>",
    "_cdc_commit": "timestamp",
}
NOTHING = Table("", "", (), (), "")
BOOKKEEPING = {"changes": CHANGES, "mirror": MIRROR}
"""Our own columns; `_cdc_topic` is the id of the topic that offsets are of."""
METADATA = "_metadata"
"""Where Spark tells of the file that a row is from; with a column of that name marks can't be read."""


def refusals(table: Table) -> list[str]:
    """Why a warehouse can't hold a table as it is, a sentence for each column concerned; nothing when it can.

    Pure, so that it may be asked before anything is made. What repairs it is to rename the column, or `exclude`.
    What no view can hold (names that differ in case only, our own) is refused before: `cdc.model.column_names`.
    """
    names = [column.name for column in table.columns]
    return [*_with_unfit_characters(names), *_of_sparks(names)]


def _with_unfit_characters(names: Iterable[str]) -> list[str]:
    found = ((name, sorted(set(name) & set(UNFIT))) for name in names)
    return [
        f"column {name!r} has {', '.join(map(repr, unfit))} in its name, which a Delta table can't have there"
        for name, unfit in found
        if unfit
    ]


def _of_sparks(names: Iterable[str]) -> list[str]:
    return [
        f"column {name!r} has a name that Spark uses for itself when it reads a Delta table"
        for name in names
        if name.lower() == METADATA
    ]


def column_type(table: Table, name: str) -> str:
    """Spark's text for it: decimal(10,2), array<string>."""
    from cdc.codec.types import kind

    return kind(table.column(name).type).column


def delta_type(text: str) -> object:
    """The JSON of the same type in a Delta schema."""
    if fields := re.fullmatch(r"struct<(.*)>", text):
        named = (one.split(" ", 1) for one in fields[1].split(", "))
        return {"type": "struct", "fields": [_field(name, type_) for name, type_ in named]}
    if element := re.fullmatch(r"array<(.*)>", text):
        return {"type": "array", "elementType": delta_type(element[1]), "containsNull": True}
    return NAMES.get(text, text)


def _field(name: str, type_: str) -> object:
    return {"name": name, "type": delta_type(type_), "nullable": True, "metadata": {}}


def schema(table: Table, kind: str) -> "deltalake.Schema":
    """The columns of a table's `changes` or `mirror`: our own, then those of the table."""
    import deltalake

    own = BOOKKEEPING[kind].items()
    columns = ((column.name, column_type(table, column.name)) for column in table.columns)
    fields = [_field(name, type_) for name, type_ in (*own, *columns)]
    return deltalake.Schema.from_json(json.dumps({"type": "struct", "fields": fields}))


@cache
def arrow_schema(table: Table | None, kind: str) -> "pa.Schema":
    """The same for the files of a Delta table; of our own columns alone where there is no table."""
    import pyarrow as pa

    return pa.schema(schema(table or NOTHING, kind).to_arrow())


def features(columns: "deltalake.Schema") -> set[str]:
    """What readers of a table of these columns have to know of."""
    return {"timestampNtz"} if '"timestamp_ntz"' in columns.to_json() else set()


def misfits(held: "deltalake.DeltaTable", table: Table) -> bool:
    """Whether a Delta table has a column of another type than the source's has now, or one that Spark refuses."""
    types = {field.name: json.loads(field.type.to_json()) for field in held.schema().fields}
    if any(set(name) & set(UNFIT) for name in types):
        return True
    wanted = {column.name: column_type(table, column.name) for column in table.columns}
    # Structs are of one shape; whether their fields may be null says nothing about rows.
    plain = {name: delta_type(text) for name, text in wanted.items() if not text.startswith("struct<")}
    return any(types.get(name, type_) != type_ for name, type_ in plain.items())
