"""Durations in the pipeline file: `90 seconds`, `10 minutes`, `1 hour`, `2 days`, `1 week`."""

import re

from cdc.config.mistakes import InvalidSetting

MICROSECONDS = {
    "second": 1_000_000,
    "minute": 60_000_000,
    "hour": 3_600_000_000,
    "day": 86_400_000_000,
    "week": 604_800_000_000,
}
"""Microseconds of each unit. A day has 24 hours: times are compared in UTC."""
DURATION = re.compile(r"(\d+)\s+([a-z]+?)s?")
LONGEST_DAYS = 100_000


def microseconds(text: str) -> int:
    """Read a duration. Raises InvalidSetting."""
    match = DURATION.fullmatch(text.strip())
    unit = match[2] if match else ""
    if unit in ("month", "year"):
        raise InvalidSetting(f"a {unit} has no fixed length", "for example: 30 days")
    if match is None or unit not in MICROSECONDS:
        raise InvalidSetting(
            "a duration is a whole number and a unit: seconds, minutes, hours, days or weeks",
            "for example: 10 minutes",
        )
    duration = int(match[1]) * MICROSECONDS[unit]
    if duration > LONGEST_DAYS * MICROSECONDS["day"]:
        raise InvalidSetting(f"a duration is at most {LONGEST_DAYS:,} days", "for example: 30 days")
    return duration
