"""Batches of a warehouse that executors write in many chunks, of several tables, in several tasks."""

import errno
import itertools
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock
from uuid import UUID

import pytest

import cdc.sinks.delta.batch
from cdc.codec.decode_options import DecodeOptions
from cdc.errors import DecodeError, SinkUnavailable
from cdc.model.outcome import Advance, Applied
from cdc.model.position import Position
from cdc.model.table import Column, Table
from cdc.sink.contract import Batch
from cdc.sink.lane import ChunkLimits, FoldedRow, Part
from cdc.sink.rejection import Skip
from cdc.sinks.delta.executor import Staged, StoredRows, WarehouseWriter
from cdc.sinks.delta.sink import Delta
from cdc.sinks.delta.vectors import encode85
from tests.contract.laws import TOPIC_ID, row
from tests.support.envelopes import PLACEHOLDER, Topic, listed
from tests.support.envelopes import table as items
from tests.support.histories import World, table
from tests.support.warehouse import logged_events, mirror_documents

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def vectors_id(file: Path) -> str:
    """The text by which a log names a file of deletion vectors."""
    return encode85(UUID(file.stem.removeprefix("deletion_vector_")).bytes)


class Warehouse:
    """A sink and the topics of its tables."""

    def __init__(self, spark: "SparkSession", sink: Delta, topics: list[Topic]) -> None:
        self.spark, self.sink, self.topics, self.runs = spark, sink, topics, itertools.count()
        for topic in topics:
            sink.prepare(topic.table)

    def batch(self, share: float = 1.0) -> Batch:
        """Up to a share of what is left of each partition."""
        advances, records = [], []
        for topic in self.topics:
            stored = self.sink.position(topic.table)
            start = stored.position.offsets if stored else (0,) * topic.partitions
            ends = tuple(
                offset + round(share * (end - offset))
                for offset, end in zip(start, topic.ends, strict=True)
            )
            records += [(topic.table, record) for record in topic.between(start, ends)]
            advances.append(
                Advance(topic.table, stored.position if stored else None, Position(TOPIC_ID, ends))
            )
        log = listed(self.spark, records)
        return Batch(
            f"run {next(self.runs)}", tuple(advances), log, DecodeOptions(PLACEHOLDER), Skip()
        )

    def apply(self, share: float = 1.0) -> dict[str, Applied]:
        applied = self.sink.apply(self.batch(share)).applied
        assert all(counts.read == counts.accounted for counts in applied.values())
        return applied

    def scan(self, table: Table) -> list[tuple[str, str]]:
        """The ids and documents of a view as comparisons read them."""
        rows = self.sink.scan(table, self.spark).collect()
        return [(row["id"], row["document"]) for row in rows]

    def check(self) -> None:
        for topic in self.topics:
            stored = self.sink.position(topic.table)
            assert stored
            rows = mirror_documents(self.sink, topic.table)
            view = {key: json.loads(document) for key, document in rows}
            assert len(view) == len(rows), "an id twice in the view"
            assert view == topic.model(stored.position.offsets)
            assert sorted(logged_events(self.sink.folder(topic.table, "changes"))) == sorted(
                (record.partition, record.offset)
                for record in topic.between((0,) * topic.partitions, stored.position.offsets)
                if record.value is not None
            )

    def unused(self) -> list[str]:
        """Files that no version of a table names."""
        files = []
        for topic, kind in itertools.product(self.topics, ("changes", "mirror")):
            folder = Path(self.sink.folder(topic.table, kind))
            logs = "".join(path.read_text() for path in (folder / "_delta_log").glob("*.json"))
            files += [path.name for path in folder.glob("*.parquet") if path.name not in logs]
            vectors = list(folder.glob("*.bin"))
            files += [path.name for path in vectors if vectors_id(path) not in logs]
        return files


