"""What an audit folds of a topic, in Spark: against the plain twin."""

from typing import TYPE_CHECKING

import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from cdc.audit import auditor
from cdc.codec import log_rows
from cdc.codec.decode_options import DecodeOptions
from cdc.codec.log_rows import RecordClassifier
from cdc.model.position import Position
from cdc.model.table import Column, Table
from cdc.sink.lane_run import freeze_gc_after
from cdc.verify import recent_changes
from cdc.verify.row_equality import comparable
from tests.support import twin
from tests.support.budget import budget
from tests.support.envelopes import PLACEHOLDER, RECORDS, envelope
from tests.support.scribe import Scribe, packed
from tests.support.twin import Raw, Twin

if TYPE_CHECKING:
    import pytest
    from pyspark.sql import DataFrame, SparkSession

FLOOR, BELOW = 150, 250


def table() -> Table:
    types = ("text", "bigint", "text", "integer", "text[]", "jsonb")
    columns = tuple(Column(f"c{index}", type_) for index, type_ in enumerate(types))
    return Table("public", "one", columns, ("c0", "c1"), "t.public.one")


def framed(spark: "SparkSession", records: list[Raw]) -> "DataFrame":
    columns = [
        pa.array([record[index] for record in records], RECORDS[name])
        for index, name in enumerate(Raw._fields)
    ]
    return spark.createDataFrame(pa.table(columns, list(Raw._fields)))


@given(seed=st.integers(0, 2**32), garbage=st.sampled_from([0.0, 0.3]))
@budget(4)
def test_the_newest_of_each_key_equals_the_twin(
    spark: "SparkSession", seed: int, garbage: float
) -> None:
    items = table()
    keys = [{"c0": text, "c1": number} for text in ("", "a", "é") for number in range(6)]
    records = Scribe(items, seed, ["", "a"], keys).log(300, garbage=garbage, lacking=0.4)
    classifier = RecordClassifier(
        items, DecodeOptions(PLACEHOLDER, {items.topic: FLOOR}), warehouses=(items,), below=BELOW
    )
    summaries = (
        framed(spark, records)
        .select(*log_rows.RECORDS)
        .mapInArrow(freeze_gc_after(classifier.work), log_rows.SUMMARY)
        .persist()
    )
    rows = auditor.newest_states(summaries).persist()
    decode = Twin([items], "events", PLACEHOLDER, {items.topic: FLOOR}).decode
    changes = [change for record in records if (change := decode(record)).id is not None]
    folded = {
        (state.id, state.partition): (state.offset, state.row is not None, state.missing)
        for state in twin.fold(changes)
    }
    lsn = {(change.partition, change.offset): change.lsn for change in changes}
    listed = rows.collect()
    assert sorted((row["id"], row["partition"]) for row in listed) == sorted(folded)
    for row in listed:
        offset, lives, missing = folded[row["id"], row["partition"]]
        assert row["partial"] == bool(missing)
        record_lsn = lsn[row["partition"], offset] if offset is not None else None
        assert row["outdated"] == (lives and record_lsn is not None and record_lsn < BELOW)
    _, lost = twin.applied(changes, {})
    assert sorted(
        row["id"] for row in auditor.unrecoverable_ids(items, summaries, rows).collect()
    ) == sorted(lost)
    rows.unpersist()
    summaries.unpersist()


def test_states_and_keys_of_a_topic(
    spark: "SparkSession", monkeypatch: "pytest.MonkeyPatch"
) -> None:
    """What verify and repair ask of a topic; records that can't be read, and keys of another table,
    are left out.
    """
    items = table()
    key, row = (
        packed({"c0": "a", "c1": 1}),
        {"c0": "a", "c1": 1, "c2": "x", "c3": 1, "c4": [], "c5": "{}"},
    )
    event = envelope("u", None, row)
    event["source"] |= {"table": "one"}
    values = [packed(event), None, b"no json", packed({**event, "after": {**row, "c5": "[1]"}})]
    records = [Raw(key, value, items.topic, 0, offset) for offset, value in enumerate(values)]
    records += [Raw(b"no", None, items.topic, 0, 9), Raw(None, None, items.topic, 0, 10)]
    monkeypatch.setattr(recent_changes, "read_records", lambda *_: framed(spark, records))
    states = [
        (row["id"], row["seen"])
        for row in recent_changes.states_since(spark, "", items, Position("id", (0,))).collect()
    ]
    documents = [
        '{"c0":"a","c1":1,"c2":"x","c3":1,"c4":[],"c5":{}}',
        '{"c0":"a","c1":1,"c2":"x","c3":1,"c4":[],"c5":[1]}',
    ]
    rules = comparable(items)
    first = rules.state_hash(documents[0])
    last = rules.state_hash(documents[1])
    assert states == [('["a",1]', first), ('["a",1]', None), ('["a",1]', last)]
    assert [
        (row["id"], bytes(row["key"])) for row in recent_changes.keys(spark, "", items).collect()
    ] == [('["a",1]', key)]
    assert [tuple(row) for row in recent_changes.ids_since(spark, "", items, 0).collect()] == [
        ('["a",1]',)
    ]


def test_the_last_change_of_a_row_says_how_old_it_is(
    spark: "SparkSession", monkeypatch: "pytest.MonkeyPatch"
) -> None:
    """By its offset, whichever change was committed last. One that has no row, or can't be read, says nothing."""
    items = table()
    commits_ms = {
        "younger": [10, 30],
        "older": [30, 10],
        "just": [20],
        "gone": [10],
        "unread": [10],
    }
    ends = {"gone": None, "unread": b"no json"}
    records: list[Raw] = []
    for name, times_ms in commits_ms.items():
        row = {"c0": name, "c1": 1, "c2": "x", "c3": 1, "c4": [], "c5": "{}"}
        events = [envelope("u", None, row, committed_us=time_ms * 1000) for time_ms in times_ms]
        for event in events:
            event["source"] |= {"table": "one"}
        values = [*map(packed, events), *([ends[name]] if name in ends else [])]
        key = packed({"c0": name, "c1": 1})
        start = len(records)
        records += [
            Raw(key, value, items.topic, 0, start + number) for number, value in enumerate(values)
        ]
    monkeypatch.setattr(recent_changes, "read_records", lambda *_: framed(spark, records))
    unchanged = recent_changes.ids_unchanged_since(spark, "", items, 20).collect()
    assert [row["id"] for row in unchanged] == ['["older",1]']
