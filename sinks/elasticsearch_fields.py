"""How Elasticsearch indexes each Postgres type; the mapping is explicit and strict, nothing is guessed."""

import re
from typing import Any

KEYWORD = {"type": "keyword", "ignore_above": 8191}
TEXT = {"type": "text", "fields": {"keyword": KEYWORD}}
DATE = {"type": "date", "format": "strict_date_optional_time", "ignore_malformed": True}
OPAQUE = {"type": "object", "enabled": False}

FIELDS_OF_TYPES: dict[str, dict[str, Any]] = {
    "smallint": {"type": "short"},
    "integer": {"type": "integer"},
    "bigint": {"type": "long"},
    "oid": {"type": "long"},
    "real": {"type": "float"},
    "double precision": {"type": "double"},
    "boolean": {"type": "boolean"},
    "bytea": {"type": "binary"},
    "json": OPAQUE,
    "jsonb": OPAQUE,
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
    base = re.sub(r"\(.*?\)", "", type_).removesuffix("[]").strip()
    return FIELDS_OF_TYPES.get(base, KEYWORD)