@pytest.fixture(params=["marked", "unmarked"])
def sink(
    request: pytest.FixtureRequest, unique: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Delta]:
    # Several tasks for a few records.
    monkeypatch.setattr("cdc.spark.lane_records.SPLIT", 1)
    patterns = ["*"] if request.param == "unmarked" else []
    path = str(tmp_path / "a warehouse+é")
    delta = Delta("warehouse", path, unique, without_deletion_vectors=patterns)
    yield delta
    delta.close()


@pytest.fixture(params=["in tasks", "in a job"])
def searched(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where superseded rows are found: by the tasks that write the batch, or by others after them."""
    if request.param == "in a job":
        monkeypatch.setattr("cdc.sinks.delta.batch.SEARCHED_BYTES", -1)


def live(spark: "SparkSession", unique: str, sink: Delta, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows whose values an earlier chunk, or the mirror, has; that are deleted and come again; that come in each."""
    monkeypatch.setattr("cdc.sinks.delta.executor.LIMITS", ChunkLimits(7, 2**30))
    tables = [replace(table(f"{unique}.public.{name}"), name=name) for name in ("one", "two")]
    worlds = [World(table, partitions=3, keys=40) for table in tables]
    warehouse = Warehouse(spark, sink, [world.topic for world in worlds])
    for turn in range(2):
        for number, world in enumerate(worlds):
            world.write(100 * turn + number, 150)
        warehouse.apply(0.6)
        warehouse.check()
    applied = warehouse.apply()
    warehouse.check()
    for lives in tables:
        assert sorted(warehouse.scan(lives)) == sorted(mirror_documents(sink, lives))
    assert all(counts.folded and counts.deleted for counts in applied.values())
    assert warehouse.unused() == []


@pytest.mark.usefixtures("searched")
def test_many_chunks(
    spark: "SparkSession", unique: str, sink: Delta, monkeypatch: pytest.MonkeyPatch
) -> None:
    live(spark, unique, sink, monkeypatch)


SOME: dict[str, tuple[str, Any]] = {
    "day": ("date", 15707),
    "far": ("date", 2145042905),
    "local": ("timestamp without time zone", -63517780799500000),
    "zoned": ("timestamp with time zone", "2013-01-01T10:00:00.123456Z"),
    "never": ("timestamp with time zone", "-infinity"),
    "real": ("real", 0.1),
    "reals": ("real[]", [0.1, None]),
    "stamps": ("timestamp with time zone[]", ["2013-01-01T10:00:00.000001Z"]),
    "money": ("numeric(10,2)", "1.50"),
    "bytes": ("bytea", "YWJj"),
    "way": (
        "path",
        {
            "wkb": "AQIAAAACAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAPA/AAAAAAAA8D8=",
            "extensions": {"closed": "true"},
        },
    ),
    "nothing": ("text", None),
}


def test_values_of_every_type_are_taken_back(
    spark: "SparkSession", unique: str, sink: Delta, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From a chunk before, and from the mirror: what a row held is what it holds, to the last digit."""
    monkeypatch.setattr("cdc.sinks.delta.executor.LIMITS", ChunkLimits(1, 2**30))
    typed = tuple(Column(name, type_) for name, (type_, _) in SOME.items())
    base = items(f"{unique}.public.items")
    topic = Topic(Table("public", "items", (*base.columns, *typed), base.key, base.topic), 1)
    values = {name: value for name, (_, value) in SOME.items()}
    missing = [name for name in SOME if name not in ("way", "reals", "stamps")]
    warehouse = Warehouse(spark, sink, [topic])
    topic.add("c", {**row("k", 1, "x", 0), **values})
    warehouse.apply()
    ((first_id, first),) = warehouse.scan(topic.table)
    for number in (1, 2):
        # In a chunk each, since the other lies between.
        topic.add("u", {**row("k", 1, "x", 0), **values}, lacking=[*missing, "v"])
        topic.add("c", row("other", number))
    warehouse.apply()
    documents = dict(warehouse.scan(topic.table))
    assert json.loads(documents[first_id]) == json.loads(first)
    assert len(documents) == 3


def test_a_value_of_a_deleted_row_is_unknown_in_a_later_chunk(
    spark: "SparkSession", unique: str, sink: Delta, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cdc.sinks.delta.executor.LIMITS", ChunkLimits(1, 2**30))
    topic = Topic(items(f"{unique}.public.items"), 1)
    warehouse = Warehouse(spark, sink, [topic])
    topic.add("c", row("k", 1))
    warehouse.apply()
    topic.add("d", row("k", 1))
    topic.add("c", row("other", 1))
    topic.add("u", row("k", 1), lacking=["v"])
    outcome = sink.apply(warehouse.batch())
    assert [(record.offset, record.id) for record in outcome.rejected] == [(4, '["k",1]')]
    assert [key for key, _ in warehouse.scan(topic.table)] == ['["other",1]']
    # What it said is on record all the same.
    assert (0, 4) in logged_events(sink.folder(topic.table, "changes"))


def test_a_column_that_the_mirror_lacks_is_unknown(
    spark: "SparkSession", unique: str, sink: Delta
) -> None:
    base = items(f"{unique}.public.items")
    topic = Topic(base, 1)
    warehouse = Warehouse(spark, sink, [topic])
    topic.add("c", row("k", 1))
    warehouse.apply()
    topic.table = Table(
        "public", "items", (*base.columns, Column("added", "text")), base.key, base.topic
    )
    topic.add("u", {**row("k", 1), "added": "x"}, lacking=["added"])
    (rejected,) = sink.apply(warehouse.batch()).rejected
    assert rejected.id == '["k",1]'


def test_what_failed_leaves_no_files(
    spark: "SparkSession", unique: str, sink: Delta, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither a batch that a record has ended, nor one whose commit the disk didn't take."""
    monkeypatch.setattr("cdc.sinks.delta.executor.LIMITS", ChunkLimits(2, 2**30))
    topic = Topic(items(f"{unique}.public.items"), 2)
    warehouse = Warehouse(spark, sink, [topic])
    for number in range(9):
        topic.add("c", row(f"k{number}", number))
    good = warehouse.batch()
    topic.add("c", {**row("bad", 1), "n": "no number"})
    batch = warehouse.batch()
    with pytest.raises(DecodeError):
        sink.apply(Batch(batch.writer, batch.advances, batch.records, batch.reading))
    assert warehouse.unused() == []
    with monkeypatch.context() as patch:
        patch.setattr(os, "link", full)
        with pytest.raises(SinkUnavailable, match="No space left"):
            sink.apply(good)
    assert warehouse.unused() == []
    sink.apply(good)
    warehouse.check()


def full(*_: object, **__: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def without_word(text: str) -> Staged:
    """Takes no note of rows that are in several files."""
    staged = DECODE_STAGED(text)
    staged.repeated = False
    for file in staged.rows:
        staged.superseded.pop(file["path"], None)
    return staged


DECODE_STAGED = cdc.sinks.delta.batch.decode_staged


class Mirrored(WarehouseWriter):
    """Asks only the mirror for what a change doesn't carry."""

    def read_stored(self, part: Part, rows: Sequence[FoldedRow]) -> Mapping[str, Any]:
        with mock.patch.object(StoredRows, "staged_ids", return_value=[]):
            return super().read_stored(part, rows)


@pytest.mark.parametrize("sink", ["marked"], indirect=True)
@pytest.mark.parametrize(
    ("name", "bug"), [("decode_staged", without_word), ("WarehouseWriter", Mirrored)]
)
def test_planted(
    spark: "SparkSession",
    unique: str,
    sink: Delta,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    bug: object,
) -> None:
    monkeypatch.setattr(cdc.sinks.delta.batch, name, bug)
    with pytest.raises(AssertionError):
        live(spark, unique, sink, monkeypatch)
