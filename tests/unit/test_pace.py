"""How much of a backlog one batch takes."""

import pytest

from cdc.apply.batch.size import FIRST, FIRST_BYTES, LEAST, MOST, first_limit, fitting_limit

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
