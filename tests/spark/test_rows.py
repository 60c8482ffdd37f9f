"""Every form of a value: as the connector writes it, in a document, in a warehouse column and back.

What the connector writes was read off a real one; `tests/scenarios/test_types.py` holds it to that.
"""

import json
from typing import TYPE_CHECKING, Any

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import functions as F

from cdc import exact, rows
from cdc import types as spark_types
from cdc.change import Column, Table, row_id
from cdc.codec import types as codec_types
from cdc.explain import explain
from tests.support.forms import KEYS, LOST, STAMP, TYPES, compact, wide

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@pytest.mark.parametrize("null", [False, True])
def test_forms_of_a_value(spark: "SparkSession", null: bool) -> None:
    made = wide([type_ for type_, *_ in TYPES])
    names = [column.name for column in made.columns[1:]]
    wire, document, column = ([None if null else one[at] for one in TYPES] for at in (1, 2, 3))
    after = compact({"id": 1, **dict(zip(names, wire, strict=True))})
    held = spark.createDataFrame([(after,)], "after string")
    text = held.select(rows.document(made, F.col("after"))).collect()[0][0]
    found = [json.loads(text)[name] for name in names]
    assert wrong(found, document) == []
    columns = rows.parsed(held, made, "after").select(*rows.columns(made))
    shown = columns.select(*(F.col(name).cast("string") for name in names)).collect()[0]
    assert wrong(list(shown), column) == []
    back = json.loads(columns.select(rows.document_of_columns(made)).collect()[0][0])
    assert wrong([back[name] for name in names], document) == []


def test_a_row_is_parsed_once(spark: "SparkSession") -> None:
    """Not once for each use of each column, which took most of what the warehouse does."""
    made = wide([type_ for type_, *_ in TYPES])
    # Neither rows nor a constant, which Spark would parse while it plans.
    held = spark.range(1).selectExpr("CAST(id AS string) AS after")
    columns = rows.parsed(held, made, "after").select(*rows.columns(made))
    plan, parsed = columns._jdf.queryExecution().optimizedPlan(), 0
    while plan.children().size():
        parsed += plan.expressions().mkString().count("from_json(")
        plan = plan.children().head()
    assert parsed == 1


def wrong(found: list[Any], expected: list[Any]) -> list[tuple[str, Any, Any]]:
    pairs = zip(TYPES, found, expected, strict=True)
    return [(one[0], got, wanted) for one, got, wanted in pairs if got != wanted]


def test_a_value_that_the_connector_damaged_is_told(spark: "SparkSession") -> None:
    made = wide([type_ for type_, _ in LOST])
    names = [column.name for column in made.columns[1:]]
    after = compact(dict(zip(names, (wire for _, wire in LOST), strict=True)))
    row = rows.wire(made, F.col("after"))
    held = spark.createDataFrame([(after,), (compact(dict.fromkeys(names)),)], "after string")
    damaged, null = held.select(*(rows.lost(made, name, row.getField(name)) for name in names)).collect()
    assert [type_ for (type_, _), told in zip(LOST, damaged, strict=True) if not told] == []
    assert not any(null)


@pytest.mark.parametrize(("type_", "wire"), [LOST[0], LOST[1], LOST[-1]])
def test_a_value_that_the_connector_damaged_enters_no_view(spark: "SparkSession", type_: str, wire: Any) -> None:
    made = wide([type_])
    held = spark.createDataFrame([(compact({"id": 1, "v0": wire}),)], "after string")
    document = held.select(rows.document(made, F.col("after")))
    for frame in (document, rows.parsed(held, made, "after").select(*rows.columns(made))):
        with pytest.raises(PySparkException) as caught:
            frame.collect()
        error = explain(caught.value, "search")
        assert f"public.x.v0 ({type_})" in error.message
        assert str(wire) not in error.message


@pytest.mark.parametrize(
    ("type_", "wire"),
    [("numeric(10,3)", "NAN"), (STAMP, "+294276-12-31T23:59:59.999999Z"), ("numeric(3,1)[]", ["1e9"])],
)
def test_a_value_that_no_column_holds_is_refused_by_name_alone(spark: "SparkSession", type_: str, wire: Any) -> None:
    held = spark.createDataFrame([(compact({"id": 1, "v0": wire}),)], "after string")
    with pytest.raises(PySparkException) as caught:
        rows.parsed(held, wide([type_]), "after").select(*rows.columns(wide([type_]))).collect()
    error = explain(caught.value, "warehouse")
    assert f"public.x.v0 ({type_})" in error.message
    assert str(wire) not in error.message


def test_what_needs_no_other_form_passes_untouched(spark: "SparkSession") -> None:
    """A document whose table has texts, numbers, arrays and zoned times is the connector's own text."""
    types = ("text", "numeric", "double precision", "text[]", STAMP, "uuid")
    made = Table("public", "x", tuple(Column(f"c{n}", type_) for n, type_ in enumerate(types)), ("c0",), "t")
    after = '{"c0":"a", "c1":"1.50","c2":1.50,"c3":["x",null],"c4":"2013-01-01T10:00:00.000000Z","c5":null}'
    held = spark.createDataFrame([(after,)], "after string")
    assert held.select(rows.document(made, F.col("after"))).collect()[0][0] == after


@pytest.mark.parametrize("type_", sorted({type_ for type_, *_ in TYPES} | {"numeric(50,2)", "json[]", "point[]"}))
def test_both_tables_of_types_agree(type_: str) -> None:
    """As long as there are two."""
    ours, plain = spark_types.kind(type_), codec_types.kind(type_)
    for name in ("name", "words", "raw", "column", "source", "compare"):
        assert getattr(ours, name) == getattr(plain, name)


def test_ids_are_made_of_what_the_views_show(spark: "SparkSession") -> None:
    expressions, keys = [], []
    for number, (types, wire, _) in enumerate(KEYS):
        names = [f"k{at}" for at in range(len(types))]
        columns = tuple(Column(name, type_, False) for name, type_ in zip(names, types, strict=True))
        made = Table("public", "x", columns, tuple(names), "t")
        expressions.append(rows.row_id(made, F.col(f"key{number}")))
        keys.append(compact(dict(zip(names, wire, strict=True))))
    schema = ", ".join(f"key{number} string" for number in range(len(KEYS)))
    found = spark.createDataFrame([tuple(keys)], schema).select(*expressions).collect()[0]
    assert list(found) == [row_id(values) for _, _, values in KEYS]


@pytest.mark.parametrize(
    "text",
    [
        '{"n":12345678901234567890.123,"e":[1e400,-0,1.10],"s":"1","t":"","q":"a\\"1\\\\","z":null,"b":true}',
        '{"deep":{"":{"x":[[],{}]}},"u":"\\u00e9\\n 😀"}',
    ],
)
def test_numbers_survive_the_parser(spark: "SparkSession", text: str) -> None:
    held = spark.createDataFrame([(f'{{"hits":[{{"source":{text}}}]}}',)], "page string")
    parsed = F.from_json(exact.marked(F.col("page")), "hits array<struct<source string>>")
    found = held.select(exact.unmarked(parsed["hits"][0]["source"])).collect()[0][0]
    same = json.loads(text, parse_float=str, parse_int=str)
    assert json.loads(found, parse_float=str, parse_int=str) == same
