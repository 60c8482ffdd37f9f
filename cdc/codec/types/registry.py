"""The table of types: the codec of each Postgres type."""

import re
from dataclasses import replace
from functools import cache

from cdc.codec.types import geometric, numeric, temporal, text
from cdc.codec.types.arrays import array
from cdc.codec.types.kind import TypeCodec
from cdc.model.pg_types import base_type

KINDS = {
    "smallint": numeric.SMALLINT,
    "integer": numeric.INTEGER,
    "bigint": numeric.BIGINT,
    "oid": numeric.OID,
    "real": numeric.REAL,
    "double precision": numeric.DOUBLE,
    "boolean": numeric.BOOLEAN,
    "bytea": text.BINARY,
    "json": text.JSON_VALUE,
    "jsonb": text.JSON_VALUE,
    "hstore": text.JSON_VALUE,
    "date": temporal.DATE,
    "time without time zone": temporal.TIME,
    "time with time zone": temporal.TIMETZ,
    "timestamp without time zone": temporal.TIMESTAMP,
    "timestamp with time zone": temporal.TIMESTAMPTZ,
    "interval": temporal.INTERVAL,
    "numeric": numeric.NUMERIC,
    "money": numeric.MONEY,
    "vector": numeric.VECTOR,
    "halfvec": numeric.VECTOR,
    "point": geometric.POINT,
    "line": geometric.LINE,
    "circle": geometric.CIRCLE,
    "lseg": geometric.SEGMENT,
    "box": geometric.BOX,
    "polygon": geometric.POLYGON,
    "path": geometric.PATH,
}
# Types that the connector sends as unknown ones: the bytes of Postgres' own text.
KINDS |= dict.fromkeys(
    (
        *(
            "unknown",
            "tsquery",
            "pg_lsn",
            "xid",
            "xid8",
            "cid",
            "tid",
            "txid_snapshot",
            "pg_snapshot",
            "jsonpath",
        ),
        *(
            "int4multirange",
            "int8multirange",
            "nummultirange",
            "tsmultirange",
            "tstzmultirange",
            "datemultirange",
        ),
        *(
            "aclitem",
            "regclass",
            "regcollation",
            "regconfig",
            "regdictionary",
            "regtype",
            "regproc",
            "regprocedure",
            "regoper",
            "regoperator",
            "regrole",
            "regnamespace",
        ),
    ),
    text.UNKNOWN,
)


@cache
def kind(type_: str) -> TypeCodec:
    """Return the codec of a type as `format_type` prints it; a type without an entry travels as its
    text.
    """
    if type_.endswith("[]"):
        return array(kind(type_.removesuffix("[]")))
    name = base_type(type_)
    type_codec = KINDS.get(name, text.TEXTUAL)
    if type_codec is numeric.NUMERIC and (
        scale := re.fullmatch(r"numeric\((\d+),(-?\d+)\)", type_)
    ):
        return numeric.scaled(int(scale[1]), int(scale[2]))
    if type_codec is temporal.TIMESTAMPTZ and type_.startswith("timestamp("):
        return replace(type_codec, document=temporal.with_microseconds)
    return text.bits(type_) if name == "bit" else type_codec
