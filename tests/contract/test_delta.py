"""A warehouse: its log of changes has every event once, its mirror goes on from what it holds, whoever was at it."""

import datetime
import resource
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import deltalake
import pytest

from cdc.errors import CdcError, Fenced, SinkRejected, SinkUnavailable
from cdc.model.generation import new_generation
from cdc.model.position import Position, ViewCheckpoint
from cdc.model.table import Column
from cdc.sink.contract import SchemaMismatch
from cdc.sinks.delta.batch import TableCommit
from cdc.sinks.delta.log import Commit, LastCommit
from cdc.sinks.delta.place import Folder
from cdc.sinks.delta.sink import Delta
from tests.contract.crashes import die, survived
from tests.contract.laws import Harness, filtered, row
from tests.contract.switches import Moment
from tests.support.envelopes import Topic, table
from tests.support.warehouse import logged_events

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@pytest.fixture
def harness(spark: "SparkSession", unique: str, tmp_path: Path) -> Iterator[Harness]:
    harness = Harness(
        spark, lambda: Delta("warehouse", str(tmp_path), unique), table(f"{unique}.public.items")
    )
    fill(harness)
    yield harness
    harness.sink.close()


def fill(harness: Harness) -> None:
    """Changes in both partitions: three in the one, six in the other."""
    for number in range(6):
        harness.topic.add("c", row(f"k{number}", number + 1, f"first {number}"))
    harness.topic.add("u", row("k1", 2, "second"))
    harness.topic.add("d", row("k2", 3))


def folder(harness: Harness, kind: str) -> str:
    sink = harness.sink
    assert isinstance(sink, Delta)
    return sink.folder(harness.table, kind)


def opened(harness: Harness, kind: str) -> deltalake.DeltaTable:
    return deltalake.DeltaTable(folder(harness, kind))


def events(harness: Harness) -> Counter[tuple[str, int, int]]:
    """Count each event in the log of changes, as another reader sees it."""
    query = deltalake.QueryBuilder().register("t", opened(harness, "changes"))
    log = query.execute("SELECT * FROM t").read_all()
    partitions, offsets = log["_cdc_partition"].to_pylist(), log["_cdc_offset"].to_pylist()
    topics = (
        log["_cdc_topic"].to_pylist()
        if "_cdc_topic" in log.schema.names
        else [harness.topic_id] * len(offsets)
    )
    return Counter(zip(topics, partitions, offsets, strict=True))


def expected(harness: Harness) -> Counter[tuple[str, int, int]]:
    return Counter(
        (harness.topic_id, r.partition, r.offset)
        for r in harness.topic.records
        if r.value is not None
    )


def assert_right(harness: Harness) -> None:
    assert harness.view() == harness.topic.model()
    assert events(harness) == expected(harness)


def rebuild(harness: Harness, end: Callable[[], tuple[int, ...]] | None = None) -> None:
    """Make the mirror again beside the live one, and show it."""
    names, build = harness.begin_generation()
    harness.apply(end and end(), "rebuild", build)
    harness.sink.promote([harness.table], names)
    harness.sink = harness.writer()


def test_a_rollback_of_an_idle_view_has_its_own_name_at_once(harness: Harness) -> None:
    """Whoever repeats it finds it done, without a batch in between."""
    harness.apply()
    names, build = harness.begin_generation()
    harness.apply(writer="rebuild", sink=build)
    retained_names = harness.sink.promote([harness.table], names)
    harness.sink.promote([harness.table], retained_names)
    stored, version = harness.sink.position(harness.table), opened(harness, "mirror").version()
    assert stored
    assert stored.generation == retained_names[harness.name]
    harness.sink.promote([harness.table], retained_names)
    assert opened(harness, "mirror").version() == version
    assert_right(harness)


