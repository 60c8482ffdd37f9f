"""Which values of which types documents compare, order and add up exactly as Postgres does."""

import re

from cdc.model.pg_types import base_type
from cdc.model.table import Table
from cdc.views.scalar import terms

INTEGERS = ("smallint", "integer", "bigint")
TEXTS = ("text", "character varying", "name")
SAME = (
    "uuid",
    "boolean",
    "oid",
    "date",
    "timestamp without time zone",
    "timestamp with time zone",
    "time without time zone",
)
"""Types with one text a value, the same in every column."""
JOINED = (
    terms.BOOLEAN,
    terms.INTEGERS,
    terms.TEXTS,
    terms.UUID,
    terms.DATE,
    terms.TIMESTAMP,
    terms.TIMESTAMPTZ,
)
"""Groups of terms whose equal values have equal texts, whatever computed them."""
ORDERED = (*INTEGERS, *TEXTS, *SAME, "numeric")


def comparison(type_: str) -> str | None:
    """Name the group of types whose equal values have equal texts in documents.

    Values of two groups don't compare. None where equal values may have different texts: floats,
    numerics without a scale, citext, and whatever isn't listed.
    """
    bare = base_type(type_)
    if type_.endswith("[]"):
        return None
    if bare in INTEGERS or bare in TEXTS:
        return "integers" if bare in INTEGERS else "texts"
    if scale := re.fullmatch(r"numeric\(\d+,(-?\d+)\)", type_):
        return f"numeric of scale {scale[1]}"
    if bare in SAME:
        return bare
    is_enum = "." in bare
    return type_ if type_.startswith("character(") or is_enum else None


def joined_group(table: Table, term: terms.Term) -> str | None:
    """Return the group that a join compares an expression over a table's row in; None where it
    can't.
    """
    if term.operator == "column":
        return comparison(table.column(str(term.detail)).type)
    return term.group if term.group in JOINED else None


def is_ordered(type_: str) -> bool:
    """Whether values are ordered in documents as Postgres orders them, texts by COLLATE "C"."""
    return not type_.endswith("[]") and base_type(type_) in ORDERED


def is_summed(type_: str) -> bool:
    """Whether sums are exact."""
    return not type_.endswith("[]") and base_type(type_) in (*INTEGERS, "numeric")


def is_counted_distinct(type_: str) -> bool:
    """Whether equal values have equal texts, or get them by `trimmed`."""
    return comparison(type_) is not None or (
        base_type(type_) == "numeric" and not type_.endswith("[]")
    )


def keeps_form(type_: str) -> bool:
    """Whether the connector writes a value as documents have it."""
    return has_extremes(type_) or terms.group(type_) in (terms.BOOLEAN, terms.UUID, terms.ENUM)


def has_extremes(type_: str) -> bool:
    """Whether `min` and `max` are exact, and can be sent: an aggregate has the form of documents, in
    which the connector writes no date, no time and no time stamp without a zone.
    """
    bare = base_type(type_)
    return is_ordered(type_) and bare in (*INTEGERS, *TEXTS, "numeric", "timestamp with time zone")
