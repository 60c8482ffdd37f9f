"""A row in its forms: the connector's JSON, a document of a view, columns of the warehouse; and its id.

Spark expressions only, built per table from `cdc.types`.
"""

import json
from collections.abc import Iterable
from functools import cache, reduce

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from cdc import types
from cdc.change import Column as Shape
from cdc.change import Table
from cdc.types import Kind

UNHOLDABLE = "cdc cannot hold a value of"
"""First words of a failure that Spark reports as text; `cdc.explain` gives it its class back."""
PARSED = "_cdc_wire"
"""The column in which `parsed` leaves a row for `columns`."""
ESCAPED = r'["\\\x00-\x1f]'
"""What a text in JSON has only behind a backslash, and the backslash."""
# Jackson writes these escapes with capitals, Postgres and Python without.
CAPITAL_ESCAPES = ("000B", "000E", "000F", "001A", "001B", "001C", "001D", "001E", "001F")


def row_id(table: Table, key: Column) -> Column:
    """The id of a row in every view, from the connector's key JSON: the document form of its key columns.

    `change.row_id` is its twin.
    """
    kinds = {name: types.kind(table.column(name).type) for name in table.key}
    parsed = F.from_json(key, wire_fields(table.column(name) for name in table.key))
    values = [_document(kind, parsed.getField(name)) for name, kind in kinds.items()]
    if len(values) == 1:
        return F.coalesce(_cut(table.key[0], kinds[table.key[0]], key), values[0].cast("string"))
    listed = F.concat(F.lit("["), F.concat_ws(",", *(_literal(value) for value in values)), F.lit("]"))
    return F.when(reduce(lambda a, b: a & b, (value.isNotNull() for value in values)), listed)


def _cut(name: str, kind: Kind, key: Column) -> Column:
    """The id as it stands in a key of one member, where that is its form; null where the key has to be parsed."""
    if kind.document or kind.wire not in ("bigint", "string"):
        return F.lit(None).cast("string")
    mark = '"' if kind.wire == "string" else ""
    before, behind = "{" + json.dumps(name, ensure_ascii=False) + ":" + mark, mark + "}"
    value = F.substring(key, F.lit(len(before) + 1), F.length(key) - F.lit(len(before) + len(behind)))
    plain = ~value.rlike(ESCAPED) if mark else value.try_cast("bigint").cast("string") == value
    whole = key.startswith(before) & key.endswith(F.lit(behind)) & (F.length(key) >= len(before) + len(behind))
    return F.when(whole & plain, value)


def _document(kind: Kind, value: Column) -> Column:
    return kind.document(value) if kind.document else value


def _literal(value: Column) -> Column:
    """The JSON of one value: [value] without its brackets, since `to_json` takes no scalar."""
    listed = F.to_json(F.array(value))
    literal = F.substring(listed, F.lit(2), F.length(listed) - 2)

    def lowered(text: Column, code: str) -> Column:
        # An even number of backslashes before it, or it is the text itself that has a backslash there.
        return F.regexp_replace(text, rf"(?<!\\)((?:\\\\)*)\\u{code}", rf"$1\\u{code.lower()}")

    return F.when(literal.contains(r"\u00"), reduce(lowered, CAPITAL_ESCAPES, literal)).otherwise(literal)


def document(table: Table, after: Column) -> Column:
    """The row as the JSON document of a search index or a cache.

    Debezium's own text where no value needs another form; tables that need one for rare values only are searched for
    these first. A value that the connector has damaged stops the batch and names the column.
    """
    kinds = [types.kind(column.type) for column in table.columns]
    touched = [kind for kind in kinds if kind.document or kind.raw or kind.lost]
    if table.reshaped or any(not kind.words for kind in touched):
        return _rewritten(table, after)
    if touched:
        words = sorted({word for kind in touched for word in kind.words})
        suspect = reduce(lambda a, b: a | b, (after.contains(F.lit(word)) for word in words))
        return F.when(suspect, _rewritten(table, after)).otherwise(after)
    return after


