"""The laws of a sink, each a function of a harness: run over every sink, and over broken ones that must fail them."""

import contextlib
import json
import pickle
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from cdc.codec.decode_options import DecodeOptions
from cdc.control.floors import Floors
from cdc.errors import CdcError, DecodeError, Fenced, SinkRejected, SinkUnavailable
from cdc.model.generation import new_generation
from cdc.model.outcome import Advance, Applied
from cdc.model.position import Position, Reach, distance
from cdc.model.table import Table, row_id
from cdc.sink.contract import Batch, PositionLost, RowReader, RowsRejected, Sink, positions
from cdc.sinks.delta.sink import Delta
from cdc.spark.failures import explain
from tests.support.envelopes import PLACEHOLDER, ListedRecords, Row, Topic, listed
from tests.support.warehouse import mirror_documents

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

TOPIC_ID = "topic-1"
UP_TO = Position(TOPIC_ID, (0, 0))
During = Callable[[Callable[[], None]], contextlib.AbstractContextManager[None]]
"""Makes something happen once, at a moment of what is done meanwhile."""


class Harness:
    """A view of one table in one sink; `writer` makes a new sink object, as a new run would."""

    def __init__(
        self, spark: "SparkSession", make: Callable[[], Sink], table: Table, partitions: int = 2
    ) -> None:
        self.spark, self.make, self.table = spark, make, table
        self.topic = Topic(table, partitions)
        self.topic_id = TOPIC_ID
        self.floors = Floors()
        self.server_start: tuple[int, ...] = ()
        self.sink = self.writer()

    @property
    def name(self) -> str:
        return self.table.qualified

    def writer(self) -> Sink:
        sink = self.make()
        sink.prepare(self.table)
        return sink

    def begin_generation(self) -> tuple[dict[str, str], Sink]:
        """An empty generation beside the live view: its name by table, and its sink."""
        names = {self.name: new_generation()}
        build = self.sink.for_generation(names)
        build.prepare(self.table)
        return names, build

    def position(self, sink: Sink | None = None) -> Position | None:
        stored = (sink or self.sink).position(self.table)
        return stored.position if stored else None

    def batch(self, start: Position | None, end: Sequence[int], writer: str) -> Batch:
        # No position lies beyond the log's end.
        end = tuple(map(min, end, self.topic.ends))
        advance = Advance(
            self.table, start, Position(self.topic_id, end), self.floors.number(self.name)
        )
        records = listed(
            self.spark, [(self.table, r) for r in self.topic.between(advance.start_offsets, end)]
        )
        reading = DecodeOptions(
            PLACEHOLDER,
            {self.table.topic: self.floors.lsn(self.name)},
            {self.table.topic: self.server_start},
        )
        return Batch(writer, (advance,), records, reading)

    def repair(self, position: Position | None, writer: str) -> Batch:
        """Return all records below a position once more, as a batch of no length."""
        assert position is not None
        batch = self.batch(None, position.offsets, writer)
        return replace(batch, advances=(Advance(self.table, position, position),))

    def apply(
        self, end: Sequence[int] | None = None, writer: str = "one", sink: Sink | None = None
    ) -> Applied:
        used = sink or self.sink
        return self.send(self.batch(self.position(used), end or self.topic.ends, writer), used)

    def send(self, batch: Batch, sink: Sink | None = None) -> Applied:
        try:
            outcome = (sink or self.sink).apply(batch)
        except CdcError:
            raise
        except Exception as error:
            raise explain(error, "sink") from error
        return outcome.applied.get(self.table.qualified, Applied())

    def view(self, sink: Sink | None = None) -> dict[str, Row]:
        used = sink or self.sink
        if not isinstance(used, Delta):
            return self.scanned(used)
        return _view(mirror_documents(used, self.table))

    def scanned(self, sink: Sink | None = None) -> dict[str, Row]:
        """The view as comparisons read it, which `view` does without Spark where it can."""
        rows = (sink or self.sink).scan(self.table, self.spark).collect()
        return _view([(row["id"], row["document"]) for row in rows])


