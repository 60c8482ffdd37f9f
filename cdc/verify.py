"""Compare a view with its source, row by row and column by column, while nothing writes.

Postgres says what each document must be (`types.Kind.source`); the view says what it is. Both are read by Spark's
executors and joined there; only counts and a few keys come back, never values.
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import psycopg
from psycopg import sql
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F

from cdc import types
from cdc.change import Column as TableColumn
from cdc.change import Table
from cdc.exact import NUMBER, STRING, marked
from cdc.produce import produced
from cdc.sink import Sink

if TYPE_CHECKING:
    import pyarrow as pa

SAMPLE = 5
"""Differing keys named per view."""
FETCH_ROWS = 5000


@dataclass
class Difference:
    id: str
    kind: str
    """missing, extra or different"""
    column: str | None = None
    """The first column that differs."""


@dataclass
class Comparison:
    """What was found for one table in one sink; extra counts rows that the view holds twice as well."""

    sink: str
    table: str
    source_rows: int = 0
    view_rows: int = 0
    missing: int = 0
    extra: int = 0
    different: int = 0
    sample: list[Difference] = field(default_factory=list)

    @property
    def equal(self) -> bool:
        return not (self.missing or self.extra or self.different)

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "equal": self.equal}


def compare(spark: SparkSession, table: Table, dsn: str, sinks: list[Sink]) -> Iterator[Comparison]:
    """One comparison per sink; the source is read once."""
    expected = (
        source(spark, table, dsn).withColumn("expected", _canonical(table, "document")).drop("document").persist()
    )
    try:
        for sink in sinks:
            yield _compare(table, sink.name, expected, sink.scan(table, spark))
    finally:
        expected.unpersist()


def source(spark: SparkSession, table: Table, dsn: str) -> DataFrame:
    """The table as Postgres would write its documents: id string, document string."""
    query = source_query(table).as_string(None)

    def read() -> Iterator["pa.RecordBatch"]:
        import pyarrow as pa

        with psycopg.connect(dsn, options="-c timezone=UTC -c extra_float_digits=1") as connection:
            cursor = connection.cursor("cdc_verify")
            cursor.itersize = FETCH_ROWS
            cursor.execute(query)
            while rows := cursor.fetchmany(FETCH_ROWS):
                ids, documents = zip(*rows, strict=True)
                yield pa.RecordBatch.from_pydict({"id": ids, "document": documents})

    return produced(spark, read, "id string, document string")


def source_query(table: Table) -> sql.Composed:
    """Every row as (id, document), built by Postgres in the form that DESIGN section 7 gives a view."""

    def form(name: str) -> sql.Composable:
        source = types.kind(table.column(name).type).source
        return sql.SQL("({})").format(sql.SQL(source).format(sql.Identifier(name)))

    def member(name: str) -> sql.Composable:
        return sql.SQL("to_json({}::text)::text || ':' || coalesce(to_json({})::text, 'null')").format(
            sql.Literal(name), form(name)
        )

    if len(table.key) == 1:
        identity: sql.Composable = sql.SQL("{}::text").format(form(table.key[0]))
    else:
        literals = [sql.SQL("to_json({})::text").format(form(name)) for name in table.key]
        identity = sql.SQL("'[' || array_to_string(ARRAY[{}], ',') || ']'").format(sql.SQL(", ").join(literals))
    members = sql.SQL(", ").join([member(column.name) for column in table.columns])
    return sql.SQL("SELECT {}, '{{' || array_to_string(ARRAY[{}], ',') || '}}' FROM {}").format(
        identity, members, sql.Identifier(table.schema, table.name)
    )


def _compare(table: Table, sink: str, expected: DataFrame, view: DataFrame) -> Comparison:
    found = (
        view.withColumn("found", _canonical(table, "document"))
        .groupBy("id")
        .agg(F.first("found").alias("found"), F.count("*").alias("copies"))
    )
    joined = expected.join(found, "id", "full_outer").select(
        "id",
        "copies",
        "expected",
        "found",
        F.col("expected").isNull().alias("extra"),
        F.col("found").isNull().alias("missing"),
    )
    here = F.coalesce("copies", F.lit(0))
    differs = ~F.col("extra") & ~F.col("missing") & (F.col("expected") != F.col("found"))
    counts = joined.agg(
        F.count_if(~F.col("extra")),
        F.sum(here),
        F.count_if("missing"),
        F.sum(F.when(F.col("extra"), here).otherwise(F.greatest(here - 1, F.lit(0)))),
        F.count_if(differs),
    ).first()
    source_rows, view_rows, missing, extra, different = (int(value or 0) for value in counts or (0,) * 5)
    result = Comparison(sink, table.qualified, source_rows, view_rows, missing, extra, different)
    if not result.equal:
        wrong = joined.where(F.col("extra") | F.col("missing") | differs | (here > 1)).select(
            "id",
            "copies",
            "extra",
            "missing",
            _first_difference(F.col("expected"), F.col("found")).alias("column"),
        )
        result.sample = [_difference(row.asDict()) for row in wrong.orderBy("id").take(SAMPLE)]
    return result


def _difference(row: dict[str, Any]) -> Difference:
    kind = "missing" if row["missing"] else "extra" if row["extra"] or (row["copies"] or 0) > 1 else "different"
    return Difference(row["id"], kind, row["column"] if kind == "different" else None)


def _canonical(table: Table, document: str) -> Column:
    """A document as (column, comparable text) pairs, one for each of the table's columns.

    Members that are no column of the table (a view's bookkeeping) are left out. A column that the document lacks
    counts as null: a view made before the column was added holds rows without it.
    """

    def pair(column: TableColumn, members: Column) -> Column:
        value = F.try_element_at(members, F.lit(column.name))
        compared = _comparable(types.kind(column.type).compare, value)
        return F.struct(F.lit(column.name).alias("key"), F.coalesce(compared, F.lit("null")).alias("value"))

    # A list of one, so that the document is parsed once and not for every column.
    members = F.array(F.from_json(marked(F.col(document)), "map<string, string>"))
    return F.transform(members, lambda one: F.array(*(pair(column, one) for column in table.columns)))[0]


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


def _first_difference(expected: Column, found: Column) -> Column:
    """The name of a column whose text differs or that only one side has."""
    changed = F.array_except(expected, found)
    added = F.array_except(found, expected)
    return F.coalesce(F.try_element_at(changed, F.lit(1)), F.try_element_at(added, F.lit(1))).getField("key")
