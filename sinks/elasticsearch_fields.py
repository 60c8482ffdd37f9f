"""What a row looks like to Elasticsearch: the field of each Postgres type, and the bulk item of a change.

The mapping is explicit and strict, nothing is guessed.
"""

import re
from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pyspark.sql import Column

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


@cache
def bulk_item(indices: tuple[tuple[str, str], ...]) -> "Column":
    """A bulk item from topic, id, offset and document."""
    from pyspark.sql import functions as F

    by_topic = F.create_map(*(F.lit(text) for pair in indices for text in pair))
    head = F.struct(
        by_topic[F.col("topic")].alias("_index"),
        F.col("id").alias("_id"),
        F.col("offset").alias("version"),
        F.lit("external_gte").alias("version_type"),
    )
    delete = F.concat(F.to_json(F.struct(head.alias("delete"))), F.lit("\n"))
    index = F.concat(F.to_json(F.struct(head.alias("index"))), F.lit("\n"), F.col("document"), F.lit("\n"))
    return F.when(F.col("document").isNull(), delete).otherwise(index).alias("line")
