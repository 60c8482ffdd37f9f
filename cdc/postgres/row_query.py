"""Build the queries of a table's rows: as documents that Postgres itself writes, with conditions on
their ids, and as a snapshot reads them.

In:  a table, ids of rows or a range of buckets. Out: SQL; documents have the form of
docs/use/types.md. Pure.
"""

import json
import re
from collections.abc import Sequence

from psycopg import sql

from cdc.codec.types import kind
from cdc.model import pg_types
from cdc.model.table import Column, Table

Sample = tuple[str, str]
"""The first and the last bucket whose rows are compared."""
BUCKET_DIGITS = 4
BUCKETS = 16**BUCKET_DIGITS
DATES = ("date", "timestamp without time zone", "timestamp with time zone")
CASTABLE = (*DATES, "smallint", "integer", "bigint", "numeric", "text", "character varying", "uuid")
"""Types whose text in an id casts back to the same value, so that the key's index can be used."""
# JDBC reads a date with a calendar that has no years BC, lacks ten days of 1582 and overflows at
# infinity. As a number of days it comes through untouched: the connector takes a number for a date
# as the days since 1970.
DAYS = sql.SQL(
    "CASE WHEN isfinite({0}) THEN {0} - DATE '1970-01-01' WHEN {0} > DATE '1970-01-01' THEN 2147483647"
    " WHEN {0} IS NOT NULL THEN -2147483648 END AS {0}"
)


def row_query(table: Table, condition: sql.Composable | None = None) -> sql.Composed:
    """Build the query of rows as (id, document), in the form of docs/use/types.md. Of a sink's table it has
    the sink's rows, columns and names.
    """

    def member(column: Column) -> sql.Composable:
        return sql.SQL(
            "to_json({}::text)::text || ':' || coalesce(to_json({})::text, 'null')"
        ).format(sql.Literal(column.name), _document_value(column))

    # Values of json come last, as in the views: equal rows then have equal text and needn't be
    # parsed.
    columns = sorted(table.columns, key=lambda column: kind(column.type).raw)
    members = sql.SQL(", ").join(map(member, columns))
    query = sql.SQL("SELECT {}, '{{' || array_to_string(ARRAY[{}], ',') || '}}' FROM {}").format(
        identity(table), members, own_rows(table)
    )
    own = sql.SQL(table.where.sql) if table.where else None
    if conditions := [part for part in (own, condition) if part]:
        query += sql.SQL(" WHERE ({})").format(sql.SQL(") AND (").join(conditions))
    return query


def key_page_query(
    table: Table, after: Sequence[str], last: Sequence[str], limit: int
) -> sql.Composed:
    """Build the query of up to `limit` rows in the order of their keys: the id, and the key's texts as JSON. An
    index of the key is used.

    after, last: the texts of keys: only rows after the first one and up to the second one are wanted. Without
    `last`, the rows come from the last one backwards.
    """
    names = [sql.Identifier(name) for name in table.key]
    key = sql.SQL("({})").format(sql.SQL(", ").join(names))
    types = [sql.SQL(table.column(name).type) for name in table.key]
    conditions = [sql.SQL("({})").format(sql.SQL(table.where.sql))] if table.where else []
    for comparison, texts in ((">", after), ("<=", last)):
        if texts:
            condition = sql.SQL("{} {} {}").format(
                key, sql.SQL(comparison), _cast_row(types, texts)
            )
            conditions.append(condition)
    query = sql.SQL("SELECT {}, json_build_array({})::text FROM {}").format(
        identity(table),
        sql.SQL(", ").join(sql.SQL("{}::text").format(name) for name in names),
        own_rows(table),
    )
    if conditions:
        query += sql.SQL(" WHERE ") + sql.SQL(" AND ").join(conditions)
    order = sql.SQL(", ") if last else sql.SQL(" DESC, ")
    return query + sql.SQL(" ORDER BY {}{} LIMIT {}").format(
        order.join(names), sql.SQL("" if last else " DESC"), sql.Literal(limit)
    )


def snapshot_overrides(tables: Sequence[Table]) -> dict[str, str]:
    """The connector's settings that override the snapshot's query for each table with dates or
    children: its default would bring other rows or values than the log.
    """
    overridden = [
        table
        for table in tables
        if table.has_children or any(column.type == "date" for column in table.columns)
    ]
    if not overridden:
        return {}
    setting = "snapshot.select.statement.overrides"
    return {
        setting: ",".join(table.qualified for table in overridden),
        **{
            f"{setting}.{table.qualified}": snapshot_query(table).as_string(None)
            for table in overridden
        },
    }


