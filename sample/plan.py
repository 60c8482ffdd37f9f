"""Days of operation as transactions: what an operations desk writes while flights are sold, leave
and land.

In:  a range of New York days and a seed. Out: transactions in the order of their event time.
Invariants: the same arguments give the same plan; a row belongs to one lane for good, and the
transactions of a lane touch rows of that lane only. So lanes may run at the same time, each in its
own order: the outcome is the same, and no two of them ever wait for each other's rows.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from datetime import UTC, date, datetime, timedelta
from random import Random
from typing import Any, Literal
from zoneinfo import ZoneInfo

import numpy as np
import pandas as pd

from cdc.sample import nyc2013

KEYS = {
    "airlines": ("carrier",),
    "planes": ("tailnum",),
    "weather": ("origin", "time_hour"),
    "flights": ("carrier", "flight", "origin", "sched_dep"),
}
Operation = Literal["insert", "update", "delete"]
BANK = timedelta(minutes=10)
REMARKS = (
    "late inbound aircraft",
    "crew rest",
    "de-icing",
    "retardé — météo",
    "ATC flow: ZNY ➜ ZBW",
    "gate change",
)


@dataclass(frozen=True, slots=True)
class Change:
    """A change of one row; `values` are all columns of an insert, the changed ones of an update."""

    table: str
    op: Operation
    key: tuple[Any, ...]
    values: dict[str, Any]

    @property
    def key_after(self) -> tuple[Any, ...]:
        key = dict(zip(KEYS[self.table], self.key, strict=True))
        return tuple(self.values.get(column, value) for column, value in key.items())


@dataclass(frozen=True, slots=True)
class Transaction:
    """Changes that commit together at event time `time`; `lane` names the rows that it may touch."""

    time: datetime
    kind: str
    lane: str
    changes: tuple[Change, ...]


def plan(start: date, end: date, seed: int = 1) -> list[Transaction]:
    """The live transactions of those days, by event time; a flight is scheduled hours ahead."""
    flights = records(nyc2013.flights(start, end))
    transactions = _banked([step for row in flights for step in _life(row, seed)], seed)
    transactions += [
        step for row in records(nyc2013.weather(start, end)) for step in _observed(row, seed)
    ]
    transactions += _fleet(flights, start, end, seed)
    return sorted(transactions, key=lambda step: step.time)


def records(frame: pd.DataFrame) -> list[dict[str, Any]]:
    """Rows as plain Python values, gaps as None."""
    columns = [
        [None if pd.isna(value) else _plain(value) for value in frame[name]] for name in frame
    ]
    names = [str(name) for name in frame]
    return [dict(zip(names, values, strict=True)) for values in zip(*columns, strict=True)]


def _plain(value: Any) -> Any:
    if isinstance(value, pd.Timestamp):
        return value.to_pydatetime()
    return value.item() if isinstance(value, np.generic) else value


def _key(table: str, row: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(row[column] for column in KEYS[table])


def _dice(seed: int, subject: object) -> Random:
    """Dice of its own for each thing, so that one more flight doesn't change what happens to the
    others.
    """
    return Random(f"{seed} {subject}")  # noqa: S311


def _lane(row: dict[str, Any]) -> str:
    """Flights of one carrier that leave one airport in one hour: enough for a bank of
    departures.
    """
    return f"flights {row['carrier']} {row['origin']} {row['sched_dep']:%Y-%m-%dT%H}"


class _Flight:
    """A flight: its current row, and the transactions that made the row so."""

    def __init__(self, row: dict[str, Any]) -> None:
        self.row = row
        self.lane = _lane(row)
        self.steps: list[Transaction] = []

    def _step(self, time: datetime, kind: str, *changes: Change) -> None:
        # Clocks of the data have minutes; a flight's own order must hold within one as well.
        earliest = self.steps[-1].time + timedelta(seconds=1) if self.steps else time
        self.steps.append(Transaction(max(time, earliest), kind, self.lane, changes))

    def insert(self, time: datetime, kind: str) -> None:
        self._step(time, kind, self._change("insert", self.row))

    def update(self, time: datetime, kind: str, **values: Any) -> None:
        change = self._change("update", values)
        self.row = self.row | values
        self._step(time, kind, change)

    def delete(self, time: datetime, kind: str) -> None:
        self._step(time, kind, self._change("delete", {}))

    def exchange(self, time: datetime, kind: str, **values: Any) -> None:
        """Delete the row and insert it again under the same key, in one transaction."""
        deleted = self._change("delete", {})
        self.row = self.row | values
        self._step(time, kind, deleted, self._change("insert", self.row))

    def _change(self, op: Operation, values: dict[str, Any]) -> Change:
        return Change("flights", op, _key("flights", self.row), values)


UNKNOWN_YET = dict.fromkeys(
    ("tailnum", "dep_time", "dep_delay", "arr_time", "arr_delay", "air_time", "remark", "on_time")
)


def _life(row: dict[str, Any], seed: int) -> list[Transaction]:
    """A flight from its schedule to its end, as the data has it, with a desk's second thoughts
    added.
    """
    rng = _dice(seed, _key("flights", row))
    flight = _Flight(row | UNKNOWN_YET | {"status": "scheduled"})
    scheduled = row["sched_dep"]
    flight.insert(scheduled - timedelta(minutes=180 + rng.randrange(60)), "schedule")
    _rearranged(flight, scheduled, rng)
    if row["dep_time"] is None:
        _cancelled(flight, scheduled, rng)
        return flight.steps
    if row["dep_delay"] >= 30:
        flight.update(scheduled - timedelta(minutes=5), "notice", remark=_remark(rng))
    flight.update(
        row["dep_time"], "depart", status="departed", tailnum=row["tailnum"],
        dep_time=row["dep_time"], dep_delay=row["dep_delay"],
    )  # fmt: skip
    if row["arr_time"] is None:
        lost = row["dep_time"] + timedelta(hours=4)
        flight.update(lost, "cancel", status="cancelled", remark=row["remark"])
        return flight.steps
    remark = {"remark": row["remark"]} if row["remark"] else {}
    flight.update(
        row["arr_time"], "arrive", status="arrived", arr_time=row["arr_time"], arr_delay=row["arr_delay"],
        air_time=row["air_time"], on_time=row["on_time"], **remark,
    )  # fmt: skip
    if rng.random() < 0.25:
        _corrected(flight, row, rng)
    return flight.steps


def _rearranged(flight: _Flight, scheduled: datetime, rng: Random) -> None:
    """Things that happen to a few flights before they leave, among them those that break naive
    pipelines.
    """
    roll = rng.random()
    if roll < 0.03:
        flight.exchange(scheduled - timedelta(minutes=110), "exchange", remark="rebooked")
    elif roll < 0.04:
        flight.delete(scheduled - timedelta(minutes=115), "withdraw")
        flight.insert(scheduled - timedelta(minutes=95), "reinstate")
    elif roll < 0.045:
        # No flight of 2013 has a number above 8500, so the new key is free.
        flight.update(
            scheduled - timedelta(minutes=100), "renumber", flight=flight.row["flight"] + 9000
        )


def _cancelled(flight: _Flight, scheduled: datetime, rng: Random) -> None:
    time = scheduled - timedelta(minutes=rng.randrange(90))
    flight.update(time, "cancel", status="cancelled", remark=_remark(rng))
    if rng.random() < 0.3:
        flight.delete(time + timedelta(minutes=60 + rng.randrange(300)), "remove")


def _corrected(flight: _Flight, row: dict[str, Any], rng: Random) -> None:
    time = row["arr_time"] + timedelta(minutes=20 + rng.randrange(160))
    if row["arr_delay"] is None:
        flight.update(time, "correct", remark=_remark(rng))
        return
    moved = rng.choice((-2, -1, 1, 2, 3))
    delay = row["arr_delay"] + moved
    flight.update(
        time, "correct", arr_delay=delay, arr_time=row["arr_time"] + timedelta(minutes=moved),
        on_time=delay < nyc2013.ON_TIME_MIN, remark=_remark(rng),
    )  # fmt: skip


def _remark(rng: Random) -> str:
    """Now and then a page of hexadecimal: too long to stay in the row, so Postgres moves it out of
    line.
    """
    text = rng.choice(REMARKS)
    return f"{text}\n{rng.randbytes(2500).hex()}" if rng.random() < 0.04 else text


def _banked(steps: list[Transaction], seed: int) -> list[Transaction]:
    """Let some departures of a lane within ten minutes commit together.

    They commit at the time of the last one; a flight's next event is later than that, because
    nothing flies for less than twenty minutes.
    """
    banks: dict[tuple[str, int], list[Transaction]] = defaultdict(list)
    singles = []
    for step in steps:
        if step.kind == "depart" and _dice(seed, step.lane).random() < 0.3:
            banks[step.lane, int(step.time.timestamp() // BANK.total_seconds())].append(step)
        else:
            singles.append(step)
    return singles + [_together(bank) for bank in banks.values()]


def _together(bank: list[Transaction]) -> Transaction:
    if len(bank) == 1:
        return bank[0]
    ordered = sorted(bank, key=lambda step: step.time)
    changes = tuple(change for step in ordered for change in step.changes)
    return replace(ordered[-1], kind="bank", changes=changes)


def _observed(row: dict[str, Any], seed: int) -> Iterator[Transaction]:
    """An hour's weather: half of it is put down provisionally and amended within the hour."""
    rng = _dice(seed, _key("weather", row))
    lane = f"weather {row['origin']} {row['time_hour']:%Y-%m-%d}"
    provisional = rng.random() < 0.5
    first = row | {"pressure": None, "wind_gust": None, "visib": None} if provisional else row
    time = row["time_hour"] + timedelta(minutes=2 + rng.randrange(8))
    yield Transaction(
        time, "observe", lane, (Change("weather", "insert", _key("weather", row), first),)
    )
    if provisional:
        values = {name: row[name] for name in ("pressure", "wind_gust", "visib")}
        later = time + timedelta(minutes=15 + rng.randrange(30))
        yield Transaction(
            later, "amend", lane, (Change("weather", "update", _key("weather", row), values),)
        )


