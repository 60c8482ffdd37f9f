"""Decode and fold in Spark against their plain twins, records of another making included."""

import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark.errors import PySparkException
from pyspark.sql import Column as SparkColumn
from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from cdc import backlog, decode, order
from cdc.apply.batch import make_batch
from cdc.change import Advance, Column, Form, Position, Table, row_id
from cdc.decode import Reading
from cdc.errors import DecodeError
from cdc.explain import explain
from cdc.rows import row_id as row_id_column
from sinks.elasticsearch.executor import LONGEST_ID, document_id
from tests.support import twin
from tests.support.budget import budget
from tests.support.envelopes import PLACEHOLDER, RECORDS, Record, Row, Topic, envelope, frame, table
from tests.support.scribe import Scribe, packed
from tests.support.twin import Change, Folded, Raw, Twin

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

ITEMS = table("t.public.items")
OTHERS = table("t.public.others", "others")
FORMS: tuple[Form, ...] = ("events", "documents")
TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\x00"), max_size=12)
STRANGE = [
    "after",
    "before",
    "source",
    "op",
    "key",
    "id",
    "offset",
    "a.b",
    "`",
    "``x",
    "'",
    '"',
    "\\",
    "é",
    "😀",
    "a b",
]
STRANGE += ["row", "kept", "problem", "value", "$.x", "[0]", "x,y", "NULL", "\n", "{}"]


@pytest.mark.parametrize(
    "record",
    [
        (b'{"a":"k","b":1}', b"not json"),
        (b'{"a":"k","b":1}', b'{"op":"z","after":null}'),
        (b'{"a":"k","b":1}', b'{"op":"c","after":null}'),
        (None, b'{"op":"c","after":{"a":"k","b":1}}'),
        (b'{"a":"k","b":1}', b'{"op":"c","after":{"a":"k","b":1,"v":"\xff"}}'),
        (b'{"a":"\xff","b":1}', b'{"op":"c","after":{"a":"k","b":1}}'),
    ],
)
def test_a_record_of_another_writer_is_named_by_its_place(
    spark: "SparkSession", record: tuple[bytes | None, bytes]
) -> None:
    records = framed(spark, [Raw(*record, ITEMS.topic, 1, 42)])
    with pytest.raises(PySparkException) as caught:
        decode.decoded(records, [ITEMS], "events", Reading()).collect()
    error = explain(caught.value, "search")
    assert isinstance(error, DecodeError)
    assert f"{ITEMS.topic} partition 1 offset 42" in error.message


def test_before_what_counts_nothing_is_looked_at(spark: "SparkSession") -> None:
    """What another server, or the same with another key, has left there is no error: dead, tombstones as well."""
    key, row = packed({"a": "k", "b": 1}), {"a": "k", "b": 1, "v": "1", "n": 1}
    values = (b"no json", None, None, packed(envelope("c", None, row, 1)), packed(envelope("c", None, row, 1)))
    keys = (b'{"other":1}', b'{"other":1}', key, key, key)
    raws = [Raw(*raw, ITEMS.topic, int(at == 4), min(at, 3)) for at, raw in enumerate(zip(keys, values, strict=True))]
    for careful in (True, False):
        reading = Reading(PLACEHOLDER, {}, {ITEMS.topic: (3, 4)}, careful=careful)
        decoded = decode.decoded(framed(spark, raws), [ITEMS], "documents", reading)
        assert [row["dead"] for row in decoded.orderBy("partition", "offset").collect()] == [True] * 3 + [False, True]
        folded = order.fold(decoded, "documents", 5, tasks=2).collect()
        assert {(row["id"], row["partition"], row["dead"], row["quarantined"], row["offset"]) for row in folded} == {
            (None, 0, 2, 0, None),
            ('["k",1]', 0, 1, 0, 3),
            ('["k",1]', 1, 1, 0, None),
        }


def test_a_text_may_hold_what_stands_for_bytes_that_are_none(spark: "SparkSession") -> None:
    row = {"a": "\ufffd", "b": 1, "v": "\ufffd", "n": 1}
    record = Raw(packed({"a": row["a"], "b": 1}), packed(envelope("c", None, row)), ITEMS.topic, 0, 0)
    (found,) = decode.decoded(framed(spark, [record]), [ITEMS], "documents", Reading()).collect()
    assert json.loads(found["document"]) == row


