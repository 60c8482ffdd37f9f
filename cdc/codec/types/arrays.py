"""Arrays: lists of one type."""

import re
from collections.abc import Callable
from typing import Any

from cdc.codec.types import temporal
from cdc.codec.types.kind import Convert, TypeCodec

ROW_OF_NULLS = "[null"
"""What the connector makes of an inner array of nulls, in a two-dimensional array."""
JAVA_ARRAY = "[Ljava."
"""What it makes of any other inner array."""
JAVA = re.compile(r"\[+L[\w.]+;@[0-9a-f]+", re.ASCII)


def array(element: TypeCodec) -> TypeCodec:
    """Build the codec of an array.

    Values that the connector can't distinguish within an array are lost, as are inner arrays.
    """
    document = element.document
    to_column = element.to_column
    unsure = element.lost
    if element.name == "date":
        unsure = temporal.unsure_date
    elif element.name == "timestamp":
        unsure = temporal.unsure_moment
    elif element.name == "timestamptz":
        document = temporal.from_array
        to_column = _array_stamp
        unsure = temporal.unsure_stamp
    wire = element.wire
    within = element.within
    floats = element.compare in ("real", "double")
    words = (ROW_OF_NULLS, JAVA_ARRAY, *element.words)
    return TypeCodec(
        "array",
        wire=list[wire | None],  # type: ignore[valid-type]
        document=_for_elements(document),
        words=() if element.raw or (document and not element.words) or unsure else words,
        lost=_lost(element.wire is str, unsure),
        raw=element.raw,
        column=f"array<{element.column}>",
        within=list[within | None] if within else None,  # type: ignore[valid-type]
        to_column=_for_elements(to_column),
        from_column=_for_elements(element.from_column),
        source=_source(element),
        compare=f"{element.compare}s" if floats else "json",
    )


def _array_stamp(text: str) -> Any:
    return temporal.to_stamp(temporal.from_array(text))


def _for_elements(convert: Convert | None) -> Convert | None:
    """One element that can't be held makes the whole list one that can't be held."""
    if convert is None:
        return None

    def convert_all(values: list[Any]) -> list[Any] | None:
        converted = [None if value is None else convert(value) for value in values]
        return converted if converted.count(None) == values.count(None) else None

    return convert_all


def _lost(texts: bool, unsure: Callable[[Any], bool] | None) -> Callable[[list[Any]], bool]:
    """Inner arrays come as nulls or as the names of Java objects: a list of nothing but nulls may
    have been one.
    """

    def lost(values: list[Any]) -> bool:
        elements = [value for value in values if value is not None]
        if values and not elements:
            return True
        if texts and any(value.startswith("[") and JAVA.fullmatch(value) for value in elements):
            return True
        return unsure is not None and any(map(unsure, elements))

    return lost


def _source(element: TypeCodec) -> str:
    """An array of several dimensions as its text: no list equals it, certainly not its elements in
    a row.
    """
    # By subscript: unnest would take a composite apart.
    item = element.source.format("({0})[_cdc_i]")
    return (
        "CASE WHEN array_ndims({0}) > 1 THEN to_json({0}::text) WHEN {0} IS NOT NULL THEN "
        f"(SELECT coalesce(json_agg({item} ORDER BY _cdc_i), '[]') FROM generate_subscripts({{0}}, 1) AS u(_cdc_i)) END"
    )
