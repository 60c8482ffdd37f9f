"""The groups of types that expressions have: which values documents compare, order and add up exactly
as Postgres does.

A group is a set of Postgres types whose values this package treats alike.
"""

import re
from functools import cache

from cdc.model.pg_types import base_type

BOOLEAN = "boolean"
INTEGERS = "integers"
NUMERIC = "numeric"
TEXTS = "texts"
CHARACTER = "character"
ENUM = "enum"
UUID = "uuid"
DATE = "date"
TIMESTAMP = "timestamp without time zone"
TIMESTAMPTZ = "timestamp with time zone"
JSON = "json"
OTHER = "other"
"""Types whose values can only be tested for NULL."""
MEMBERS = {
    **dict.fromkeys(("smallint", "integer", "bigint"), INTEGERS),
    **dict.fromkeys(("text", "character varying", "name"), TEXTS),
    **dict.fromkeys(("json", "jsonb", "hstore"), JSON),
    **{name: name for name in (BOOLEAN, NUMERIC, CHARACTER, UUID, DATE, TIMESTAMP, TIMESTAMPTZ)},
}
JOINED = (BOOLEAN, INTEGERS, TEXTS, UUID, DATE, TIMESTAMP, TIMESTAMPTZ)
"""Groups whose equal values have equal texts, whatever computed them."""
SAME = ("oid", "time without time zone")
"""Types beyond the groups with one text a value, the same in every column."""


@cache
def group(type_: str) -> str:
    """Return the group of a column's type, as `format_type` prints it."""
    bare = base_type(type_)
    if type_.endswith("[]"):
        return OTHER
    return MEMBERS.get(bare, ENUM if "." in bare else OTHER)


def comparison(type_: str) -> str | None:
    """Name the types whose equal values have equal texts in documents, and that compare with these.

    None where equal values may have different texts: floats, numerics without a scale, citext, and
    whatever isn't listed.
    """
    type_group = group(type_)
    if type_group in JOINED:
        return type_group
    if type_group in (ENUM, CHARACTER):
        # Of `character` alone the length isn't known.
        return type_ if type_group == ENUM or type_.startswith("character(") else None
    if scale := re.fullmatch(r"numeric\(\d+,(-?\d+)\)", type_):
        return f"numeric of scale {scale[1]}"
    bare = base_type(type_)
    return bare if bare in SAME and not type_.endswith("[]") else None


def is_ordered(type_: str) -> bool:
    """Whether values are ordered in documents as Postgres orders them, texts by COLLATE "C"."""
    type_group = group(type_)
    is_listed = base_type(type_) in SAME and not type_.endswith("[]")
    return type_group in JOINED or type_group == NUMERIC or is_listed
