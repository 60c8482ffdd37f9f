"""JSON documents as the text of their members: values move from one to the other untouched, no number is rounded."""

from collections.abc import Iterable, Mapping, Sequence

import msgspec

from cdc.codec.problem import Unreadable

NULL = msgspec.Raw(b"null")
encode = msgspec.json.Encoder().encode
"""A Python value as JSON; escapes are those of Postgres. No NaN: it would become null."""
_object = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode


def members(document: bytes) -> dict[str, msgspec.Raw]:
    """The members of a JSON object, each value as its own text; of several of one name the last.

    Raises:
        Unreadable: it is no JSON object, or is nested deeper than Python goes (about a thousand levels).
    """
    try:
        return _object(document)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise Unreadable("its document is no JSON object that can be taken apart") from None


def joined(values: Mapping[str, msgspec.Raw | bytes]) -> bytes:
    """The JSON object of these members: the way back."""
    return b"{" + b",".join([b"%b:%b" % (encode(name), value) for name, value in values.items()]) + b"}"


def complete(
    document: bytes, missing: Sequence[str], older: Iterable[tuple[bytes | None, Sequence[str]]]
) -> bytes | None:
    """A document with the values it lacks, from older ones of the same row, newest first; the last may be the view's.

    An older one is (document, what it lacks itself); one without a document ends the search. None when a value is in
    none of them: it is unknown, and must not become null.
    """
    if not missing:
        return document
    whole, wanted = members(document), set(missing)
    for text, lacking in older:
        if text is None:
            return None
        values = members(text)
        # A view made before the column was added doesn't hold it: nobody has ever seen its value.
        for name in [name for name in missing if name in wanted and name in values and name not in lacking]:
            whole[name] = values[name]
            wanted.discard(name)
        if not wanted:
            return joined(whole)
    return None