def assert_read_by_id(harness: Harness, ids: Sequence[str]) -> None:
    """What executors read by these ids, of which some are absent, is what the view has."""
    if not isinstance(harness.sink, RowReader):
        return
    read = pickle.loads(pickle.dumps(harness.sink.row_reader(harness.table)))
    rows = [
        (str(row_id), str(document))
        for batch in read(ids)
        for row_id, document in zip(*(column.to_pylist() for column in batch.columns), strict=True)
    ]
    assert _view(rows) == {key: row for key, row in harness.view().items() if key in ids}


def assert_listed(harness: Harness, change: Callable[[], object]) -> None:
    """What is there all the time is listed, by a listing of small pages with a change after each; what isn't there
    isn't listed.
    """
    assert isinstance(harness.sink, RowReader)
    before = harness.scanned()
    listed: list[str] = []
    cursor = None
    for _ in range(200):
        list_ids = pickle.loads(pickle.dumps(harness.sink.id_lister(harness.table)))
        page, cursor = list_ids(cursor)
        listed += page
        if cursor is None:
            break
        change()
    assert cursor is None, "the listing has no end"
    after = harness.scanned()
    unchanged = {row_id for row_id, row in before.items() if after.get(row_id) == row}
    assert unchanged
    assert unchanged <= set(listed), f"not listed: {unchanged - set(listed)}"
    assert set(listed) <= before.keys() | after.keys()


def _view(rows: Sequence[tuple[str, str]]) -> dict[str, Row]:
    documents = {key: json.loads(document) for key, document in rows}
    assert len(documents) == len(rows), "an id twice in the view"
    # A view may have more fields; their names begin like this.
    return {
        key: {n: v for n, v in row.items() if not n.startswith("_cdc")}
        for key, row in documents.items()
    }


def filtered(batch: Batch, keeps: Callable[[int, int, bytes | None], object]) -> Batch:
    """The batch of a harness with the records whose partition, offset and value `keeps` accepts."""
    assert isinstance(batch.records, ListedRecords)
    kept = [
        (topic, partition, record)
        for topic, partition, record in batch.records.records
        if keeps(partition, record[2], record[1])
    ]
    return replace(batch, records=replace(batch.records, records=kept))


def row(a: str, b: int, v: str | None = "x", n: int | None = 1) -> Row:
    return {"a": a, "b": b, "v": v, "n": n}


def fill(harness: Harness) -> None:
    for number in range(6):
        harness.topic.add("c", row(f"k{number}", number, f"first {number}"))
    harness.topic.add("u", row("k1", 1, "second"))
    harness.topic.add("d", row("k2", 2))


def fill_view(harness: Harness) -> None:
    fill(harness)
    harness.apply()


def applying_twice_equals_once(harness: Harness) -> None:
    fill(harness)
    batch = harness.batch(None, harness.topic.ends, "one")
    harness.send(batch)
    view = harness.view()
    harness.send(batch)
    assert harness.view() == view == harness.topic.model()
    assert harness.position() == batch.advances[0].end


def an_older_position_never_wins(harness: Harness) -> None:
    fill(harness)
    batch = harness.batch(None, harness.topic.ends, "one")
    harness.send(batch)
    harness.topic.add("u", row("k1", 1, "third"))
    harness.topic.add("d", row("k3", 3))
    harness.apply()
    with pytest.raises(CdcError):
        harness.send(batch)
    assert harness.view() == harness.topic.model()


def deleting_what_is_absent_succeeds(harness: Harness) -> None:
    harness.topic.add("d", row("nobody", 1))
    harness.apply()
    harness.topic.add("d", row("nobody", 2))
    harness.apply()
    assert harness.view() == {}
    assert harness.position() == Position(TOPIC_ID, harness.topic.ends)


def the_newest_of_a_batch_wins(harness: Harness) -> None:
    harness.topic.add("c", row("k", 1, "one"))
    harness.topic.add("u", row("k", 1, "two"))
    harness.topic.add("d", row("k", 1))
    harness.topic.add("c", row("k", 1, "three"))
    harness.topic.add("c", row("gone", 1, "one"))
    harness.topic.add("d", row("gone", 1))
    harness.apply()
    assert harness.view() == harness.topic.model() == {'["k",1]': row("k", 1, "three")}


