"""Planted bugs: each turns the law or the check that is named beside it red, which is green without it."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn
from unittest import mock

import pytest
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

import sinks.elasticsearch.sink
import sinks.redis
from cdc import decode, order, tree, types
from cdc.change import Advance, Applied, Form, Stored, Table
from cdc.change import Column as TableColumn
from cdc.decode import Reading
from cdc.rows import columns, document_of_columns, parsed
from cdc.sink import Batch, Sink, stored_after
from cdc.toast import Placeholder
from sinks import redis_scripts
from sinks.delta import frames
from sinks.delta.sink import Delta
from sinks.elasticsearch import executor
from sinks.elasticsearch.sink import Elasticsearch
from sinks.memory import Memory
from sinks.redis import Redis
from tests.contract import laws
from tests.contract.crashes import Send, Torn, die
from tests.contract.switches import Moment
from tests.spark.test_decode import assert_told_apart
from tests.support.envelopes import table

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from tests.conftest import Stack

RED = (AssertionError, pytest.fail.Exception)
Law = Callable[[laws.Harness], None]


def harness_of(spark: "SparkSession", unique: str, make: Callable[[], Sink] | None = None) -> laws.Harness:
    held = Memory("memory")
    return laws.Harness(spark, make or (lambda: held), table(f"{unique}.public.items"))


def last_row_wins(changes: DataFrame, form: Form, records: int, tasks: int, **_: object) -> DataFrame:
    """The newest change as it is, for all columns: null where it carries no value."""
    whole = FOLD(changes, form, records, tasks)
    return whole.withColumn("kept", F.lit(None).cast("array<string>")).withColumn("first", F.col("offset"))


FOLD, DECODED = order.fold, decode.decoded


def floor_ignored(*_: object) -> Column:
    return F.lit(False)


def placeholder_passed(self: Placeholder, row: Column, _: Column) -> Column:
    return row


def nothing_kept(self: Placeholder, row: Column, _: Column) -> Column:
    return F.lit(None).cast("array<string>")


def before_trusted(records: DataFrame, tables: Sequence[Table], form: Form, reading: Reading) -> DataFrame:
    """A delete writes the row that it calls `before`, with dummy values in all columns but the key."""
    value = F.col("value").cast("string")
    parts = (F.get_json_object(value, f"$.{name}") for name in ("before", "source"))
    row = F.format_string('{"op":"u","after":%s,"source":%s}', *parts)
    turned = F.when(F.get_json_object(value, "$.op") == "d", row).otherwise(value).cast("binary")
    return DECODED(records.where(F.col("value").isNotNull()).withColumn("value", turned), tables, form, reading)


PATCHES: dict[str, tuple[list[tuple[Any, str, Any]], Law]] = {
    "last-row-wins fold": ([(order, "fold", last_row_wins)], laws.a_value_that_is_not_carried_stays),
    "floor ignored": ([(decode, "_dead", floor_ignored)], laws.what_a_truncate_has_voided_stays_away),
    "floors by LSN alone": ([(decode, "_past", floor_ignored)], laws.what_a_server_before_has_written_stays_away),
    "placeholder written": (
        [(Placeholder, "masked", placeholder_passed), (Placeholder, "kept", nothing_kept)],
        laws.a_value_that_is_not_carried_stays,
    ),
    "before trusted on delete": ([(decode, "decoded", before_trusted)], laws.the_newest_of_a_batch_wins),
}


@pytest.mark.parametrize("bug", PATCHES)
def test_expressions(spark: "SparkSession", unique: str, monkeypatch: pytest.MonkeyPatch, bug: str) -> None:
    places, law = PATCHES[bug]
    law(harness_of(spark, f"{unique}_good"))
    for place in places:
        monkeypatch.setattr(*place)
    with pytest.raises(RED):
        law(harness_of(spark, unique))


class PositionFirst(Memory):
    """Moves the position and dies; the next writer finds it moved."""

    dies = True

    def apply(self, batch: Batch) -> Mapping[str, Applied]:
        if not self.dies:
            return super().apply(batch)
        self.dies = False
        return self._move(batch)

    def _move(self, batch: Batch) -> NoReturn:
        for advance in batch.advances:
            name = advance.table.qualified
            self.stored[name] = stored_after(advance, self.stored.get(name), Applied(), batch.writer)
        die()


class DataFirst(Torn):
    """Writes the data and dies: nothing is lost."""

    dies = True

    def apply(self, batch: Batch) -> Mapping[str, Applied]:
        if not self.dies:
            return Memory.apply(self, batch)
        self.dies = False
        return super().apply(batch)


def test_position_before_data(spark: "SparkSession", unique: str) -> None:
    good, bad = DataFirst("memory"), PositionFirst("memory")
    laws.a_crash_leaves_nothing_out(harness_of(spark, f"{unique}_good", lambda: good))
    assert not good.dies
    with pytest.raises(RED):
        laws.a_crash_leaves_nothing_out(harness_of(spark, unique, lambda: bad))


def test_what_a_mirror_has_is_merged_again(
    spark: "SparkSession", unique: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a batch that begins before the view's position all is taken for new."""

    def harness(name: str) -> laws.Harness:
        return harness_of(spark, name, lambda: Delta("warehouse", str(tmp_path), name))

    def unseen(frame: DataFrame, advance: Advance, _: Stored | None) -> DataFrame:
        return frame.where(frame["topic"] == advance.table.topic)

    laws.what_a_view_has_is_not_set_back(harness(f"{unique}_good"))
    monkeypatch.setattr(frames, "unseen", unseen)
    with pytest.raises(RED):
        laws.what_a_view_has_is_not_set_back(harness(unique))


