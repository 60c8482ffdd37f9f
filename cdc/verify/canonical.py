"""When a row of a view equals its source: documents as (column, comparable text) pairs, and how two of them differ.

Spark expressions only, built per table from `cdc.codec.types`.
"""

from pyspark.sql import Column
from pyspark.sql import functions as F

from cdc.codec.types import kind
from cdc.model.table import Column as TableColumn
from cdc.model.table import Table
from cdc.verify.lossless_json import NUMBER, STRING, marked

ALIKE = ("text", "json")
"""Comparisons whose equal values are nearly always written alike, by Postgres and in the views."""


def canonical(table: Table, document: str) -> Column:
    """A document as (column, comparable text) pairs, one for each of the table's columns.

    Members that are no column of the table (a view's bookkeeping) are left out. A column that the document lacks
    counts as null: a view made before the column was added holds rows without it. A document that Spark's parser
    refuses (nested deeper than a thousand levels, or no object at all) is its own text instead, under no column: it
    equals what is written alike, and nothing else.
    """

    def pair(column: TableColumn, members: Column) -> Column:
        value = F.try_element_at(members, F.lit(column.name))
        compared = _comparable(kind(column.type).compare, value)
        return F.struct(F.lit(column.name).alias("key"), F.coalesce(compared, F.lit("null")).alias("value"))

    # A list of one, so that the document is parsed once and not for every column.
    members = F.array(F.from_json(marked(F.col(document)), "map<string, string>"))
    nowhere = F.lit(None).cast("string")
    text = F.array(F.struct(nowhere.alias("key"), F.col(document).alias("value")))
    return F.transform(
        members,
        lambda one: F.when(one.isNull(), text).otherwise(F.array(*(pair(column, one) for column in table.columns))),
    )[0]


def fingerprint(table: Table) -> Column:
    """A 64-bit hash of (id, document): rows with equal ones are equal; rows with different ones perhaps not.

    Of the document's text as it is where equal rows are written alike: parsing costs twenty times as much.
    """
    alike = all(kind(column.type).compare in ALIKE for column in table.columns)
    return F.xxhash64("id", F.col("document") if alike else canonical(table, "document"))


def first_difference(expected: Column, found: Column) -> Column:
    """The name of a column whose text differs or that only one side has; both as `canonical` makes them.

    None where one of them is a document that couldn't be taken apart.
    """
    changed = F.array_except(expected, found)
    added = F.array_except(found, expected)
    name = F.coalesce(F.try_element_at(changed, F.lit(1)), F.try_element_at(added, F.lit(1))).getField("key")
    whole = expected[0].getField("key").isNull() | found[0].getField("key").isNull()
    return F.when(~whole, name)


def _comparable(compare: str, value: Column) -> Column:
    """The text that equals another one's exactly when Postgres calls the values equal."""
    if compare in ("real", "double"):
        return _number(compare, value)
    if compare == "json":
        # What can't be parsed as one value (an object that has a member twice) is compared as it is written.
        return F.coalesce(F.to_json(F.try_parse_json(value)), value)
    if compare in ("reals", "doubles"):
        return _numbers(compare.removesuffix("s"), value)
    if compare == "path":
        parts = F.from_json(value, "closed string, points string")
        return F.concat(parts.getField("closed"), F.lit(" "), _numbers("double", parts.getField("points")))
    return value


def _numbers(type_: str, value: Column) -> Column:
    listed = F.from_json(value, "array<string>")
    numbers = F.to_json(F.transform(listed, lambda element: _number(type_, element)))
    return F.when(value.startswith("[") & listed.isNotNull(), numbers).otherwise(value)


def _number(type_: str, value: Column) -> Column:
    """By value: 1e20 is 100000000000000000000, NaN is NaN, and -0 is 0 as in Postgres. Other text stays."""
    held = "float" if type_ == "real" else "double"
    number = F.regexp_replace(value, f"[{STRING}{NUMBER}]", "").try_cast(held)
    return F.coalesce((number + F.lit(0).cast(held)).cast("string"), value)