def every_key_has_a_row_of_its_own(harness: Harness) -> None:
    """Every key has a row of its own, also keys longer than an index takes for an id (512 bytes),
    alike in all that it would take.
    """
    long = "x" * 600
    keys = [
        "",
        " ",
        '"',
        '","',
        "\\",
        "\n",
        "ü",
        "\U0001f600",
        long,
        long + "y",
        long + '"',
        "é" * 300,
    ]
    for key in keys:
        harness.topic.add("c", row(key, 1, key))
    harness.apply()
    assert harness.view() == harness.topic.model()
    assert len(harness.view()) == len(keys)
    ids = list(harness.view())
    harness.topic.add("d", row(long, 1))
    harness.topic.add("u", row(long + "y", 1, "second"))
    harness.topic.add("u", row("", 1, "second"))
    harness.apply()
    assert harness.view() == harness.topic.model()
    assert_read_by_id(harness, ids[2:])


def the_position_is_not_ahead_of_the_data(harness: Harness) -> None:
    """A batch that can't be applied as a whole must not move the position past what is missing."""
    fill_view(harness)
    harness.topic.add("u", row("k0", 0, "after"))
    harness.topic.add("c", {**row("bad", 1), "n": "not a number, a secret"})
    position = harness.position()
    batch = harness.batch(position, harness.topic.ends, "one")
    try:
        harness.send(batch)
    except (SinkRejected, DecodeError) as error:
        assert "secret" not in f"{error.message}{error.hint}{error.details}"
        assert harness.position() == position
    else:
        assert harness.position() == Position(TOPIC_ID, harness.topic.ends)
        assert harness.view() == harness.topic.model()


def a_run_resumes_from_the_sink(harness: Harness) -> None:
    """Whatever was applied before a crash, the next run goes on from the sink's position and ends right."""
    fill(harness)
    harness.apply((2, 1), "one")
    harness.sink = harness.writer()
    harness.topic.add("u", row("k0", 0, "later"))
    harness.apply(None, "two")
    assert harness.view() == harness.topic.model()
    assert harness.position() == Position(TOPIC_ID, harness.topic.ends)


def a_second_writer_is_fenced(harness: Harness) -> None:
    fill(harness)
    second = harness.writer()
    stale = harness.position(second)
    harness.apply((3, 2), "one")
    expected = harness.view()
    with pytest.raises(Fenced):
        harness.send(harness.batch(stale, harness.topic.ends, "two"), second)
    assert harness.view() == expected == harness.topic.model((3, 2))


def a_stopped_writer_is_fenced(harness: Harness, during: During) -> bool:
    """A writer that is stopped at a moment of its batch is fenced once another has gone on in its
    place.

    It may have applied all of its batch by then, and then it may say so. Returns False when the
    moment didn't come.
    """
    fill(harness)
    for number in range(4):
        harness.topic.add("c", row("in the other partition", number))
    harness.apply((3, 0), "before")
    zombie, heir, positions = harness.writer(), harness.writer(), []
    batch = harness.batch(harness.position(zombie), harness.topic.ends, "zombie")

    def go_on() -> None:
        positions.append(harness.position(heir))
        for number in range(2):
            harness.topic.add("u", row("k0", 0, f"change {number}"))
            harness.topic.add("u", row("k1", 1, f"change {number}"))
            harness.topic.add("c", row("new", number))
            harness.apply(None, "heir", heir)

    refused: CdcError | None = None
    with during(go_on):
        try:
            _send_insisting(harness, batch, zombie)
        except CdcError as error:
            refused = error
    if not positions:
        return False
    is_applied = positions[0] == batch.advances[0].end
    assert isinstance(refused, Fenced) or (is_applied and refused is None), refused
    assert harness.view() == harness.topic.model()
    assert harness.position() == Position(TOPIC_ID, harness.topic.ends)
    harness.topic.add("u", row("k0", 0, "last"))
    harness.apply(None, "heir", heir)
    assert harness.view() == harness.topic.model()
    return True


def _send_insisting(harness: Harness, batch: Batch, sink: Sink) -> None:
    """Send a batch again and again, as a stream does where the destination only asks for time."""
    for _ in range(3):
        try:
            harness.send(batch, sink)
        except PositionLost:
            raise
        except SinkUnavailable:
            continue
        return


