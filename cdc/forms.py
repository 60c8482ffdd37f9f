"""Single values from one form to another: the connector's (time.precision.mode=microseconds) to documents and columns.

Days and microseconds count from 1970. Infinity lies beyond Postgres' own range on every way, so it can't be mistaken.
"""

from collections.abc import Callable

from pyspark.sql import Column
from pyspark.sql import functions as F

Convert = Callable[[Column], Column]

FIRST_DAY, LAST_DAY = -2440588, 2145042905
"""4714-11-24 BC and 5874897-12-31: Postgres' range of dates."""
SNAPSHOT_DAYS = (-622191234, -625821272)
"""Infinity and -infinity as JDBC's dates overflow, in snapshots and in arrays."""
FOREVER, NEVER = 2**63 - 1, -(2**63)
FIRST_MOMENT = -210866803200000000
ARRAY_NEVER = "+292269055-12-02T23:00:00.000000Z"
"""-infinity in an array of time stamps with a zone."""
MIDNIGHT = 86_400_000_000
STAMP = "yyyy-MM-dd'T'HH:mm:ss.SSSSSS"

# The day after the last one that two calendars give different names, twice: the connector reads arrays with a calendar
# that has no BC and calls 1582-10-05 to 14 by the names of the days ten later.
SURE_DAY = -141417
SURE_MOMENT = SURE_DAY * MIDNIGHT
SURE_STAMP = "1582-10-25"

ROW_OF_NULLS, JAVA_ARRAY = "[null", "[Ljava."
"""What the connector makes of the inner arrays of a two-dimensional one."""


def _after_all(days: Column) -> Column:
    return (days > LAST_DAY) | (days == SNAPSHOT_DAYS[0])


def date(days: Column) -> Column:
    finite = F.date_from_unix_date(days).cast("string")
    return F.when(_after_all(days), "infinity").when(days < FIRST_DAY, "-infinity").otherwise(finite)


def to_date(days: Column) -> Column:
    """Infinity becomes the last and the first day of a warehouse, both beyond Postgres' own."""
    last, first = F.lit(2**31 - 1), F.lit(-(2**31))
    return F.date_from_unix_date(F.when(_after_all(days), last).when(days < FIRST_DAY, first).otherwise(days))


def unsure_date(days: Column) -> Column:
    return (days < SURE_DAY) & ~days.isin(*SNAPSHOT_DAYS)


def local(micros: Column) -> Column:
    """Years before 1 and after 9999 as ISO 8601 has them: -0043, +12000."""
    return _moment(micros, STAMP)


def _moment(micros: Column, pattern: str) -> Column:
    finite = F.date_format(F.timestamp_micros(micros), pattern)
    return F.when(micros == FOREVER, "infinity").when(micros == NEVER, "-infinity").otherwise(finite)


def overflown(micros: Column) -> Column:
    """The last 29 years of Postgres' range, from 294247 on, don't fit into 64 bits: they come out below its first."""
    return (micros < FIRST_MOMENT) & (micros != NEVER)


def unsure_moment(micros: Column) -> Column:
    return (micros < SURE_MOMENT) & (micros != NEVER)


def unsure_stamp(text: Column) -> Column:
    return (text < SURE_STAMP) & ~text.startswith("+")


def to_local(micros: Column) -> Column:
    return F.timestamp_micros(micros).cast("timestamp_ntz")


def from_local(stamp: Column) -> Column:
    return local(F.unix_micros(stamp.cast("timestamp")))


def to_stamp(text: Column) -> Column:
    forever, never = (F.timestamp_micros(F.lit(micros)) for micros in (FOREVER, NEVER))
    return F.when(text == "infinity", forever).when(text == "-infinity", never).otherwise(text.try_cast("timestamp"))


def from_stamp(stamp: Column) -> Column:
    return _moment(F.unix_micros(stamp), f"{STAMP}'Z'")


def of_array(text: Column) -> Column:
    return F.when(text == ARRAY_NEVER, "-infinity").otherwise(text)