def _rewritten(table: Table, after: Column) -> Column:
    # A list of one, so that the row is parsed once: within a condition Spark parses it anew for every use.
    made = F.transform(F.array(wire(table, after)), lambda row: _document_of(table, row))
    return F.when(after.isNotNull(), F.get(made, F.lit(0)))


def _document_of(table: Table, row: Column) -> Column:
    values = {}
    for column in table.columns:
        kind, value = types.kind(column.type), row.getField(column.name)
        made = _document(kind, value)
        stopped = F.when(lost(table, column.name, value), _stop(table, column.name)).otherwise(made)
        values[column.name] = stopped if kind.lost else made
    return as_json(table, values)


def lost(table: Table, name: str, value: Column) -> Column:
    """Whether the connector has damaged a value of this column: true or false, of the wire form."""
    kind = types.kind(table.column(name).type)
    return F.coalesce(kind.lost(value), F.lit(False)) if kind.lost else F.lit(False)


def as_json(table: Table, values: dict[str, Column]) -> Column:
    """A JSON object of the row; json columns are set in as the values they are, not as strings."""
    raw = [column.name for column in table.columns if types.kind(column.type).raw]
    plain = [values[name].alias(name) for name in values if name not in raw]
    text = F.to_json(F.struct(*plain), {"ignoreNullFields": "false"})
    if not raw:
        return text
    pieces = []
    for name in raw:
        value = F.coalesce(F.regexp_replace(values[name], "[\r\n]", " "), F.lit("null"))
        pieces.append(F.concat(_literal(F.lit(name)), F.lit(":"), value))
    head = F.substring(text, F.lit(1), F.length(text) - 1)
    return F.concat(head, F.lit(","), F.concat_ws(",", *pieces), F.lit("}"))


def wire(table: Table, after: Column) -> Column:
    """The row parsed as the connector wrote it: a struct of wire types.

    A value of another JSON type stops the batch; otherwise Spark would make it null.
    """
    return F.from_json(after, wire_fields(table.columns), {"mode": "FAILFAST"})


def wire_fields(columns: Iterable[Shape]) -> str:
    """The fields of Spark's schema for the connector's JSON of these columns."""
    return ", ".join(f"{quoted(column.name)} {types.kind(column.type).wire}" for column in columns)


def parsed(frame: DataFrame, table: Table, source: str) -> DataFrame:
    """The frame and the row that an expression of it has as JSON text, for `columns`.

    In a select of its own: within one Spark would parse it anew for each use of each column.
    """
    return frame.select("*", _parsed(table, source))


@cache
def _parsed(table: Table, source: str) -> Column:
    return wire(table, F.expr(source)).alias(PARSED)


@cache
def columns(table: Table) -> list[Column]:
    """What `parsed` has found as warehouse columns, named like the table's own.

    A value that its column can't hold (a numeric(10,2) that is NaN) stops the batch and names the column.
    """
    row = F.col(PARSED)
    return [_held(table, column.name, row.getField(column.name)).alias(column.name) for column in table.columns]


def _held(table: Table, name: str, value: Column) -> Column:
    kind = types.kind(table.column(name).type)
    held = holdable(kind, value)
    if not (kind.to_column or kind.lost):
        return held
    return F.when(value.isNull(), None).otherwise(F.coalesce(held, _stop(table, name).cast(kind.column)))


def holdable(kind: Kind, value: Column) -> Column:
    """A wire value as its warehouse column has it; null for one that can't be held."""
    held = (kind.to_column(value) if kind.to_column else value).try_cast(kind.column)
    return F.when(~F.coalesce(kind.lost(value), F.lit(False)), held) if kind.lost else held


def _stop(table: Table, name: str) -> Column:
    return F.raise_error(F.lit(f"{UNHOLDABLE} {table.qualified}.{name} ({table.column(name).type})"))


def document_of_columns(table: Table) -> Column:
    """The way back: the document of a row that is held as warehouse columns."""
    values = {}
    for column in table.columns:
        kind = types.kind(column.type)
        value = F.col(quoted(column.name))
        values[column.name] = kind.from_column(value) if kind.from_column else value
    return as_json(table, values)


def quoted(name: str) -> str:
    return "`" + name.replace("`", "``") + "`"
