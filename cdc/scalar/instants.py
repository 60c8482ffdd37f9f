"""Times of documents as numbers, and as the bounds of lists that are ordered by them.

Only the years 1 to 9999 count: a time beyond them, such as infinity, is in no interval.
"""

import re
from datetime import UTC, datetime, timedelta
from functools import lru_cache

from cdc.scalar.ordering import order_text, time_key

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
FIRST = -62_135_596_800_000_000
LAST = 253_402_300_799_999_999
"""The first and the last microsecond of the years 1 to 9999, since 1970."""
REMEMBERED = 10_000
"""Times whose conversions are remembered: rows of one time are read together, and each several times."""
ORDER = re.compile(r"!Q1(?P<length>[Q-T])(?P<year>\d{1,4})(?P<rest>-.*)!")
"""What `ordering.order_text` makes of the time of a year of one to four digits."""


@lru_cache(REMEMBERED)
def microseconds(text: str) -> int | None:
    """Return microseconds since 1970 of a time as documents have it; None beyond the years 1 to 9999."""
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        return None
    return (moment.replace(tzinfo=UTC) - EPOCH) // timedelta(microseconds=1)


@lru_cache(REMEMBERED)
def text_of(instant: int, *, has_zone: bool = True) -> str:
    """Write microseconds since 1970 as documents have a time stamp, with a zone or without."""
    moment = EPOCH + timedelta(microseconds=instant)
    text = moment.replace(tzinfo=None).isoformat(timespec="microseconds")
    return f"{text}Z" if has_zone else text


def binned(every: int, start: int, text: str) -> str | None:
    """Return the beginning of the part of time that has a time of a document. Parts are `every`
    microseconds long, and one begins at `start`, in microseconds since 1970. None beyond the years 1
    to 9999.
    """
    instant = microseconds(text)
    if instant is None:
        return None
    begin = start + (instant - start) // every * every
    return text_of(begin, has_zone=text.endswith("Z")) if begin >= FIRST else None


@lru_cache(REMEMBERED)
def order_of(instant: int, *, has_zone: bool) -> str:
    """Return what a list is ordered by that has this instant, limited to the years 1 to 9999."""
    text = text_of(min(max(instant, FIRST), LAST), has_zone=has_zone)
    return f"!{order_text(time_key(text))}"


@lru_cache(REMEMBERED)
def instant_of(order: str) -> int | None:
    """Reverse `order_of`: return the instant; None of NULL, and beyond the years 1 to 9999."""
    match = ORDER.fullmatch(order)
    if match is None or ord(match["length"]) - ord("P") != len(match["year"]):
        return None
    return microseconds(f"{int(match['year']):04}{match['rest']}")
