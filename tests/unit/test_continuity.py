"""G5: a view goes on only from a log that still continues it."""

import json
import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from cdc.config.view_settings import STATE
from cdc.errors import ConnectorError, KafkaUnavailable
from cdc.kafka.clients import translated_errors
from cdc.kafka.ledger import Hole, Ledger
from cdc.kafka.log_continuity import (
    Continuity,
    Log,
    hole_behind,
    pending_records,
    request_name,
    safe_until,
    uncertain_records,
)
from cdc.kafka.log_refusals import Discontinued, refuse_gap, shape_errors
from cdc.kafka.records import Record
from cdc.model.finding import find_error
from cdc.model.generation import generation_of_copy, generation_time, new_generation
from cdc.model.position import Position, ViewCheckpoint
from cdc.model.table import Column, Table
from tests.support.pipelines import NO_SOURCE, changed, pipeline
from tests.support.simulated import MemoryLog, SimulatedClock

TABLE = Table("public", "items", (Column("id", "bigint"),), ("id",), "shop.public.items")


def judge(
    position: Position | None, starts: tuple[int, ...] = (0, 0), ends: tuple[int, ...] = (9, 9)
) -> None:
    refuse_gap("search", TABLE, Position("id", starts), Position("id", ends), position)


@pytest.mark.parametrize(
    ("topic", "partitions", "policy", "fix"),
    [
        ("shop.public.items", 2, "compact", "cdc -p FILE topics renew --table public.items"),
        ("shop.view.docs", 2, "compact", "cdc -p FILE topics renew --table view.docs"),
        ("shop.view.docs", 1, "delete", "cdc -p FILE topics renew --table view.docs"),
        # `topics renew` takes none of the pipeline's own.
        ("shop.quarantine", 2, "compact", "cdc -p FILE register"),
        ("shop.cdc.heartbeat", 1, "delete", "cdc -p FILE register"),
        ("shop.cdc.debezium.shop", 2, "compact", "cdc -p FILE register"),
        ("shop.cdc.truncation", 2, "compact", "cdc -p FILE register --new-snapshot"),
        ("shop.cdc.ddl", 1, "delete", "cdc -p FILE register --new-snapshot"),
    ],
)
def test_a_topic_of_another_shape_has_a_command_that_takes_it(
    topic: str, partitions: int, policy: str, fix: str
) -> None:
    (error,) = shape_errors(topic, 1, partitions, policy)
    assert find_error(str(error.finding_key), topic, error).fix == fix


def test_both_mistakes_of_a_topic_are_named() -> None:
    keys = [error.finding_key for error in shape_errors("shop.public.items", 1, 2, "delete", 3)]
    assert keys == ["topic-unfit/partitions", "topic-unfit/policy"]


def test_a_damaged_entry_of_the_ledger_is_named() -> None:
    """It came as a Kafka that can't be reached, wherever the ledger was read to check topics."""
    damaged = [Record(7, 0, b"holes search shop.public.items", b'[{"start"')]
    broker: Any = SimpleNamespace(existing=set, read_all=lambda _: damaged)
    with (
        pytest.raises(ConnectorError, match=r"offset 7 of t\.settings") as caught,
        translated_errors("kafka"),
    ):
        Ledger(pipeline("t", "", "public.items"), broker).read()
    assert not isinstance(caught.value, KafkaUnavailable)
    assert "cdc -p FILE register" in caught.value.hint


def test_what_the_log_continues_is_accepted() -> None:
    judge(None)
    judge(Position("id", (0, 0)))
    judge(Position("id", (3, 9)), starts=(3, 9))
    judge(Position("id", (9, 9)))


@pytest.mark.parametrize(
    ("position", "starts", "ends", "message"),
    [
        (Position("other", (1, 1)), (0, 0), (9, 9), "it has been recreated"),
        (Position("id", (1, 1, 1)), (0, 0), (9, 9), "has 2 partitions, the view was made from 3"),
        (Position("id", (1, 4)), (0, 5), (9, 9), "has lost records that the view still needs"),
        (Position("id", (1, 9)), (0, 0), (9, 8), "its log was cut"),
        (None, (0, 1), (9, 9), "no longer holds its first records"),
    ],
)
def test_what_it_does_not_is_refused(
    position: Position | None, starts: tuple[int, ...], ends: tuple[int, ...], message: str
) -> None:
    with pytest.raises(ConnectorError, match=message) as caught:
        judge(position, starts, ends)
    assert caught.value.hint
    assert caught.value.exit_code == 5


