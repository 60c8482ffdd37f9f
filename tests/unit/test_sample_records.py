"""Codec and lane against the twin on the sample's flights: with `make properties` all 336,776 of
2013, and what became of them in a week of each month; without, a few days.
"""

from calendar import monthrange
from datetime import date

import pytest

from tests.support.budget import SCALE
from tests.support.comparing import assert_as_the_twin, assert_view_as_the_twin
from tests.support.flights import MASK, TABLE, history, snapshot

IN_FULL = SCALE > 1
STORM = (date(2013, 2, 8), date(2013, 2, 10))
MONTHS = [
    (date(2013, month, 1), date(2013, month, monthrange(2013, month)[1])) for month in range(1, 13)
]
WEEKS = [(start, start.replace(day=7)) for start, _ in MONTHS]


def test_every_flight_is_shown_as_by_the_twin() -> None:
    flights = 0
    for period in MONTHS if IN_FULL else [STORM]:
        records = snapshot(*period)
        for form in ("events", "documents"):
            assert_as_the_twin(TABLE, records, form)
        flights += len(assert_view_as_the_twin(TABLE, records, chunk_rows=997))
    assert flights == (336_776 if IN_FULL else 2443)


@pytest.mark.parametrize("period", WEEKS if IN_FULL else [STORM], ids=str)
def test_a_history_of_flights_leads_to_the_view_of_the_twin(period: tuple[date, date]) -> None:
    """Updates that leave a long text alone, deletes, rows that come back, keys that change."""
    records = history(*period)
    assert any(MASK in (record.value or b"") for record in records)
    assert any(record.value is None for record in records)
    for form in ("events", "documents"):
        assert_as_the_twin(TABLE, records, form)
    assert len(assert_view_as_the_twin(TABLE, records, chunk_rows=97)) > 2000
