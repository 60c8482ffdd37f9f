"""Every form of a value: as the connector writes it, in a document, in a warehouse column.

What the connector writes was read off a real one; `tests/scenarios/test_types.py` holds it to that.
"""

import json
from collections.abc import Sequence
from typing import Any

from cdc.model.table import Column, Table

UUID = "a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11"
BOX = "AQMAAAABAAAABQAAAAAAAAAAAPA/AAAAAAAA+D8AAAAAAADwPwAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA+D8AAAAAAADwPwAAAAAAAPg/"  # noqa: E501
LINE = "AQIAAAACAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAPA/AAAAAAAA8D8="
RING = "AQMAAAABAAAABAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAADwPwAAAAAAAPA/AAAAAAAAAEAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA="
DATE, TIME, LOCAL = "date", "time without time zone", "timestamp without time zone"
STAMP, STAMP3 = "timestamp with time zone", "timestamp(3) with time zone"
FOREVER, NEVER = 2**63 - 1, -(2**63)
# type, as the connector writes it, in a document, in a warehouse column (cast to string)
TYPES: list[tuple[str, Any, Any, str]] = [
    ("smallint", 7, 7, "7"),
    ("bigint", 2**63 - 1, 2**63 - 1, str(2**63 - 1)),
    ("oid", 2**32 - 1, 2**32 - 1, str(2**32 - 1)),
    ("double precision", 1e20, 1e20, "1.0E20"),
    ("double precision", "NaN", "NaN", "NaN"),
    ("real", "-Infinity", "-Infinity", "-Infinity"),
    ("boolean", True, True, "true"),
    ("text", 'a"b\\\n😀', 'a"b\\\n😀', 'a"b\\\n😀'),
    ("text", "NAN", "NAN", "NAN"),
    ("numeric(10,2)", "1.50", "1.50", "1.50"),
    ("numeric", "NAN", "NaN", "NaN"),
    ("numeric", "NEGATIVE_INFINITY", "-Infinity", "-Infinity"),
    ("numeric", "1" + "0" * 40, "1" + "0" * 40, "1" + "0" * 40),
    ("numeric(5,-2)", "12300." + "0" * 500, "12300", "12300"),
    ("numeric(2,4)", "0.0012", "0.0012", "0.0012"),
    ("money", "12.34", "12.34", "12.34"),
    ("bytea", "YWJj", "YWJj", "abc"),
    (DATE, 15707, "2013-01-02", "2013-01-02"),
    (DATE, -735160, "-0043-03-15", "-0043-03-15"),
    (DATE, 3663382, "+12000-01-01", "+12000-01-01"),
    (DATE, 2145042905, "+5874897-12-31", "+5874897-12-31"),
    (DATE, 2146033979, "infinity", "+5881580-07-11"),
    (DATE, 2147483647, "infinity", "+5881580-07-11"),
    (DATE, -2147472691, "-infinity", "-5877641-06-23"),
    (TIME, 36000500000, "10:00:00.500000", "10:00:00.500000"),
    ("time(0) without time zone", 86400000000, "24:00:00.000000", "24:00:00.000000"),
    ("time with time zone", "08:00:00Z", "08:00:00.000000Z", "08:00:00.000000Z"),
    ("time with time zone", "24:00:00.25Z", "24:00:00.250000Z", "24:00:00.250000Z"),
    (LOCAL, 1357034400100000, "2013-01-01T10:00:00.100000", "2013-01-01 10:00:00.1"),
    (LOCAL, -63517780799500000, "-0043-03-15T12:00:00.500000", "-0043-03-15 12:00:00.5"),
    (LOCAL, 316516204800000001, "+12000-01-01T00:00:00.000001", "+12000-01-01 00:00:00.000001"),
    (LOCAL, FOREVER, "infinity", "+294247-01-10 04:00:54.775807"),
    (LOCAL, NEVER, "-infinity", "-290308-12-21 19:59:05.224192"),
    (STAMP, "2013-01-01T10:00:00.000000Z", "2013-01-01T10:00:00.000000Z", "2013-01-01 10:00:00"),
    (STAMP, "-0043-03-15T12:00:00.500000Z", "-0043-03-15T12:00:00.500000Z", "-0043-03-15 12:00:00.5"),
    (STAMP, "infinity", "infinity", "+294247-01-10 04:00:54.775807"),
    (STAMP3, "2013-01-01T10:00:00.1Z", "2013-01-01T10:00:00.100000Z", "2013-01-01 10:00:00.1"),
    (STAMP3, "-infinity", "-infinity", "-290308-12-21 19:59:05.224192"),
    ("interval", "P-1Y-2M3DT-4H-5M-6.7S", "P-1Y-2M3DT-4H-5M-6.7S", "P-1Y-2M3DT-4H-5M-6.7S"),
    ("jsonb", '{"a": [1, null]}', {"a": [1, None]}, '{"a": [1, null]}'),
    ("json", '"x"', "x", '"x"'),
    ("public.hstore", '{"a":"1","b":null}', {"a": "1", "b": None}, '{"a":"1","b":null}'),
    ("uuid", UUID, UUID, UUID),
    ("two.mood", "sad", "sad", "sad"),
    ("tsquery", "J2ZhdCc=", "'fat'", "'fat'"),
    ("unknown", "KDEsYSk=", "(1,a)", "(1,a)"),
    ("bit(1)", True, "1", "1"),
    ("bit(10)", "AQI=", "1000000001", "1000000001"),
    ("bit(10)", "", "0000000000", "0000000000"),
    ("point", {"x": 1.5, "y": "NaN", "wkb": "", "srid": None}, [1.5, "NaN"], "[1.5, NaN]"),
    ("line", {"a": 1.0, "b": 2.0, "c": 3.0}, [1.0, 2.0, 3.0], "[1.0, 2.0, 3.0]"),
    ("circle", {"center": {"x": 0.0, "y": 1.0}, "radius": 1.5}, [0.0, 1.0, 1.5], "[0.0, 1.0, 1.5]"),
    ("lseg", {"wkb": LINE}, [0.0, 0.0, 1.0, 1.0], "[0.0, 0.0, 1.0, 1.0]"),
    ("box", {"wkb": BOX}, [1.0, 1.5, 0.0, 0.0], "[1.0, 1.5, 0.0, 0.0]"),
    ("polygon", {"wkb": RING}, [0.0, 0.0, 1.0, 1.0, 2.0, 0.0], "[0.0, 0.0, 1.0, 1.0, 2.0, 0.0]"),
    (
        "path",
        {"wkb": LINE, "extensions": {"type": "path", "closed": "true"}},
        {"closed": True, "points": [0.0, 0.0, 1.0, 1.0]},
        "{true, [0.0, 0.0, 1.0, 1.0]}",
    ),
    ("public.vector(2)", [1.0, -2.5], [1.0, -2.5], "[1.0, -2.5]"),
    ("integer[]", [1, None, 3], [1, None, 3], "[1, null, 3]"),
    ("integer[]", [], [], "[]"),
    ("text[]", ["a,b", None, "[x]"], ["a,b", None, "[x]"], "[a,b, null, [x]]"),
    ("numeric(6,2)[]", ["1.50", None], ["1.50", None], "[1.50, null]"),
    ("jsonb[]", ['{"a": 1}', None, '"x"'], [{"a": 1}, None, "x"], '[{"a": 1}, null, "x"]'),
    ("date[]", [15706, None, -622191234, -625821272], ["2013-01-01", None, "infinity", "-infinity"],
     "[2013-01-01, null, +5881580-07-11, -5877641-06-23]"),
    (f"{STAMP}[]", ["2013-01-01T08:00:00.000000Z", "+292269055-12-02T23:00:00.000000Z"],
     ["2013-01-01T08:00:00.000000Z", "-infinity"], "[2013-01-01 08:00:00, -290308-12-21 19:59:05.224192]"),
    (f"{LOCAL}[]", [1357034400123456, FOREVER], ["2013-01-01T10:00:00.123456", "infinity"],
     "[2013-01-01 10:00:00.123456, +294247-01-10 04:00:54.775807]"),
    ("bytea[]", ["YWJj", None], ["YWJj", None], "[abc, null]"),
]  # fmt: skip

