"""Every sink keeps the laws; a sink that breaks one is caught by it."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import deltalake
import pyarrow as pa
import pytest
import redis
from pyspark.sql import functions as F

from cdc.errors import SinkUnavailable
from cdc.kafka.log_reader import Record
from cdc.model.generation import new_generation
from cdc.model.outcome import Applied
from cdc.model.position import Position, ViewCheckpoint
from cdc.sink.contract import Batch, Outcome, PositionLost, Sink
from cdc.sink.fencing import checkpoint_after
from cdc.sinks.delta import generations
from cdc.sinks.delta.commit_pool import run_all
from cdc.sinks.delta.files.parquet import FileNames
from cdc.sinks.delta.log import add_files, jvm, spark_generations
from cdc.sinks.delta.log.commits import CommitInfo, Commits, LastCommit, number_commits
from cdc.sinks.delta.mirror import merge, rewrite
from cdc.sinks.delta.sink import Delta
from cdc.sinks.elasticsearch.sink import Elasticsearch
from cdc.sinks.memory import Memory
from cdc.sinks.redis.sink import Redis
from tests.contract import laws
from tests.support import http
from tests.support.envelopes import ListedRecords, table
from tests.support.warehouse import begin, columns, staged, write

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
        if kind.endswith("large"):
            monkeypatch = request.getfixturevalue("monkeypatch")
            monkeypatch.setattr("cdc.sinks.delta.batch_commit.REWRITE_BYTES", 0)
            monkeypatch.setattr("cdc.sinks.delta.mirror.merge.SMALL_FILES", 3)
        return lambda: Delta("warehouse", str(folder / "warehouse"), unique)
    stack: Stack = request.getfixturevalue("stack")
    if kind == "redis":
        # Databases of its own: generations change places with all that is in them.
        return lambda: Redis("cache", stack.endpoints.redis.removesuffix("/0") + "/4", unique)
    if kind == "elasticsearch":
        return lambda: Elasticsearch("search", stack.endpoints.elasticsearch, unique)
    raise ValueError(f"{kind} is built nowhere")


@pytest.mark.parametrize("law", laws.LAWS, ids=lambda law: law.__name__)
def test_law(law: Callable[[laws.Harness], None], harness: laws.Harness) -> None:
    law(harness)
    if isinstance(harness.sink, Delta):
        assert harness.scanned() == harness.view()


@pytest.mark.parametrize("harness", ["delta, large"], indirect=True)
@pytest.mark.parametrize("law", laws.MERGING, ids=lambda law: law.__name__)
def test_law_of_a_large_mirror(law: Callable[[laws.Harness], None], harness: laws.Harness) -> None:
    """It marks changed rows as deleted, where a small one is written again."""
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


@pytest.mark.parametrize("large", [False, True])
def test_a_large_mirror_keeps_its_files(
    large: bool,
    spark: "SparkSession",
    unique: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rows are marked as deleted where rewriting would cost too much; other readers see the same
    rows either way.
    """
    if large:
        monkeypatch.setattr("cdc.sinks.delta.batch_commit.REWRITE_BYTES", 0)
    sink = Delta("warehouse", str(tmp_path), unique)
    harness = laws.Harness(spark, lambda: sink, table(f"{unique}.public.items"))
    laws.an_older_position_never_wins(harness)
    mirror = Path(sink.folder(harness.table, "mirror"))
    log = "".join(path.read_text() for path in (mirror / "_delta_log").glob("*.json"))
    assert ('"deletionVector":{' in log) is large
    reader = deltalake.QueryBuilder().register("t", deltalake.DeltaTable(str(mirror)))
    ids = reader.execute("SELECT _cdc_id AS id FROM t").read_all()["id"].to_pylist()
    assert sorted(ids) == sorted(row["id"] for row in sink.scan(harness.table, spark).collect())


@pytest.mark.parametrize("harness", ["elasticsearch", "redis"], indirect=True)
@pytest.mark.parametrize("records", [0, 1])
def test_beside_a_promoted_view_that_is_emptied_lies_what_it_replaced(
    harness: laws.Harness, records: int
) -> None:
    """That tells a rebuild, which was killed and is resumed after a TRUNCATE, that it is promoted."""
    laws.fill(harness)
    harness.apply()
    live, name, captured = harness.sink, new_generation(), harness.table
    (former,) = live.generations(captured)
    build = live.for_generation({captured.qualified: name})
    build.prepare(captured)
    harness.apply(writer="rebuild", sink=build)
    live.clear(captured)
    live.prepare(captured)
    emptied, *beside = live.generations(captured)
    assert (beside, emptied == former) == ([name], False)
    live.promote([captured], {captured.qualified: name})
    assert live.generations(captured) == [name, emptied]
    live.clear(captured)
    live.prepare(captured)
    if records:
        harness.apply()
    newest, *beside = live.generations(captured)
    assert (beside, newest == name) == ([emptied], False)


@pytest.mark.parametrize("harness", ["elasticsearch"], indirect=True)
def test_an_index_that_is_gone_is_made_again(harness: laws.Harness) -> None:
    """Somebody has deleted it; the stream is told to start again from where the view stands, which
    is nowhere.
    """
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


