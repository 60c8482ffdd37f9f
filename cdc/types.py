"""One table of types: how a Postgres type travels in Debezium's JSON, and how the views hold it.

Four forms of a value, and the only place that knows them:
    wire      what Debezium writes into `after` (decimal, binary and time modes of `connectors/debezium.py`)
    document  the JSON of a search document or a cached row
    column    the type of a warehouse column
    source    an SQL expression whose JSON is the document form: the oracle that `verify` compares with
"""

import re
from dataclasses import dataclass, replace

from pyspark.sql import Column
from pyspark.sql import functions as F

from cdc import forms
from cdc.codec.types.temporal import CLOCK, INTERVAL_SOURCE, MONTH_DAY, TIMETZ_SOURCE, YEAR
from cdc.forms import Convert
from cdc.type_names import base

NUMBER, JSON = "to_json({})", "{}::json"
# What Postgres prints: a cast to text would cut the blanks of char(n) and add /32 to an inet.
TEXT = "CASE WHEN {0} IS DISTINCT FROM NULL THEN concat({0}) END"


@dataclass(frozen=True)
class Kind:
    """How one type is held. A conversion that is None changes nothing."""

    name: str
    wire: str = "string"
    document: Convert | None = None
    words: tuple[str, ...] = ()
    """When given, `document` and `lost` matter only to a row whose JSON contains one of these."""
    lost: Convert | None = None
    """Of the wire: whether the connector has damaged the value beyond repair. No view takes such a row."""
    raw: bool = False
    """The document form is JSON text, to be set in as it is."""
    column: str = "string"
    to_column: Convert | None = None
    """Null for a value that the column can't hold."""
    from_column: Convert | None = None
    source: str = TEXT
    compare: str = "text"
    """How verify compares: text; json by value, its numbers by their text; the others by value, as their names say."""


SPECIAL = ('"NAN"', '"POSITIVE_INFINITY"', '"NEGATIVE_INFINITY"')
"""Debezium's words for the numerics that are no numbers (decimal.handling.mode=string)."""
NUMBERS = "to_json(string_to_array(translate({0}::text, '()[]<>{{}}', ''), ',')::float8[])"


def _iso(rest: str, value: str = "{0}") -> str:
    """Postgres' SQL for a date or a time stamp as ISO 8601, infinity as text."""
    finite = f"{YEAR} || {rest}".replace("{0}", value)
    return f"CASE WHEN NOT isfinite({{0}}) THEN {{0}}::text ELSE {finite} END"


def _cast(type_: str) -> Convert:
    return lambda value: value.try_cast(type_)


SMALLINT = Kind("smallint", wire="bigint", column="smallint", to_column=_cast("smallint"), source=NUMBER)
INTEGER = Kind("integer", wire="bigint", column="int", to_column=_cast("int"), source=NUMBER)
BIGINT = Kind("bigint", wire="bigint", column="bigint", source=NUMBER)
OID = replace(BIGINT, source="to_json({}::bigint)")
REAL = Kind("real", wire="double", column="float", to_column=_cast("float"), source=NUMBER, compare="real")
DOUBLE = Kind("double", wire="double", column="double", source=NUMBER, compare="double")
BOOLEAN = Kind("boolean", wire="boolean", column="boolean", source=NUMBER)
TEXTUAL = Kind("text")
NUMERIC = Kind("numeric", document=forms.numeric, words=SPECIAL, to_column=forms.numeric)
MONEY = Kind("money", source="{}::numeric::text")
BINARY = Kind(
    "binary",
    column="binary",
    to_column=F.unbase64,
    from_column=forms.base64,
    source="translate(encode({}, 'base64'), E'\\n', '')",
)
JSON_VALUE = Kind("json", raw=True, source=JSON, compare="json")
DATE = Kind(
    "date",
    wire="bigint",
    document=forms.date,
    column="date",
    to_column=forms.to_date,
    from_column=lambda v: forms.date(F.unix_date(v)),
    source=_iso(MONTH_DAY),
)
TIME = Kind(
    "time",
    wire="bigint",
    document=forms.time,
    to_column=forms.time,
    source="to_char({}::interval, 'HH24:MI:SS.US')",
)
TIMETZ = Kind("timetz", document=forms.filled, to_column=forms.filled, source=TIMETZ_SOURCE)
TIMESTAMP = Kind(
    "timestamp",
    wire="bigint",
    document=forms.local,
    lost=forms.overflown,
    column="timestamp_ntz",
    to_column=forms.to_local,
    from_column=forms.from_local,
    source=_iso(CLOCK),
)
TIMESTAMPTZ = Kind(
    "timestamptz",
    column="timestamp",
    to_column=forms.to_stamp,
    from_column=forms.from_stamp,
    source=_iso(f"{CLOCK} || 'Z'", "({0} AT TIME ZONE 'UTC')"),
)
INTERVAL = Kind("interval", source=INTERVAL_SOURCE)
UNKNOWN = Kind("unknown", document=forms.text_of_bytes, to_column=forms.text_of_bytes)
VECTOR = Kind("vector", wire="array<double>", column="array<float>", source="to_json({}::real[])", compare="reals")


