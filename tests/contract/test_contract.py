"""Every sink keeps the laws; a sink that breaks one is caught by it."""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import deltalake
import pytest
import redis
from pyspark.sql import functions as F

from cdc.errors import SinkUnavailable
from cdc.kafka.log_reader import Record
from cdc.model.outcome import Applied
from cdc.model.position import Position, ViewCheckpoint
from cdc.sink.contract import Batch, Outcome, PositionLost, Sink
from cdc.sink.fencing import checkpoint_after
from cdc.sinks.delta import generations
from cdc.sinks.delta.log import TableLog
from cdc.sinks.delta.sink import Delta
from cdc.sinks.elasticsearch.sink import Elasticsearch
from cdc.sinks.memory import Memory
from cdc.sinks.redis.sink import Redis
from tests.contract import laws
from tests.support import buckets, http
from tests.support.envelopes import ListedRecords, table
from tests.support.warehouse import begin, write

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from tests.conftest import Stack

SINKS = ["memory", "redis", "elasticsearch", "delta"]


@pytest.fixture(params=SINKS)
def harness(
    request: pytest.FixtureRequest, spark: "SparkSession", unique: str, tmp_path: Path
) -> "Iterator[laws.Harness]":
    harness = laws.Harness(
        spark, maker(request, request.param, unique, tmp_path), table(f"{unique}.public.items")
    )
    yield harness
    harness.sink.close()


def maker(
    request: pytest.FixtureRequest, kind: str, unique: str, folder: Path
) -> Callable[[], Sink]:
    if kind == "memory":
        store = Memory("memory")

        def remake() -> Sink:
            sink = Memory("memory")
            sink.views, sink.stored = store.views, store.stored
            return sink

        return remake
    if kind.startswith("delta"):
        unmarked = ["*"] if kind.endswith("unmarked") else []
        if kind.endswith("compacted"):
            monkeypatch = request.getfixturevalue("monkeypatch")
            monkeypatch.setattr("cdc.sinks.delta.mirror.SMALL_FILES", 2)
        path = str(folder / "warehouse")
        if kind.endswith("bucket"):
            path = f"{buckets.new_bucket(unique)}/warehouse"
        return lambda: Delta("warehouse", path, unique, without_deletion_vectors=unmarked)
    stack: Stack = request.getfixturevalue("stack")
    if kind == "redis":
        # Databases of its own: generations change places with all that is in them.
        url = stack.endpoints.redis.removesuffix("/0")
        for number in "45":
            redis.Redis.from_url(f"{url}/{number}").flushdb()
        return lambda: Redis("cache", f"{url}/4", unique)
    if kind == "redis, shared":
        url = stack.endpoints.redis.removesuffix("/0") + "/6"
        return lambda: Redis("cache", url, unique, shared=True)
    if kind == "elasticsearch":
        return lambda: Elasticsearch("search", stack.endpoints.elasticsearch, unique)
    raise ValueError(f"{kind} is built nowhere")


@pytest.mark.parametrize("law", laws.LAWS, ids=lambda law: law.__name__)
def test_law(law: Callable[[laws.Harness], None], harness: laws.Harness) -> None:
    law(harness)
    if isinstance(harness.sink, Delta):
        assert harness.scanned() == harness.view()


@pytest.mark.parametrize("harness", ["delta, compacted", "delta, unmarked"], indirect=True)
@pytest.mark.parametrize("law", laws.MERGING, ids=lambda law: law.__name__)
def test_law_of_a_mirror(law: Callable[[laws.Harness], None], harness: laws.Harness) -> None:
    """One that is compacted after each batch, and one without deletion vectors."""
    law(harness)
    assert harness.scanned() == harness.view()


@pytest.mark.parametrize("harness", ["delta, in a bucket"], indirect=True)
@pytest.mark.parametrize("law", laws.SHARING, ids=lambda law: law.__name__)
def test_law_of_a_bucket(law: Callable[[laws.Harness], None], harness: laws.Harness) -> None:
    law(harness)
    assert harness.scanned() == harness.view()


AWAY: dict[str, Callable[[Path], Sink]] = {
    "redis": lambda _: Redis("cache", "redis://127.0.0.1:1/0", "away"),
    "elasticsearch": lambda _: Elasticsearch("search", "http://127.0.0.1:1", "away"),
    "delta": lambda folder: Delta("warehouse", str(folder / "file"), "away"),
}
"""Every sink whose views lie outside of this process, with a destination that can't be reached: a
port that nobody listens to, a file where a folder was.
"""


@pytest.mark.parametrize("kind", AWAY)
def test_a_position_that_cannot_be_read_stops(kind: str, tmp_path: Path) -> None:
    assert set(SINKS) - AWAY.keys() == {"memory"}
    (tmp_path / "file").touch()
    sink = AWAY[kind](tmp_path)
    laws.a_position_that_cannot_be_read_stops(sink, table("away.public.items"))
    sink.close()


def test_planted_a_sink_that_says_there_is_nothing() -> None:
    with pytest.raises(pytest.fail.Exception):
        laws.a_position_that_cannot_be_read_stops(Memory("memory"), table("away.public.items"))


