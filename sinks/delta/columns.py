"""Columns of a warehouse table: their types, and names that are refused."""

import json
from collections.abc import Iterable
from functools import cache
from typing import TYPE_CHECKING, Any

import deltalake

from cdc.codec.table import codec
from cdc.codec.types.arrow import arrow
from cdc.model.table import Table

if TYPE_CHECKING:
    import pyarrow as pa

FORBIDDEN = " ,;{}()\n\t="
"""Characters that Delta refuses in a column's name.

Its files are Parquet, and a reader may not find such a column in them.
"""
MIRROR = {"_cdc_id": "string", "_cdc_partition": "int", "_cdc_offset": "bigint"}
CHANGES = {
    **MIRROR,
    "_cdc_op": "string",
    "_cdc_topic": "string",
    "_cdc_lsn": "bigint",
    "_cdc_kept": "array<string>",
    "_cdc_commit": "timestamp",
}
NO_COLUMNS = Table("", "", (), (), "")
"""A table without columns: its schema is our own columns alone."""
BOOKKEEPING = {"changes": CHANGES, "mirror": MIRROR}
"""Our own columns, with Spark's names of types. `_cdc_topic` is the id of the topic that the offsets are of."""
METADATA = "_metadata"
"""The column in which Spark names the file that a row is from.

With a column of that name in the table, deletion vectors can't be read.
"""


def refusals(table: Table) -> list[str]:
    """List why a warehouse can't hold a table, one sentence a column; empty when it can.

    Needs no warehouse, so it may be called before anything is created. The remedy is to rename the
    column, or `exclude`. What no view can hold (names that differ in case only, our own names) is
    refused before: `cdc.model.column_names`.
    """
    reasons = []
    for name in (column.name for column in table.columns):
        if characters := sorted(set(name) & set(FORBIDDEN)):
            reasons.append(
                f"column {name!r} has {', '.join(map(repr, characters))} in its name, which a Delta table can't"
                " have there"
            )
        if name.lower() == METADATA:
            reasons.append(
                f"column {name!r} has a name that Spark uses for itself when it reads a Delta table"
            )
    return reasons


@cache
def schema(table: Table, kind: str) -> Any:
    """Make the columns of a table's `changes` or `mirror`, as Delta's JSON has a struct: ours, then
    the table's.
    """
    import pyarrow as pa

    bookkeeping = pa.schema([(name, arrow(type_)) for name, type_ in BOOKKEEPING[kind].items()])
    return _struct([*bookkeeping, *codec(table).schema])


def _struct(fields: "Iterable[pa.Field]") -> Any:
    """Translate columns into Delta's JSON of a struct."""
    import pyarrow as pa

    return json.loads(deltalake.Schema.from_arrow(pa.schema(fields)).to_json())


@cache
def arrow_schema(table: Table | None, kind: str) -> "pa.Schema":
    """Make the Arrow schema of a table's files; of our own columns alone when table is None."""
    return to_arrow(schema(table or NO_COLUMNS, kind))


def to_arrow(columns: Any) -> "pa.Schema":
    """Translate a struct of Delta's."""
    import pyarrow as pa

    return pa.schema(deltalake.Schema.from_json(json.dumps(columns)).to_arrow())


def reader_features(columns: Any) -> set[str]:
    """Name the features of the Delta protocol that readers of these columns must support."""
    return {"timestampNtz"} if '"timestamp_ntz"' in json.dumps(columns) else set()


def differs(stored: Any, table: Table) -> bool:
    """Whether the columns of a Delta table, as its JSON has a struct, can't take the source's.

    That is so when a column has another type than in the source, or a name that Spark refuses or
    that differs from the source's in case alone.
    """
    if any(set(field["name"]) & set(FORBIDDEN) for field in stored["fields"]):
        return True
    return not _can_take(stored, _struct(codec(table).schema))


def _can_take(stored: Any, required: Any) -> bool:
    """Return whether a column takes values of a type. Structs on either side may lack any fields."""
    if isinstance(stored, str) or isinstance(required, str) or stored["type"] != required["type"]:
        return bool(stored == required)
    if stored["type"] == "array":
        return _can_take(stored["elementType"], required["elementType"])
    types = {field["name"]: field["type"] for field in stored["fields"]}
    # Delta refuses a field whose name differs from another one's in case alone.
    lowered = {name.lower() for name in types}
    return all(
        _can_take(types[field["name"]], field["type"])
        if field["name"] in types
        else field["name"].lower() not in lowered
        for field in required["fields"]
    )


def merged(stored: Any, required: Any) -> Any:
    """Add to a type the fields of another one that it lacks, in structs at any depth."""
    if isinstance(stored, str) or isinstance(required, str):
        return stored
    if stored["type"] == "array":
        return {**stored, "elementType": merged(stored["elementType"], required["elementType"])}
    types = {field["name"]: field["type"] for field in required["fields"]}
    fields = [
        {**field, "type": merged(field["type"], types[field["name"]])}
        if field["name"] in types
        else field
        for field in stored["fields"]
    ]
    present = {field["name"] for field in stored["fields"]}
    lacking = [field for field in required["fields"] if field["name"] not in present]
    return {**stored, "fields": [*fields, *lacking]}