def finish_unasked() -> str:
    """Moves whatever position is there."""
    guard = "if not held or below(now, ARGV[i + 1]) or below(ARGV[i + 2], now) then return moved(ARGV[i]) end"
    assert guard in redis_scripts.FINISH
    return redis_scripts.FINISH.replace(guard, "")


def test_position_taken_back_by_a_stopped_writer(
    spark: "SparkSession", unique: str, stack: "Stack", monkeypatch: pytest.MonkeyPatch
) -> None:
    """Finding 16; the same without the bug is `test_zombies`."""
    monkeypatch.setattr(sinks.redis, "FINISH", finish_unasked())
    harness = harness_of(spark, unique, lambda: Redis("cache", stack.endpoints.redis.removesuffix("/0") + "/4", unique))
    with pytest.raises(RED):
        laws.a_stopped_writer_is_fenced(harness, Moment(3).during)


class ByLsn(Elasticsearch):
    """Takes the LSN for the version of a document."""

    lsns: Mapping[str, int]

    def _lines(self, batch: Batch, indices: Mapping[str, str]) -> DataFrame:
        place = F.concat_ws(" ", "partition", "offset")
        lsns = F.create_map(*(F.lit(one) for pair in self.lsns.items() for one in pair))
        lines: DataFrame = super()._lines(batch, indices)
        version = F.concat(F.lit('"version":'), lsns[place].cast("string"), F.lit(","))
        return lines.withColumn("line", F.regexp_replace("line", F.lit('"version":[0-9]+,'), version))


def test_lsn_instead_of_offset(spark: "SparkSession", unique: str, stack: "Stack") -> None:
    def make(kind: type[Elasticsearch], name: str) -> laws.Harness:
        return harness_of(spark, name, lambda: kind("search", stack.endpoints.elasticsearch, name))

    laws.a_later_change_wins_whatever_its_lsn(make(Elasticsearch, f"{unique}_good"))
    harness = make(ByLsn, unique)
    assert isinstance(harness.sink, ByLsn)
    harness.sink.lsns = Lsns(harness)
    with pytest.raises(RED):
        laws.a_later_change_wins_whatever_its_lsn(harness)