@pytest.mark.parametrize("harness", ["elasticsearch", "redis"], indirect=True)
@pytest.mark.parametrize("records", [0, 1])
def test_beside_a_promoted_view_that_is_emptied_lies_what_it_replaced(
    harness: laws.Harness, records: int
) -> None:
    """That tells a rebuild, which was killed and is resumed after a TRUNCATE, that it is promoted."""
    laws.fill_view(harness)
    live = harness.sink
    captured = harness.table
    (former,) = live.generations(captured)
    names, build = harness.begin_generation()
    name = names[harness.name]
    harness.apply(writer="rebuild", sink=build)
    live.clear(captured)
    live.prepare(captured)
    emptied, *beside = live.generations(captured)
    assert (beside, emptied == former) == ([name], False)
    live.promote([captured], names)
    assert live.generations(captured) == [name, emptied]
    live.clear(captured)
    live.prepare(captured)
    if records:
        harness.apply()
    newest, *beside = live.generations(captured)
    assert (beside, newest == name) == ([emptied], False)


@pytest.mark.parametrize("harness", ["elasticsearch"], indirect=True)
def test_an_index_that_is_gone_is_made_again(harness: laws.Harness) -> None:
    """Somebody has deleted it; the stream has to start again from where the view stands, which is nowhere."""
    laws.fill(harness)
    harness.apply((3, 2))
    sink, batch = harness.sink, harness.batch(harness.position(), harness.topic.ends, "one")
    assert isinstance(sink, Elasticsearch)
    (index,) = http.get(f"{sink.url}/_alias/{sink.alias(harness.table)}").raise_for_status().json()
    http.delete(f"{sink.url}/{index}").raise_for_status()
    with pytest.raises(PositionLost):
        harness.send(batch)
    assert harness.position() is None
    sink.prepare(harness.table)
    harness.apply()
    assert harness.view() == harness.topic.model()


@pytest.mark.parametrize("harness", ["redis", "elasticsearch"], indirect=True)
def test_what_is_empty_is_there_for_other_readers(harness: laws.Harness) -> None:
    """An index that can be searched, and no key; of a warehouse see `test_delta`."""
    sink = harness.sink
    if isinstance(sink, Elasticsearch):
        url = f"{sink.url}/{sink.alias(harness.table)}"
        assert http.get(f"{url}/_count").raise_for_status().json()["count"] == 0
        (mapping,) = http.get(f"{url}/_mapping").raise_for_status().json().values()
        assert {column.name for column in harness.table.columns} <= mapping["mappings"][
            "properties"
        ].keys()
    else:
        assert isinstance(sink, Redis)
        with redis.Redis.from_url(sink.url) as server:
            assert list(server.scan_iter(f"{sink.prefix}:{harness.table.qualified}:*")) == []


class Forgetful(Memory):
    """Stores positions, never compares them."""

    def apply(self, batch: Batch) -> Outcome:
        for advance in batch.advances:
            if advance.start is None:
                self.stored.pop(advance.table.qualified, None)
            elif position := self.stored.get(advance.table.qualified):
                self.stored[advance.table.qualified] = checkpoint_after(
                    type(advance)(advance.table, None, advance.start),
                    position,
                    Applied(),
                    batch.writer,
                )
        return super().apply(batch)


class Unfolded(Memory):
    """Applies the first change of a key instead of the newest."""

    def apply(self, batch: Batch) -> Outcome:
        assert isinstance(batch.records, ListedRecords)
        first = dict[tuple[str, int, bytes | None], tuple[str, int, Record]]()
        for topic, partition, record in batch.records.records:
            first.setdefault((topic, partition, record[0]), (topic, partition, record))
        records = replace(batch.records, records=list(first.values()))
        return super().apply(replace(batch, records=records))


LISTING = [
    "redis",
    "redis, shared",
    "elasticsearch",
    "delta",
    "delta, compacted",
    "delta, in a bucket",
]