def _geometric(wire: str, convert: Convert) -> Kind:
    held = "array<double>"
    return Kind(
        "geometric", f"struct<{wire}>", convert, column=held, to_column=convert, source=NUMBERS, compare="doubles"
    )


SHAPE = "wkb string"
PATH = Kind(
    "path",
    wire=f"struct<{SHAPE}, extensions map<string, string>>",
    document=forms.path,
    column="struct<closed boolean, points array<double>>",
    to_column=forms.path,
    source=f"CASE WHEN {{0}} IS NOT NULL THEN json_build_object('closed', isclosed({{0}}), 'points', {NUMBERS}) END",
    compare="path",
)

KINDS = {
    "smallint": SMALLINT,
    "integer": INTEGER,
    "bigint": BIGINT,
    "oid": OID,
    "real": REAL,
    "double precision": DOUBLE,
    "boolean": BOOLEAN,
    "bytea": BINARY,
    "json": JSON_VALUE,
    "jsonb": JSON_VALUE,
    "hstore": JSON_VALUE,
    "date": DATE,
    "time without time zone": TIME,
    "time with time zone": TIMETZ,
    "timestamp without time zone": TIMESTAMP,
    "timestamp with time zone": TIMESTAMPTZ,
    "interval": INTERVAL,
    "numeric": NUMERIC,
    "money": MONEY,
    "vector": VECTOR,
    "halfvec": VECTOR,
    "point": _geometric("x double, y double", forms.struct_of("x", "y")),
    "line": _geometric("a double, b double, c double", forms.struct_of("a", "b", "c")),
    "circle": _geometric(
        "center struct<x double, y double>, radius double", forms.struct_of("center.x", "center.y", "radius")
    ),
    "lseg": _geometric(SHAPE, forms.coordinates(9)),
    "box": _geometric(SHAPE, forms.box),
    "polygon": _geometric(SHAPE, forms.polygon),
    "path": PATH,
}
# Types that the connector sends as unknown ones: the bytes of Postgres' own text.
KINDS |= dict.fromkeys(
    (
        *("unknown", "tsquery", "pg_lsn", "xid", "xid8", "cid", "tid", "txid_snapshot", "pg_snapshot", "jsonpath"),
        *("int4multirange", "int8multirange", "nummultirange", "tsmultirange", "tstzmultirange", "datemultirange"),
        *("regclass", "regtype", "regproc", "regprocedure", "regoper", "regoperator", "regrole", "regnamespace"),
    ),
    UNKNOWN,
)