@pytest.mark.parametrize(
    ("position", "starts", "rereadable", "hint"),
    [
        (Position("other", (1, 1)), (0, 0), True, "cdc -p FILE run --sink documents; where "),
        (Position("id", (10, 1)), (0, 0), True, "cdc -p FILE run --sink documents"),
        (Position("id", (1, 1, 1)), (0, 0), False, "cdc -p FILE topics renew --table public.items"),
        (None, (0, 1), False, "cdc -p FILE topics renew --table public.items"),
    ],
)
def test_what_mends_the_state_of_documents_is_no_rebuild(
    position: Position | None, starts: tuple[int, ...], rereadable: bool, hint: str
) -> None:
    """It has no other generation. Not all of it is mended by reading records again."""
    with pytest.raises(Discontinued) as caught:
        refuse_gap(STATE, TABLE, Position("id", starts), Position("id", (9, 9)), position)
    assert caught.value.hint.startswith(hint)
    assert "rebuild" not in caught.value.hint
    assert "give documents" not in caught.value.hint
    assert caught.value.rereadable is rereadable


NOW = 1_000_000_000.0
HOUR = 3600.0
WEEK = 168 * HOUR
TOPIC = TABLE.topic


LOG = Log(Position("id", (0,)), Position("id", (100,)), WEEK, Position("id", (90,)), NOW)


def view(offset: int, ago_s: float, generation: str = "") -> ViewCheckpoint:
    return ViewCheckpoint(Position("id", (offset,)), changed_at=NOW - ago_s, generation=generation)


def ms(ago_s: float) -> int:
    return int((NOW - ago_s) * 1000)


def missed(
    stored: ViewCheckpoint, following: tuple[int, int] | None = None, birth: float = 0.0
) -> bool:
    """`following`: the next record after the view, its offset and its time."""
    records = dict.fromkeys(uncertain_records(LOG, TOPIC, stored), following)
    return safe_until(LOG, TOPIC, stored, records, birth) < NOW


DAY = 24 * HOUR


@pytest.mark.parametrize(
    ("stored", "following", "may_have"),
    [
        pytest.param(view(100, 52 * WEEK), None, False, id="idle for a year, at the end"),
        pytest.param(view(95, 52 * WEEK), None, False, id="idle for a year, behind by what has just come"),
        pytest.param(view(50, 52 * WEEK), (50, ms(6 * DAY)), False, id="the next record is six days old"),
        pytest.param(view(50, 6 * DAY), (60, ms(HOUR)), False, id="the next record is gone, the view was there since"),
        pytest.param(view(50, 6 * DAY), None, False, id="all that followed is gone, the view was there since"),
        pytest.param(view(50, 8 * DAY), (50, ms(8 * DAY)), True, id="away for eight days"),
        pytest.param(view(50, 60), (50, ms(8 * DAY)), True, id="slow by eight days"),
        pytest.param(view(50, 8 * DAY), (60, ms(HOUR)), True, id="away for eight days, the next record is gone"),
        pytest.param(view(50, 8 * DAY), None, True, id="away for eight days, all that followed is gone"),
    ],
)  # fmt: skip
def test_whether_a_view_may_have_missed_a_delete(
    stored: ViewCheckpoint, following: tuple[int, int] | None, may_have: bool
) -> None:
    assert missed(stored, following) is may_have


def test_what_was_read_from_nothing_within_the_time_has_missed_none() -> None:
    """A new view of an old log, started again half way: its next record is a year old."""
    half_way = view(50, 60), (50, ms(52 * WEEK))
    assert not missed(*half_way, birth=NOW - HOUR)
    assert missed(*half_way, birth=NOW - WEEK - HOUR)
    assert generation_time(new_generation()) == pytest.approx(time.time(), abs=5)
    assert generation_time("") == generation_time("old") == 0.0


def test_a_copy_is_as_old_as_what_was_copied() -> None:
    """Also the copy of a copy. Each has another name."""
    original = "20200101t000000000000"
    copy = generation_of_copy(original)
    names = [original, copy, generation_of_copy(copy)]
    assert len(set(names)) == 3
    assert {generation_time(name) for name in names} == {1577836800.0}
    assert generation_time(generation_of_copy("")) == 0.0


def test_it_is_sure_until_the_oldest_that_a_view_has_not_seen_may_go() -> None:
    oldest = (50, ms(6 * DAY))
    assert safe_until(LOG, TOPIC, view(50, 0), {(TOPIC, 0, 50): oldest}) == NOW + DAY
    assert safe_until(LOG, TOPIC, view(100, 0), {}) == NOW + WEEK
    assert safe_until(LOG, TOPIC, None, {}) == NOW + WEEK
    assert safe_until(LOG, TOPIC, view(90, 0), {}) == NOW + WEEK / 2