def filled(text: Column) -> Column:
    """A time or a time stamp in UTC with its fraction written out to microseconds."""
    bare = F.regexp_replace(text, "Z$", "")
    parts = F.split(bare, r"\.")
    fraction = F.rpad(F.coalesce(F.get(parts, F.lit(1)), F.lit("")), 6, "0")
    return F.when(text.endswith("Z"), F.concat(parts[0], F.lit("."), fraction, F.lit("Z"))).otherwise(text)


def time(micros: Column) -> Column:
    usual = F.date_format(F.timestamp_micros(micros), "HH:mm:ss.SSSSSS")
    return F.when(micros == MIDNIGHT, "24:00:00.000000").otherwise(usual)


def numeric(text: Column) -> Column:
    return (
        F.when(text == "NAN", "NaN")
        .when(text == "POSITIVE_INFINITY", "Infinity")
        .when(text == "NEGATIVE_INFINITY", "-Infinity")
        .otherwise(text)
    )


def whole(text: Column) -> Column:
    """A numeric of negative scale: the connector writes thousands of zeros after its point."""
    return numeric(F.regexp_replace(text, r"\.0*$", ""))


def text_of_bytes(encoded: Column) -> Column:
    return F.unbase64(encoded).cast("string")


def base64(value: Column) -> Column:
    return F.regexp_replace(F.base64(value), "[\r\n]", "")


def bits(length: int) -> Convert:
    """bit(n) as Postgres prints it: the connector sends its bytes, the lowest first and without those that are zero."""
    if length == 1:
        return lambda value: F.when(value, "1").when(~value, "0")

    def convert(encoded: Column) -> Column:
        digits = F.hex(F.unbase64(encoded))
        highest_first = F.reverse(F.sequence(F.lit(0), F.lit((length - 1) // 8)))

        def byte(at: Column) -> Column:
            number = F.conv(F.substring(digits, at * 2 + 1, F.lit(2)), 16, 10).cast("bigint")
            return F.lpad(F.bin(F.coalesce(number, F.lit(0))), 8, "0")

        joined = F.array_join(F.transform(highest_first, byte), "")
        return F.when(encoded.isNotNull(), F.right(joined, F.lit(length)))

    return convert


def coordinates(header: int) -> Convert:
    """The doubles of a well-known binary after its header of that many bytes."""

    def convert(shape: Column) -> Column:
        digits = F.hex(F.unbase64(shape.getField("wkb")))
        starts = F.sequence(F.lit(header * 2 + 1), F.length(digits) - 15, F.lit(16))

        def double(start: Column) -> Column:
            swapped = F.concat(*(F.substring(digits, start + at, F.lit(2)) for at in range(14, -2, -2)))
            number = F.conv(swapped, 16, -10).cast("bigint")
            return F.reflect(F.lit("java.lang.Double"), F.lit("longBitsToDouble"), number).cast("double")

        return F.transform(starts, double)

    return convert


def struct_of(*names: str) -> Convert:
    """The named numbers of a struct as a list; a dot goes into a struct of the struct."""

    def convert(shape: Column) -> Column:
        return F.when(shape.isNotNull(), F.array(*(_nested(shape, name) for name in names)))

    return convert


def _nested(shape: Column, name: str) -> Column:
    for part in name.split("."):
        shape = shape.getField(part)
    return shape


def box(shape: Column) -> Column:
    """Upper right and lower left of the five corners that the connector sends."""
    corners = coordinates(13)(shape)
    return F.concat(F.slice(corners, 1, 2), F.slice(corners, 5, 2))


def polygon(shape: Column) -> Column:
    """Without the first point's repetition at the end."""
    ring = coordinates(13)(shape)
    return F.slice(ring, F.lit(1), F.size(ring) - 2)


def path(shape: Column) -> Column:
    closed = shape.getField("extensions").getItem("closed").cast("boolean")
    return F.when(shape.isNotNull(), F.struct(closed.alias("closed"), coordinates(9)(shape).alias("points")))
