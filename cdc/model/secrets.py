"""Read what a pipeline file keeps in other files: `${file:/path}`, and `${file:/path:key}` of a file
of properties or of JSON.

A setting with which a client connects keeps its references. Its client reads them at each new
connection, so a password that has been changed counts from then on. Messages that quote the setting
quote the reference.
"""

import json
import re
from pathlib import Path
from urllib.parse import quote

from cdc.errors import SecretUnreadable

REFERENCE = re.compile(r"\$\{file:([^{}]*)\}")
LOGIN = re.compile(r"(?<=://).*(?=@)")
"""User and password of a URL."""


def read(text: str) -> str:
    """Return a text with its references replaced by what the files hold now.

    Raises:
        SecretUnreadable: a file can't be read, is empty, or lacks the key. Quotes no content.
    """
    return REFERENCE.sub(lambda match: _content(match[1]), text)


def read_before_login(url: str) -> str:
    """Return a URL with its references replaced, except those in its user and password.

    These stay, escaped. A client unescapes user and password, and reads each: a secret may hold any
    character.
    """
    kept = LOGIN.search(url)
    if kept is None:
        return read(url)
    return f"{read(url[: kept.start()])}{escaped(kept[0])}{read(url[kept.end() :])}"


def escaped(part: str) -> str:
    """Return a part of a URL with its references as %XX, so that a parser takes each for one value."""
    return REFERENCE.sub(lambda match: quote(match[0], safe=""), part)


def for_worker(text: str) -> str:
    """Return a text with its references in the words of Kafka's own providers `file` and `directory`."""

    def replaced(match: re.Match[str]) -> str:
        path, _, key = match[1].partition(":")
        folder, _, name = path.rpartition("/")
        return match[0] if key else f"${{directory:{folder or '/'}:{name}}}"

    return REFERENCE.sub(replaced, text)


def _content(reference: str) -> str:
    path, _, key = reference.partition(":")
    where = f"${{file:{reference}}}"
    try:
        content = Path(path).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it isn't text in UTF-8"
        raise SecretUnreadable(
            f"{where} can't be read: {reason}.",
            hint="check the file and who may read it; it is read again at the next connection",
            reference=where,
        ) from None
    # Editors and most tools end a file with a line break, which no password has.
    value = _members(content).get(key) if key else content.removesuffix("\n").removesuffix("\r")
    if not value:
        raise SecretUnreadable(
            f"{where} is empty." if value == "" else f"{where}: the file has no such key.",
            hint="write the secret into the file; it is read again at the next connection",
            reference=where,
        )
    return value


def _members(content: str) -> dict[str, str]:
    """Parse a JSON object, or else properties as Java writes them: `key=value` or `key: value`."""
    if content.lstrip().startswith("{"):
        try:
            members = json.loads(content)
        except ValueError:
            return {}
        return {name: value for name, value in members.items() if isinstance(value, str)}
    lines = (line.strip() for line in content.splitlines())
    pairs = (re.match(r"([^#!=:\s][^=:\s]*)\s*[=:]?\s*(.*)", line) for line in lines)
    return {pair[1]: re.sub(r"\\(.)", r"\1", pair[2]) for pair in pairs if pair}