def snapshot_query(table: Table) -> sql.Composed:
    """The query for all rows of a table without its children, with each date as a number.

    The log has rows of children under their own names.
    """
    columns = [
        DAYS.format(sql.Identifier(column.name))
        if column.type == "date"
        else sql.Identifier(column.name)
        for column in table.columns
    ]
    return sql.SQL("SELECT {} FROM {}").format(sql.SQL(", ").join(columns), own_rows(table))


def source_names(table: Table) -> list[str]:
    """Name the captured tables that the rows of a table are made of."""
    return [name for name, _ in table.derivation.tables] if table.derivation else [table.qualified]


def own_rows(table: Table) -> sql.Composable:
    """Build what to select the rows from: the table without its children, or the query of a view."""
    if table.derivation:
        # The text is of the pipeline's own making, see `cdc.documents.sql`.
        query = sql.SQL(table.derivation.query)
        return sql.SQL("({}) AS {}").format(query, sql.Identifier(table.name))
    only = sql.SQL("ONLY " if table.has_children else "")
    return only + sql.Identifier(table.schema, table.name)


def identity(table: Table) -> sql.Composable:
    """Build the expression of a row's id over its columns.

    `TableCodec.row_id` computes the same in Python.
    """
    if len(table.key) == 1:
        return sql.SQL("{}::text").format(_document_value(table.column(table.key[0])))
    literals = [
        sql.SQL("to_json({})::text").format(_document_value(table.column(name)))
        for name in table.key
    ]
    return sql.SQL("'[' || array_to_string(ARRAY[{}], ',') || ']'").format(
        sql.SQL(", ").join(literals)
    )


def bucket(table: Table) -> sql.Composable:
    """Build the expression of a row's bucket, of 65,536.

    `bucket_hashes.bucket` computes the same in Spark.
    """
    return sql.SQL("substr(md5(convert_to({}, 'UTF8')), 1, {})").format(
        identity(table), sql.Literal(BUCKET_DIGITS)
    )


def sample_condition(table: Table, sample: Sample) -> sql.Composable:
    """Build the condition that a row's bucket is in the sample."""
    return sql.SQL('{} COLLATE "C" BETWEEN {} AND {}').format(
        bucket(table), *map(sql.Literal, sample)
    )


def text_condition(table: Table, ids: Sequence[str]) -> sql.Composable:
    """Build the condition that a row has one of these ids, for any type of key.

    It reads the whole table.
    """
    valid_ids = [key for key in ids if "\0" not in key]
    return sql.SQL("({}) = ANY ({}::text[])").format(identity(table), sql.Literal(valid_ids))


def id_condition(table: Table, ids: Sequence[str]) -> sql.Composable:
    """Build the same condition over the columns of the key, so that their index is used.

    Where their types don't allow it, it is `text_condition`.

    A query with it raises DataError when an id is no value of the key's type.
    """
    kinds = [pg_types.base_type(table.column(name).type) for name in table.key]
    values = [_key_values(row_id, len(kinds)) for row_id in ids]
    if not all(_castable(kinds, parts) for parts in values):
        return text_condition(table, ids)
    types = [sql.SQL(kind) for kind in kinds]
    rows = [_cast_row(types, parts) for parts in values if parts]
    if not rows:
        return sql.SQL("false")
    names = sql.SQL(", ").join(map(sql.Identifier, table.key))
    return sql.SQL("({}) IN (VALUES {})").format(names, sql.SQL(", ").join(rows))


def _cast_row(types: Sequence[sql.Composable], parts: Sequence[str]) -> sql.Composable:
    casts = [
        sql.SQL("{}::{}").format(sql.Literal(part), type_)
        for type_, part in zip(types, parts, strict=True)
    ]
    return sql.SQL("({})").format(sql.SQL(", ").join(casts))


def _castable(kinds: Sequence[str], values: Sequence[str]) -> bool:
    """Whether all values can be cast to the key's types. True for no values: the id of no row."""
    return all(kind in CASTABLE for kind in kinds) and not any(
        "\0" in text or (kind in DATES and re.match(r"\d{4}-", text) is None)
        for kind, text in zip(kinds, values, strict=False)
    )


def _key_values(key: str, count: int) -> list[str]:
    """Split an id into the texts of its parts. Empty when it isn't an id of so many columns."""
    if count == 1:
        return [key]
    try:
        parts = json.loads(key, parse_int=str, parse_float=str)
    except ValueError:
        return []
    valid = (
        isinstance(parts, list)
        and len(parts) == count
        and all(isinstance(part, str) for part in parts)
    )
    return parts if valid else []


def _document_value(column: Column) -> sql.Composable:
    value: sql.Composable = sql.Identifier(column.source_name)
    if column.mask:
        value = sql.SQL(column.mask.sql(column.type, value.as_string(None)))
    return sql.SQL("({})").format(sql.SQL(kind(column.type).source).format(value))