def test_only_views_that_are_long_behind_cost_a_look() -> None:
    assert uncertain_records(LOG, TOPIC, None) == []
    assert uncertain_records(LOG, TOPIC, view(90, 0)) == []
    assert uncertain_records(LOG, TOPIC, view(89, 0)) == [(TOPIC, 0, 89)]


def test_a_log_of_changes_tells_where_it_may_have_holes() -> None:
    """Superseded records older than they are kept, from where it stands."""
    following = {(TOPIC, 0, 50): (50, ms(8 * DAY))}
    hole = hole_behind(LOG, TOPIC, view(50, 8 * DAY), following, Position("id", (70,)))
    assert hole == Hole(Position("id", (50,)), Position("id", (70,)), NOW - 8 * DAY, NOW - WEEK)
    times = "from 2001-09-01 01:46:40+00:00 to 2001-09-02 01:46:40+00:00"
    assert str(hole) == f"offsets 50-69 of partition 0, written {times}"


def test_holes_that_touch_are_told_as_one() -> None:
    def hole(start: tuple[int, int], end: tuple[int, int], time: float, id_: str = "id") -> Hole:
        return Hole(Position(id_, start), Position(id_, end), time, time + 1)

    first = hole((0, 0), (5, 5), 1)
    later = hole((7, 5), (9, 9), 5)
    assert later.merged([first]) == [first, later]
    assert hole((5, 3), (9, 9), 3).merged([first]) == [replace(hole((0, 0), (9, 9), 1), until=4)]
    assert later.merged([hole((0, 0), (5, 5), 1, "another")])[0].end.topic_id == "another"
    assert hole((0, 0), (6, 6), 1).merged([first]) == [hole((0, 0), (6, 6), 1)]


SHOP = pipeline("shop", NO_SOURCE, TABLE.qualified)
BORN = "20961002t070640000000"
"""A generation that begins at the first time of a simulated clock."""


class Standing:
    """A log whose first record was written at `began`, and what a pipeline makes of it later."""

    def __init__(self) -> None:
        self.clock = SimulatedClock()
        self.log = MemoryLog(self.clock)
        for topic in (SHOP.settings_topic, SHOP.topic("cdc.signal"), SHOP.heartbeat_topic, TOPIC):
            self.log.create(topic)
        self.began = self.clock.now
        self.log.append(TOPIC, 0, b"key", b"value")

    @property
    def end(self) -> Position:
        return self.log.ends([TOPIC])[TOPIC]

    def at(self, offset: int = 0, generation: str = "") -> ViewCheckpoint:
        """A checkpoint that a view stored at the beginning."""
        place = Position(self.end.topic_id, (offset,))
        return ViewCheckpoint(place, changed_at=self.began, generation=generation)

    def after(self, seconds: float, shop: Any = SHOP) -> Continuity:
        self.clock.now = self.began + seconds
        return Continuity(shop, self.log, self.clock.time).read([TOPIC])

    def signal(self, topic: str, name: str, op: str, lsn: int | None = None) -> None:
        change = {"op": op, "source": None if lsn is None else {"lsn": lsn}}
        self.log.write(topic, [(json.dumps({"id": name}).encode(), json.dumps(change).encode())])


def test_a_view_goes_on_for_as_long_as_tombstones_last() -> None:
    """The log keeps them for a day. Of a record that has just come, its time isn't looked up."""
    standing = Standing()
    for seconds, sure_s in ((0, DAY / 2), (DAY - 9, 9), (DAY, 1)):
        continuity = standing.after(seconds)
        continuity.refuse("cache", TABLE, standing.at())
        assert continuity.sure_until == standing.began + seconds + sure_s
    late = standing.after(DAY + 1)
    with pytest.raises(Discontinued, match="may have missed deletes") as caught:
        late.refuse("cache", TABLE, standing.at())
    assert caught.value.hint == "cdc -p FILE rebuild cache --table public.items"
    late.refuse("cache", replace(TABLE, events=True), standing.at())
    assert late.sure_until == float("inf")
    late.refuse("cache", TABLE, standing.at(standing.end.offsets[0]))
    late.refuse("cache", TABLE, None)
    assert late.sure_until == standing.began + 2 * DAY + 1
    assert late.read([TOPIC]).sure_until == float("inf")