def test_many_tables_in_one_batch(spark: "SparkSession") -> None:
    records = [
        (ITEMS, Record(0, 0, {"a": "k", "b": 1}, envelope("c", None, {"a": "k", "b": 1, "v": "x", "n": 1}))),
        (OTHERS, Record(0, 0, {"a": "k", "b": 1}, envelope("c", None, {"a": "k", "b": 1, "v": "y", "n": 1}))),
    ]
    steps = [Advance(one, None, Position("id", (1, 0))) for one in (ITEMS, OTHERS)]
    decoded = decode.decoded(frame(spark, records), [ITEMS, OTHERS], "documents", Reading())
    rows = make_batch("w", "documents", steps, decoded, tasks=2).changes.collect()
    assert {(row["topic"], row["id"], json.loads(row["document"])["v"]) for row in rows} == {
        (ITEMS.topic, '["k",1]', "x"),
        (OTHERS.topic, '["k",1]', "y"),
    }


def framed(spark: "SparkSession", records: Sequence[Raw]) -> DataFrame:
    columns = [pa.array([record[at] for record in records], RECORDS[name]) for at, name in enumerate(Raw._fields)]
    return spark.createDataFrame(pa.table(columns, list(Raw._fields)))


def named(topic: str, names: Sequence[str]) -> Table:
    """A table whose columns have these names, one of a type each."""
    types = ("text", "bigint", "text", "integer", "boolean", "numeric(10,2)", "text[]", "integer[]", "jsonb")
    made = tuple(Column(name, type_) for name, type_ in zip(names, types, strict=True))
    return Table("public", topic.rsplit(".", 1)[1], made, tuple(names[:2]), topic)


def assert_decoded(found: DataFrame, expected: Sequence[Change], form: Form) -> None:
    value = "after" if form == "events" else "document"
    rows = {(row["topic"], row["partition"], row["offset"]): row.asDict() for row in found.collect()}
    assert len(rows) == len(expected)
    for change in expected:
        row = rows[change.topic, change.partition, change.offset]
        where = (change, row["record"]) if "record" in row else change
        assert (row.get("problem") is not None) == change.wrong, (row.get("problem"), where)
        if change.wrong:
            assert row[value] is None
            continue
        assert row["id"] == change.id, where
        assert parsed(row[value]) == change.after, where
        assert unordered(row["kept"]) == change.kept, where
        assert row["dead"] == change.dead, where
        assert form == "documents" or (row["op"], row["lsn"]) == (change.op, change.lsn), where


def assert_folded(found: DataFrame, expected: Sequence[Folded], form: Form) -> None:
    """The same rows; a Kafka partition in one task, in the order of `first`."""
    rows = found.select("*", F.spark_partition_id().alias("task")).collect()
    twins = {(row.topic, row.partition, row.id): row for row in expected}
    assert len(rows) == len(twins)
    for row in rows:
        one = twins[row["topic"], row["partition"], row["id"]]
        older = None if row["older"] is None else tuple((parsed(o["row"]), unordered(o["kept"])) for o in row["older"])
        after = parsed(row["after" if form == "events" else "document"])
        own = (row["offset"], after, unordered(row["kept"]), older, row["first"])
        assert own == (one.offset, one.row, one.kept, one.older, one.first), one
        assert (row["records"], row["dead"], row["quarantined"]) == (one.records, one.dead, one.quarantined), one
    by_task: dict[int, list[tuple[str, int, int]]] = {}
    for row in rows:
        by_task.setdefault(row["task"], []).append((row["topic"], row["partition"], row["first"] or -1))
    assert all(places == sorted(places) for places in by_task.values())
    partitions = [{place[:2] for place in places} for places in by_task.values()]
    assert sum(map(len, partitions)) == len(set().union(*partitions)), "a Kafka partition in two tasks"


def parsed(text: str | None) -> Any:
    return None if text is None else twin.loads(text)


def unordered(kept: Sequence[str] | None) -> frozenset[str] | None:
    return None if kept is None else frozenset(kept)


