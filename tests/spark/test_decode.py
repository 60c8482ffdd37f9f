"""Decode and fold in Spark against their plain twins, and every form of a value against what DESIGN section 7 says."""

import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as budget
from hypothesis import strategies as st
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from cdc import decode, order, rows
from cdc.change import Advance, Column, Form, Position, Table, row_id
from cdc.errors import DecodeError
from cdc.explain import explain
from cdc.stream import make_batch
from tests.support.envelopes import Record, Topic, envelope, frame, table

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

ITEMS = table("t.public.items")
OTHERS = table("t.public.others", "others")
UUID = "a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11"
# type, as the connector writes it, in a document, in a warehouse column (cast to string)
TYPES: list[tuple[str, Any, Any, str]] = [
    ("smallint", 7, 7, "7"),
    ("bigint", 2**63 - 1, 2**63 - 1, str(2**63 - 1)),
    ("double precision", 1e20, 1e20, "1.0E20"),
    ("boolean", True, True, "true"),
    ("text", 'a"b\\\n😀', 'a"b\\\n😀', 'a"b\\\n😀'),
    ("numeric(10,2)", "1.50", "1.50", "1.50"),
    ("numeric", "NAN", "NaN", "NaN"),
    ("numeric", "1" + "0" * 40, "1" + "0" * 40, "1" + "0" * 40),
    ("bytea", "YWJj", "YWJj", "abc"),
    ("date", "2013-01-02Z", "2013-01-02", "2013-01-02"),
    ("time without time zone", "10:00:00.5Z", "10:00:00.500000", "10:00:00.500000"),
    ("timestamp without time zone", "2013-01-01T10:00:00.1Z", "2013-01-01T10:00:00.100000", "2013-01-01 10:00:00.1"),
    ("timestamp with time zone", "2013-01-01T10:00:00.000000Z", "2013-01-01T10:00:00.000000Z", "2013-01-01 10:00:00"),
    ("timestamp(3) with time zone", "2013-01-01T10:00:00.1Z", "2013-01-01T10:00:00.100000Z", "2013-01-01 10:00:00.1"),
    ("jsonb", '{"a": [1, null]}', {"a": [1, None]}, '{"a": [1, null]}'),
    ("integer[]", [1, None, 3], [1, None, 3], "[1, null, 3]"),
    ("numeric(6,2)[]", ["1.50", None], ["1.50", None], "[1.50, null]"),
    ("uuid", UUID, UUID, UUID),
]  # fmt: skip


def one_column(type_: str) -> Table:
    return Table("public", "x", (Column("id", "bigint", False), Column("v", type_)), ("id",), "t.public.x")


@pytest.mark.parametrize(("type_", "wire", "document", "column"), TYPES)
@pytest.mark.parametrize("null", [False, True])
def test_forms_of_a_value(spark: "SparkSession", type_: str, wire: Any, document: Any, column: Any, null: bool) -> None:
    made, value = one_column(type_), None if null else wire
    after = json.dumps({"id": 1, "v": value})
    held = spark.createDataFrame([(after,)], "after string")
    text = held.select(rows.document(made, F.col("after"))).collect()[0][0]
    assert json.loads(text) == {"id": 1, "v": None if null else document}
    columns = held.select(*rows.columns(made, "after"))
    assert columns.select(F.col("v").cast("string")).collect()[0][0] == (None if null else column)
    back = columns.select(rows.document_of_columns(made)).collect()[0][0]
    assert json.loads(back) == json.loads(text)


def test_a_value_that_no_column_holds_is_refused_by_name_alone(spark: "SparkSession") -> None:
    held = spark.createDataFrame([('{"id": 1, "v": "+292278994-08-16Z"}',)], "after string")
    with pytest.raises(PySparkException) as caught:
        held.select(*rows.columns(one_column("date"), "after")).collect()
    error = explain(caught.value, "warehouse")
    assert "public.x.v (date)" in error.message
    assert "292278994" not in error.message


@pytest.mark.parametrize(
    "record",
    [
        (b'{"a":"k","b":1}', b"not json"),
        (b'{"a":"k","b":1}', b'{"op":"z","after":null}'),
        (b'{"a":"k","b":1}', b'{"op":"c","after":null}'),
        (None, b'{"op":"c","after":{"a":"k","b":1}}'),
    ],
)
def test_a_record_of_another_writer_is_named_by_its_place(
    spark: "SparkSession", record: tuple[bytes | None, bytes]
) -> None:
    schema = frame(spark, []).schema
    records = spark.createDataFrame([(*record, ITEMS.topic, 1, 42, None)], schema)
    with pytest.raises(PySparkException) as caught:
        decode.events(records, [ITEMS]).collect()
    error = explain(caught.value, "search")
    assert isinstance(error, DecodeError)
    assert f"{ITEMS.topic} partition 1 offset 42" in error.message


