"""Compare the locations of sinks by their settings. Pure: no server is asked.

Two sinks at one location would move each other's positions and overwrite each other's rows, so that
is refused.
"""

from collections.abc import Mapping
from urllib.parse import urlsplit

LOCAL = ("localhost", "127.0.0.1", "::1", "")


def server(url: str, ports: Mapping[str, int]) -> tuple[str, int]:
    """Host and port of a URL; all names of this machine are equal. `ports`: defaults by scheme."""
    parts = urlsplit(url)
    host = parts.hostname or ""
    return ("127.0.0.1" if host in LOCAL else host), parts.port or ports.get(parts.scheme, 0)