class Lsns(dict[str, int]):
    """The LSN of each place in a harness' log, as it is when asked."""

    def __init__(self, harness: laws.Harness) -> None:
        super().__init__()
        self.harness = harness

    def items(self) -> Any:
        records = self.harness.topic.records
        return {f"{r.partition} {r.offset}": r.value["source"]["lsn"] if r.value else 1 for r in records}.items()


def lenient(*arguments: Any) -> Send:
    """Takes the answer to every item for a good one."""
    whole = executor.sender(*arguments)

    def count(item: executor.Item, answer: Mapping[str, Any]) -> bool:
        item.said.written += 1
        return False

    def apply(batches: Iterator[Any]) -> Iterator[Any]:
        with mock.patch.object(executor, "_count", count):
            yield from whole(batches)

    return apply


def test_bulk_item_error_ignored(
    spark: "SparkSession", unique: str, stack: "Stack", monkeypatch: pytest.MonkeyPatch
) -> None:
    def make(name: str) -> laws.Harness:
        return harness_of(spark, name, lambda: Elasticsearch("search", stack.endpoints.elasticsearch, name))

    laws.the_position_is_not_ahead_of_the_data(make(f"{unique}_good"))
    monkeypatch.setattr(sinks.elasticsearch.sink, "sender", lenient)
    with pytest.raises(RED):
        laws.the_position_is_not_ahead_of_the_data(make(unique))


def joined(keyed: Table, key: Column) -> Column:
    return F.concat_ws("_", *(F.get_json_object(key, f"$.{name}") for name in keyed.key))


def test_key_joined_with_an_underscore(spark: "SparkSession") -> None:
    keyed = Table("public", "x", (TableColumn("a", "text", False), TableColumn("b", "text", False)), ("a", "b"), "t")
    keys = [("a_b", "c"), ("a", "b_c")]
    assert_told_apart(spark, keyed, keys)
    with pytest.raises(AssertionError, match="two keys with one id"):
        assert_told_apart(spark, keyed, keys, joined)


EXACT = "12345678901234567890.123456789012345678"


def compared(spark: "SparkSession", name: str) -> list[tuple[str, str]]:
    """A numeric(38,18) through the columns of a warehouse and back, as `cdc verify` sees it."""
    made = Table("public", name, (TableColumn("id", "bigint", False), TableColumn("v", "numeric(38,18)")), ("id",), "t")
    row = f'{{"id":1,"v":"{EXACT}"}}'
    held = parsed(spark.createDataFrame([(row,)], "after string"), made, "after").select(*columns(made))
    view = held.select(F.lit("1").alias("id"), document_of_columns(made).alias("document"))
    source = spark.createDataFrame([("1", row)], "id string, document string")
    return [(found["kind"], found["column"]) for found in tree.differing(made, source, view).collect()]


def as_double(precision: int, scale: int) -> types.Kind:
    return types.Kind(
        "numeric",
        column="double",
        to_column=lambda value: value.cast("double"),
        from_column=lambda value: value.cast("decimal(38,18)").cast("string"),
    )


def test_float_for_numeric(spark: "SparkSession", monkeypatch: pytest.MonkeyPatch) -> None:
    assert compared(spark, "exact") == []
    monkeypatch.setattr(types, "_numeric", as_double)
    assert compared(spark, "rounded") == [("different", "v")]


def test_every_planted_bug_has_its_test() -> None:
    """The list of issue and design; a name that is gone is a bug that nothing is known to catch any more."""
    source = Path(__file__).read_text(encoding="utf-8")
    functions = {"position_before_data", "lsn_instead_of_offset", "bulk_item_error_ignored", "key_joined", "float_for"}
    functions |= {"position_taken_back"}
    assert all(f"def test_{name}" in source for name in functions)
    assert len(PATCHES) == 5
