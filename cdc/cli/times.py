"""Times as options of verbs are written: lengths such as 30m, and moments.

In:  the text of an option. Out: seconds, or Unix milliseconds; SettingsError for any other text.
"""

import re
import time
from datetime import UTC, datetime

from cdc.errors import SettingsError

UNITS_S = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def seconds(text: str) -> float:
    """Parse a length of time: `90s`, `30m`, `2h`, `1d`. Raises SettingsError."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd])", text)
    if not match:
        raise SettingsError(
            f"{text!r} isn't a length of time.", hint="a number and a unit: 90s, 30m, 2h, 1d"
        )
    return float(match[1]) * UNITS_S[match[2]]


def moment_ms(text: str) -> int:
    """Parse a time with zone, or a length of time before now: Unix milliseconds. Raises
    SettingsError.
    """
    if text[-1:] in UNITS_S:
        return int((time.time() - seconds(text)) * 1000)
    try:
        moment = datetime.fromisoformat(text)
    except ValueError as error:
        raise SettingsError(
            f"{text!r} isn't a time.", hint="2h for two hours ago, or 2026-01-31T12:00+01:00"
        ) from error
    return int((moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp() * 1000)