def pool(names: Sequence[str], texts: Sequence[str]) -> list[Row]:
    numbers = (0, 1, -1, 2**53 + 1, 2**53 + 2, 2**63 - 1, -(2**63))
    return [{names[0]: text, names[1]: number} for text in texts for number in numbers]


@given(
    names=st.lists(st.one_of(st.sampled_from(STRANGE), TEXT.filter(len)), min_size=9, max_size=9, unique_by=str.lower),
    texts=st.lists(TEXT, min_size=3, max_size=6, unique=True),
    seed=st.integers(0, 2**32),
    form=st.sampled_from(FORMS),
    garbage=st.sampled_from([0.0, 0.4]),
    small=st.booleans(),
)
@budget(5)
def test_decode_and_fold_equal_their_twins(
    spark: "SparkSession",
    names: list[str],
    texts: list[str],
    seed: int,
    form: Form,
    garbage: float,
    small: bool,
) -> None:
    tables = [named("t.public.one", names), named("t.public.two", names[::-1])]
    scribes = [Scribe(one, seed + n, texts, pool(one.key, texts)) for n, one in enumerate(tables)]
    records = [record for scribe in scribes for record in scribe.log(300, garbage=garbage)]
    reading = Reading(PLACEHOLDER, {tables[0].topic: 150}, careful=garbage > 0)
    changes = [Twin(tables, form, PLACEHOLDER, reading.floors).decode(record) for record in records]
    decoded = decode.decoded(framed(spark, records), tables, form, reading).persist()
    assert_decoded(decoded, changes, form)
    assert_folded(
        order.fold(decoded, form, 1 if small else order.SMALL + 1, tasks=2),
        twin.fold(changes),
        form,
    )
    decoded.unpersist()


@given(seed=st.integers(0, 2**32), small=st.booleans())
@budget(3)
def test_a_plain_fold_equals_the_full_one_where_nothing_lacks(spark: "SparkSession", seed: int, small: bool) -> None:
    tables = [named("t.public.one", STRANGE[:9]), named("t.public.two", STRANGE[8::-1])]
    scribes = [Scribe(one, seed + n, ["a", ""], pool(one.key, ["a", "b"])) for n, one in enumerate(tables)]
    records = [record for scribe in scribes for record in scribe.log(300, lacking=0.0)]
    reading = Reading(PLACEHOLDER, {tables[0].topic: 150})
    decoded = decode.decoded(framed(spark, records), tables, "documents", reading)
    found = order.fold(decoded, "documents", 1 if small else order.SMALL + 1, tasks=2, plain=True)
    none = {name: F.lit(None).cast("array<string>") for name in ("kept", "older")}
    reader = Twin(tables, "documents", PLACEHOLDER, reading.floors)
    assert_folded(found.withColumns(none), twin.fold([reader.decode(record) for record in records]), "documents")


def test_a_plain_fold_fails_where_a_value_lacks(spark: "SparkSession") -> None:
    topic = Topic(ITEMS)
    topic.add("c", {"a": "k", "b": 1, "v": "1", "n": 1})
    topic.add("u", {"a": "k", "b": 1, "v": "2", "n": 2}, lacking=["v"])
    topic.add("u", {"a": "k", "b": 1, "v": "3", "n": 3})
    records = [(ITEMS, record) for record in topic.records]
    decoded = decode.decoded(frame(spark, records), [ITEMS], "documents", Reading(PLACEHOLDER))
    with pytest.raises(PySparkException, match=order.LACKING):
        order.fold(decoded, "documents", 3, tasks=2, plain=True).collect()
    assert order.fold(decoded, "documents", 3, tasks=2).count() == 1


