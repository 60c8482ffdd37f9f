"""JSON documents as the text of their members: values move from one to the other untouched, no number is rounded."""

import json
from collections.abc import Sequence

_DECODER = json.JSONDecoder()
WHITE = " \t\r\n"


def members(text: str) -> dict[str, str]:
    """The members of a JSON object, each value as its own text. Raises ValueError for anything else."""
    found: dict[str, str] = {}
    at = _skip(text, 0, "{")
    while text[at : at + 1] != "}":
        name, at = _DECODER.raw_decode(text, at)
        at = _skip(text, at, ":")
        _, end = _DECODER.raw_decode(text, at)
        found[name] = text[at:end]
        at = _next(text, end, "}")
    return found


def elements(text: str) -> list[str]:
    """The elements of a JSON array, each as its own text."""
    found = []
    at = _skip(text, 0, "[")
    while text[at : at + 1] != "]":
        _, end = _DECODER.raw_decode(text, at)
        found.append(text[at:end])
        at = _next(text, end, "]")
    return found


def completed(
    document: str, kept: Sequence[str], older: Sequence[tuple[str | None, Sequence[str] | None]]
) -> str | None:
    """A document with the values it lacks, from older ones of the same row, newest first; the last may be the view's.

    None when a value is in none of them: it is unknown, and must not become null.
    """
    whole, missing = members(document), set(kept)
    for text, lacking in older:
        if text is None:
            break
        found = members(text)
        for name in sorted(missing - set(lacking or ())):
            # A view made before the column was added doesn't hold it: nobody has ever seen its value.
            if name in found:
                whole[name] = found[name]
                missing.discard(name)
        if not missing:
            return (
                "{" + ",".join(f"{json.dumps(name, ensure_ascii=False)}:{value}" for name, value in whole.items()) + "}"
            )
    return None


def _skip(text: str, at: int, expected: str) -> int:
    """Past an expected character and the white space around it."""
    at = _blank(text, at)
    if text[at : at + 1] != expected:
        raise ValueError(f"expected {expected} at {at}")
    return _blank(text, at + 1)


def _next(text: str, at: int, close: str) -> int:
    """Past a comma, to the next member or to the closing bracket."""
    at = _blank(text, at)
    return at if text[at : at + 1] == close else _skip(text, at, ",")


def _blank(text: str, at: int) -> int:
    while at < len(text) and text[at] in WHITE:
        at += 1
    return at