LOST: list[tuple[str, Any]] = [
    ("integer[]", [None, None]),
    ("text[]", ["[Ljava.lang.String;@727ccc0b", "[Ljava.lang.String;@ea7fdd9"]),
    ("text[]", ["[[Ljava.lang.String;@530b3af9"]),
    ("uuid[]", ["[Ljava.util.UUID;@345bc823"]),
    ("jsonb[]", ["[Ljava.lang.String;@3ad82357"]),
    ("date[]", [15706, -703383]),
    (f"{LOCAL}[]", [-63517996800000000]),
    (f"{STAMP}[]", ["0044-03-15T00:00:00.000000Z"]),
    (LOCAL, -9223372036853775810),
]
"""Two-dimensional arrays, times in arrays that may be BC, the last years of Postgres' range."""


def wide(types: Sequence[str]) -> Table:
    """A table with a column v0, v1, ... for each type."""
    columns = [Column(f"v{number}", type_) for number, type_ in enumerate(types)]
    return Table("public", "x", (Column("id", "bigint"), *columns), ("id",), "t.public.x")


def compact(value: object) -> str:
    """JSON as the connector writes it: without white space."""
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False)


KEYS: list[tuple[tuple[str, ...], list[Any], list[Any]]] = [
    (("text",), ["é 😀"], ["é 😀"]),
    (("text",), [""], [""]),
    (("uuid",), [UUID], [UUID]),
    (("bigint",), [2**63 - 1], [2**63 - 1]),
    (("boolean",), [True], [True]),
    (("numeric",), ["1.50"], ["1.50"]),
    (("numeric",), ["NAN"], ["NaN"]),
    (("date",), [-735160], ["-0043-03-15"]),
    ((LOCAL,), [1357034400100000], ["2013-01-01T10:00:00.100000"]),
    ((STAMP3,), ["2013-01-01T10:00:00.100Z"], ["2013-01-01T10:00:00.100000Z"]),
    (("bytea",), ["AP8="], ["AP8="]),
    (("character(3)",), ["a  "], ["a  "]),
    (("text", "bigint"), ['a,"b\\', 2**60 + 1], ['a,"b\\', 2**60 + 1]),
    (("text", "text"), ["", "]["], ["", "]["]),
    (
        ("text", "text"),
        ["\x0b\x1f\\u000B\\", "\\\x0b/\x7f\u2028"],
        ["\x0b\x1f\\u000B\\", "\\\x0b/\x7f\u2028"],
    ),
    (
        ("date", TIME, "boolean"),
        [15707, 86400000000, False],
        ["2013-01-02", "24:00:00.000000", False],
    ),
]
