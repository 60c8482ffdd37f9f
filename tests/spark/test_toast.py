"""Values that the log doesn't carry: what a fold finds and what a row is completed with, against the plain twin."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from cdc import decode, order
from cdc.change import Column, Table
from cdc.decode import Reading
from cdc.quarantine import TAINTED
from cdc.report import Row as FoldedRow
from cdc.toast import Placeholder
from tests.spark.test_decode import assert_folded, framed
from tests.support import twin
from tests.support.budget import budget
from tests.support.envelopes import PLACEHOLDER, Row
from tests.support.scribe import SHAPES, Scribe, packed
from tests.support.twin import Change, Raw, Twin

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

TYPES = ("text", "bytea", "text[]", "bytea[]", "integer[]", "bigint[]", "uuid[]", "jsonb", "hstore", "integer")
WIDE = Table(
    "public",
    "wide",
    (Column("id", "bigint", False), *(Column(f"c{n} {t}", t) for n, t in enumerate(TYPES))),
    ("id",),
    "t.public.wide",
)
TEXTS = ["", "a", 'q"\\', "😀", "null", PLACEHOLDER[:-1], PLACEHOLDER[1:]]


@pytest.mark.parametrize("kind", SHAPES)
def test_every_shape_is_a_placeholder(spark: "SparkSession", kind: str) -> None:
    """Alone, beside others, and never what merely looks like one."""
    shape = SHAPES[kind]
    near = {"x": PLACEHOLDER[:-1], "y": [PLACEHOLDER[:-1]], "z": list(PLACEHOLDER.encode())[:-1]}
    text = packed({"a": shape, **near, "b": "b", "é": shape, "c": None}).decode()
    placeholder, row = Placeholder(PLACEHOLDER), F.col("row")
    held = spark.createDataFrame([(text,)], "row string")
    suspected = placeholder.suspected(row)
    kept, masked = held.select(placeholder.kept(row, suspected), placeholder.masked(row, suspected)).collect()[0]
    assert sorted(kept) == ["a", "é"]
    assert twin.loads(masked) == {"a": None, **near, "b": "b", "é": None, "c": None}


def complete(folded: DataFrame, view: Mapping[str, str]) -> tuple[dict[str, str], set[str]]:
    """What a sink makes of folded rows, and the ids of those with a value that nobody knows."""
    now, lost = dict(view), set[str]()
    for found in folded.select(*FoldedRow._fields).collect():
        row = FoldedRow._make(found.asDict(recursive=True)[name] for name in FoldedRow._fields)
        if row.offset is None:
            continue
        document = row.document if row.kept is None else row.complete(view.get(row.id) if row.asks_view else None)
        if row.kept is not None and document is None:
            lost.add(row.id)
        elif document is None:
            now.pop(row.id, None)
        else:
            now[row.id] = document
    return now, lost


@given(seed=st.integers(0, 2**32), cuts=st.lists(st.integers(1, 599), min_size=2, max_size=4, unique=True))
@budget(3)
def test_rows_are_completed_as_the_twin_says(spark: "SparkSession", seed: int, cuts: list[int]) -> None:
    """Many rows' lives in a few batches, a share of the records in quarantine, and what was before a floor is dead."""
    scribe = Scribe(WIDE, seed, TEXTS, [{"id": n} for n in range(120)])
    records = scribe.log(600, garbage=0.06, lacking=0.5)
    reading = Reading(PLACEHOLDER, {WIDE.topic: 120}, careful=True)
    reader = Twin([WIDE], "documents", PLACEHOLDER, reading.floors)
    view: dict[str, str] = {}
    tainted: set[tuple[int, str]] = set()
    for start, end in zip([0, *sorted(cuts)], [*sorted(cuts), len(records)], strict=True):
        changes = [reader.decode(record) for record in records[start:end]]
        stand_ins = [Change(WIDE.topic, partition, -1, key, wrong=True) for partition, key in sorted(tainted)]
        decoded = decode.decoded(framed(spark, records[start:end]), [WIDE], "documents", reading)
        folded = order.fold(with_tainted(decoded, stand_ins), "documents", 1, tasks=2).persist()
        assert_folded(folded, twin.fold([*stand_ins, *changes]), "documents")
        expected, lost = twin.applied([*stand_ins, *changes], {key: twin.loads(text) for key, text in view.items()})
        found, refused = complete(folded, view)
        folded.unpersist()
        assert refused == lost
        assert {key: twin.loads(text) for key, text in found.items() if key not in lost} == expected
        view = {key: text for key, text in found.items() if key not in lost}
        tainted = still_tainted(tainted, changes, lost)


def with_tainted(decoded: DataFrame, stand_ins: Sequence[Change]) -> DataFrame:
    """As `Quarantine.tainted` puts them into a batch."""
    rows = [(one.topic, one.partition, one.id, one.offset, False, TAINTED) for one in stand_ins]
    schema = "topic string, partition int, id string, offset long, dead boolean, problem string"
    listed = decoded.sparkSession.createDataFrame(rows, schema)
    return decoded.unionByName(listed, allowMissingColumns=True) if rows else decoded


def still_tainted(before: set[tuple[int, str]], changes: Sequence[Change], lost: set[str]) -> set[tuple[int, str]]:
    now = set(before)
    for one in changes:
        if one.id is None:
            continue
        if one.wrong or one.id in lost:
            now.add((one.partition, one.id))
        elif not one.dead and one.kept is None:
            now.discard((one.partition, one.id))
    return now


def test_a_quarantined_record_hides_nothing_older(spark: "SparkSession") -> None:
    """What is known before the newest good change stays known when a bad record comes after it."""
    scribe = Scribe(WIDE, 1, TEXTS, [{"id": 1}], partitions=1)
    row: Row = {column.name: None for column in WIDE.columns} | {"id": 1, "c0 text": "new", "c9 integer": 1}
    masked: dict[str, Any] = {**row, "c0 text": PLACEHOLDER, "c9 integer": 2}
    values = [scribe.envelope("c", None, row), scribe.envelope("u", None, masked), {"op": "x"}]
    raws = [Raw(b'{"id":1}', packed(value), WIDE.topic, 0, offset) for offset, value in enumerate(values)]
    decoded = decode.decoded(framed(spark, raws), [WIDE], "documents", Reading(PLACEHOLDER, careful=True))
    view, lost = complete(order.fold(decoded, "documents", 3, 2), {"1": packed({**row, "c0 text": "old"}).decode()})
    assert not lost
    assert twin.loads(view["1"]) == {**row, "c0 text": "new", "c9 integer": 2}