@given(seed=st.integers(0, 2**32))
@budget(3)
def test_what_is_folded_first_and_decoded_then_is_the_same(spark: "SparkSession", seed: int) -> None:
    """Records that are no changes included, where another record of the row follows; else they stop the batch."""
    tables = [named("t.public.one", STRANGE[:9]), named("t.public.two", STRANGE[8::-1])]
    scribes = [Scribe(one, seed + n, ["a", ""], pool(one.key, ["a", "b"])) for n, one in enumerate(tables)]
    records = [record for scribe in scribes for record in scribe.log(300, lacking=0.0)]
    none = {name: F.lit(None).cast("array<string>") for name in ("kept", "older")}
    reader, reading = Twin(tables, "documents", PLACEHOLDER), Reading(PLACEHOLDER)
    expected = twin.fold([reader.decode(record) for record in records])
    last = {(one.topic, one.partition, one.key): one.offset for one in records}
    followed = [one for one in records if one.offset < last[one.topic, one.partition, one.key]]
    spoiled = [one._replace(value=b"{") if one in followed[::3] else one for one in records]
    assert spoiled != records

    def newest(records: Sequence[Raw]) -> DataFrame:
        parts = [framed(spark, [one for one in records if one.partition % 2 == turn]) for turn in (0, 1)]
        return backlog.newest(parts, tables, reading)

    found = newest(spoiled)
    assert "Exchange" not in found._jdf.queryExecution().executedPlan().toString()
    assert_folded(found.withColumns(none), expected, "documents")
    with pytest.raises(PySparkException, match=decode.UNDECODABLE):
        newest([*records[:-1], records[-1]._replace(value=b"{")]).collect()


def test_a_newest_change_without_a_value_fails_its_fold(spark: "SparkSession") -> None:
    topic = Topic(ITEMS)
    topic.add("c", {"a": "k", "b": 1, "v": "1", "n": 1})
    topic.add("u", {"a": "k", "b": 1, "v": "2", "n": 2}, lacking=["v"])
    lacking = frame(spark, [(ITEMS, record) for record in topic.records])
    topic.add("u", {"a": "k", "b": 1, "v": "3", "n": 3})
    whole = frame(spark, [(ITEMS, record) for record in topic.records])
    with pytest.raises(PySparkException, match=order.LACKING):
        backlog.newest([lacking], [ITEMS], Reading(PLACEHOLDER)).collect()
    (row,) = backlog.newest([whole], [ITEMS], Reading(PLACEHOLDER)).collect()
    assert (row["records"], json.loads(row["document"])["v"]) == (3, "3")


@pytest.mark.parametrize("plain", [False, True])
def test_tasks_take_partitions_in_turn(spark: "SparkSession", plain: bool) -> None:
    """By Spark's own hash, one of two tasks has three of some topics' four."""
    records = [(topic, partition, partition) for topic in "abc" for partition in range(4)]
    named = spark.createDataFrame(records, "topic string, partition int, offset bigint")
    changes = named.selectExpr(
        "*", "'1' AS id", "CAST(NULL AS array<string>) AS kept", "false AS dead", "'{}' AS document"
    )
    folded = order.fold(changes, "documents", order.SMALL + 1, tasks=2, plain=plain)
    assert "task" not in folded.columns
    placed = folded.select("topic", "partition", F.spark_partition_id().alias("at")).collect()
    shares = Counter((row["topic"], row["at"]) for row in placed)
    assert shares == {(topic, at): 2 for topic in "abc" for at in range(2)}


LONG = "x" * 600
TRICKY = [
    "",
    '"',
    "\\",
    ",",
    "[",
    "]",
    "a,b",
    '","',
    "_",
    ":",
    "é",
    "😀",
    "\n",
    "\x0b",
    "\x1f",
    "\u2028",
    "\\u000b",
    "null",
    "1",
]
KEYED = st.one_of(st.sampled_from([*TRICKY, LONG, LONG + "y", "sha256:" + "0" * 64]), TEXT)


@given(
    texts=st.lists(st.tuples(KEYED, KEYED), min_size=30, max_size=60, unique=True),
    numbers=st.lists(st.integers(-(2**63), 2**63 - 1), min_size=3, max_size=6, unique=True),
    types=st.sampled_from([("text",), ("text", "text"), ("text", "bigint"), ("bigint", "text", "text"), ("bigint",)]),
)
@budget(4)
def test_no_two_keys_collide(
    spark: "SparkSession", texts: list[tuple[str, str]], numbers: list[int], types: tuple[str, ...]
) -> None:
    """Neither as ids, nor as the ids of documents, which are at most 512 bytes long."""
    near = [*numbers, *(n + 1 for n in numbers if n < 2**63 - 1)]
    pairs = [(pair, number) for pair in texts for number in near]
    mixed = list(
        dict.fromkeys(tuple(n if t == "bigint" else p[at % 2] for at, t in enumerate(types)) for p, n in pairs)
    )
    made = Table("public", "x", tuple(Column(f"k{at}", one) for at, one in enumerate(types)), (), "t.public.x")
    assert_told_apart(spark, replace(made, key=tuple(column.name for column in made.columns)), mixed)


