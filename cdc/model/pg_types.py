"""Name Postgres types as `format_type` prints them, and say which the connector can't carry.

Needs no Spark, so that `cdc` describes tables and starts a connector fast.
"""

import re

EXTENSIONS = ("citext", "hstore", "ltree", "vector", "halfvec", "isbn")
"""Types of extensions that the connector carries, in whichever schema they were created."""
LOSSES: dict[str, str] = {
    "bit varying": "the connector drops leading zeros",
    "sparsevec": "the connector has no text for it",
    "geometry": "PostGIS isn't supported",
    "geography": "PostGIS isn't supported",
    "int2vector": "the connector sends an empty list",
    "oidvector": "the connector sends an empty list",
}
CONNECTOR_TYPES = (*EXTENSIONS, *LOSSES)
"""Types outside of pg_catalog that the connector has a form of its own for."""
NO_ELEMENTS = (
    *("bit", "money", "name", "interval", "xml", "refcursor", "bit varying", "sparsevec", "hstore"),
    *(
        "vector",
        "halfvec",
        "point",
        "line",
        "lseg",
        "box",
        "path",
        "polygon",
        "circle",
        "geometry",
        "geography",
    ),
)
NO_KEYS = (
    "real",
    "double precision",
    "json",
    "jsonb",
    "hstore",
    "vector",
    "halfvec",
    "point",
    "line",
    "circle",
    # The connector converts it to UTC: 12:00+00 and 13:00+01 are two keys, and one text.
    "time with time zone",
)


def base_type(type_: str) -> str:
    """A type without length and brackets; without its schema if the connector knows it by name."""
    bare = re.sub(r"\(.*?\)", "", type_).removesuffix("[]").strip()
    if bare.startswith("interval "):
        return "interval"
    last = bare.rpartition(".")[2]
    return last if last in CONNECTOR_TYPES else bare


def loss(type_: str, *, key: bool = False) -> str | None:
    """What the connector would lose of a column of this type; None if it carries the type
    exactly.
    """
    name = base_type(type_)
    if type_.endswith("[]"):
        if name == "time without time zone":
            return "the connector cuts the elements' microseconds"
        if name in NO_ELEMENTS:
            return "the connector doesn't send arrays of it"
    elif name in LOSSES:
        return LOSSES[name]
    if key and (type_.endswith("[]") or name in NO_KEYS):
        return "the text of its values doesn't identify a row"
    return None
