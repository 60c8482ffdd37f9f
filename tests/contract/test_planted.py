"""Planted bugs: each turns the law or the check that is named beside it red, which is green without it."""

import contextlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import pyarrow as pa
import pytest

import cdc.sinks.elasticsearch.sink
import cdc.sinks.redis.positions
from cdc.codec.decode_options import DecodeOptions
from cdc.codec.forms import Documents, FilledValue
from cdc.codec.record import Change, Placeholder, RecordDecoder
from cdc.codec.table import TableCodec, codec
from cdc.codec.types import TypeCodec, kind, numeric
from cdc.errors import SinkRejected
from cdc.model.outcome import Advance, Applied
from cdc.model.table import Column as TableColumn
from cdc.model.table import IndexOptions, Table
from cdc.sink.contract import Batch, Outcome, Sink
from cdc.sink.fencing import checkpoint_after
from cdc.sink.lane import Part, Verdicts
from cdc.sink.lane_task import LaneRun, Records
from cdc.sinks.delta.sink import Delta
from cdc.sinks.elasticsearch.executor import ElasticsearchWriter
from cdc.sinks.elasticsearch.sink import Elasticsearch
from cdc.sinks.memory import Memory
from cdc.sinks.redis import scripts as redis_scripts
from cdc.sinks.redis.sink import Redis
from cdc.verify import bucket_hashes
from tests.contract import laws
from tests.contract.crashes import Torn, die
from tests.contract.switches import Moment
from tests.support.envelopes import table
from tests.unit.test_codec_record import assert_told_apart

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from tests.conftest import Stack

RED = (AssertionError, pytest.fail.Exception)
Law = Callable[[laws.Harness], None]


def harness_of(
    spark: "SparkSession", unique: str, make: Callable[[], Sink] | None = None
) -> laws.Harness:
    memory = Memory("memory")
    return laws.Harness(spark, make or (lambda: memory), table(f"{unique}.public.items"))


def last_row_wins(self: Documents, table: Table, value: bytes, *_: object) -> FilledValue:
    """The newest change as it is, for all columns: null where it carries no value."""
    return FilledValue(value, ())


DECODE, FOLD = RecordDecoder.decode, LaneRun.fold


def floor_ignored(
    self: RecordDecoder, topic: str, key: bytes | None, value: bytes | None
) -> Change:
    change = DECODE(self, topic, key, value)
    change.lsn = None
    return change


def servers_ignored(placeholder: str, floors: Mapping[str, int], _: object) -> DecodeOptions:
    return DecodeOptions(placeholder, floors)


def placeholder_passed(*_: object) -> None:
    return None


def before_trusted(
    self: RecordDecoder, topic: str, key: bytes | None, value: bytes | None
) -> Change:
    """A delete writes the row that it calls `before`, with dummy values in all columns but the key."""
    change = DECODE(self, topic, key, value)
    if change.op == "d":
        old_row = json.loads(value or b"")["before"]
        change.row = json.dumps({**old_row, "n": 0}).encode()
    return change


def without_tombstones(self: LaneRun, topic: str, partition: int, records: Records) -> None:
    FOLD(self, topic, partition, [record for record in records if record[1] is not None])


PATCHES: dict[str, tuple[list[tuple[Any, str, Any]], Law]] = {
    "last-row-wins fold": ([(Documents, "fill", last_row_wins)], laws.a_value_that_is_not_carried_stays),
    "floor ignored": ([(RecordDecoder, "decode", floor_ignored)], laws.what_a_truncate_has_voided_stays_away),
    "floors by LSN alone": (
        [(laws, "DecodeOptions", servers_ignored)],
        laws.what_a_server_before_has_written_stays_away,
    ),
    "placeholder written": ([(Placeholder, "carried", placeholder_passed)], laws.a_value_that_is_not_carried_stays),
    "before trusted on delete": (
        [(RecordDecoder, "decode", before_trusted), (LaneRun, "fold", without_tombstones)],
        laws.the_newest_of_a_batch_wins,
    ),
}  # fmt: skip