def fill_and_list(harness: laws.Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    """List a view in pages of two rows, while rows are changed, deleted and added."""
    monkeypatch.setattr("cdc.sinks.redis.scan.PAGE_ROWS", 2)
    monkeypatch.setattr("cdc.sinks.elasticsearch.scan.PAGE_ROWS", 2)
    monkeypatch.setattr("cdc.sinks.delta.scan.LISTED_ROWS", 2)
    names = [f"k{number}" for number in range(12)] + ["", "x" * 600, "ü*?"]
    for number, name in enumerate(names):
        harness.topic.add("c", laws.row(name, number))
        if number % 5 == 0:
            harness.apply()
    harness.apply()
    count = itertools.count()

    def change() -> None:
        number = next(count)
        harness.topic.add("u", laws.row(f"k{number % 6}", number % 6, f"changed {number}"))
        harness.topic.add("c", laws.row(f"new {number}", number))
        harness.topic.add("d", laws.row(f"k{6 + number % 2}", 6 + number % 2))
        harness.apply()

    laws.assert_listed(harness, change)


@pytest.mark.parametrize("harness", LISTING, indirect=True)
def test_all_ids_are_listed(harness: laws.Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    fill_and_list(harness, monkeypatch)


@pytest.mark.parametrize("harness", ["redis"], indirect=True)
def test_a_listing_begins_again_on_another_server(
    harness: laws.Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    servers = iter(["a", "a", *"b" * 1000])
    monkeypatch.setattr("cdc.sinks.redis.scan.run_id", lambda _: next(servers))
    fill_and_list(harness, monkeypatch)


@pytest.mark.parametrize("harness", ["delta", "delta, compacted", "delta, unmarked"], indirect=True)
def test_a_changed_row_has_nothing_in_a_dropped_column(harness: laws.Harness) -> None:
    """Nor has one that stays anything in a column that was added."""
    sink = harness.sink
    assert isinstance(sink, Delta)
    laws.fill_view(harness)
    mirror = sink.folder(harness.table, "mirror")
    former = harness.table
    dropped = replace(former.columns[-1], name="dropped")
    harness.table = replace(former, columns=(*former.columns, dropped))
    harness.topic.table = harness.table
    harness.topic.add("u", {**laws.row("k1", 2, "with"), "dropped": None})
    harness.apply()
    names = [field.name for field in deltalake.DeltaTable(mirror).schema().fields]
    assert names.count("dropped") == 1
    harness.table = former
    harness.topic.table = former
    harness.topic.add("u", laws.row("k1", 2, "without"))
    harness.apply()
    assert harness.view() == harness.topic.model()


def test_a_commit_of_files_that_meets_another_is_tried_again(
    spark: "SparkSession", tmp_path: Path
) -> None:
    folder = str(tmp_path / "table")
    rows = spark.range(3).select(F.col("id").cast("string").alias("_cdc_id"))
    stored = ViewCheckpoint(Position("id", (1,)))
    begin(folder, rows, stored)
    with pytest.raises(SinkUnavailable, match="same time"):
        begin(folder, rows, stored)
    state = TableLog(folder).refresh()
    assert state
    write(folder, state.identity, rows, stored)
    with pytest.raises(SinkUnavailable, match="same time"):
        write(folder, state.identity, rows, stored)
    assert spark.read.format("delta").load(folder).count() == 6


@pytest.mark.parametrize("marked", [False, True])
def test_a_switch_asks_of_readers_what_new_columns_do(
    spark: "SparkSession", tmp_path: Path, marked: bool
) -> None:
    live = str(tmp_path / "live")
    build = str(tmp_path / "live@other")
    live_log = TableLog(live)
    log = TableLog(build)
    rows = spark.range(3).select(F.col("id").cast("string").alias("_cdc_id"))
    begin(live, rows, ViewCheckpoint(Position("id", (1,))))
    assert deltalake.DeltaTable(live).protocol().min_reader_version == 1
    dated = rows.withColumn("at", F.lit("2026-01-01").cast("timestamp_ntz")).coalesce(1)
    begin(build, dated, ViewCheckpoint(Position("id", (2,))))
    if marked:
        spark.sql(
            f"ALTER TABLE delta.`{build}` SET TBLPROPERTIES ('delta.enableDeletionVectors' = 'true')"
        )
        spark.sql(f"DELETE FROM delta.`{build}` WHERE _cdc_id = '1'")
        state = log.refresh()
        assert state
        assert state.has_marks
        log.commit(state.identity, [], "WRITE", ViewCheckpoint(Position("id", (2,))))
    assert generations.switch(live_log, log, {}, may_have_marks=True)
    last = live_log.last_commit()
    assert last.checkpoint == ViewCheckpoint(Position("id", (2,)), generation="other")
    now = deltalake.DeltaTable(live)
    features = {"timestampNtz", "deletionVectors"} if marked else {"timestampNtz"}
    assert set(now.protocol().reader_features or ()) == features
    state = live_log.refresh()
    assert state
    stored = ViewCheckpoint(Position("id", (3,)))
    write(live, state.identity, dated.where("_cdc_id = '0'"), stored)
    rows_with_time = spark.read.format("delta").load(live).where("at IS NOT NULL")
    assert rows_with_time.count() == (3 if marked else 4)


class KeepsDeleted(Memory):
    """Ignores deletes."""

    def apply(self, batch: Batch) -> Outcome:
        return super().apply(
            laws.filtered(batch, lambda _, __, value: value and b'"op":"d"' not in value)
        )


@pytest.mark.parametrize(
    ("broken", "law"),
    [
        (Forgetful, laws.a_second_writer_is_fenced),
        (Forgetful, laws.an_older_position_never_wins),
        (Unfolded, laws.the_newest_of_a_batch_wins),
        (KeepsDeleted, laws.an_older_position_never_wins),
        (KeepsDeleted, laws.a_later_change_wins_whatever_its_lsn),
    ],
)
def test_a_broken_sink_is_caught(
    broken: type[Memory], law: Callable[[laws.Harness], None], spark: "SparkSession", unique: str
) -> None:
    sink = broken("memory")
    harness = laws.Harness(spark, lambda: sink, table(f"{unique}.public.items"))
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        law(harness)
