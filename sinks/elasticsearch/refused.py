"""Documents that an index refuses: why, without quoting a value, and a repaired document that the
index accepts.

Only refused documents are examined, so no other row is held up.
"""

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from cdc.codec.members import encode, joined, members
from cdc.codec.problem import Unreadable

NUMBER_LENGTH = 1000
"""Characters that the server's parser allows in a number (Jackson's `StreamReadConstraints`)."""
CAUSES = {
    "Duplicate field '": "it has a key twice in an object",
    "Number value length (": f"it has a number of over {NUMBER_LENGTH:,} characters",
    "Document nesting depth (": "it is nested deeper than 1,000 levels",
    "The provided [flattened] field [": "it is nested deeper than 20 levels",
}
"""How the server's reasons begin, and what they mean. The reasons themselves quote the row."""
PLACE = re.compile(r"^(?:\[1:(\d+)\] )?(?:failed to parse: )?(?:\[1:\d+\] )?")
"""How a reason begins: with an offset in the document, counted from 1, at or after the name of the
member concerned."""
FIELD = re.compile(r"field \[([^\]]+)\]")
NAME_END = re.compile(rb"\s*:")
TOKEN = re.compile(rb'"(?:[^"\\]|\\.)*+"|[{}\[\]]')


def describe(document: bytes, error: Mapping[str, Any]) -> str:
    """Say why a document was refused: the error's type, the field, and the cause if CAUSES has it.

    error: the item's, with its `caused_by`. document: as it was sent.
    """
    reasons = [error.get("reason") or "", error.get("caused_by", {}).get("reason") or ""]
    plain_reasons = [PLACE.sub("", reason, count=1) for reason in reasons]
    causes = [
        words
        for start, words in CAUSES.items()
        if any(reason.startswith(start) for reason in plain_reasons)
    ]
    name = _field(document, reasons[0], plain_reasons[0])
    subject = f", field {name}" if name else ""
    return f"{error.get('type')}{subject}{': ' + causes[0] if causes else ''}"


def _field(document: bytes, reason: str, plain_reason: str) -> str | None:
    """Return the name of the field that a reason is about.

    A value that the reason quotes may look like a field, so only members of the document count.
    """
    places = dict(_places(document))
    quoted = None if plain_reason.startswith(tuple(CAUSES)) else FIELD.search(reason)
    if quoted and any(f"{quoted[1]}.".startswith(f"{name}.") for name in places):
        return quoted[1]
    place = PLACE.match(reason)
    if place is None or place[1] is None:
        return None
    before = [name for name, start in places.items() if start < int(place[1])]
    return before[-1] if before else None


def _places(document: bytes) -> Iterator[tuple[str, int]]:
    """List the members of a document, each with the offset of its name.

    Doesn't use a parser, since the document may exceed a parser's limits.
    """
    depth = 0
    for token in TOKEN.finditer(document):
        if token[0] in b"{[":
            depth += 1
        elif token[0] in b"}]":
            depth -= 1
        elif depth == 1 and NAME_END.match(document, token.end()):
            yield json.loads(token[0]), token.start()


def repair(document: bytes) -> bytes | None:
    """Return a document that the index accepts, or None if there is nothing to repair.

    If an object has a key twice, the last value counts, as in jsonb. A number that is too long
    becomes a string. `verify` treats both as equal to Postgres, see `cdc.verify.row_equality`.
    """
    try:
        values = {name: bytes(value) for name, value in members(document).items()}
    except Unreadable:
        return None
    repaired = {name: _repair(value) for name, value in values.items()}
    return joined(repaired) if repaired != values else None


def _repair(value: bytes) -> bytes:
    """Return a value as it is, unless something in it has to be changed."""
    is_changed = False

    def number(text: str) -> Any:
        nonlocal is_changed
        if len(text) <= NUMBER_LENGTH:
            return msgspec.Raw(text.encode())
        is_changed = True
        return text

    def object_of(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        nonlocal is_changed
        parsed = dict(pairs)
        is_changed |= len(parsed) < len(pairs)
        return parsed

    decoder = json.JSONDecoder(
        object_pairs_hook=object_of, parse_int=number, parse_float=number, strict=False
    )
    try:
        parsed = decoder.decode(value.decode())
        return encode(parsed) if is_changed else value
    except (ValueError, RecursionError):
        # Nested deeper than Python's limit, or half of a surrogate pair.
        return value