@pytest.mark.parametrize(
    ("type_", "keys"),
    [
        ("bigint", ['{"k":}', '{"k":1', '{"k":1,"k":x}', '{"k":"}', '{"k":0x1}', '{"k":01}', '{"k":+1}', '{"j":1}']),
        ("text", ['{"k":"}', '{"k":"a', '{"k":"a"b"}', '{"k":"\\"}', '{"k":"a\nb"}', '{"k":a"}', '{"j":"a"}']),
    ],
)
def test_what_is_no_key_has_no_id(spark: "SparkSession", type_: str, keys: list[str]) -> None:
    made = Table("public", "x", (Column("k", type_),), ("k",), "t.public.x")
    ids = spark.createDataFrame(pa.table({"key": keys})).select(row_id_column(made, F.col("key")).alias("id"))
    assert [row["id"] for row in ids.collect()] == [None] * len(keys)


def assert_told_apart(
    spark: "SparkSession",
    keyed: Table,
    mixed: Sequence[tuple[Any, ...]],
    make: Callable[[Table, SparkColumn], SparkColumn] = row_id_column,
) -> None:
    keys = [packed(dict(zip(keyed.key, key, strict=True))).decode() for key in mixed]
    held = spark.createDataFrame(pa.table({"key": keys}))
    ids = held.select(make(keyed, F.col("key")).alias("id"))
    rows = ids.select("id", document_id(F.col("id")).alias("document_id")).collect()
    assert len({row["id"] for row in rows}) == len(mixed), "two keys with one id"
    assert len({row["document_id"] for row in rows}) == len(mixed), "two keys with one document"
    assert [row["id"] for row in rows] == [row_id(list(key)) for key in mixed]
    assert all(len(row["document_id"].encode()) <= LONGEST_ID for row in rows)


def oldest(events: DataFrame, form: Form, records: int, tasks: int) -> DataFrame:
    first = events.groupBy("topic", "partition", "id").agg(F.min_by(F.struct("offset", "after"), "offset").alias("x"))
    folded = order.fold(events, form, records, tasks).drop("offset", "after", "first")
    joined = folded.join(first.select("topic", "partition", "id", "x.*"), ["topic", "partition", "id"])
    return joined.withColumn("first", F.col("offset"))


def unplaced(events: DataFrame, form: Form, _: int, tasks: int) -> DataFrame:
    """Right rows, but a Kafka partition's rows are spread over the tasks by key."""
    return order.fold(events, form, 1, tasks).repartition(16, "id")


def uncounted(events: DataFrame, form: Form, records: int, tasks: int) -> DataFrame:
    return order.fold(events, form, records, tasks).withColumn("records", F.lit(1).cast("long"))


@pytest.mark.parametrize("broken", [oldest, unplaced, uncounted])
def test_a_broken_fold_is_caught(spark: "SparkSession", broken: Callable[..., DataFrame]) -> None:
    topic = Topic(ITEMS)
    for number in range(40):
        topic.add("u", {"a": "k", "b": number % 20, "v": str(number), "n": number})
    events = decode.decoded(frame(spark, [(ITEMS, r) for r in topic.records]), [ITEMS], "events", Reading())
    raws = [
        Raw(json.dumps(r.key).encode(), json.dumps(r.value).encode(), ITEMS.topic, r.partition, r.offset)
        for r in topic.records
    ]
    expected = twin.fold([Twin([ITEMS], "events", PLACEHOLDER).decode(raw) for raw in raws])
    assert_folded(order.fold(events, "events", 1, 2), expected, "events")
    with pytest.raises(AssertionError):
        assert_folded(broken(events, "events", 1, 2), expected, "events")
