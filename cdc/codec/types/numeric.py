"""Numbers, truth values and money."""

import re
from dataclasses import replace
from decimal import ROUND_HALF_UP, Context, Decimal
from math import isfinite, isnan
from typing import Annotated, Any, Literal

from msgspec import Meta

from cdc.codec.types.kind import NUMBER, Convert, TypeCodec

SPECIAL = {"NAN": "NaN", "POSITIVE_INFINITY": "Infinity", "NEGATIVE_INFINITY": "-Infinity"}
"""Debezium's words for the numerics that are no numbers (decimal.handling.mode=string), and
Postgres'.
"""
LONGEST = 38
"""Digits of the widest decimal column."""
PLAIN = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d+)?", re.ASCII)
LARGEST_REAL = 3.4028235677973362e38
"""What four bytes round to their largest number: its shortest text, 3.4028235e38, is beyond it."""


def _integer(bits: int) -> Any:
    return Annotated[int, Meta(ge=-(2 ** (bits - 1)), le=2 ** (bits - 1) - 1)]


Float = float | Literal["NaN", "Infinity", "-Infinity"]
"""As the connector writes one: JSON has no number for the words."""


def numeric(text: str) -> str:
    """Replace Debezium's words for NaN and the infinities by Postgres'."""
    return SPECIAL.get(text, text)


def without_decimals(text: str) -> str:
    """A numeric of negative scale: the connector writes thousands of zeros after its point."""
    return numeric(re.sub(r"\.0*$", "", text))


def real(value: float | str) -> float | None:
    """A number that four bytes don't hold would become infinity."""
    number = float(value)
    return number if isinstance(value, str) or abs(number) <= LARGEST_REAL else None


def json_number(number: float) -> float | str:
    """A double as JSON: the words of those that have no number there."""
    if isfinite(number):
        return number
    if isnan(number):
        return "NaN"
    return "Infinity" if number > 0 else "-Infinity"


def from_real(text: str) -> float | str:
    """Write a number of four bytes, given as its shortest text, as JSON."""
    return json_number(float(text))


def decimal(precision: int, scale: int) -> Convert:
    """A text as a decimal of that precision and scale; None when it is none, or too large.

    Rounds as Postgres does: the log holds rows from before a column got its scale.
    """
    integral = rf"\d{{1,{precision - scale}}}" if precision > scale else "0"
    fits = re.compile(
        rf"-?{integral}" + (rf"(\.\d{{1,{scale}}})?" if scale else ""), re.ASCII
    ).fullmatch
    unit = Decimal(1).scaleb(-scale)
    limit = Decimal(10) ** (precision - scale)
    context = Context(prec=2 * LONGEST, rounding=ROUND_HALF_UP)

    def convert(text: str) -> Decimal | None:
        if fits(text):
            return Decimal(text)
        if not PLAIN.fullmatch(text):
            return None
        number = Decimal(text).quantize(unit, context=context)
        return number if abs(number) < limit else None

    return convert


def _plain(value: Decimal) -> str:
    return format(value, "f")


BIGINT = TypeCodec("bigint", wire=_integer(64), column="bigint", source=NUMBER)
SMALLINT = replace(BIGINT, name="smallint", column="smallint", within=_integer(16))
INTEGER = replace(BIGINT, name="integer", column="int", within=_integer(32))
OID = replace(BIGINT, source="to_json({}::bigint)")
DOUBLE = TypeCodec(
    "double",
    wire=Float,
    column="double",
    to_column=float,
    from_column=json_number,
    source=NUMBER,
    compare="double",
)
REAL = replace(
    DOUBLE, name="real", column="float", to_column=real, from_column=from_real, compare="real"
)
BOOLEAN = TypeCodec("boolean", wire=bool, column="boolean", source=NUMBER)
NUMERIC = TypeCodec(
    "numeric", document=numeric, words=tuple(f'"{word}"' for word in SPECIAL), to_column=numeric
)
MONEY = TypeCodec("money", source="{}::numeric::text")
VECTOR = TypeCodec(
    "vector",
    wire=list[Float | None],
    column="array<float>",
    to_column=lambda values: [None if element is None else float(element) for element in values],
    from_column=lambda values: [
        None if element is None else from_real(element) for element in values
    ],
    source="to_json({}::real[])",
    compare="reals",
)


def scaled(precision: int, scale: int) -> TypeCodec:
    """A numeric of fixed scale: a decimal column, where the warehouse has one that is wide
    enough.
    """
    type_codec = (
        NUMERIC
        if scale >= 0
        else TypeCodec("numeric", document=without_decimals, to_column=without_decimals)
    )
    digits = max(precision, scale) - min(scale, 0)
    if digits > LONGEST:
        return type_codec
    column = f"decimal({digits},{max(scale, 0)})"
    return replace(
        type_codec, column=column, to_column=decimal(digits, max(scale, 0)), from_column=_plain
    )