def markers_alone_move_the_position(harness: Harness) -> None:
    fill_view(harness)
    for partition in range(harness.topic.partitions):
        harness.topic.gap(partition)
    harness.apply()
    assert harness.position() == Position(TOPIC_ID, harness.topic.ends)
    assert harness.view() == harness.topic.model()


def a_value_that_is_not_carried_stays(harness: Harness) -> None:
    """Insert and update in one batch, update in a later one, and after a delete in between."""
    topic = harness.topic
    topic.add("c", row("k", 1, "large", 1))
    topic.add("u", row("k", 1, n=2), lacking=["v"])
    topic.add("c", row("other", 1, "huge, with 1.00000000000000000001", 1))
    harness.apply()
    assert harness.view() == topic.model()
    topic.add("u", row("k", 1, n=3), lacking=["v"])
    topic.add("u", row("other", 1, n=3), lacking=["v"])
    topic.add("u", row("other", 1, n=4), lacking=["v"])
    harness.apply()
    assert harness.view() == topic.model()
    topic.add("d", row("k", 1))
    topic.add("c", row("k", 1, "another", 1))
    topic.add("u", row("k", 1, n=5), lacking=["v"])
    harness.apply()
    assert harness.view() == topic.model()
    assert harness.view()[row_id(["k", 1])] == row("k", 1, "another", 5)


def an_unknown_value_is_refused(harness: Harness) -> None:
    """Never null, never the placeholder; the key is named, and nothing is lost: the position doesn't pass it."""
    fill_view(harness)
    start, view = harness.position(), harness.view()
    harness.topic.add("u", row("never seen", 1), lacking=["v"])
    with pytest.raises(RowsRejected) as caught:
        harness.apply()
    assert set(caught.value.rows) == {(harness.table.topic, row_id(["never seen", 1]))}
    assert harness.view() == view
    position = harness.position()
    assert position is not None
    assert position == start or harness.topic.between(position.offsets, harness.topic.ends)


def what_a_view_has_is_not_set_back(harness: Harness) -> None:
    """A batch that begins, and in one partition ends, before the view's position: for the sake of a view beside it."""
    fill(harness)
    for number in range(3):
        harness.topic.add("c", row(f"k{number}", number + 1))
    assert all(end > 1 for end in harness.topic.ends)
    old_ends, table = harness.topic.ends, harness.table
    harness.topic.add("u", row("k0", 0, "newest"))
    ends = harness.topic.ends
    newest = [now > then for now, then in zip(ends, old_ends, strict=True)]
    harness.apply([end if has else 1 for end, has in zip(ends, newest, strict=True)])
    start = harness.position()
    early = harness.batch(None, old_ends, "one")
    harness.send(replace(early, advances=(Advance(table, start, Position(TOPIC_ID, ends)),)))
    assert harness.view() == harness.topic.model()
    assert harness.position() == Position(TOPIC_ID, ends)


def a_cleared_view_is_made_again(harness: Harness) -> None:
    fill_view(harness)
    harness.sink.clear(harness.table)
    harness.sink.prepare(harness.table)
    assert (harness.view(), harness.position()) == ({}, None)
    harness.topic.add("u", row("k0", 0, "later"))
    harness.apply()
    assert harness.view() == harness.topic.model()


def a_repair_moves_nothing(harness: Harness) -> None:
    """A batch of no length rewrites rows, and the writer that owns the position doesn't notice."""
    fill_view(harness)
    position = harness.position()
    harness.send(harness.repair(position, "repairer"), harness.writer())
    assert (harness.position(), harness.view()) == (position, harness.topic.model())
    harness.topic.add("u", row("k0", 0, "later"))
    harness.apply()
    assert harness.view() == harness.topic.model()


def every_record_is_accounted_for(harness: Harness) -> None:
    fill(harness)
    harness.topic.add("u", row("k0", 0, "again"))
    first = harness.apply((3, 2))
    second = harness.apply()
    # What adds them up takes nothing else.
    assert type(first) is Applied
    for applied, start, end in ((first, (0, 0), (3, 2)), (second, (3, 2), harness.topic.ends)):
        assert applied.read == len(harness.topic.between(start, end)) == applied.accounted
    assert second.folded > 0