@pytest.mark.parametrize("bug", PATCHES)
def test_expressions(
    spark: "SparkSession", unique: str, monkeypatch: pytest.MonkeyPatch, bug: str
) -> None:
    places, law = PATCHES[bug]
    law(harness_of(spark, f"{unique}_good"))
    for place in places:
        monkeypatch.setattr(*place)
    with pytest.raises(RED):
        law(harness_of(spark, unique))


class PositionFirst(Memory):
    """Moves the position and dies; the next writer finds it moved."""

    dies = True

    def apply(self, batch: Batch) -> Outcome:
        if not self.dies:
            return super().apply(batch)
        self.dies = False
        return self._move(batch)

    def _move(self, batch: Batch) -> NoReturn:
        for advance in batch.advances:
            name = advance.table.qualified
            self.stored[name] = checkpoint_after(
                advance, self.stored.get(name), Applied(), batch.writer
            )
        die()


class DataFirst(Torn):
    """Writes the data and dies: nothing is lost."""

    dies = True

    def apply(self, batch: Batch) -> Outcome:
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

    def nothing(advance: Advance, _: object) -> tuple[int, ...]:
        return (0,) * advance.end.partition_count

    laws.what_a_view_has_is_not_set_back(harness(f"{unique}_good"))
    monkeypatch.setattr("cdc.sinks.delta.batch.known_offsets", nothing)
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
    monkeypatch.setattr(cdc.sinks.redis.positions, "FINISH", finish_unasked())
    harness = harness_of(
        spark,
        unique,
        lambda: Redis("cache", stack.endpoints.redis.removesuffix("/0") + "/4", unique),
    )
    with pytest.raises(RED):
        laws.a_stopped_writer_is_fenced(harness, Moment(3).during)


@dataclass
class ByLsn(ElasticsearchWriter):
    """Takes the LSN for the version of a document; lsns: by partition and offset."""

    lsns: Mapping[tuple[int, int], int] = field(default_factory=dict)

    def write(self, parts: Sequence[Part]) -> Sequence[Verdicts]:
        for part in parts:
            for row in part.rows.values():
                row.offset = self.lsns[part.partition, row.offset]
        return super().write(parts)


def test_lsn_instead_of_offset(
    spark: "SparkSession", unique: str, stack: "Stack", monkeypatch: pytest.MonkeyPatch
) -> None:
    def make(name: str) -> laws.Harness:
        return harness_of(
            spark, name, lambda: Elasticsearch("search", stack.endpoints.elasticsearch, name)
        )

    laws.a_later_change_wins_whatever_its_lsn(make(f"{unique}_good"))
    harness = make(unique)

    def by_lsn(url: str, aliases: Mapping[str, str], fresh: frozenset[str]) -> ByLsn:
        records = harness.topic.records
        lsns = {
            (r.partition, r.offset): r.value["source"]["lsn"] if r.value else 1 for r in records
        }
        return ByLsn(url, aliases, fresh, lsns=lsns)

    monkeypatch.setattr(cdc.sinks.elasticsearch.sink, "ElasticsearchWriter", by_lsn)
    with pytest.raises(RED):
        laws.a_later_change_wins_whatever_its_lsn(harness)


class Lenient(ElasticsearchWriter):
    """Takes the answer to every item for a good one."""

    def write(self, parts: Sequence[Part]) -> Sequence[Verdicts]:
        super().write(parts)
        return [Verdicts()] * len(parts)


def test_bulk_item_error_ignored(
    spark: "SparkSession", unique: str, stack: "Stack", monkeypatch: pytest.MonkeyPatch
) -> None:
    def make(name: str) -> laws.Harness:
        numbers = replace(
            table(f"{name}.public.items"), index=IndexOptions({"v": {"type": "integer"}})
        )
        sink = Elasticsearch("search", stack.endpoints.elasticsearch, name)
        return laws.Harness(spark, lambda: sink, numbers)

    refused_by_the_index(make(f"{unique}_good"))
    monkeypatch.setattr(cdc.sinks.elasticsearch.sink, "ElasticsearchWriter", Lenient)
    with pytest.raises(RED):
        refused_by_the_index(make(unique))