def kind(type_: str) -> Kind:
    """The kind of a type as `format_type` prints it; a type without an entry travels as its text."""
    if type_.endswith("[]"):
        return _array(kind(type_.removesuffix("[]")))
    found = KINDS.get(base(type_), TEXTUAL)
    if found is NUMERIC and (scale := re.fullmatch(r"numeric\((\d+),(-?\d+)\)", type_)):
        return _numeric(int(scale[1]), int(scale[2]))
    if found is TIMESTAMPTZ and type_.startswith("timestamp("):
        return replace(TIMESTAMPTZ, document=forms.filled)
    if base(type_) == "bit":
        length = int(re.sub(r"\D", "", type_) or 1)
        convert = forms.bits(length)
        return Kind("bits", wire="boolean" if length == 1 else "string", document=convert, to_column=convert)
    return found


def _numeric(precision: int, scale: int) -> Kind:
    """A numeric of fixed scale: a decimal column, where the warehouse has one that is wide enough."""
    found = NUMERIC if scale >= 0 else Kind("numeric", document=forms.whole, to_column=forms.whole)
    digits = max(precision, scale) - min(scale, 0)
    if digits > 38:
        return found
    exact = f"decimal({digits},{max(scale, 0)})"
    return replace(
        found,
        column=exact,
        to_column=lambda v: v.try_cast(exact),
        from_column=_cast("string"),
    )


def _array(element: Kind) -> Kind:
    """A list of one kind. What the connector can't tell apart within an array is lost, as are inner arrays."""
    document, to_column, unsure = element.document, element.to_column, element.lost
    if element.name == "date":
        unsure = forms.unsure_date
    elif element.name == "timestamp":
        unsure = forms.unsure_moment
    elif element.name == "timestamptz":
        document, unsure = forms.of_array, forms.unsure_stamp
        to_column = lambda v: forms.to_stamp(forms.of_array(v))  # noqa: E731

    def each(convert: Convert | None) -> Convert | None:
        return None if convert is None else lambda value: F.transform(value, convert)

    floats = element.compare in ("real", "double")
    compare = f"{element.compare}s" if floats else "json"
    words = (forms.ROW_OF_NULLS, forms.JAVA_ARRAY, *element.words)
    return Kind(
        "array",
        wire=f"array<{element.wire}>",
        document=_json_list if element.raw else each(document),
        words=() if element.raw or (document and not element.words) or unsure else words,
        lost=lambda value: _lost(value, element.wire, unsure),
        raw=element.raw,
        column=f"array<{element.column}>",
        to_column=_all_or_nothing(to_column),
        from_column=_json_list if element.raw else each(element.from_column),
        source=_array_source(element),
        compare=compare,
    )


def _all_or_nothing(convert: Convert | None) -> Convert | None:
    """One element that the column can't hold makes the whole list one that it can't hold."""
    if convert is None:
        return None

    def nulls(listed: Column) -> Column:
        return F.size(F.filter(listed, lambda e: e.isNull()))

    def whole(value: Column) -> Column:
        made = F.transform(value, convert)
        return F.when(nulls(made) == nulls(value), made)

    return whole


def _lost(value: Column, wire: str, unsure: Convert | None) -> Column:
    """Inner arrays come as nulls or as the names of Java objects: a list of nothing but nulls may have been one."""
    found = (F.size(value) > 0) & F.forall(value, lambda e: e.isNull())
    if wire == "string":
        found |= F.exists(value, lambda e: F.coalesce(e.rlike(r"^\[+L[\w.]+;@[0-9a-f]+$"), F.lit(False)))
    if unsure:
        found |= F.exists(value, lambda e: F.coalesce(unsure(e), F.lit(False)))
    return found


def _json_list(value: Column) -> Column:
    joined = F.array_join(value, ",", "null")
    return F.when(value.isNotNull(), F.concat(F.lit("["), joined, F.lit("]")))


def _array_source(element: Kind) -> str:
    """An array of several dimensions as its text: no list equals it, certainly not its elements in a row."""
    # By subscript: unnest would take a composite apart.
    item = element.source.format("({0})[_cdc_i]")
    return (
        "CASE WHEN array_ndims({0}) > 1 THEN to_json({0}::text) WHEN {0} IS NOT NULL THEN "
        f"(SELECT coalesce(json_agg({item} ORDER BY _cdc_i), '[]') FROM generate_subscripts({{0}}, 1) AS u(_cdc_i)) END"
    )
