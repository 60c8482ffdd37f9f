"""How much of a backlog one batch takes."""

from types import SimpleNamespace
from typing import Any

import pytest

from cdc.apply.batch import (
    FIRST,
    FIRST_BYTES,
    LEAST,
    MOST,
    BatchSize,
    first_limit,
    fitting_limit,
)
from cdc.apply.machine import ResumePlan
from cdc.kafka.log_reader import OffsetRange
from cdc.model.position import Position
from cdc.spark.lane_records import balanced

PLENTY = 10_000_000


@pytest.mark.parametrize(
    ("offsets", "took_s", "expected"),
    [
        (100_000, 1.0, 1_000_000),
        (100_000, 2.5, 400_000),
        (100_000, 50.0, 20_000),
        (100_000, 0.01, MOST),
        (100_000, 10_000.0, LEAST),
        (MOST, 0.1, MOST),
        (LEAST, 1000.0, LEAST),
    ],
)
def test_a_batch_takes_some_seconds(offsets: int, took_s: float, expected: int) -> None:
    assert fitting_limit(offsets, took_s) == expected


@pytest.mark.parametrize(
    ("width", "expected"),
    [
        (0, FIRST),
        (100, FIRST),
        (1024, FIRST_BYTES >> 10),
        (2048, FIRST_BYTES >> 11),
        (1 << 20, LEAST),
    ],
    ids=["unknown", "narrow", "wide", "wider", "huge"],
)
def test_the_first_batch_is_shorter_where_records_are_wide(width: int, expected: int) -> None:
    assert first_limit(PLENTY, PLENTY * width) == expected


def sized(offsets: int) -> tuple[BatchSize, ResumePlan]:
    """A batch size before its first batch, and a plan of topics with so many offsets."""
    end = Position("id", (offsets, 0))
    topics: Any = SimpleNamespace(
        starts=lambda _: {"t": Position("id", (0, 0))}, log_size_bytes=lambda _: 0
    )
    plan = ResumePlan(positions={"t": Position("id", (5, 5))}, shapes={"t": end})
    size = BatchSize(topics)
    size.begin(plan)
    return size, plan


def test_a_batch_has_a_share_of_each_partition() -> None:
    size, plan = sized(PLENTY)
    assert size.limited(plan, {"t": (5, 5)}) is None
    assert size.limited(plan, {"t": (9, 5)}) == {"t": (9, 5)}
    # Of the small one at least a record, so that it moves; of the large one as the limit says.
    assert size.limited(plan, {"t": (5 + 2 * FIRST, 6)}) == {"t": (5 + FIRST, 6)}


def test_a_batch_that_is_small_for_the_limit_does_not_change_it() -> None:
    size, plan = sized(PLENTY)
    ends = {"t": (5 + PLENTY, 5)}
    before = size.limited(plan, ends)
    size.adapt(FIRST // 2 - 1, 0.001)
    assert size.limited(plan, ends) == before
    size.adapt(FIRST, 100.0)
    assert size.limited(plan, ends) == {"t": (5 + FIRST // 10, 5)}


def test_ranges_are_divided_among_tasks() -> None:
    ranges = [OffsetRange("t", number, 0, end) for number, end in enumerate((900, 5000, 3000, 800))]
    assert balanced(ranges, 2) == [[ranges[1]], [ranges[2], ranges[0], ranges[3]]]
    # A second task isn't worth its while.
    assert balanced([ranges[0], OffsetRange("t", 1, 0, 10)], 2) == [
        [ranges[0], OffsetRange("t", 1, 0, 10)]
    ]
    assert balanced([], 2) == []
