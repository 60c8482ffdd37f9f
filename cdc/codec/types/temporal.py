"""Dates, times and time stamps; the connector's time.precision.mode is microseconds.

Days and microseconds count from 1970. Infinity lies beyond Postgres' own range on every way, so it
can't be mistaken.
"""

import re
from datetime import UTC, date, datetime, timedelta
from functools import lru_cache

from cdc.codec.types.kind import TypeCodec
from cdc.codec.types.numeric import BIGINT

FIRST_DAY = -2440588
"""4714-11-24 BC, Postgres' first date."""
LAST_DAY = 2145042905
"""5874897-12-31, Postgres' last date."""
SNAPSHOT_DAYS = (-622191234, -625821272)
"""Infinity and -infinity as JDBC's dates overflow, in snapshots and in arrays."""
FOREVER = 2**63 - 1
NEVER = -(2**63)
FOREVER_DAY = 2**31 - 1
"""Infinity as the last day of a warehouse, which is beyond Postgres' last date."""
NEVER_DAY = -(2**31)
"""-infinity as its first day, which is before Postgres' first date."""
FIRST_MOMENT = -210866803200000000
ARRAY_NEVER = "+292269055-12-02T23:00:00.000000Z"
"""-infinity in an array of time stamps with a zone."""
SECOND = 1_000_000
MIDNIGHT = 86_400_000_000

# The day after the last one that two calendars give different names, twice: the connector reads
# arrays with a calendar that has no BC and calls 1582-10-05 to 14 by the names of the days ten
# later.
SURE_DAY = -141417
SURE_MOMENT = SURE_DAY * MIDNIGHT
SURE_STAMP = "1582-10-25"

EPOCH_DAY = date(1970, 1, 1).toordinal()
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
MICROSECOND = timedelta(microseconds=1)
CYCLE = 146097
"""Days after which the calendar repeats itself: 400 years."""
PLAIN_DAYS = range(1 - EPOCH_DAY, date.max.toordinal() - EPOCH_DAY + 1)
MINUTES = tuple(f"{hour:02d}:{minute:02d}" for hour in range(24) for minute in range(60))
SECONDS = tuple(f"{second:02d}" for second in range(60))
"""A third of the time that datetime takes to write one."""
STAMP = re.compile(r"([+-]?\d{4,9})-(\d\d)-(\d\d)T(\d\d):(\d\d):(\d\d)(?:\.(\d{1,6}))?Z", re.ASCII)

INTERVAL_SOURCE = (
    "CASE WHEN NOT isfinite({0}) THEN {0}::text WHEN {0} IS NOT NULL THEN 'P' || extract(year FROM {0}) || 'Y' || "
    "extract(month FROM {0}) || 'M' || extract(day FROM {0}) || 'DT' || extract(hour FROM {0}) || 'H' || "
    "extract(minute FROM {0}) || 'M' || trim_scale(extract(second FROM {0})) || 'S' END"
)
TIMETZ_SOURCE = (
    "CASE WHEN {0} = '24:00:00+00' THEN '24:00:00.000000' "
    "ELSE to_char(({0} AT TIME ZONE 'UTC')::time::interval, 'HH24:MI:SS.US') END || 'Z'"
)
# ISO 8601 counts the year before 1 as 0 and gives a year beyond 9999 a sign; to_char does neither.
YEAR = (
    "CASE WHEN extract(year FROM {0}) < -1 THEN to_char(extract(year FROM {0}) + 1, 'FMSG0000') "
    "WHEN extract(year FROM {0}) < 0 THEN '0000' "
    "WHEN extract(year FROM {0}) > 9999 THEN to_char(extract(year FROM {0}), 'FMSG9999999') "
    "ELSE to_char(extract(year FROM {0}), 'FM0000') END"
)
# to_char makes a time stamp of a date, and that has a smaller range.
MONTH_DAY = "'-' || to_char(extract(month FROM {0}), 'FM00') || '-' || to_char(extract(day FROM {0}), 'FM00')"
CLOCK = "to_char({0}, '-MM-DD\"T\"HH24:MI:SS.US')"


def _iso(suffix: str, value: str = "{0}") -> str:
    """Postgres' SQL for a date or a time stamp as ISO 8601, infinity as text."""
    finite = f"{YEAR} || {suffix}".replace("{0}", value)
    return f"CASE WHEN NOT isfinite({{0}}) THEN {{0}}::text ELSE {finite} END"


@lru_cache(4096)
def _day(days: int) -> str:
    """Any day as ISO 8601 has it, years before 1 and after 9999 with a sign: -0043, +12000."""
    if days in PLAIN_DAYS:
        return date.fromordinal(days + EPOCH_DAY).isoformat()
    cycles, day_of_cycle = divmod(days + EPOCH_DAY - 1, CYCLE)
    day = date.fromordinal(day_of_cycle + 1)
    year = day.year + 400 * cycles
    sign = "+" if year > 9999 else "-" if year < 0 else ""
    return f"{sign}{abs(year):04d}-{day.month:02d}-{day.day:02d}"