def test_the_shorter_of_what_the_file_and_the_topic_say_counts() -> None:
    standing = Standing()
    shop = changed(SHOP, delete_retention_hours=1.0)
    standing.after(HOUR, shop).refuse("cache", TABLE, standing.at())
    with pytest.raises(Discontinued, match="may have missed deletes"):
        standing.after(HOUR + 1, shop).refuse("cache", TABLE, standing.at())


def test_the_birth_of_a_view_counts_until_it_has_once_been_complete() -> None:
    standing = Standing()
    standing.clock.now -= DAY
    standing.log.create(TOPIC)
    standing.log.append(TOPIC, 0, b"key", b"value")
    stored = replace(standing.at(generation=BORN), changed_at=standing.clock.now)
    continuity = standing.after(2)
    continuity.refuse("cache", TABLE, stored)
    with pytest.raises(Discontinued, match="may have missed deletes"):
        continuity.refuse("cache", TABLE, stored, complete=True)


def test_only_the_state_of_documents_is_read_again_by_itself() -> None:
    """And it only where its topic still has all records, in order."""
    standing = Standing()
    late = standing.after(2 * DAY)
    stored = standing.at()
    assert late.resume(STATE, TABLE, stored) is None
    with pytest.raises(Discontinued):
        late.resume("cache", TABLE, stored)
    with pytest.raises(Discontinued, match="keys have moved"):
        late.resume(STATE, TABLE, ViewCheckpoint(Position(standing.end.topic_id, (0, 0))))
    at_end = standing.at(1)
    assert late.resume(STATE, TABLE, at_end) is at_end
    standing.log.topics[TOPIC].partitions[0].delete_before(1)
    with pytest.raises(Discontinued, match="no longer holds its first records"):
        standing.after(2 * DAY).resume(STATE, TABLE, stored)


def test_a_view_that_moves_while_its_log_is_read_is_no_sign_of_a_cut() -> None:
    standing = Standing()
    continuity = standing.after(1)
    standing.log.append(TOPIC, 0, b"key", b"later")
    continuity.refuse("cache", TABLE, standing.at(2))
    with pytest.raises(Discontinued, match="its log was cut"):
        continuity.refuse("cache", TABLE, standing.at(3))


SIGNALS, HEARTBEATS = SHOP.topic("cdc.signal"), SHOP.heartbeat_topic
ASKED = (SIGNALS, "c", 7)
CAME = (SIGNALS, "r", 7)


@pytest.mark.parametrize(
    ("marks", "floor_lsn", "recreated", "waits"),
    [
        pytest.param([], None, False, False, id="nothing has happened"),
        pytest.param([], None, True, True, id="a new topic, nobody knows of its rows"),
        pytest.param([ASKED], None, True, True, id="they were requested"),
        pytest.param([ASKED, CAME], None, True, False, id="they came"),
        pytest.param([ASKED, (HEARTBEATS, "u", 7)], None, True, True, id="another heartbeat"),
        pytest.param([ASKED, (HEARTBEATS, "r", 7)], None, True, False, id="they came, the log was held up"),
        pytest.param([(SIGNALS, "c", None), (SIGNALS, "r", None)], None, True, False, id="without an LSN"),
        pytest.param([ASKED, CAME, (SIGNALS, "d", 7)], None, True, False, id="a request that was removed"),
        pytest.param([], 7, False, False, id="a TRUNCATE requests none"),
        pytest.param([ASKED], 7, False, True, id="requested with the floor"),
        pytest.param([ASKED], 8, False, False, id="requested before the floor"),
        pytest.param([ASKED, CAME], 8, True, False, id="of a new topic every request counts"),
        pytest.param([ASKED], None, False, False, id="a topic whose rows are all alive"),
    ],
)  # fmt: skip
def test_the_state_waits_for_rows_that_are_sent_again(
    marks: list[tuple[str, str, int | None]], floor_lsn: int | None, recreated: bool, waits: bool
) -> None:
    standing = Standing()
    for topic, op, lsn in marks:
        standing.signal(topic, request_name("it is new here", standing.end), op, lsn)
    former = ViewCheckpoint(Position("former", (0,)))
    stored = former if recreated else standing.at()
    continuity = standing.after(1)
    continuity.refuse_unfilled("cache", TABLE, stored, floor_lsn)
    try:
        continuity.refuse_unfilled(STATE, TABLE, stored, floor_lsn)
    except Discontinued as refusal:
        assert "may not have all rows of public.items yet" in refusal.message
        assert waits
    else:
        assert not waits


