"""One table of types: how a Postgres type travels in Debezium's JSON, and how the views hold it.

Four forms of a value, and the only place that knows them:
    wire      what Debezium writes into `after` (decimal, binary and time modes of `connectors/debezium.py`)
    document  the JSON of a search document or a cached row
    column    the type of a warehouse column
    source    an SQL expression whose JSON is the document form: the oracle that `verify` compares with
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, replace

from pyspark.sql import Column
from pyspark.sql import functions as F

Convert = Callable[[Column], Column]
MICROSECONDS = 26
"""Characters of 2013-01-01T10:00:00.000000, the fixed width of a time stamp."""


@dataclass(frozen=True)
class Kind:
    """How one type is held. A conversion that is None changes nothing."""

    name: str
    wire: str = "string"
    document: Convert | None = None
    special: Convert | None = None
    """Like `document`, but needed only for records that contain one of `SPECIAL`."""
    column: str = "string"
    to_column: Convert | None = None
    from_column: Convert | None = None
    source: str = "{}::text"


SPECIAL = ('"NAN"', '"POSITIVE_INFINITY"', '"NEGATIVE_INFINITY"')
"""Debezium's words for the numerics that are no numbers (decimal.handling.mode=string)."""


def _numeric(value: Column) -> Column:
    return (
        F.when(value == "NAN", "NaN")
        .when(value == "POSITIVE_INFINITY", "Infinity")
        .when(value == "NEGATIVE_INFINITY", "-Infinity")
        .otherwise(value)
    )


def _without_zone(value: Column) -> Column:
    return F.regexp_replace(value, "Z$", "")


def _stamp(value: Column) -> Column:
    """Fill the fraction up to microseconds; infinity and years beyond 9999 have another shape and stay."""
    bare = _without_zone(value)
    dotted = F.when(F.length(bare) == 19, F.concat(bare, F.lit("."))).otherwise(bare)
    usual = value.rlike(r"^\d{4}-\d\d-\d\dT[0-9:.]+Z$")
    return F.when(usual, F.rpad(dotted, MICROSECONDS, "0")).otherwise(value)


def _stamp_utc(value: Column) -> Column:
    filled = _stamp(value)
    return F.when(F.length(filled) == MICROSECONDS, F.concat(filled, F.lit("Z"))).otherwise(filled)


def _time(value: Column) -> Column:
    bare = _without_zone(value)
    dotted = F.when(F.length(bare) == 8, F.concat(bare, F.lit("."))).otherwise(bare)
    return F.rpad(dotted, 15, "0")


def _format(pattern: str) -> Convert:
    return lambda value: F.date_format(value, pattern)


INTERVAL_SOURCE = (
    "CASE WHEN {0} IS NULL THEN NULL ELSE 'P' || extract(year FROM {0}) || 'Y' || extract(month FROM {0}) || 'M' || "
    "extract(day FROM {0}) || 'DT' || extract(hour FROM {0}) || 'H' || extract(minute FROM {0}) || 'M' || "
    "trim_scale(extract(second FROM {0})) || 'S' END"
)

