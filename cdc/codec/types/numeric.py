"""Numbers, truth values and money."""

import re
from dataclasses import replace
from decimal import ROUND_HALF_UP, Context, Decimal
from math import isfinite, isnan
from typing import Annotated, Any, Literal

from msgspec import Meta

from cdc.codec.types.kind import NUMBER, Convert, Kind

SPECIAL = {"NAN": "NaN", "POSITIVE_INFINITY": "Infinity", "NEGATIVE_INFINITY": "-Infinity"}
"""Debezium's words for the numerics that are no numbers (decimal.handling.mode=string), and Postgres'."""
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
    return SPECIAL.get(text, text)


def whole(text: str) -> str:
    """A numeric of negative scale: the connector writes thousands of zeros after its point."""
    return numeric(re.sub(r"\.0*$", "", text))


def real(value: float | str) -> float | None:
    """A number that four bytes don't hold would become infinity."""
    made = float(value)
    return made if isinstance(value, str) or abs(made) <= LARGEST_REAL else None


def written(number: float) -> float | str:
    """A double as JSON: the words of those that have no number there."""
    if isfinite(number):
        return number
    if isnan(number):
        return "NaN"
    return "Infinity" if number > 0 else "-Infinity"


def from_real(text: str) -> float | str:
    return written(float(text))


def decimal(precision: int, scale: int) -> Convert:
    """A text as a decimal of that precision and scale; None when it is none, or too large.

    Rounds as Postgres does: the log holds rows from before a column got its scale.
    """
    integral = rf"\d{{1,{precision - scale}}}" if precision > scale else "0"
    fits = re.compile(rf"-?{integral}" + (rf"(\.\d{{1,{scale}}})?" if scale else ""), re.ASCII).fullmatch
    unit, limit = Decimal(1).scaleb(-scale), Decimal(10) ** (precision - scale)
    context = Context(prec=2 * LONGEST, rounding=ROUND_HALF_UP)

    def convert(text: str) -> Decimal | None:
        if fits(text):
            return Decimal(text)
        if not PLAIN.fullmatch(text):
            return None
        made = Decimal(text).quantize(unit, context=context)
        return made if abs(made) < limit else None

    return convert


def _plain(value: Decimal) -> str:
    return format(value, "f")


BIGINT = Kind("bigint", wire=_integer(64), column="bigint", source=NUMBER)
SMALLINT = replace(BIGINT, name="smallint", column="smallint", within=_integer(16))
INTEGER = replace(BIGINT, name="integer", column="int", within=_integer(32))
OID = replace(BIGINT, source="to_json({}::bigint)")
DOUBLE = Kind(
    "double", wire=Float, column="double", to_column=float, from_column=written, source=NUMBER, compare="double"
)
REAL = replace(DOUBLE, name="real", column="float", to_column=real, from_column=from_real, compare="real")
BOOLEAN = Kind("boolean", wire=bool, column="boolean", source=NUMBER)
NUMERIC = Kind("numeric", document=numeric, words=tuple(f'"{word}"' for word in SPECIAL), to_column=numeric)
MONEY = Kind("money", source="{}::numeric::text")
VECTOR = Kind(
    "vector",
    wire=list[Float | None],
    column="array<float>",
    to_column=lambda values: [None if one is None else float(one) for one in values],
    from_column=lambda values: [None if one is None else from_real(one) for one in values],
    source="to_json({}::real[])",
    compare="reals",
)


def scaled(precision: int, scale: int) -> Kind:
    """A numeric of fixed scale: a decimal column, where the warehouse has one that is wide enough."""
    made = NUMERIC if scale >= 0 else Kind("numeric", document=whole, to_column=whole)
    digits = max(precision, scale) - min(scale, 0)
    if digits > LONGEST:
        return made
    column = f"decimal({digits},{max(scale, 0)})"
    return replace(made, column=column, to_column=decimal(digits, max(scale, 0)), from_column=_plain)
