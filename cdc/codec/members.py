"""Members of JSON documents, as text: values move between documents untouched, and no number is
rounded.
"""

from collections.abc import Mapping

import msgspec

from cdc.codec.problem import Unreadable

NULL = msgspec.Raw(b"null")
encode = msgspec.json.Encoder().encode
"""A Python value as JSON, with the escapes that Postgres uses. No NaN: it would become null."""
_object = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode


def members(document: bytes) -> dict[str, msgspec.Raw]:
    """Split a JSON object into its members, each value as its own text; the last of several with
    one name wins.

    Raises:
        Unreadable: it is no JSON object, or is nested deeper than Python goes (about a thousand
        levels).
    """
    try:
        return _object(document)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise Unreadable("its document is no JSON object that can be taken apart") from None


def joined(values: Mapping[str, msgspec.Raw | bytes]) -> bytes:
    """Join members to a JSON object: the inverse of `members`."""
    return (
        b"{"
        + b",".join([b"%b:%b" % (encode(name), value) for name, value in values.items()])
        + b"}"
    )
