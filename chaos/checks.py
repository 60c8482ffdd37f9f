"""What must hold, as pure functions of what was written and seen: each returns the violations it has found.

Keys are named, values of rows never.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from chaos.writer import Row, Rows

SHOWN = 3
WRITES = 2.0
"""The fewest acknowledged transactions per second, pauses included, of a run that proves something."""
ACCOUNTING = re.compile(r"read \d+ records and accounts for \d+")


@dataclass(frozen=True)
class Seen:
    """A version that a reader has seen for the first time; None: the row wasn't there."""

    sink: str
    table: str
    key: int
    ver: int | None


@dataclass(frozen=True)
class Alert:
    """A record of the topic of a view with alerts, in the order of its partition; `op` is empty for
    a tombstone, `value` the document as text.
    """

    key: str
    op: str
    value: str = ""


def differences(name: str, found: Mapping[str, Row], expected: Mapping[str, Row]) -> list[str]:
    """Compare a view with its source: rows that are missing, extra or different."""
    kinds = {
        "missing": sorted(expected.keys() - found.keys()),
        "extra": sorted(found.keys() - expected.keys()),
        "different": sorted(
            key for key in expected.keys() & found.keys() if expected[key] != found[key]
        ),
    }
    return [
        f"{name}: {len(keys)} rows {kind}: {', '.join(keys[:SHOWN])}"
        for kind, keys in kinds.items()
        if keys
    ]


def lost_writes(source: Mapping[str, Mapping[str, Row]], written: Rows) -> list[str]:
    """Compare Postgres with what it has acknowledged."""
    return [
        line
        for table, rows in written.items()
        for line in differences(
            f"acknowledged, in Postgres' {table}",
            source[table],
            {str(key): row for key, row in rows.items()},
        )
    ]


def went_back(seen: Iterable[Seen]) -> list[str]:
    """Find rows whose version a reader has seen go back, also by way of a row that was gone."""
    last: dict[tuple[str, str, int], int] = {}
    gone: set[tuple[str, str, int]] = set()
    wrong: list[str] = []
    for one in seen:
        place = (one.sink, one.table, one.key)
        if one.ver is None:
            gone.add(place)
            continue
        former = last.get(place, -1)
        # A row that comes back has another version than before it was deleted.
        if one.ver < former or (one.ver == former and place in gone):
            wrong.append(f"{one.sink}: {one.table} {one.key} went back from {former} to {one.ver}")
        last[place] = max(former, one.ver)
        gone.discard(place)
    return wrong


def wrong_sum(name: str, accounts: Mapping[str, Row], total: int) -> list[str]:
    """Check that transfers have neither made nor lost money."""
    found = sum(row["balance"] for row in accounts.values())
    return [] if found == total else [f"{name}: balances add up to {found}, not {total}"]


def wrong_alerts(alerts: Iterable[Alert], shown: Iterable[str]) -> list[str]:
    """Check that each change of an alert is there once, and that the last of each key is what the
    view shows.
    """
    standing: dict[str, str] = {}
    wrong: list[str] = []
    for alert in alerts:
        stands = alert.key in standing
        if alert.op == "" and not stands:
            wrong.append(f"alert {alert.key} was withdrawn without being raised")
        elif alert.op == "c" and stands:
            wrong.append(f"alert {alert.key} was raised twice")
        elif alert.op == "u" and not stands:
            wrong.append(f"alert {alert.key} has changed before it was raised")
        elif alert.op and standing.get(alert.key) == alert.value:
            wrong.append(f"alert {alert.key} is there twice with the same document")
        if alert.op:
            standing[alert.key] = alert.value
        else:
            standing.pop(alert.key, None)
    keys = set(shown)
    wrong += [
        f"alert {key} stands, but the view doesn't show it"
        for key in sorted(standing.keys() - keys)
    ]
    wrong += [
        f"alert {key} is shown, but was never raised" for key in sorted(keys - standing.keys())
    ]
    return wrong


def unaccounted(log: str, quarantined: list[Any], behind: Mapping[str, int]) -> list[str]:
    """Check that every record was applied: no batch that accounts for fewer than it has read, none
    in quarantine, no view behind its topic.

    log: what `cdc run` has printed; behind: records that views lack, by their names.
    """
    wrong = [f"cdc run {found}" for found in ACCOUNTING.findall(log)]
    if quarantined:
        wrong.append(f"{len(quarantined)} records are in quarantine")
    return wrong + [f"{view} is {lag} records behind" for view, lag in behind.items() if lag]


def too_little(seconds: float, faults: int, writes: int, polls: Mapping[str, int]) -> list[str]:
    """A run in which nothing happened proves nothing. `polls`: how often each view was read."""
    wrong = [] if faults else ["no fault was fired"]
    if writes < WRITES * seconds:
        wrong.append(f"only {writes:,} writes in {seconds:.0f} s, fewer than {WRITES:g} per second")
    return wrong + [f"{sink} was never read" for sink, count in polls.items() if not count]