def a_generation_is_built_unseen(harness: Harness) -> None:
    """Built beside the live view, switched to in one step, and back; both can go on all the time."""
    fill_view(harness)
    live = harness.sink
    live_view = harness.view()
    table = harness.table
    names, build = harness.begin_generation()
    assert build.position(table) is None
    harness.topic.add("c", row("fresh", 1))
    harness.topic.add("d", row("k1", 1))
    harness.apply(writer="another", sink=build)
    assert harness.view() == live_view, "the build is seen"
    assert harness.view(build) == harness.topic.model()
    replaced_names = live.promote([table], names)
    assert harness.view() == harness.topic.model()
    stored = live.position(table)
    assert stored is not None
    assert stored.generation == names[harness.name]
    # Whoever has been killed on the way repeats it.
    replaced_names = live.promote([table], names) or replaced_names
    assert harness.view() == harness.topic.model()
    old_sink = live.for_generation(replaced_names)
    old_sink.prepare(table)
    assert harness.view(old_sink) == live_view
    harness.topic.add("u", row("fresh", 1, "second"))
    harness.topic.add("d", row("k3", 3))
    harness.apply(writer="three")
    harness.apply(writer="four", sink=old_sink)
    assert harness.view() == harness.view(old_sink) == harness.topic.model()
    assert len(live.generations(table)) >= 2
    newer_names = live.promote([table], replaced_names)
    assert harness.view() == harness.topic.model()
    harness.topic.add("c", row("last", 1))
    harness.apply(writer="five")
    assert harness.view() == harness.topic.model()
    live.drop_unreferenced([table], newer_names)
    assert harness.view(live.for_generation(newer_names)) != harness.view()
    live.drop_unreferenced([table], {})
    assert harness.view() == harness.topic.model()
    harness.apply(writer="five")


def what_is_empty_exists(harness: Harness) -> None:
    """An empty view exists from `prepare` on, and after `clear`; a second, empty generation can be
    shown like any other.
    """
    table, live = harness.table, harness.sink
    assert (harness.view(), harness.position()) == ({}, None)
    names, _ = harness.begin_generation()
    replaced_names = live.promote([table], names)
    live.drop_unreferenced([table], replaced_names)
    assert (harness.view(), harness.position()) == ({}, None)
    live.clear(table)
    live.prepare(table)
    assert (harness.view(), harness.position()) == ({}, None)
    fill_view(harness)
    assert harness.view() == harness.topic.model()


def a_generation_that_is_behind_waits(harness: Harness) -> None:
    """Readers would see older values otherwise."""
    fill(harness)
    names, build = harness.begin_generation()
    harness.apply([1, 1], writer="another", sink=build)
    harness.apply()
    live_view = harness.view()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("cdc.sink.promotion.SWITCH_S", 0.5)
        with pytest.raises(SinkUnavailable, match=re.escape(harness.table.qualified)):
            harness.sink.promote([harness.table], names)
    assert harness.view() == live_view
    harness.topic.add("c", row("last", 1))
    harness.apply()


def a_later_change_wins_whatever_its_lsn(harness: Harness) -> None:
    """Within a topic's partition the offset is the order; LSNs go back at every snapshot."""
    harness.topic.add("c", row("k", 1, "first"), lsn=50)
    harness.topic.add("c", row("gone", 1, "first"), lsn=60)
    harness.apply()
    harness.topic.add("r", row("k", 1, "second"), lsn=40)
    harness.topic.add("d", row("gone", 1), lsn=55)
    harness.apply()
    assert harness.view() == harness.topic.model() == {'["k",1]': row("k", 1, "second")}


def what_a_truncate_has_voided_stays_away(harness: Harness) -> None:
    """Rows that a TRUNCATE has voided don't come back, neither from the view nor from the log."""
    for number in range(4):
        harness.topic.add("c", row("old", number), lsn=number + 1)
    harness.apply()
    harness.floors = Floors(0, {harness.name: 100})
    harness.sink.clear(harness.table)
    harness.sink.prepare(harness.table)
    harness.topic.add("c", row("new", 1), lsn=101)
    applied = harness.apply()
    assert harness.view() == harness.topic.model(floor=100) == {'["new",1]': row("new", 1)}
    assert (applied.read, applied.stale) == (5, 4)
    assert [s.floor for s in [harness.sink.position(harness.table)] if s] == [100]