def test_a_commit_that_meets_another_is_tried_again(spark: "SparkSession", tmp_path: Path) -> None:
    folder = str(tmp_path / "table")
    spark.range(3).write.format("delta").save(folder)
    transaction = jvm.begin(spark, folder)
    spark.sql(f"DELETE FROM delta.`{folder}` WHERE id = 1")
    operation = jvm.switch_operation(spark)
    with pytest.raises(SinkUnavailable, match="same time"):
        jvm.commit(spark, transaction, [], operation, 1)


def test_marks_gather_and_a_file_without_rows_goes(spark: "SparkSession", tmp_path: Path) -> None:
    """Row by row: each merge adds to the marks of the one before, and other readers see the
    same.
    """
    folder, commits, ids = str(tmp_path / "table"), Commits(), [str(number) for number in range(4)]
    rows = spark.createDataFrame(
        [(key, 0, False) for key in ids], "_cdc_id string, note int, _cdc_gone boolean"
    )
    begin(folder, rows.drop("_cdc_gone").coalesce(1), ViewCheckpoint(Position("id", (0,))), 1)
    (first,) = add_files.paths(deltalake.DeltaTable(folder))
    for number, key in enumerate(ids, 1):
        stored, last = ViewCheckpoint(Position("id", (number,))), commits.last_commit(folder)
        change = rows.where(rows["_cdc_id"] == key).selectExpr(
            "_cdc_id", "1 AS note", f"{key} = 2 AS _cdc_gone"
        )
        with_column = change.withColumn("added", F.lit("new")) if number == 4 else change
        live_table = commits.opened_table(folder)
        assert live_table
        add_files.add_columns(live_table, columns(with_column.drop("_cdc_gone")))
        merge.merge_marking(
            spark,
            live_table,
            folder,
            staged(folder, with_column),
            CommitInfo(stored, last.number + 1),
        )
        assert commits.last_commit(folder) == LastCommit(stored, last.number + 1)
        table = deltalake.DeltaTable(folder)
        assert (first in add_files.paths(table)) is (number < 4)
        expected = [(key, int(key in ids[:number])) for key in ids if key != "2" or number < 3]
        read = (
            deltalake.QueryBuilder()
            .register("t", table)
            .execute("SELECT _cdc_id, note FROM t")
            .read_all()
        )
        assert (
            sorted(zip(read["_cdc_id"].to_pylist(), read["note"].to_pylist(), strict=True))
            == expected
        )
        assert (
            sorted(spark.read.format("delta").load(folder).select("_cdc_id", "note").collect())
            == expected
        )
    later = (
        spark.read.format("delta")
        .load(folder)
        .where("added IS NOT NULL")
        .select("_cdc_id", "added")
        .collect()
    )
    assert later == [("3", "new")]
    older = deltalake.DeltaTable(folder, version=table.version() - 1)
    with pytest.raises(SinkUnavailable, match="same time"):
        merge.merge_marking(
            spark, older, folder, staged(folder, change), CommitInfo(stored, last.number + 1)
        )


@pytest.mark.parametrize("large", [False, True])
def test_a_changed_row_has_nothing_in_a_dropped_column(
    spark: "SparkSession", tmp_path: Path, large: bool
) -> None:
    """In a folder whose name is written another way in a URI."""
    folder, commits, stored = (
        str(tmp_path / "a table+é"),
        Commits(),
        ViewCheckpoint(Position("id", (1,))),
    )
    rows = spark.createDataFrame(
        [("1", "a", 1), ("2", "b", 2)], "_cdc_id string, dropped string, note int"
    )
    begin(folder, rows, stored, 1)
    change = spark.createDataFrame([("1", 3, False)], "_cdc_id string, note int, _cdc_gone boolean")
    table = commits.table(folder)
    assert table
    changed = staged(folder, change)
    if large:
        merge.merge_marking(spark, table, folder, changed, CommitInfo(stored, 2))
    else:
        schema, places = pa.schema(table.schema().to_arrow()), add_files.local_paths(table, folder)
        file_names = [file.name for file in changed.rows]
        request = rewrite.Rewrite(
            folder, places, changed.id_files, file_names, schema, FileNames().generate()
        )
        (result,) = rewrite.rewrite_mirrors(spark, {"items": request}).values()
        add_files.commit(
            table, add_files.add_actions(result), "overwrite", table.schema(), CommitInfo(stored, 2)
        )
    assert sorted(spark.read.format("delta").load(folder).collect()) == [
        ("1", None, 3),
        ("2", "b", 2),
    ]