def _fleet(
    flights: Iterable[dict[str, Any]], start: date, end: date, seed: int
) -> Iterator[Transaction]:
    """Each day a few of the planes that fly are refitted, and now and then an airline takes another
    name.
    """
    planes = {row["tailnum"]: row for row in records(nyc2013.planes())}
    carriers = records(nyc2013.airlines())
    flown: dict[date, set[str]] = defaultdict(set)
    for row in flights:
        if row["tailnum"] in planes:
            flown[row["sched_dep"].astimezone(ZoneInfo(nyc2013.ZONE)).date()].add(row["tailnum"])
    for day in pd.date_range(start, end).date:
        rng = _dice(seed, day)
        dawn = datetime(day.year, day.month, day.day, 10, tzinfo=UTC)
        for tailnum in rng.sample(sorted(flown[day]), k=min(12, len(flown[day]))):
            values = {"seats": max(2, planes[tailnum]["seats"] + rng.choice((-6, -4, 2, 6)))}
            if rng.random() < 0.3:
                values = {"engine": f"{planes[tailnum]['engine']} (overhauled {day})"}
            yield _single(
                dawn + timedelta(minutes=rng.randrange(720)), "refit", "planes", tailnum, values
            )
        if rng.random() < 0.5:
            airline = rng.choice(carriers)
            values = {"name": f"{airline['name']} (since {day})"}
            time = dawn + timedelta(minutes=rng.randrange(720))
            yield _single(time, "rename", "airlines", airline["carrier"], values)


def _single(time: datetime, kind: str, table: str, key: str, values: dict[str, Any]) -> Transaction:
    return Transaction(time, kind, f"{table} {key}", (Change(table, "update", (key,), values),))