def test_no_view_is_switched_before_each_can_be(
    harness: Harness, spark: "SparkSession", unique: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of the views would show another generation than the rest."""
    orders = Harness(spark, lambda: harness.sink, table(f"{unique}.public.orders", "orders"))
    views, name = (harness, orders), new_generation()
    names = {view.name: name for view in views}
    build = harness.sink.for_generation(names)
    fill(orders)
    for view in views:
        build.prepare(view.table)
        view.apply()
    harness.apply(writer="rebuild", sink=build)
    orders.apply((1, 1), "rebuild", build)
    tables = [view.table for view in views]
    with monkeypatch.context() as patch:
        patch.setattr("cdc.sink.promotion.SWITCH_S", 0)
        with pytest.raises(SinkUnavailable) as caught:
            harness.sink.promote(tables, names)
    for view in views:
        stored = harness.sink.position(view.table)
        assert stored
        assert stored.generation == ""
    assert "The other generation of public.orders in warehouse" in caught.value.message
    assert "cdc -p FILE rebuild warehouse --table public.orders" in caught.value.hint
    orders.apply(writer="rebuild", sink=build)
    harness.sink.promote(tables, names)
    for view in views:
        stored = harness.sink.position(view.table)
        assert stored
        assert stored.generation == name


def change_everything(harness: Harness) -> None:
    for number in (0, 1, 3, 4, 5):
        harness.topic.add(
            "u", row(f"k{number}", number + 1, f"change {len(harness.topic.records)}")
        )


def test_a_view_that_is_emptied_doubles_no_event(harness: Harness) -> None:
    """After a TRUNCATE the log is read again from offset zero, in batches."""
    harness.apply()
    harness.sink.clear(harness.table)
    for end in ((1, 1), (3, 2), None):
        harness.apply(end)
    assert_right(harness)


def test_readers_of_a_mirror_that_is_ahead_do_not_go_back(harness: Harness) -> None:
    """A rebuild has been promoted while the log of changes is behind."""
    harness.apply((1, 1))
    rebuild(harness)
    assert harness.position() == Position(harness.topic_id, (1, 1))
    for end in ((2, 1), (3, 3), None):
        assert harness.view() == harness.topic.model()
        harness.apply(end, "two")
    assert_right(harness)


def test_a_batch_that_is_tried_again_with_changes_behind_goes_on(harness: Harness) -> None:
    harness.apply((1, 1))
    rebuild(harness)
    change_everything(harness)
    batch = harness.batch(harness.position(), harness.topic.ends, "two")
    with survived(), mock.patch.object(TableCommit, "merge", die):
        harness.sink.apply(batch)
    harness.send(batch)
    assert_right(harness)


def test_a_repair_appends_what_is_lacking_and_nothing_else(harness: Harness) -> None:
    """Also when it is repeated, because it was cut off before anybody could take note of it."""
    batch = harness.batch(None, harness.topic.ends, "one")
    harness.send(filtered(batch, lambda partition, offset, _: (partition, offset) != (0, 1)))
    assert sum(events(harness).values()) == sum(expected(harness).values()) - 1
    position = harness.position()
    for _ in range(2):
        harness.send(harness.repair(position, "repairer"), harness.writer())
        assert (harness.position(), events(harness)) == (position, expected(harness))
    assert_right(harness)


Restore = Callable[["SparkSession", str, int], object]


def by_version(spark: "SparkSession", place: str, version: int) -> None:
    deltalake.DeltaTable(place).restore(version)


def by_time(spark: "SparkSession", place: str, version: int) -> None:
    deltalake.DeltaTable(place).restore(just_after(place, version))


def by_spark(spark: "SparkSession", place: str, version: int) -> None:
    spark.sql(f"RESTORE TABLE delta.`{place}` TO VERSION AS OF {version}")


def by_time_in_spark(spark: "SparkSession", place: str, version: int) -> None:
    later = just_after(place, version).strftime("%Y-%m-%d %H:%M:%S.%f")
    spark.sql(f"RESTORE TABLE delta.`{place}` TO TIMESTAMP AS OF '{later}'")


def just_after(place: str, version: int) -> datetime.datetime:
    """Readers go by the time in a commit, or by its file's time, which on a busy machine is later."""
    file_s = Path(place, "_delta_log", f"{version:020}.json").stat().st_mtime
    commits_ms = {
        commit["version"]: commit["timestamp"] for commit in deltalake.DeltaTable(place).history()
    }
    return datetime.datetime.fromtimestamp(
        max(file_s, commits_ms[version] / 1000) + 0.002, datetime.UTC
    )


@pytest.mark.parametrize(
    ("kind", "restore"), [("mirror", by_time), ("mirror", by_spark), ("changes", by_time_in_spark)]
)
def test_a_restored_table_goes_on_from_what_it_holds(
    harness: Harness, spark: "SparkSession", kind: str, restore: Restore
) -> None:
    """In `test_histories` deltalake restores versions of both."""
    for _ in range(2):
        harness.apply()
        position, version = harness.position(), opened(harness, kind).version()
        change_everything(harness)
    harness.apply()
    stale = harness.batch(harness.position(), harness.topic.ends, "one")
    restore(spark, folder(harness, kind), version)
    opened(harness, kind).optimize.compact()
    with pytest.raises(CdcError):
        harness.send(stale)
    harness.sink = harness.writer()
    assert harness.position() == position
    change_everything(harness)
    harness.apply(writer="two")
    assert_right(harness)
    assert harness.position() == Position(harness.topic_id, harness.topic.ends)


@pytest.mark.parametrize("kind", ["mirror", "changes"])
def test_a_restore_in_mid_batch_is_a_conflict(harness: Harness, kind: str) -> None:
    harness.apply((2, 2))
    harness.apply((3, 3))
    place, version = folder(harness, kind), opened(harness, kind).version() - 1
    batch = harness.batch(harness.position(), harness.topic.ends, "one")
    commits = {"create_write_transaction": {"changes": 0, "mirror": 1}[kind]}
    moment = Moment(commits["create_write_transaction"])
    with (
        mock.patch("tests.contract.switches.CALLS", set(commits)),
        moment.during(lambda: deltalake.DeltaTable(place).restore(version)),
        pytest.raises(SinkUnavailable),
    ):
        harness.send(batch)
    harness.sink = harness.writer()
    harness.apply(writer="two")
    assert_right(harness)


@pytest.mark.parametrize("kind", ["mirror", "changes"])
def test_what_somebody_else_has_changed_is_refused_until_a_rebuild(
    harness: Harness, kind: str
) -> None:
    harness.apply()
    position = harness.position()
    opened(harness, kind).alter.set_table_properties(
        {"delta.logRetentionDuration": "interval 60 days"}
    )
    opened(harness, kind).optimize.compact()
    assert harness.position() == position
    opened(harness, kind).delete("_cdc_partition = 0")
    change_everything(harness)
    batch = harness.batch(position, harness.topic.ends, "one")
    with pytest.raises(SinkUnavailable):
        harness.send(batch)
    with pytest.raises(SchemaMismatch, match="DELETE") as caught:
        harness.sink.prepare(harness.table)
    assert "cdc -p FILE rebuild warehouse --table public.items" in caught.value.hint
    # So that it can be compared with its source.
    assert harness.position() == position
    old_events = events(harness)
    rebuild(harness)
    assert (harness.view(), events(harness)) == (harness.topic.model(), old_events)
    harness.apply(writer="two")
    assert harness.view() == harness.topic.model()
    assert set(events(harness).values()) == {1}
    assert events(harness).keys() - old_events.keys() == {
        event
        for event in expected(harness)
        if position is None or event[2] >= position.offsets[event[1]]
    }


def test_events_of_a_topic_that_was_recreated_all_come(harness: Harness) -> None:
    harness.apply()
    first = expected(harness)
    harness.topic, harness.topic_id = Topic(harness.table), "topic-2"
    fill(harness)
    rebuild(harness)
    change_everything(harness)
    assert harness.position() == Position("topic-2", (0, 0))
    for end in ((1, 1), (4, 2), None):
        harness.apply(end, "two")
    assert harness.view() == harness.topic.model()
    assert events(harness) == first + expected(harness)


def test_partitions_that_were_added_leave_the_events_of_the_others(harness: Harness) -> None:
    harness.apply((3, 3))
    harness.topic.add_partition()
    for number in range(6):
        harness.topic.add("c", row(f"new {number}", number))
    rebuild(harness)
    assert harness.position() == Position(harness.topic_id, (3, 3, 0))
    harness.apply((4, 4, 1), "two")
    harness.apply(writer="two")
    assert_right(harness)


def test_changes_of_other_types_begin_where_the_events_before_end(harness: Harness) -> None:
    """The mirror was made again for them, further along the log."""
    harness.apply((2, 2))
    version = opened(harness, "changes").version()
    text = tuple(
        replace(column, type="text") if column.name == "n" else column
        for column in harness.table.columns
    )
    harness.table = replace(harness.table, columns=text)
    with pytest.raises(SchemaMismatch):
        harness.sink.prepare(harness.table)
    rebuild(harness)
    harness.apply(writer="two")
    former = logged_events(folder(harness, "changes"), version)
    assert events(harness) + Counter((harness.topic_id, *place) for place in former) == expected(
        harness
    )


def test_a_column_renamed_in_case_alone_waits_for_a_rebuild(harness: Harness) -> None:
    """Delta can't add the one name beside the other. Only this table waits."""
    harness.apply((2, 2))
    renamed = tuple(
        replace(column, name="V") if column.name == "v" else column
        for column in harness.table.columns
    )
    harness.table = replace(harness.table, columns=renamed)
    harness.topic = Topic(harness.table)
    for number in range(6):
        harness.topic.add("c", {"a": f"k{number}", "b": number, "V": "first", "n": 1})
    with pytest.raises(SchemaMismatch) as caught:
        harness.sink.prepare(harness.table)
    assert "cdc -p FILE rebuild warehouse --table public.items" in caught.value.hint
    rebuild(harness)
    harness.topic.add("u", {"a": "k1", "b": 1, "V": "second", "n": 1})
    harness.apply(writer="two")
    assert harness.view() == harness.topic.model()


def test_what_is_empty_can_be_read(spark: "SparkSession", unique: str, tmp_path: Path) -> None:
    """Before the first row, after all have gone, and when the columns have changed meanwhile."""
    harness = Harness(
        spark, lambda: Delta("warehouse", str(tmp_path), unique), table(f"{unique}.public.items")
    )
    names = [column.name for column in harness.table.columns]

    def assert_readable(kind: str) -> None:
        delta_table = opened(harness, kind)
        assert [
            field.name for field in delta_table.schema().fields if not field.name.startswith("_cdc")
        ] == names
        counted = (
            deltalake.QueryBuilder()
            .register("t", delta_table)
            .execute("SELECT count(*) AS n FROM t")
            .read_all()
        )
        assert counted["n"].to_pylist() == [
            spark.read.format("delta").load(folder(harness, kind)).count()
        ]

    assert_readable("mirror")
    assert_readable("changes")
    types = {"n": "timestamp without time zone", "v": "path"}
    columns = [
        replace(column, type=types.get(column.name, column.type))
        for column in harness.table.columns
    ]
    original, harness.table = harness.table, replace(harness.table, columns=tuple(columns))
    harness.sink.prepare(harness.table)
    assert_readable("mirror")
    assert harness.view() == {}
    harness.sink.prepare(original)
    harness.table = original
    fill(harness)
    harness.apply()
    assert_right(harness)
    harness.sink.clear(harness.table)
    versions = opened(harness, "mirror").version()
    harness.sink.clear(harness.table)
    assert opened(harness, "mirror").version() == versions, "what is empty was emptied"
    assert_readable("mirror")


def test_names_that_are_refused(harness: Harness) -> None:
    """Of the one table, with the way out."""
    for name in ("order date", "_metadata"):
        wide = replace(harness.table, columns=(*harness.table.columns, Column(name, "text")))
        with pytest.raises(SchemaMismatch, match=name) as caught:
            harness.sink.prepare(wide)
        assert "exclude" in caught.value.hint


@contextmanager
def no_room() -> Iterator[None]:
    """No file of this process may grow: what a full disk is to a commit."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@pytest.mark.parametrize(
    ("kind", "step"), [("changes", "write_new"), ("mirror", "write"), ("mirror", "write_new")]
)
def test_a_full_disk_is_reported(harness: Harness, kind: str, step: str) -> None:
    """As that, not as another writer's commit: of either commit, or of the marks. It is gone on when there is room."""
    harness.apply()
    harness.topic.add("u", row("k0", 1, "changed"))
    full = Path(folder(harness, kind))
    files = set(full.iterdir())
    carried_out = getattr(Folder, step)

    def on_a_full_disk(place: Folder, *arguments: Any) -> Any:
        if place.location != str(full):
            return carried_out(place, *arguments)
        with no_room():
            return carried_out(place, *arguments)

    with (
        mock.patch.object(Folder, step, on_a_full_disk),
        pytest.raises(SinkUnavailable, match="can't be written: File too large") as caught,
    ):
        harness.apply()
    assert str(full) in caught.value.message
    assert set(full.iterdir()) == files
    harness.apply()
    assert_right(harness)


def test_a_second_mirror_needs_room_where_spark_keeps_rows(
    harness: Harness, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness.apply()
    harness.sink.check_capacity([harness.table])
    monkeypatch.setenv("SPARK_LOCAL_DIRS", str(tmp_path))
    monkeypatch.setattr("cdc.sinks.delta.sink.TEXT_FACTOR", 2**40)
    with pytest.raises(SinkRejected, match=f"in {tmp_path};"):
        harness.sink.check_capacity([harness.table])


def newest_word(history: Iterable[Commit], *_: object) -> LastCommit | None:
    """Believes the newest position, whatever lies above it."""
    texts = (commit.get("userMetadata") or "" for commit in history)
    stored = next(
        (
            ViewCheckpoint.from_json(text)
            for text in texts
            if text.startswith(ViewCheckpoint.JSON_START)
        ),
        None,
    )
    return LastCommit(stored if stored.position.offsets else None) if stored else None


def end_of_batch(_: ViewCheckpoint | None, end: Position) -> Position:
    """Return the batch's end as the position of a part of the view, even when the part was further already."""
    return end


@pytest.mark.parametrize(
    ("place", "bug", "test"),
    [
        (
            "cdc.sinks.delta.positions.next_position",
            end_of_batch,
            test_readers_of_a_mirror_that_is_ahead_do_not_go_back,
        ),
        (
            "cdc.sinks.delta.positions.next_position",
            end_of_batch,
            test_a_view_that_is_emptied_doubles_no_event,
        ),
        (
            "cdc.sinks.delta.log.standing",
            newest_word,
            partial(
                test_a_restored_table_goes_on_from_what_it_holds, kind="mirror", restore=by_version
            ),
        ),
    ],
)
def test_planted(
    harness: Harness, spark: "SparkSession", place: str, bug: object, test: Callable[..., None]
) -> None:
    arguments = {"spark": spark} if isinstance(test, partial) else {}
    with mock.patch(place, bug), pytest.raises((AssertionError, pytest.fail.Exception, Fenced)):
        test(harness, **arguments)
