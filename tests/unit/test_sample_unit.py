"""The sample: what the data says, and a plan that could have happened."""

from collections import Counter
from datetime import date
from typing import Any

import numpy as np
import pandas as pd
import pytest

from cdc.errors import SettingsError
from cdc.sample import nyc2013
from cdc.sample.plan import KEYS, Transaction, plan, records

THREE_DAYS = date(2013, 1, 1), date(2013, 1, 3)
Rows = dict[tuple[str, tuple[Any, ...]], dict[str, Any]]


@pytest.fixture(scope="module")
def year() -> pd.DataFrame:
    return nyc2013.flights(nyc2013.FIRST, nyc2013.LAST)


@pytest.fixture(scope="module")
def steps() -> list[Transaction]:
    return plan(*THREE_DAYS, seed=1)


def run(steps: list[Transaction]) -> Rows:
    """The rows that a plan leaves; each statement has to meet the row that it expects."""
    rows: Rows = {}
    for step in steps:
        for change in step.changes:
            identity = change.table, change.key
            if change.table not in ("flights", "weather"):
                continue
            if change.op == "insert":
                assert identity not in rows, "inserted twice"
                rows[identity] = change.values
            else:
                assert identity in rows, f"{change.op} of what isn't there"
                row = rows.pop(identity)
                if change.op == "update":
                    rows[change.table, change.key_after] = row | change.values
    return rows


# The data


def test_the_whole_year_is_there_with_its_gaps(year: pd.DataFrame) -> None:
    assert len(year) == 336_776
    assert not year.duplicated(list(KEYS["flights"])).any()
    assert year["dep_time"].isna().sum() == 8_255
    assert year["tailnum"].isna().sum() == 2_512
    assert year["status"].value_counts().to_dict() == {"arrived": 328_063, "cancelled": 8_713}


def test_every_flight_is_longer_than_its_time_in_the_air(year: pd.DataFrame) -> None:
    """True only when arrivals are read in the destination's zone, each on the right day."""
    minutes = (year["arr_time"] - year["dep_time"]).dt.total_seconds() / 60
    ground = (minutes - year["air_time"]).dropna()
    assert len(ground) == 327_346
    assert ground.between(5, 240).all()
    scheduled = (year["sched_arr"] - year["sched_dep"]).dt.total_seconds() / 60
    assert scheduled.between(45, 720).all()


@pytest.mark.parametrize(
    ("clock", "floor", "zone", "expected"),
    [
        (2400, "2013-01-01T23:00", "America/New_York", "2013-01-02T05:00"),
        (30, "2013-01-02T04:50", "America/New_York", "2013-01-02T05:30"),
        (1, "2013-01-02T04:50", "America/New_York", "2013-01-02T05:01"),
        (1530, "2013-01-01T15:00", "Pacific/Honolulu", "2013-01-02T01:30"),
        # An hour that didn't exist, and one that came twice.
        (230, "2013-03-10T06:00", "America/New_York", "2013-03-10T07:00"),
        (130, "2013-11-03T04:50", "America/New_York", "2013-11-03T05:30"),
        (130, "2013-11-03T04:50", "America/Puerto_Rico", "2013-11-03T05:30"),
    ],
)
def test_the_first_instant_that_a_clock_shows(
    clock: int, floor: str, zone: str, expected: str
) -> None:
    result = nyc2013.first_at(
        pd.Series([clock]), pd.Series([pd.Timestamp(floor, tz="UTC")]), pd.Series([zone])
    )
    assert result[0] == pd.Timestamp(expected, tz="UTC")


def test_gaps_are_not_computed_from_leftover_memory() -> None:
    counts = pd.Series([1.0, float("nan"), 3.0] * 300)
    for _ in range(20):
        leftovers = [np.full(len(counts), 1.7e308) for _ in range(8)]
        del leftovers
        result = nyc2013.minutes(counts)
    assert result[:3].tolist() == [pd.Timedelta(minutes=1), pd.NaT, pd.Timedelta(minutes=3)]


@pytest.mark.parametrize(
    ("start", "end"),
    [
        (date(2012, 12, 31), date(2013, 1, 2)),
        (date(2013, 12, 1), date(2014, 1, 1)),
        (date(2013, 1, 2), date(2013, 1, 1)),
    ],
)
def test_days_without_data_are_refused(start: date, end: date) -> None:
    for reader in (nyc2013.flights, nyc2013.weather):
        with pytest.raises(SettingsError, match="there are no flights"):
            reader(start, end)


# The plan


def test_a_plan_could_have_happened(steps: list[Transaction]) -> None:
    """What is left is what the data says."""
    rows = run(steps)
    flights = {key: row for (table, key), row in rows.items() if table == "flights"}
    kinds = Counter(step.kind for step in steps)
    assert len(flights) == kinds["schedule"] - kinds["remove"]
    facts = {
        tuple(row[name] for name in KEYS["flights"]): row
        for row in records(nyc2013.flights(*THREE_DAYS))
    }
    for (carrier, number, origin, sched_dep), row in flights.items():
        fact = facts[carrier, number if number < 9000 else number - 9000, origin, sched_dep]
        assert row["status"] == fact["status"]
        assert row["tailnum"] == (fact["tailnum"] if fact["dep_time"] else None)
        assert abs((row["arr_delay"] or 0) - (fact["arr_delay"] or 0)) <= 3


def test_a_row_belongs_to_one_lane_for_good(steps: list[Transaction]) -> None:
    """Lanes run at the same time: a row in two of them would end in either's state."""
    lanes: dict[tuple[str, tuple[Any, ...]], set[str]] = {}
    for step in steps:
        for change in step.changes:
            for key in (change.key, change.key_after):
                lanes.setdefault((change.table, key), set()).add(step.lane)
    assert {len(names) for names in lanes.values()} == {1}
    assert len({step.lane for step in steps}) > 500


def test_the_awkward_cases_are_in_every_plan(steps: list[Transaction]) -> None:
    def of_kind(kind: str) -> list[Transaction]:
        return [step for step in steps if step.kind == kind]

    assert all(len(step.changes) > 1 for step in of_kind("bank"))
    for step in of_kind("exchange"):
        assert [change.op for change in step.changes] == ["delete", "insert"]
        assert len({change.key for change in step.changes}) == 1
    assert all(
        change.key != change.key_after for step in of_kind("renumber") for change in step.changes
    )
    remarks = [change.values.get("remark") or "" for step in steps for change in step.changes]
    assert any(len(remark) > 4_000 for remark in remarks), "nothing would be TOASTed"
    assert any(not remark.isascii() for remark in remarks)
