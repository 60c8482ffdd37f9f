"""Text, bytes, bits, JSON, and what travels as the text that Postgres prints."""

import re
from binascii import a2b_base64, b2a_base64

from msgspec import Raw

from cdc.codec.types.kind import JSON, TypeCodec


def to_bytes(text: str) -> bytes:
    """Decode base64; raises ValueError (binascii.Error) for anything else."""
    return a2b_base64(text, strict_mode=True)


def base64(value: bytes) -> str:
    """Encode bytes as a document holds them."""
    return b2a_base64(value, newline=False).decode()


def text_of_bytes(text: str) -> str:
    """Decode base64 of UTF-8, as the connector sends types that it does not know."""
    return to_bytes(text).decode()


def json(text: str) -> Raw:
    """JSON within a document, on one line: line breaks stand only between its values."""
    return Raw(re.sub("[\r\n]", " ", text) if "\n" in text or "\r" in text else text)


def bits(type_: str) -> TypeCodec:
    """bit(n) as Postgres prints it: the connector sends its bytes, the lowest first and without
    those that are zero.
    """
    length = int(re.sub(r"\D", "", type_) or 1)
    if length == 1:
        return TypeCodec("bits", wire=bool, document=_bit, to_column=_bit)

    def convert(text: str) -> str:
        number = int.from_bytes(to_bytes(text), "little") % 2**length
        return f"{number:0{length}b}"

    return TypeCodec("bits", document=convert, to_column=convert)


def _bit(value: bool) -> str:
    return "1" if value else "0"


TEXTUAL = TypeCodec("text")
BINARY = TypeCodec(
    "binary",
    column="binary",
    to_column=to_bytes,
    from_column=base64,
    source="translate(encode({}, 'base64'), E'\\n', '')",
)
JSON_VALUE = TypeCodec(
    "json", document=json, raw=True, from_column=json, source=JSON, compare="json"
)
UNKNOWN = TypeCodec("unknown", document=text_of_bytes, to_column=text_of_bytes)
