"""Rows of several views compared with their source, in one job: `cdc.verify.bucket_hashes`."""

from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from cdc.model.table import Column, Derivation, Table
from cdc.sinks.memory import Memory
from cdc.verify import bucket_hashes
from cdc.verify.row_equality import SOURCE, bucket_digest, comparable

if TYPE_CHECKING:
    import pytest
    from pyspark.sql import DataFrame, SparkSession


def make_table(*columns: tuple[str, str]) -> Table:
    listed = (Column("id", "bigint"), *(Column(name, type_) for name, type_ in columns))
    return Table("public", "items", listed, ("id",), "t.public.items")


def frame(spark: "SparkSession", *rows: tuple[str, str]) -> "DataFrame":
    return spark.createDataFrame(rows, "id string, document string")


def test_rows_of_closed_windows_are_left_out_and_counted(spark: "SparkSession") -> None:
    documents = {
        "open": '{"id":1,"final":false}',
        "closed": '{"id":2,"final":true}',
        "other": '{"id":3,"note":"true"}',
    }
    table = make_table(("final", "boolean"))
    sink = Memory("cache")
    sink.views[table.qualified] = documents
    for closes, listed, count in ((False, set(documents), 0), (True, {"open", "other"}, 1)):
        view = replace(table, derivation=Derivation("SELECT 1", (), ("cache",), closes=closes))
        rows = bucket_hashes.scan(sink, view, spark).collect()
        assert {row["id"] for row in rows} == listed
        assert bucket_hashes.count_closed(sink, view, spark) == count


ROWS = [(str(number), f'{{"id":{number},"n":{number}.5}}') for number in range(40)]
SEVEN = bucket_digest(b"7").hex()
ITEMS = make_table(("n", "double precision"))
FAULTS = {
    "missing": [row for row in ROWS if row[0] != "7"],
    "extra": [*ROWS, ("77", '{"id":77,"n":1}')],
    "duplicate": [*ROWS, ROWS[7], ROWS[7]],
    "different": [(key, text.replace("7.5", "7.25") if key == "7" else text) for key, text in ROWS],
    "equal": [(key, text.replace(".5", ".50")) for key, text in reversed(ROWS)],
}
"""By sink, its rows: each sink has another fault, and one has none."""


def test_buckets_that_differ_in_any_view(spark: "SparkSession") -> None:
    for sinks, differing in (
        (("equal",), set()),
        (("equal", "extra"), {bucket_digest(b"77").hex()}),
        (("missing",), {SEVEN}),
        (("duplicate",), {SEVEN}),
        (("different", "equal", "extra"), {SEVEN, bucket_digest(b"77").hex()}),
    ):
        views = {sink: frame(spark, *FAULTS[sink]) for sink in sinks}
        comparison = bucket_hashes.compare_buckets(ITEMS, frame(spark, *ROWS), views, None)
        assert set(comparison.differing) == differing
        assert comparison.rows == {SOURCE: 40, **{sink: len(FAULTS[sink]) for sink in sinks}}
        assert all(seconds > 0 for seconds in comparison.seconds.values())


def test_sums_differ_in_any_of_the_three() -> None:
    """Two pairs of hashes with one exclusive or, with one total, and with both."""
    pairs = ((1, 2), (4, 7), (0, 3))
    sums = []
    for pair in pairs:
        sums.append(bucket_hashes.BucketSums())
        hashes = np.array(pair, "uint64")
        sums[-1].add(np.array([5, 5]), 1, hashes, hashes)
    one = bucket_hashes.BucketSums()
    one.add(np.array([5]), 1, np.array([3], "uint64"), np.array([3], "uint64"))
    for first, second in ((sums[0], sums[1]), (sums[0], one)):
        assert np.flatnonzero(first.differ(second)).tolist() == [5]
    assert not sums[0].differ(sums[2]).any()