def test_many_small_files_are_gathered(
    spark: "SparkSession", tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some of them, with what the merge at hand brings to their rows; the others stay, marked."""
    monkeypatch.setattr("cdc.sinks.delta.mirror.merge.SMALL_FILES", 5)
    monkeypatch.setattr("cdc.sinks.delta.mirror.merge.COMPACTED_BYTES", 4000)
    folder, commits = str(tmp_path / "table"), Commits()
    expected: dict[str, int | None] = {}
    rows = spark.range(20).selectExpr("CAST(id AS string) AS _cdc_id", "-1 AS note").coalesce(1)
    begin(folder, rows, ViewCheckpoint(Position("id", (0,))), 1)
    for number in range(10):
        last = commits.last_commit(folder)
        change = rows.where(f"_cdc_id IN ({number}, {number // 2})").selectExpr(
            "_cdc_id", f"{number} AS note", f"_cdc_id = {number} AND {number} % 5 = 4 AS _cdc_gone"
        )
        table = commits.opened_table(folder)
        assert table
        stored = ViewCheckpoint(Position("id", (number + 1,)))
        merge.merge_marking(
            spark, table, folder, staged(folder, change), CommitInfo(stored, last.number + 1)
        )
        expected |= {
            str(key): number for key in (number, number // 2) if key != number or number % 5 != 4
        }
        expected |= {} if number % 5 != 4 else {str(number): None}
        merged = deltalake.DeltaTable(folder)
        query = deltalake.QueryBuilder().register("t", merged)
        live_rows = query.execute("SELECT _cdc_id, note FROM t WHERE note >= 0").read_all()
        assert sorted(
            zip(live_rows["_cdc_id"].to_pylist(), live_rows["note"].to_pylist(), strict=True)
        ) == sorted((key, note) for key, note in expected.items() if note is not None)
        assert len(add_files.paths(merged)) < 5 + 2 * 2
    # Spark reads marks by itself.
    last_rows = spark.read.format("delta").load(folder).where("note >= 0").collect()
    assert sorted(last_rows) == sorted(
        (key, note) for key, note in expected.items() if note is not None
    )


def test_a_commit_of_files_that_meets_another_is_tried_again(
    spark: "SparkSession", tmp_path: Path
) -> None:
    folder, rows = (
        str(tmp_path / "table"),
        spark.range(3).select(F.col("id").cast("string").alias("_cdc_id")),
    )
    stored = ViewCheckpoint(Position("id", (1,)))
    begin(folder, rows, stored, 1)
    with pytest.raises(SinkUnavailable, match="same time"):
        begin(folder, rows, stored, 1)
    stale, fresh = deltalake.DeltaTable(folder), deltalake.DeltaTable(folder)
    write(fresh, rows, "append", stored, 2)
    for mode in ("append", "overwrite"):
        with pytest.raises(SinkUnavailable, match="same time"):
            write(stale, rows, mode, stored, 2)
    assert spark.read.format("delta").load(folder).count() == 6


@pytest.mark.parametrize("marked", [False, True])
def test_a_switch_asks_of_readers_what_new_columns_do(
    spark: "SparkSession", tmp_path: Path, marked: bool
) -> None:
    live, build, commits = str(tmp_path / "live"), str(tmp_path / "live@other"), Commits()
    rows = spark.range(3).select(F.col("id").cast("string").alias("_cdc_id"))
    begin(live, rows, ViewCheckpoint(Position("id", (1,))), 1)
    assert deltalake.DeltaTable(live).protocol().min_reader_version == 1
    dated = rows.withColumn("at", F.lit("2026-01-01").cast("timestamp_ntz")).coalesce(1)
    begin(build, dated, ViewCheckpoint(Position("id", (2,))), 1)
    if marked:
        spark_generations.enable_features(spark, build, [add_files.DELETION_VECTORS])
        with number_commits(spark, ViewCheckpoint(Position("id", (2,))), 2):
            spark.sql(f"DELETE FROM delta.`{build}` WHERE _cdc_id = '1'")
        assert add_files.has_deleted_rows(deltalake.DeltaTable(build))
    assert not generations.switch(spark, commits, live, build)
    assert generations.switch(spark, commits, live, build)
    last = commits.last_commit(live)
    assert last.checkpoint == ViewCheckpoint(Position("id", (2,)), generation="other")
    now = deltalake.DeltaTable(live)
    assert add_files.reader_features(now) == {"timestampNtz"} | (
        {add_files.DELETION_VECTORS} if marked else set()
    )
    write(
        now,
        dated.where("_cdc_id = '0'"),
        "append",
        ViewCheckpoint(Position("id", (3,))),
        last.number + 1,
    )
    assert spark.read.format("delta").load(live).where("at IS NOT NULL").count() == (
        3 if marked else 4
    )


def test_tables_of_a_batch_are_applied_in_the_sinks_pool_and_all_of_them(
    spark: "SparkSession",
) -> None:
    # Many, so that some haven't begun when the first has failed.
    topics = [f"a.b.c{number}" for number in range(200)]
    first, *later_topics = topics
    pools = {}

    def apply(topic: str) -> None:
        if topic is first:
            raise SinkUnavailable("away", hint="")
        pools[topic] = spark.sparkContext.getLocalProperty("spark.scheduler.pool")

    spark.sparkContext.setLocalProperty("spark.scheduler.pool", "warehouse")
    try:
        with pytest.raises(SinkUnavailable, match="away"):
            run_all(spark, {topic: topic for topic in topics}, apply)
    finally:
        spark.sparkContext.setLocalProperty("spark.scheduler.pool", None)  # type: ignore[arg-type]
    assert pools == dict.fromkeys(later_topics, "warehouse")


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
