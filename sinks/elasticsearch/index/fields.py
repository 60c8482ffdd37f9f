"""What a row looks like to Elasticsearch: the field of each Postgres type; columns that can't be
fields.

The mapping is explicit, nothing is guessed. What a field can't hold stays in the document, where
readers see it: no query on the field finds it, and the row isn't refused.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from cdc.model.pg_types import base_type
from cdc.model.table import Column, Table

KEYWORD = {"type": "keyword", "ignore_above": 8191}
TEXT = {"type": "text", "fields": {"keyword": KEYWORD}}
CASELESS = {"type": "text", "fields": {"keyword": KEYWORD | {"normalizer": "lowercase"}}}
DATE = {"type": "date", "format": "strict_date_optional_time", "ignore_malformed": True}
OPAQUE = {"type": "object", "enabled": False}
# A leaf that is longer than a term may be would have the whole row refused: its name and 4,096
# characters always fit.
FLATTENED = {"type": "flattened", "ignore_above": 4096}

# NaN and the infinities are no numbers to the index.
REAL = {"type": "float", "ignore_malformed": True}
DOUBLE = {"type": "double", "ignore_malformed": True}

# Exact decimals come as text. The number is for ranges, sorts and sums, the text for terms of more
# than 15 digits.
EXACT_SUBFIELD = {"fields": {"exact": KEYWORD}}
DECIMAL = DOUBLE | EXACT_SUBFIELD
INTEGER = {"type": "long", "ignore_malformed": True} | EXACT_SUBFIELD
LONG_DIGITS = 18
"""So many digits always fit into 64 bits."""

METADATA = (
    "_id _index _source _type _routing _version _seq_no _primary_term _field_names _ignored"
    " _ignored_source _nested_path _doc_count _tier _size _feature _tsid _ts_routing_hash"
    " _data_stream_timestamp _inference_fields _index_mode"
)
"""Fields that every document has or can have beside its own; of 8.19, with its modules."""
MAX_DEPTH = 20
"""Objects within each other that an index takes, the document itself among them."""

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
    "hstore": FLATTENED,
    **dict.fromkeys(("point", "line", "lseg", "box", "path", "polygon", "circle"), OPAQUE),
    "date": DATE,
    "timestamp without time zone": DATE,
    "timestamp with time zone": DATE,
    "text": TEXT,
    "character varying": TEXT,
    "character": TEXT,
    "name": TEXT,
    "citext": CASELESS,
    "numeric": DECIMAL,
    "money": DECIMAL,
    "xid8": DECIMAL,
}


def field(type_: str) -> dict[str, Any]:
    """The field of a type; a numeric without decimals is a long, when all of its type fit."""
    scaled = re.match(r"numeric\((\d+),(-?\d+)\)", type_)
    if scaled and int(scaled[2]) <= 0 and int(scaled[1]) - int(scaled[2]) <= LONG_DIGITS:
        return INTEGER
    return FIELDS_OF_TYPES.get(base_type(type_), KEYWORD)


def member_field(column: Column) -> dict[str, Any]:
    """The index field of a column, or of a view's member: objects have a field for each of theirs.

    A list of objects is `nested`: a query on two of its fields finds documents in which one object
    meets both, where plain objects would be found for values of different ones.
    """
    shape = column.shape
    if shape is None:
        return field(column.type)
    if not shape.is_object:
        return field(shape.members[0].type)
    properties = {member.name: member_field(member) for member in shape.members}
    return {"type": "nested" if shape.many else "object", "properties": properties}


def merge_field(default: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """A field as the pipeline file asks for it: of another type, or ours with something added."""
    if options.get("type") == FLATTENED["type"]:
        return {**FLATTENED, **options}
    if "type" in options:
        return dict(options)
    subfields = {**default.get("fields", {}), **options.get("fields", {})}
    return {**default, **options, **({"fields": subfields} if subfields else {})}


def refusals(table: Table) -> list[str]:
    """Why an index can't hold a table as it is, a sentence for each column concerned; nothing when
    it can.

    Pure, so that it may be asked before anything is made. A dot in a name makes a field within an
    object.
    """
    metadata = METADATA.split()
    reserved = [
        f"column {column.name} has the name of a field of Elasticsearch's own"
        for column in table.columns
        if column.name in metadata
    ]
    return [*sorted(reserved), *_name_refusals(table.columns)]


def _name_refusals(columns: Sequence[Column]) -> Iterator[str]:
    names = {column.name for column in columns}
    for name in sorted(names):
        parts = name.split(".")
        if not all(part.strip() for part in parts):
            yield f"column {name!r} names a field without a name"
        if len(parts) > MAX_DEPTH:
            more = f"more than {MAX_DEPTH - 1} dots in its name, which are as many objects"
            yield f"column {name} has {more}"
        for count in range(1, len(parts)):
            outer = ".".join(parts[:count])
            if outer in names:
                yield f"column {name} would be a field within column {outer}, which isn't an object"
    for column in columns:
        if column.shape is not None and column.shape.is_object:
            for refusal in _name_refusals(column.shape.members):
                yield f"in {column.name}: {refusal}"
