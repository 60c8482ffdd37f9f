"""The memory that a state will take, by Postgres' statistics, and what is said of a server that has
less.
"""

from pathlib import Path

import pytest

from cdc.documents.needs import EXCESS, KEY, MARK, Forecast, forecast, judge_room
from cdc.documents.plan import StatePlan
from cdc.documents.state import StateSizes, StateTooLarge
from cdc.model.table import RowEstimate
from tests.unit.test_view_settings import GOOD, resolve

URL = "redis://:secret@cache:6380/4"
MIB = 1 << 20
EMPTY = StateSizes({}, {}, {}, 0, 10 * MIB, 100 * MIB, {})
NAME = "public.flights"


@pytest.fixture
def plan(tmp_path: Path) -> StatePlan:
    return StatePlan(resolve(tmp_path, GOOD))


def sizes(plan: StatePlan, rows: int, size: int) -> StateSizes:
    """A state that has so many rows of the flights, of so many bytes."""
    none = dict.fromkeys((table.qualified for table in plan.tables), 0)
    return EMPTY._replace(rows={**none, NAME: rows}, bytes={**none, NAME: size})


def estimate(plan: StatePlan, rows: int, width: int = 8) -> RowEstimate:
    (table,) = (table for table in plan.tables if table.qualified == NAME)
    return RowEstimate(rows, {column.name: width for column in table.columns})


def test_rows_that_are_to_be_read_are_as_postgres_estimates_them(plan: StatePlan) -> None:
    empty = sizes(plan, 0, 0)
    short, long = (
        forecast(plan, "shop", empty, [NAME], {NAME: estimate(plan, 1000, width)})
        for width in (8, 80)
    )
    # A row has its columns once, those of its key in its key, its id and its indexes besides.
    columns = len(estimate(plan, 1).widths)
    assert short.needed == short.growth > 1000 * (KEY + 8 * columns)
    assert long.needed - short.needed >= 1000 * 72 * (columns + 2)
    assert forecast(plan, "shop", empty, [NAME], {}) == (0, 0)


def test_rows_that_are_there_count_as_they_are(plan: StatePlan) -> None:
    held = sizes(plan, 1000, 500_000)
    retained = forecast(plan, "shop", held, [], {NAME: estimate(plan, 10**6)})
    assert 500_000 + 1000 * KEY < retained.needed < 750_000
    assert retained.growth == 0
    # Rows that are read again take the place of those that are there.
    again = forecast(plan, "shop", held, [NAME], {NAME: estimate(plan, 1000)})
    assert again.growth <= 1000 * MARK
    more = forecast(plan, "shop", held, [NAME], {NAME: estimate(plan, 3000)})
    assert 0 < more.growth < more.needed


def test_what_fits_is_not_spoken_of() -> None:
    assert judge_room(URL, Forecast(90 * MIB, 90 * MIB), EMPTY) is None
    for unknown in (EMPTY._replace(limit_bytes=None), EMPTY._replace(used_bytes=None)):
        assert judge_room(URL, Forecast(10**12, 10**12), unknown) is None
    # All of it is there already, whatever the estimate says.
    assert judge_room(URL, Forecast(10**12, 0), EMPTY) is None


def test_a_little_too_much_is_a_risk_and_far_too_much_a_refusal() -> None:
    risk = judge_room(URL, Forecast(91 * MIB, 91 * MIB), EMPTY)
    assert risk is not None
    assert (risk.code, risk.severity) == ("state-too-large", "warning")
    edge = int(EXCESS * 100 * MIB)
    assert judge_room(URL, Forecast(edge, edge), EMPTY)
    with pytest.raises(StateTooLarge) as refused:
        judge_room(URL, Forecast(edge + 1, edge + 1), EMPTY)
    error = refused.value
    assert "cache:6380" in error.message
    assert "157,286,401 bytes" in error.message
    assert "94,371,840 of 104,857,600 bytes (maxmemory) are free" in error.message
    assert error.hint == (
        f"redis-cli -h cache -p 6380 --askpass CONFIG SET maxmemory {10 * MIB + round(1.5 * (edge + 1))}"
    )
    assert "secret" not in f"{error.message}{error.hint}{risk}"
    assert risk.fix.startswith("redis-cli -h cache")