def test_marks_of_other_rows_are_not_what_the_state_waits_for() -> None:
    standing = Standing()
    other = request_name("it is new here", Position("another", (1,)))
    former = ViewCheckpoint(Position("former", (0,)))
    for op in ("c", "r"):
        standing.signal(SIGNALS, other, op)
    with pytest.raises(Discontinued, match="may not have all rows"):
        standing.after(1).resume(STATE, TABLE, former)
    standing.signal(SIGNALS, request_name("it is new here", standing.end), "c")
    standing.signal(HEARTBEATS, other, "r")
    with pytest.raises(Discontinued, match="may not have all rows"):
        standing.after(1).resume(STATE, TABLE, former)
    standing.signal(HEARTBEATS, request_name("it is new here", standing.end), "r")
    assert standing.after(1).resume(STATE, TABLE, former) is None


def test_the_view_of_another_pipeline_is_not_made_again() -> None:
    standing = Standing()
    standing.log.create("other.public.items")
    theirs = standing.log.ends(["other.public.items"])["other.public.items"]
    with pytest.raises(Discontinued, match=r"another pipeline's: it was made from other\.public"):
        standing.after(1).refuse("cache", TABLE, ViewCheckpoint(theirs))


def test_what_a_view_lacks_begins_at_the_next_record_of_each_partition() -> None:
    end = Position("id", (5, 7))
    assert pending_records(TOPIC, None, end) == [(TOPIC, 0, 0), (TOPIC, 1, 0)]
    stored = ViewCheckpoint(Position("id", (5, 6)))
    assert pending_records(TOPIC, stored, end) == [(TOPIC, 1, 6)]
    for other in (Position("another", (1, 1)), Position("id", (1,))):
        assert pending_records(TOPIC, ViewCheckpoint(other), end) == []


def test_the_partition_that_is_furthest_behind_decides() -> None:
    """Whichever it is; one that is behind by what has just come doesn't hide it."""
    start, end, recent = (Position("id", (offset,) * 3) for offset in (0, 100, 90))
    log = Log(start, end, WEEK, recent, NOW)
    times = (ms(HOUR), ms(6 * DAY))
    for first, second in (times, times[::-1]):
        stored = ViewCheckpoint(Position("id", (95, 50, 50)), changed_at=NOW)
        following = {(TOPIC, 1, 50): (50, first), (TOPIC, 2, 50): (50, second)}
        assert safe_until(log, TOPIC, stored, following) == NOW + DAY


def test_a_log_of_changes_that_is_too_far_behind_gets_a_hole() -> None:
    """Where the topic says nothing, superseded records are sure for a minute."""
    standing = Standing()
    standing.clock.now += 50
    standing.log.append(TOPIC, 0, b"key", b"later")
    for seconds, offset, sure_s in ((59, 0, 60), (60, 0, 61), (59, 1, 89)):
        in_time = standing.after(seconds)
        in_time.record_holes("cache", [(TABLE, standing.at(offset))])
        assert in_time.ledger.holes("cache", TOPIC) == []
        assert in_time.sure_until == standing.began + sure_s
    hole = Hole(standing.at().position, standing.end, standing.began, standing.began + 60)
    for sink, stored in (("cache", standing.at()), ("search", None)):
        late = standing.after(120)
        late.record_holes(sink, [(TABLE, stored)])
        assert late.ledger.holes(sink, TOPIC) == [hole]
        assert standing.after(120).ledger.holes(sink, TOPIC) == [hole]
        assert late.sure_until == standing.began + 180
    others = standing.after(120)
    others.record_holes("other", [(TABLE, standing.at(2))])
    assert others.ledger.holes("other", TOPIC) == []
    assert others.sure_until == standing.began + 180


def test_a_hole_ends_before_what_the_topic_still_has_to_keep() -> None:
    """The shorter of what the file and the topic say counts."""
    standing = Standing()
    standing.log.compaction_lag_s = 7200
    standing.clock.now += 50
    standing.log.append(TOPIC, 0, b"key", b"later")
    shop = changed(SHOP, changes_retention_hours=1.0)
    in_time = standing.after(HOUR, shop)
    in_time.record_holes("cache", [(TABLE, standing.at())])
    assert in_time.ledger.holes("cache", TOPIC) == []
    late = standing.after(HOUR + 1, shop)
    late.record_holes("cache", [(TABLE, standing.at())])
    hole = Hole(standing.at().position, standing.at(1).position, standing.began, standing.began + 1)
    assert late.ledger.holes("cache", TOPIC) == [hole]
    assert late.sure_until == standing.began + HOUR + 1 + HOUR / 2
    standing.log.compaction_lag_s = 1800
    shorter = standing.after(HOUR, shop)
    shorter.record_holes("other", [(TABLE, standing.at())])
    assert shorter.ledger.holes("other", TOPIC)
