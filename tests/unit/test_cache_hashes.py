"""A row in a hash of the cache: what a document says, readable by HGET."""

import json

import msgspec
import pytest

from cdc.model.table import Column, Table
from cdc.sinks.redis.hashes import document, packed_fields

TYPES = {
    "id": "bigint",
    "note": "text",
    "amount": "numeric(10,2)",
    "ratio": "double precision",
    "flag": "boolean",
    "extra": "jsonb",
    "tags": "text[]",
    "at": "timestamp with time zone",
    "raw": "bytea",
    "price": "money",
    "place": "point",
    "kind": "some_enum",
}
TABLE = Table("public", "items", tuple(Column(*column) for column in TYPES.items()), ("id",), "t")
ROW = {
    "id": 9007199254740993,
    "note": 'a "quoted" line\nof text, ü, \U0001f600',
    "amount": "1.10",
    "ratio": 0.1,
    "flag": False,
    "extra": {"a": [1, None, "x"]},
    "tags": ["5", None],
    "at": "2013-01-01T10:00:00.000000Z",
    "raw": "AAE=",
    "price": "12.00",
    "place": [1.5, 2.0],
    "kind": "blue",
}


def fields(row: dict[str, object]) -> dict[str, str]:
    text = json.dumps({**dict.fromkeys(TYPES), **row}, separators=(",", ":")).encode()
    words = msgspec.msgpack.decode(packed_fields(TABLE, text), type=list[str])
    return dict(zip(words[::2], words[1::2], strict=True))


def test_readers_find_texts_as_they_are_and_json_for_anything_else() -> None:
    assert fields(ROW) == {
        **{name: value for name, value in ROW.items() if isinstance(value, str)},
        "id": "9007199254740993",
        "ratio": "0.1",
        "flag": "false",
        "extra": '{"a":[1,null,"x"]}',
        "tags": '["5",null]',
        "place": "[1.5,2.0]",
    }


@pytest.mark.parametrize(
    "row",
    [
        ROW,
        {"id": 1},
        {"id": 1, "note": "", "ratio": "NaN", "extra": "5"},
        {"id": 1, "note": "null", "extra": None},
        {"id": 1, "note": "5", "extra": 5, "kind": "true", "tags": []},
    ],
)
def test_a_hash_says_what_the_document_says(row: dict[str, object]) -> None:
    """Whatever a text looks like, and whatever is null."""
    assert json.loads(document(TABLE, fields(row))) == {**dict.fromkeys(TYPES), **row}
