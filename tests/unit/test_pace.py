"""How much of a backlog one batch takes."""

import pytest

from cdc.apply.batch.size import FIRST, FIRST_BYTES, LEAST, MOST, first_limit, fitting_limit

PLENTY = 10_000_000


@pytest.mark.parametrize(
    ("limit", "offsets", "took_s", "remaining", "expected"),
    [
        (100_000, 100_000, 1.0, PLENTY, 1_000_000),
        (100_000, 100_000, 2.5, PLENTY, 400_000),
        # Not worth a start of the query: nearly right, or little is left.
        (100_000, 100_000, 6.0, PLENTY, 100_000),
        (100_000, 100_000, 35.0, PLENTY, 100_000),
        (100_000, 100_000, 1.0, 150_000, 100_000),
        (100_000, 100_000, 50.0, 15_000, 100_000),
        (100_000, 100_000, 50.0, PLENTY, 20_000),
        # By what the batch had, which may be less than it could have.
        (100_000, 60_000, 40.0, PLENTY, 15_000),
        (100_000, 100_000, 0.01, PLENTY, MOST),
        (100_000, 100_000, 10_000.0, PLENTY, LEAST),
        (MOST, MOST, 0.1, PLENTY, MOST),
        (LEAST, LEAST, 1000.0, PLENTY, LEAST),
    ],
)
def test_a_batch_takes_some_seconds(
    limit: int, offsets: int, took_s: float, remaining: int, expected: int
) -> None:
    assert fitting_limit(limit, offsets, took_s, remaining) == expected


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


def test_an_outage_is_caught_up_with_in_few_starts() -> None:
    """A sink that takes 80,000 records a second, and 0.3 s a batch; after a while only 4,000."""
    limit, remaining, starts, longest = 100_000, PLENTY, 0, 0.0
    while remaining:
        offsets = min(limit, remaining)
        took_s = 0.3 + offsets / (80_000 if remaining > PLENTY / 2 else 4_000)
        remaining -= offsets
        changed = fitting_limit(limit, offsets, took_s, remaining)
        starts, limit = starts + (changed != limit), changed
        longest = max(longest, took_s) if remaining < PLENTY / 3 else longest
    assert starts == 2
    assert longest < 40
