"""G5: a view goes on only from a log that still continues it."""

import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from cdc.config.view_settings import STATE
from cdc.errors import ConnectorError, KafkaUnavailable
from cdc.kafka.clients import translated_errors
from cdc.kafka.ledger import Hole, Ledger
from cdc.kafka.log_continuity import Log, hole_behind, safe_until, uncertain_records
from cdc.kafka.log_refusals import Discontinued, refuse_gap, shape_errors
from cdc.kafka.records import Record
from cdc.model.finding import find_error
from cdc.model.generation import generation_of_copy, generation_time, new_generation
from cdc.model.position import Position, ViewCheckpoint
from cdc.model.table import Column, Table
from tests.support.pipelines import pipeline

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