def what_a_server_before_has_written_stays_away(harness: Harness) -> None:
    """Records of an earlier server have higher positions than those of the new one, whose TRUNCATE
    must not bring the old rows back.
    """
    for number in range(4):
        harness.topic.add("c", row("old", number), lsn=1000 + number)
    harness.topic.add("d", row("old", 3), lsn=1004)
    harness.apply()
    harness.server_start = harness.topic.ends
    for lsn, name in ((0, "new"), (50, "newer")):
        harness.floors = Floors(1, {harness.name: lsn})
        assert [
            distance(
                harness.sink.position(harness.table), UP_TO, harness.floors.number(harness.name)
            ).reach
        ] == [Reach.BEFORE_FLOOR]
        harness.sink.clear(harness.table)
        harness.sink.prepare(harness.table)
        harness.topic.add("c", row(name, 1), lsn=lsn + 1)
        harness.apply()
        assert harness.view() == {f'["{name}",1]': row(name, 1)}
        assert [s.floor for s in [harness.sink.position(harness.table)] if s] == [
            harness.floors.number(harness.name)
        ]


def a_crash_leaves_nothing_out(harness: Harness) -> None:
    """Wherever a writer has ended, the next one goes on from the position and finds nothing missing."""
    fill(harness)
    with contextlib.suppress(CdcError):
        harness.apply((3, 2))
    harness.sink = harness.writer()
    harness.apply(None, "two")
    assert harness.view() == harness.topic.model()


def a_removed_view_leaves_nothing_behind(harness: Harness) -> None:
    """With all of its generations; a removal may be repeated, and the view made again after it."""
    fill_view(harness)
    _, candidate = harness.begin_generation()
    harness.apply(writer="build", sink=candidate)
    assert harness.sink.remains([harness.table])
    for _ in range(2):
        harness.sink.remove([harness.table])
        assert harness.sink.remains([harness.table]) == []
        assert set(harness.sink.generations(harness.table)) <= {""}
    second = harness.writer()
    assert harness.position(second) is None
    harness.apply(writer="two", sink=second)
    assert harness.view(second) == harness.topic.model()


def a_position_that_cannot_be_read_stops(sink: Sink, table: Table) -> None:
    """Of a sink whose destination is away: "nothing there" would have its view made empty."""
    for read in (sink.position, lambda table: positions(sink, [table])):
        with pytest.raises(SinkUnavailable):
            read(table)


LAWS = [
    applying_twice_equals_once,
    an_older_position_never_wins,
    deleting_what_is_absent_succeeds,
    the_newest_of_a_batch_wins,
    every_key_has_a_row_of_its_own,
    the_position_is_not_ahead_of_the_data,
    a_run_resumes_from_the_sink,
    a_second_writer_is_fenced,
    markers_alone_move_the_position,
    a_value_that_is_not_carried_stays,
    an_unknown_value_is_refused,
    what_a_view_has_is_not_set_back,
    a_cleared_view_is_made_again,
    a_repair_moves_nothing,
    every_record_is_accounted_for,
    a_generation_is_built_unseen,
    what_is_empty_exists,
    a_generation_that_is_behind_waits,
    a_later_change_wins_whatever_its_lsn,
    what_a_truncate_has_voided_stays_away,
    what_a_server_before_has_written_stays_away,
    a_removed_view_leaves_nothing_behind,
]
MERGING = [
    an_older_position_never_wins,
    deleting_what_is_absent_succeeds,
    every_key_has_a_row_of_its_own,
    a_value_that_is_not_carried_stays,
    what_a_view_has_is_not_set_back,
    a_repair_moves_nothing,
    a_later_change_wins_whatever_its_lsn,
]
"""Those in which changed rows meet the rows of a view, once or in several batches: all that a mirror
without deletion vectors does in another way.
"""
SHARING = [
    *MERGING,
    the_position_is_not_ahead_of_the_data,
    a_second_writer_is_fenced,
    a_cleared_view_is_made_again,
    what_is_empty_exists,
    a_generation_is_built_unseen,
    a_generation_that_is_behind_waits,
    a_removed_view_leaves_nothing_behind,
]
"""Those in which files are written, found, given to another generation and removed."""
