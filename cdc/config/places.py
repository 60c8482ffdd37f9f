"""Where the views of a sink are, as far as its settings tell. Pure: no server is asked.

Two sinks on one place would move each other's positions and overwrite each other's rows, so that isn't accepted.
"""

from collections.abc import Hashable, Mapping
from itertools import combinations
from urllib.parse import urlsplit

LOCAL = ("localhost", "127.0.0.1", "::1", "")


def first_shared(places: dict[str, Hashable]) -> tuple[str, str] | None:
    """The first two names that are on one place."""
    return next(((name, other) for name, other in combinations(places, 2) if places[name] == places[other]), None)


def server(url: str, ports: Mapping[str, int]) -> tuple[str, int]:
    """Host and port, whichever way this machine is named; `ports` are by scheme, for where the url has none."""
    parts = urlsplit(url)
    host = parts.hostname or ""
    return ("127.0.0.1" if host in LOCAL else host), parts.port or ports.get(parts.scheme, 0)
