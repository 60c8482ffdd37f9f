"""What parts of the pipeline file are made of: the file's own, and those that a sink brings."""

import re
from typing import Annotated
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, ConfigDict

from cdc.config.mistakes import InvalidSetting


class Section(BaseModel):
    """A part of the pipeline file: what it doesn't know is a mistake."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


def readable(url: str) -> str:
    """The URL, once it is sure to name a host and a port, or a socket."""
    try:
        host, port = urlsplit(url).hostname, urlsplit(url).port
    except ValueError:
        host, port = None, None
    if (not host or port == 0) and not url.startswith("unix:"):
        raise InvalidSetting("names no host and port", "scheme://user:password@host:port, special characters as %XX")
    return url


def _web(url: str) -> str:
    if not re.match(r"https?://[^/]", url):
        raise InvalidSetting("needs http:// or https:// before its host", "for example: http://localhost:9200")
    return readable(url)


Web = Annotated[str, AfterValidator(_web)]
