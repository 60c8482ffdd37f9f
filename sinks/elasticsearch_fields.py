"""What a row looks like to Elasticsearch: the field of each Postgres type.

The mapping is explicit, nothing is guessed.
"""

from typing import Any

from cdc.type_names import base

KEYWORD = {"type": "keyword", "ignore_above": 8191}
TEXT = {"type": "text", "fields": {"keyword": KEYWORD}}
DATE = {"type": "date", "format": "strict_date_optional_time", "ignore_malformed": True}
OPAQUE = {"type": "object", "enabled": False}

# NaN and the infinities stay in the document, where readers see them; no query on the field finds them.
REAL = {"type": "float", "ignore_malformed": True}
DOUBLE = {"type": "double", "ignore_malformed": True}

FIELDS_OF_TYPES: dict[str, dict[str, Any]] = {
    "smallint": {"type": "short"},
    "integer": {"type": "integer"},
    "bigint": {"type": "long"},
    "oid": {"type": "long"},
    "real": REAL,
    "double precision": DOUBLE,
    "vector": REAL,
    "halfvec": REAL,
    "boolean": {"type": "boolean"},
    "bytea": {"type": "binary"},
    "json": OPAQUE,
    "jsonb": OPAQUE,
    "hstore": OPAQUE,
    **dict.fromkeys(("point", "line", "lseg", "box", "path", "polygon", "circle"), OPAQUE),
    "date": DATE,
    "timestamp without time zone": DATE,
    "timestamp with time zone": DATE,
    "text": TEXT,
    "character varying": TEXT,
    "character": TEXT,
    "name": TEXT,
    "citext": TEXT,
}


def field(type_: str) -> dict[str, Any]:
    """The index field of a Postgres type. Exact decimals are keywords: a float would round them."""
    return FIELDS_OF_TYPES.get(base(type_), KEYWORD)