def test_buckets_of_a_sample(spark: "SparkSession") -> None:
    """A fault outside the sample isn't seen, and its rows aren't counted."""
    views = {"different": frame(spark, *FAULTS["different"])}
    border = sorted([SEVEN, bucket_digest(b"8").hex()])
    for sample in ((SEVEN, SEVEN), ("0000", "ffff"), (border[1], "ffff")):
        rows = [
            row for row in ROWS if sample[0] <= bucket_digest(row[0].encode()).hex() <= sample[1]
        ]
        comparison = bucket_hashes.compare_buckets(ITEMS, frame(spark, *rows), views, sample)
        expected = [SEVEN] if sample[0] <= SEVEN <= sample[1] else []
        assert comparison.differing == expected
        assert comparison.rows == {SOURCE: len(rows), "different": len(rows)}


def test_an_empty_side_differs_from_one_that_has_rows(spark: "SparkSession") -> None:
    for source, view in (((), ROWS[:2]), (ROWS[:2], ())):
        views = {"cache": frame(spark, *view)}
        comparison = bucket_hashes.compare_buckets(ITEMS, frame(spark, *source), views, None)
        assert set(comparison.differing) == {bucket_digest(b"0").hex(), bucket_digest(b"1").hex()}
        assert comparison.rows == {SOURCE: len(source), "cache": len(view)}


def test_each_fault_is_its_sinks(spark: "SparkSession") -> None:
    views = {sink: frame(spark, *rows) for sink, rows in FAULTS.items()}
    wrong = bucket_hashes.compare_rows(ITEMS, frame(spark, *ROWS), views).collect()
    hash_of = comparable(ITEMS).state_hash
    assert {row["sink"]: tuple(row)[1:] for row in wrong} == {
        "missing": ("7", "missing", None, 1, None),
        "extra": ("77", "extra", None, 1, hash_of('{"id":77,"n":1.0}')),
        "duplicate": ("7", "duplicate", None, 2, hash_of(ROWS[7][1])),
        "different": ("7", "different", "n", 1, hash_of('{"id":7,"n":7.25}')),
    }
    assert len(wrong) == 4


def test_only_ids_that_were_asked_for_are_compared(spark: "SparkSession") -> None:
    """Each sink's are its own: a row that one doesn't compare isn't missing there."""
    views = {"missing": frame(spark, *FAULTS["missing"]), "empty": frame(spark)}
    only = {"missing": {"7", "8"}, "empty": {"9"}}
    wrong = bucket_hashes.compare_rows(ITEMS, frame(spark, *ROWS), views, only).collect()
    assert {(row["sink"], row["id"], row["kind"]) for row in wrong} == {
        ("missing", "7", "missing"),
        ("empty", "9", "missing"),
    }


def test_two_rows_of_the_source_with_one_id(spark: "SparkSession") -> None:
    """A view can't hold both, whichever it has; one that has both is equal in number only."""
    source = frame(spark, ("1", '{"id":1,"n":1}'), ("1", '{"id":1,"n":2}'))
    views = {
        "first": frame(spark, ("1", '{"id":1,"n":1}')),
        "second": frame(spark, ("1", '{"id":1,"n":2}')),
        "neither": frame(spark),
    }
    wrong = bucket_hashes.compare_rows(ITEMS, source, views).collect()
    assert {(row["sink"], row["kind"], row["count"]) for row in wrong} == {
        ("first", "missing", 1),
        ("second", "missing", 1),
        ("neither", "missing", 2),
    }


def test_duplicates_that_are_not_read_again_stay_wrong(
    spark: "SparkSession", monkeypatch: "pytest.MonkeyPatch"
) -> None:
    """A scan gives each row twice, and so many can't be read by id: none counts as equal."""
    monkeypatch.setattr(bucket_hashes, "MAX_SUSPECTS", 1)
    sink = Memory("cache")
    sink.views[ITEMS.qualified] = dict(ROWS[:4])
    views = {"cache": frame(spark, *ROWS[:4], *ROWS[:4])}
    with ExitStack() as frames:
        wrong = bucket_hashes.confirmed_differences(
            frames, ITEMS, [sink], frame(spark, *ROWS[:4]), views
        )
        assert wrong is not None
        assert [row["kind"] for row in wrong.collect()] == ["duplicate"] * 3
