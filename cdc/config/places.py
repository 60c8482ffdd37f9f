"""Compare the locations of sinks by their settings. Pure: no server is asked.

Two sinks at one location would move each other's positions and overwrite each other's rows, so that
is refused.
"""

from collections.abc import Hashable, Mapping
from itertools import combinations
from urllib.parse import urlsplit

LOCAL = ("localhost", "127.0.0.1", "::1", "")


def first_shared(places: dict[str, Hashable]) -> tuple[str, str] | None:
    """The first two sinks at the same location; None if there are none."""
    pairs = combinations(places, 2)
    return next(
        ((first, second) for first, second in pairs if places[first] == places[second]), None
    )


def server(url: str, ports: Mapping[str, int]) -> tuple[str, int]:
    """Host and port of a URL; all names of this machine are equal. `ports`: defaults by scheme."""
    parts = urlsplit(url)
    host = parts.hostname or ""
    return ("127.0.0.1" if host in LOCAL else host), parts.port or ports.get(parts.scheme, 0)