NUMBER, TEXT, JSON = "to_json({})", "{}::text", "{}::json"
SMALLINT = Kind("smallint", wire="bigint", column="smallint", to_column=lambda v: v.cast("smallint"), source=NUMBER)
INTEGER = Kind("integer", wire="bigint", column="int", to_column=lambda v: v.cast("int"), source=NUMBER)
BIGINT = Kind("bigint", wire="bigint", column="bigint", source=NUMBER)
REAL = Kind("real", wire="double", column="float", to_column=lambda v: v.cast("float"), source=NUMBER)
DOUBLE = Kind("double", wire="double", column="double", source=NUMBER)
BOOLEAN = Kind("boolean", wire="boolean", column="boolean", source=NUMBER)
TEXTUAL = Kind("text", source=TEXT)
NUMERIC = Kind("numeric", special=_numeric, to_column=_numeric, source=TEXT)
BINARY = Kind(
    "binary",
    column="binary",
    to_column=F.unbase64,
    from_column=lambda v: F.regexp_replace(F.base64(v), "[\r\n]", ""),
    source="translate(encode({}, 'base64'), E'\\n', '')",
)
JSON_VALUE = Kind("json", source=JSON)
DATE = Kind(
    "date",
    document=_without_zone,
    column="date",
    to_column=lambda v: _without_zone(v).try_cast("date"),
    from_column=_format("yyyy-MM-dd"),
    source="to_char({}, 'YYYY-MM-DD')",
)
TIME = Kind("time", document=_time, to_column=_time, source="to_char({}::interval, 'HH24:MI:SS.US')")
TIMESTAMP = Kind(
    "timestamp",
    document=_stamp,
    column="timestamp_ntz",
    to_column=lambda v: _without_zone(v).try_cast("timestamp_ntz"),
    from_column=_format("yyyy-MM-dd'T'HH:mm:ss.SSSSSS"),
    source="to_char({}, 'YYYY-MM-DD\"T\"HH24:MI:SS.US')",
)
TIMESTAMPTZ = Kind(
    "timestamptz",
    column="timestamp",
    to_column=lambda v: v.try_cast("timestamp"),
    from_column=_format("yyyy-MM-dd'T'HH:mm:ss.SSSSSS'Z'"),
    source="CASE WHEN isfinite({0}) THEN to_char({0} AT TIME ZONE 'UTC', 'YYYY-MM-DD\"T\"HH24:MI:SS.US\"Z\"') "
    "ELSE {0}::text END",
)
INTERVAL = Kind("interval", source=INTERVAL_SOURCE)

KINDS = {
    "smallint": SMALLINT,
    "integer": INTEGER,
    "bigint": BIGINT,
    "oid": BIGINT,
    "real": REAL,
    "double precision": DOUBLE,
    "boolean": BOOLEAN,
    "bytea": BINARY,
    "json": JSON_VALUE,
    "jsonb": JSON_VALUE,
    "date": DATE,
    "time without time zone": TIME,
    "timestamp without time zone": TIMESTAMP,
    "timestamp with time zone": TIMESTAMPTZ,
    "interval": INTERVAL,
    "numeric": NUMERIC,
}


def kind(type_: str) -> Kind:
    """The kind of a type as `format_type` prints it; a type without an entry travels as its text."""
    if type_.endswith("[]"):
        return _array(kind(type_.removesuffix("[]")))
    base = re.sub(r"\(.*?\)", "", type_).strip()
    found = KINDS.get(base, TEXTUAL)
    if found is NUMERIC and (scale := re.fullmatch(r"numeric\((\d+),(\d+)\)", type_)):
        precision, digits = int(scale[1]), int(scale[2])
        if digits <= precision <= 38:
            exact = f"decimal({precision},{digits})"
            return replace(
                NUMERIC,
                column=exact,
                to_column=lambda v: v.try_cast(exact),
                from_column=lambda v: v.cast("string"),
            )
    if found is TIMESTAMPTZ and type_.startswith("timestamp("):
        return replace(TIMESTAMPTZ, document=_stamp_utc)
    return found


def _array(element: Kind) -> Kind:
    def each(convert: Convert | None) -> Convert | None:
        return None if convert is None else lambda value: F.transform(value, convert)

    inner = element.source.format("e")
    return Kind(
        "array",
        wire=f"array<{element.wire}>",
        document=each(element.document),
        special=each(element.special),
        column=f"array<{element.column}>",
        to_column=each(element.to_column),
        from_column=each(element.from_column),
        source=f"(SELECT json_agg({inner} ORDER BY n) FROM unnest({{0}}) WITH ORDINALITY AS u(e, n))"
        if element.source != NUMBER
        else NUMBER,
    )