def _is_infinite(days: int) -> bool:
    return days > LAST_DAY or days == SNAPSHOT_DAYS[0]


def date_text(days: int) -> str:
    """Write a date, in days since 1970, as ISO 8601 or as infinity."""
    if _is_infinite(days):
        return "infinity"
    return "-infinity" if days < FIRST_DAY else _day(days)


def to_date(days: int) -> int:
    """Convert days since 1970 to a day of the column; infinity becomes its first or last day."""
    if _is_infinite(days):
        return FOREVER_DAY
    return NEVER_DAY if days < FIRST_DAY else days


def unsure_date(days: int) -> bool:
    """Say whether an array may name a wrong date: one from before 1582-10-25."""
    return days < SURE_DAY and days not in SNAPSHOT_DAYS


def local(micros: int) -> str:
    """A time stamp without a zone."""
    if micros == FOREVER:
        return "infinity"
    if micros == NEVER:
        return "-infinity"
    seconds, fraction = divmod(micros, SECOND)
    minutes, second = divmod(seconds, 60)
    days, minute = divmod(minutes, 1440)
    return f"{_day(days)}T{MINUTES[minute]}:{SECONDS[second]}.{fraction:06d}"


def overflown(micros: int) -> bool:
    """The last 29 years of Postgres' range, from 294247 on, don't fit into 64 bits: they come out
    below its first.
    """
    return NEVER != micros < FIRST_MOMENT


def unsure_moment(micros: int) -> bool:
    """Say whether an array may name a wrong time stamp, in microseconds: one from before
    1582-10-25.
    """
    return NEVER != micros < SURE_MOMENT


def unsure_stamp(text: str) -> bool:
    """Say whether an array may name a wrong time stamp, as text: one from before 1582-10-25."""
    return text < SURE_STAMP and not text.startswith("+")


def to_stamp(text: str) -> int | None:
    """Microseconds since 1970 of a time stamp with a zone; None for what has no 64 bits."""
    if text[4:5] == "-" and text[:4] > "0000" and text.endswith("Z"):
        # Arrow takes longer for a datetime with a zone.
        return (datetime.fromisoformat(text) - EPOCH) // MICROSECOND
    if text == "infinity":
        return FOREVER
    return NEVER if text == "-infinity" else moment(text)


def moment(text: str) -> int | None:
    """Microseconds since 1970 of a time stamp with a zone, of any year; None for what has no 64 bits."""
    parts = STAMP.fullmatch(text)
    if parts is None:
        return None
    year, month, day, hour, minute, second = map(int, parts.groups()[:6])
    cycles, year_of_cycle = divmod(year - 1, 400)
    within_cycle = datetime(year_of_cycle + 1, month, day, hour, minute, second)  # noqa: DTZ001
    days = within_cycle.toordinal() + cycles * CYCLE - EPOCH_DAY
    clock = ((hour * 60 + minute) * 60 + second) * SECOND + int((parts[7] or "").ljust(6, "0"))
    micros = days * MIDNIGHT + clock
    return micros if NEVER < micros < FOREVER else None


def from_stamp(micros: int) -> str:
    """Write a time stamp with a zone, in microseconds, as a document holds it."""
    text = local(micros)
    return text if text.endswith("infinity") else f"{text}Z"


def from_array(text: str) -> str:
    """Replace the connector's text for -infinity in an array."""
    return "-infinity" if text == ARRAY_NEVER else text


def with_microseconds(text: str) -> str:
    """A time or a time stamp in UTC with its fraction written out to microseconds."""
    if not text.endswith("Z"):
        return text
    bare, _, fraction = text[:-1].partition(".")
    return f"{bare}.{fraction[:6]:0<6}Z"


def time(micros: int) -> str:
    """Write a time of day, in microseconds, as text; 24:00 is one."""
    return "24:00:00.000000" if micros == MIDNIGHT else local(micros % MIDNIGHT)[11:]


DATE = TypeCodec(
    "date",
    wire=BIGINT.wire,
    document=date_text,
    column="date",
    to_column=to_date,
    from_column=date_text,
    source=_iso(MONTH_DAY),
)
TIME = TypeCodec(
    "time",
    wire=BIGINT.wire,
    document=time,
    to_column=time,
    source="to_char({}::interval, 'HH24:MI:SS.US')",
)
TIMETZ = TypeCodec(
    "timetz", document=with_microseconds, to_column=with_microseconds, source=TIMETZ_SOURCE
)
TIMESTAMP = TypeCodec(
    "timestamp",
    wire=BIGINT.wire,
    document=local,
    lost=overflown,
    column="timestamp_ntz",
    from_column=local,
    source=_iso(CLOCK),
)
TIMESTAMPTZ = TypeCodec(
    "timestamptz",
    column="timestamp",
    to_column=to_stamp,
    from_column=from_stamp,
    source=_iso(f"{CLOCK} || 'Z'", "({0} AT TIME ZONE 'UTC')"),
)
INTERVAL = TypeCodec("interval", source=INTERVAL_SOURCE)
