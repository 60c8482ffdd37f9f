"""A row in its forms: the connector's JSON, a document of a view, columns of the warehouse; and its id.

Spark expressions only, built per table from `cdc.types`.
"""

from functools import cache, reduce

from pyspark.sql import Column
from pyspark.sql import functions as F

from cdc import types
from cdc.change import Table

UNHOLDABLE = "cdc cannot hold a value of"
"""First words of a failure that Spark reports as text; `cdc.explain` gives it its class back."""


def row_id(table: Table, key: Column) -> Column:
    """The id of a row in every view, from the connector's key JSON; `change.row_id` is its twin."""
    names = [(name, types.kind(table.column(name).type).wire) for name in table.key]
    parsed = F.from_json(key, ", ".join(f"{quoted(name)} {wire}" for name, wire in names))
    if len(names) == 1:
        return parsed.getField(names[0][0]).cast("string")
    literals = [_literal(parsed.getField(name)) for name, _ in names]
    return F.concat(F.lit("["), F.concat_ws(",", *literals), F.lit("]"))


def _literal(value: Column) -> Column:
    """The JSON of one value: [value] without its brackets, since `to_json` takes no scalar."""
    listed = F.to_json(F.array(value))
    return F.substring(listed, F.lit(2), F.length(listed) - 2)


def document(table: Table, after: Column) -> Column:
    """The row as the JSON document of a search index or a cache.

    Debezium's own text where no column of the table needs another form; `special` values are looked for first.
    """
    kinds = {column.name: types.kind(column.type) for column in table.columns}
    if any(kind.document or kind.name == "json" for kind in kinds.values()):
        return _rewritten(table, after)
    if any(kind.special for kind in kinds.values()):
        suspect = reduce(lambda a, b: a | b, (after.contains(word) for word in types.SPECIAL))
        return F.when(suspect, _rewritten(table, after)).otherwise(after)
    return after


def _rewritten(table: Table, after: Column) -> Column:
    row = wire(table, after)
    values = {}
    for column in table.columns:
        kind = types.kind(column.type)
        convert = kind.document or kind.special
        value = row.getField(column.name)
        values[column.name] = convert(value) if convert else value
    return F.when(after.isNotNull(), as_json(table, values))


def as_json(table: Table, values: dict[str, Column]) -> Column:
    """A JSON object of the row; json columns are set in as the values they are, not as strings."""
    raw = [column.name for column in table.columns if types.kind(column.type).name == "json"]
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
    fields = ", ".join(f"{quoted(c.name)} {types.kind(c.type).wire}" for c in table.columns)
    return F.from_json(after, fields, {"mode": "FAILFAST"})


@cache
def columns(table: Table, source: str) -> list[Column]:
    """The JSON text in column `source` as warehouse columns, named like the table's own.

    A value that its column can't hold (an infinite date) stops the batch and names the column.
    """
    row = wire(table, F.col(source))
    made = []
    for column in table.columns:
        kind = types.kind(column.type)
        value = row.getField(column.name)
        held = (kind.to_column(value) if kind.to_column else value).cast(kind.column)
        if kind.to_column:
            lost = F.raise_error(F.lit(f"{UNHOLDABLE} {table.qualified}.{column.name} ({column.type})"))
            held = F.when(value.isNull(), None).otherwise(F.coalesce(held, lost.cast(kind.column)))
        made.append(held.alias(column.name))
    return made


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
