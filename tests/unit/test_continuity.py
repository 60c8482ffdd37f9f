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
from cdc.model.generation import generation_time, new_generation
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
        ("__debezium-heartbeat.shop", 2, "compact", "cdc -p FILE register"),
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
    """It has no other generation. Moved keys, and a log without its beginning, aren't mended by
    reading them again.
    """
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


def log() -> Log:
    return Log(
        Position("id", (0,)),
        Position("id", (100,)),
        WEEK,
        Position("id", (90,)),
        NOW,
    )


def view(offset: int, ago_s: float, generation: str = "") -> ViewCheckpoint:
    return ViewCheckpoint(Position("id", (offset,)), changed_at=NOW - ago_s, generation=generation)


def ms(ago_s: float) -> int:
    return int((NOW - ago_s) * 1000)


def missed(
    topic_log: Log,
    stored: ViewCheckpoint,
    following: tuple[int, int] | None = None,
    birth: float = 0.0,
) -> bool:
    """`following`: the next record after the view, its offset and its time."""
    return (
        safe_until(
            topic_log,
            TOPIC,
            stored,
            dict.fromkeys(uncertain_records(topic_log, TOPIC, stored), following),
            birth,
        )
        < NOW
    )


@pytest.mark.parametrize(
    ("stored", "following"),
    [
        pytest.param(view(100, 52 * WEEK), None, id="idle for a year, at the end"),
        pytest.param(view(95, 52 * WEEK), None, id="idle for a year, behind by what has just come"),
        pytest.param(view(50, 52 * WEEK), (50, ms(6 * 24 * HOUR)), id="the next record is six days old"),
        pytest.param(view(50, 6 * 24 * HOUR), (60, ms(HOUR)), id="the next record is gone, the view was there since"),
        pytest.param(view(50, 6 * 24 * HOUR), None, id="all that followed is gone, the view was there since"),
    ],
)  # fmt: skip
def test_a_view_that_can_have_missed_no_delete(
    stored: ViewCheckpoint, following: tuple[int, int] | None
) -> None:
    assert not missed(log(), stored, following)


@pytest.mark.parametrize(
    ("stored", "following"),
    [
        pytest.param(view(50, 8 * 24 * HOUR), (50, ms(8 * 24 * HOUR)), id="away for eight days"),
        pytest.param(view(50, 60), (50, ms(8 * 24 * HOUR)), id="slow by eight days"),
        pytest.param(
            view(50, 8 * 24 * HOUR),
            (60, ms(HOUR)),
            id="away for eight days, the next record is gone",
        ),
        pytest.param(
            view(50, 8 * 24 * HOUR), None, id="away for eight days, all that followed is gone"
        ),
    ],
)
def test_a_view_that_may_have_missed_one(
    stored: ViewCheckpoint, following: tuple[int, int] | None
) -> None:
    assert missed(log(), stored, following)


def test_what_was_read_from_nothing_within_the_time_has_missed_none() -> None:
    """A new view of an old log, started again half way: its next record is a year old."""
    half_way = view(50, 60), (50, ms(52 * WEEK))
    assert not missed(log(), *half_way, birth=NOW - HOUR)
    assert missed(log(), *half_way, birth=NOW - WEEK - HOUR)
    assert generation_time(new_generation()) == pytest.approx(time.time(), abs=5)
    assert generation_time("") == generation_time("old") == 0.0


def test_it_is_sure_until_the_oldest_that_a_view_has_not_seen_may_go() -> None:
    oldest = (50, ms(6 * 24 * HOUR))
    assert safe_until(log(), TOPIC, view(50, 0), {(TOPIC, 0, 50): oldest}) == NOW + 24 * HOUR
    assert (
        safe_until(log(), TOPIC, view(100, 0), {})
        == safe_until(log(), TOPIC, None, {})
        == NOW + WEEK
    )
    assert safe_until(log(), TOPIC, view(90, 0), {}) == NOW + WEEK / 2


def test_only_views_that_are_long_behind_cost_a_look() -> None:
    assert (
        uncertain_records(log(), TOPIC, None) == uncertain_records(log(), TOPIC, view(90, 0)) == []
    )
    assert uncertain_records(log(), TOPIC, view(89, 0)) == [(TOPIC, 0, 89)]


def test_a_log_of_changes_tells_where_it_may_have_holes() -> None:
    """Superseded records older than they are kept, from where it stands."""
    away = view(50, 8 * 24 * HOUR)
    following = {(TOPIC, 0, 50): (50, ms(8 * 24 * HOUR))}
    hole = hole_behind(log(), TOPIC, away, following, Position("id", (70,)))
    assert hole == Hole(
        Position("id", (50,)), Position("id", (70,)), NOW - 8 * 24 * HOUR, NOW - WEEK
    )
    assert (
        str(hole)
        == "offsets 50-69 of partition 0, written from 2001-09-01 01:46:40+00:00 to 2001-09-02 01:46:40+00:00"
    )


def test_holes_that_touch_are_told_as_one() -> None:
    def hole(start: tuple[int, int], end: tuple[int, int], time: float, id_: str = "id") -> Hole:
        return Hole(Position(id_, start), Position(id_, end), time, time + 1)

    first = hole((0, 0), (5, 5), 1)
    later = hole((7, 5), (9, 9), 5)
    assert later.merged([first]) == [first, later]
    assert hole((5, 3), (9, 9), 3).merged([first]) == [replace(hole((0, 0), (9, 9), 1), until=4)]
    assert later.merged([hole((0, 0), (5, 5), 1, "another")])[0].end.topic_id == "another"
    assert hole((0, 0), (6, 6), 1).merged([first]) == [hole((0, 0), (6, 6), 1)]


def test_a_check_that_only_looks_at_the_start_is_found_out() -> None:
    """The planted bug: it takes a log that still has the next offset for one that continues a
    view.
    """
    away = view(50, 8 * 24 * HOUR)
    judge(Position("id", (50, 50)), ends=(100, 100))
    assert missed(log(), away, (60, ms(HOUR)))