def refused_by_the_index(harness: laws.Harness) -> None:
    """A text that an index with numbers in its place won't take: the position doesn't pass what is missing."""
    harness.topic.add("c", laws.row("k", 1, "7"))
    harness.apply()
    position = harness.position()
    harness.topic.add("c", laws.row("bad", 1, "no number"))
    with contextlib.suppress(SinkRejected):
        harness.apply()
    assert harness.position() == position or harness.view() == harness.topic.model()


def joined(self: TableCodec, key: bytes) -> str:
    return "_".join(json.loads(key).values())


def test_key_joined_with_an_underscore(monkeypatch: pytest.MonkeyPatch) -> None:
    keyed = Table(
        "public", "x", (TableColumn("a", "text"), TableColumn("b", "text")), ("a", "b"), "t"
    )
    keys = [("a_b", "c"), ("a", "b_c")]
    assert_told_apart(keyed, keys)
    monkeypatch.setattr(TableCodec, "row_id", joined)
    with pytest.raises(AssertionError, match="two keys with one id"):
        assert_told_apart(keyed, keys)


EXACT = "12345678901234567890.123456789012345678"


def compared(spark: "SparkSession", name: str) -> list[tuple[str, str]]:
    """A numeric(38,18) through the columns of a warehouse and back, as `cdc verify` sees it."""
    table = Table(
        "public",
        name,
        (TableColumn("id", "bigint"), TableColumn("v", "numeric(38,18)")),
        ("id",),
        "t",
    )
    row, table_codec = f'{{"id":1,"v":"{EXACT}"}}', codec(table)
    columns = [
        pa.array([value], type_)
        for value, type_ in zip(
            table_codec.values(row.encode()), table_codec.schema.types, strict=True
        )
    ]
    (document,) = table_codec.documents(
        pa.RecordBatch.from_arrays(columns, schema=table_codec.schema)
    ).to_pylist()
    view, source = (
        spark.createDataFrame([("1", text)], "id string, document string")
        for text in (document, row)
    )
    return [
        (difference["kind"], difference["column"])
        for difference in bucket_hashes.compare_rows(table, source, {"cache": view}).collect()
    ]


def as_double(precision: int, scale: int) -> TypeCodec:
    return TypeCodec("numeric", column="double", to_column=float, from_column="{:.18f}".format)


def test_float_for_numeric(spark: "SparkSession", monkeypatch: pytest.MonkeyPatch) -> None:
    assert compared(spark, "exact") == []
    with monkeypatch.context() as planted:
        planted.setattr(numeric, "scaled", as_double)
        kind.cache_clear()
        assert compared(spark, "rounded") == [("different", "v")]
    kind.cache_clear()


class PositionStays(Memory):
    """Removes the rows alone: a view that is made again lacks all that was before."""

    def remove(self, tables: Sequence[Table]) -> None:
        self.generations_by_name.clear()
        for removed in tables:
            self.views.pop(removed.qualified, None)


def test_what_a_removal_leaves_behind(
    spark: "SparkSession", unique: str, stack: "Stack", monkeypatch: pytest.MonkeyPatch
) -> None:
    """The position, or another generation, of which `remains` doesn't know either."""
    memory, bad = Memory("memory"), PositionStays("memory")
    laws.a_removed_view_leaves_nothing_behind(harness_of(spark, f"{unique}_good", lambda: memory))
    with pytest.raises(RED):
        laws.a_removed_view_leaves_nothing_behind(harness_of(spark, unique, lambda: bad))

    url = stack.endpoints.redis.removesuffix("/0") + "/4"
    databases = Redis.databases
    monkeypatch.setattr(Redis, "databases", lambda sink: databases(sink)[:1])
    with pytest.raises(RED):
        laws.a_removed_view_leaves_nothing_behind(
            harness_of(spark, unique, lambda: Redis("cache", url, unique))
        )