def test_many_tables_in_one_batch(spark: "SparkSession") -> None:
    records = [
        (ITEMS, Record(0, 0, {"a": "k", "b": 1}, envelope("c", None, {"a": "k", "b": 1, "v": "x", "n": 1}))),
        (OTHERS, Record(0, 0, {"a": "k", "b": 1}, envelope("c", None, {"a": "k", "b": 1, "v": "y", "n": 1}))),
    ]
    steps = [Advance(one, None, Position("id", (1, 0))) for one in (ITEMS, OTHERS)]
    decoded = decode.decoded(frame(spark, records), [ITEMS, OTHERS], "documents")
    rows = make_batch("w", "documents", steps, decoded, tasks=2).changes.collect()
    assert {(row["topic"], row["id"], json.loads(row["document"])["v"]) for row in rows} == {
        (ITEMS.topic, '["k",1]', "x"),
        (OTHERS.topic, '["k",1]', "y"),
    }


KEYS = st.tuples(
    st.one_of(st.sampled_from(["", "a", 'q"', "a,b", "[", "\\"]), st.text(max_size=4).filter(str.isprintable)),
    st.integers(-(2**63), 2**63 - 1),
)
HISTORY = st.lists(st.tuples(st.integers(0, 5), st.sampled_from("crud"), st.text(max_size=6)), max_size=25)


@given(keys=st.lists(KEYS, min_size=6, max_size=6, unique=True), history=HISTORY, small=st.booleans())
@budget(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
def test_fold_equals_its_twin(
    spark: "SparkSession", keys: list[tuple[str, int]], history: list[tuple[int, str, str]], small: bool
) -> None:
    """Twin: a dict that takes the records in offset order."""
    topic = Topic(ITEMS)
    for which, op, text in history:
        topic.add(op, {"a": keys[which][0], "b": keys[which][1], "v": text, "n": len(text)})
    assert_fold(spark, topic, 1 if small else order.SMALL + 1, order.fold)


def assert_fold(spark: "SparkSession", topic: Topic, records: int, fold: Callable[..., DataFrame]) -> None:
    expected: dict[str, tuple[int, Any]] = {}
    for record in topic.records:
        after = record.value["after"] if record.value else None
        expected[row_id([record.key["a"], record.key["b"]])] = (record.offset, after)
    events = decode.events(frame(spark, [(ITEMS, record) for record in topic.records]), [ITEMS])
    rows = fold(events, "events", records, tasks=2).select("*", F.spark_partition_id().alias("task")).collect()
    assert {row["id"]: (row["offset"], row["after"] and json.loads(row["after"])) for row in rows} == expected
    assert len(rows) == len(expected)
    by_task: dict[int, list[tuple[int, int]]] = {}
    for row in rows:
        by_task.setdefault(row["task"], []).append((row["partition"], row["offset"]))
    assert all(places == sorted(places) for places in by_task.values())
    partitions = [{partition for partition, _ in places} for places in by_task.values()]
    assert sum(map(len, partitions)) == len(set().union(*partitions)), "a Kafka partition in two tasks"


def oldest(events: DataFrame, _: str, __: int, tasks: int) -> DataFrame:
    return (
        events.groupBy("topic", "partition", "id")
        .agg(F.min_by(F.struct("offset", "after"), "offset").alias("x"))
        .select("*", "x.*")
    )


def unplaced(events: DataFrame, form: Form, _: int, tasks: int) -> DataFrame:
    """Right rows, but a Kafka partition's rows are spread over the tasks by key."""
    return order.fold(events, form, 1, tasks).repartition(16, "id")


@pytest.mark.parametrize("broken", [oldest, unplaced])
def test_a_broken_fold_is_caught(spark: "SparkSession", broken: Callable[..., DataFrame]) -> None:
    topic = Topic(ITEMS)
    for number in range(40):
        topic.add("u", {"a": "k", "b": number % 20, "v": str(number), "n": number})
    with pytest.raises(AssertionError):
        assert_fold(spark, topic, 1, broken)
