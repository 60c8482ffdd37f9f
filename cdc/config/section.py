"""The base of all sections of the pipeline file: its own, and those that a sink brings."""

import re
from collections.abc import Mapping
from typing import Annotated
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, ConfigDict

from cdc.config.mistakes import InvalidSetting

LOCAL = ("localhost", "127.0.0.1", "::1", "")


class Section(BaseModel):
    """A section of the pipeline file. An unknown setting is a mistake."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


def readable(url: str) -> str:
    """Return the URL if it names a host and a port, or a socket. Raises InvalidSetting."""
    try:
        host = urlsplit(url).hostname
        port = urlsplit(url).port
    except ValueError:
        host = None
        port = None
    if (not host or port == 0) and not url.startswith("unix:"):
        raise InvalidSetting(
            "names no host and port", "scheme://user:password@host:port, special characters as %XX"
        )
    return url


def _web(url: str) -> str:
    if not re.match(r"https?://[^/]", url):
        raise InvalidSetting(
            "needs http:// or https:// before its host", "for example: http://localhost:9200"
        )
    if re.search(r"[\s\x00-\x1f\x7f]", url):
        raise InvalidSetting(
            "has white space or a control character", "no line break at its end, a space as %20"
        )
    return readable(url)


Web = Annotated[str, AfterValidator(_web)]


def server(url: str, ports: Mapping[str, int]) -> tuple[str, int]:
    """Host and port of a URL; all names of this machine are equal. `ports`: defaults by scheme."""
    parts = urlsplit(url)
    host = parts.hostname or ""
    return ("127.0.0.1" if host in LOCAL else host), parts.port or ports.get(parts.scheme, 0)
