"""Decide when a row of a view equals its source: documents become (column, comparable text) pairs.

Spark expressions only, built per table from `cdc.codec.types`.
"""

from pyspark.sql import Column
from pyspark.sql import functions as F

from cdc.codec.types import kind
from cdc.model.table import Column as TableColumn
from cdc.model.table import Table

SAME_TEXT = ("text", "json")
"""Comparisons whose equal values nearly always have the same text, in Postgres and in the views."""
STRING, NUMBER = "\ufdd1", "\ufdd0"
"""Marks of strings and numbers: code points that no text has (Unicode noncharacters)."""
VALUE = r'"((?:[^"\\]++|\\.)*+)"|(-?[0-9][0-9.eE+-]*+)'
LONG_NUMBER = rf"{STRING}(-?[0-9][0-9.eE+-]{{999,}}){NUMBER}"
"""A string with a number of a thousand characters or more. An index gets such a number as a string,
so in every view the string and the number count as equal.
"""
MEMBER_NAME = rf'"{STRING}((?:[^"\\{NUMBER}]++|\\.)*+){NUMBER}"(\s*+:)'


def canonical(table: Table, document: str) -> Column:
    """Turn a document into (column, comparable text) pairs, one for each of the table's columns.

    Members that are no column of the table (a view's bookkeeping) are left out. A column that the
    document lacks counts as null: a view made before the column was added holds rows without it. A
    document that Spark's parser refuses (nested deeper than a thousand levels, or no object at all)
    stays text, under no column: it equals the same text, and nothing else.
    """

    def pair(column: TableColumn, members: Column) -> Column:
        value = F.try_element_at(members, F.lit(column.name))
        compared = _comparable(kind(column.type).compare, value)
        return F.struct(
            F.lit(column.name).alias("key"), F.coalesce(compared, F.lit("null")).alias("value")
        )

    # A list with one element, so that the document is parsed once and not for every column.
    members = F.array(F.from_json(_marked(F.col(document)), "map<string, string>"))
    no_column = F.lit(None).cast("string")
    text = F.array(F.struct(no_column.alias("key"), F.col(document).alias("value")))
    return F.transform(
        members,
        lambda parsed: F.when(parsed.isNull(), text).otherwise(
            F.array(*(pair(column, parsed) for column in table.columns))
        ),
    )[0]


def fingerprint(table: Table) -> Column:
    """A 64-bit hash of (id, document).

    Equal hashes mean equal rows; different hashes don't prove a difference.

    Where equal rows have equal text, the hash is of the text as it is: parsing costs twenty times
    as much.
    """
    same_text = all(kind(column.type).compare in SAME_TEXT for column in table.columns)
    return F.xxhash64("id", F.col("document") if same_text else canonical(table, "document"))


def first_difference(expected: Column, actual: Column) -> Column:
    """Name a column whose text differs or that only one side has.

    Both arguments are results of `canonical`.

    Null where one of the documents couldn't be parsed.
    """
    changed = F.array_except(expected, actual)
    added = F.array_except(actual, expected)
    name = F.coalesce(
        F.try_element_at(changed, F.lit(1)), F.try_element_at(added, F.lit(1))
    ).getField("key")
    is_text = expected[0].getField("key").isNull() | actual[0].getField("key").isNull()
    return F.when(~is_text, name)


def _marked(text: Column) -> Column:
    """Mark JSON text: "a" becomes "«a»", and 1 becomes "«»1" (« is STRING, » is NUMBER). Member
    names stay.

    So numbers within objects and lists survive Spark's parser, which turns them into doubles, and
    text taken out of a document still tells 1 from "1".
    """
    all_marked = F.regexp_replace(text, VALUE, f'"{STRING}$1{NUMBER}$2"')
    return F.regexp_replace(all_marked, MEMBER_NAME, '"$1"$2')


def _comparable(compare: str, value: Column) -> Column:
    """Text of a value: two texts are equal exactly when Postgres calls the values equal."""
    if compare in ("real", "double"):
        return _number(compare, value)
    if compare == "json":
        # Text that isn't one JSON value is compared as it is. Of two members with one name the last
        # counts.
        long = F.regexp_replace(value, LONG_NUMBER, f"{STRING}{NUMBER}$1")
        same = F.when(F.length(value) < 1000, value).otherwise(long)
        return F.coalesce(F.to_json(F.try_parse_json(same)), same)
    if compare in ("reals", "doubles"):
        return _numbers(compare.removesuffix("s"), value)
    if compare == "path":
        parts = F.from_json(value, "closed string, points string")
        return F.concat(
            parts.getField("closed"), F.lit(" "), _numbers("double", parts.getField("points"))
        )
    return value


def _numbers(type_: str, value: Column) -> Column:
    listed = F.from_json(value, "array<string>")
    numbers = F.to_json(F.transform(listed, lambda element: _number(type_, element)))
    return F.when(value.startswith("[") & listed.isNotNull(), numbers).otherwise(value)


def _number(type_: str, value: Column) -> Column:
    """Compare by value: 1e20 is 100000000000000000000, NaN is NaN, and -0 is 0 as in Postgres.

    Other text stays.
    """
    float_type = "float" if type_ == "real" else "double"
    number = F.regexp_replace(value, f"[{STRING}{NUMBER}]", "").try_cast(float_type)
    return F.coalesce((number + F.lit(0).cast(float_type)).cast("string"), value)
