"""Where the views of a sink are, as far as its settings tell. Pure: no server is asked.

Two sinks on one place would move each other's positions and overwrite each other's rows, so that isn't accepted.
"""

import os
from collections.abc import Hashable
from itertools import combinations
from urllib.parse import parse_qs, urlsplit

LOCAL = ("localhost", "127.0.0.1", "::1", "")
PORTS = {"http": 80, "https": 443, "redis": 6379, "rediss": 6379}


def of_index(url: str) -> Hashable:
    """The pipeline's own aliases and positions lie there, whoever asks and in whichever way."""
    return "elasticsearch", *_server(url), urlsplit(url).path.strip("/")


def of_cache(url: str, prefix: str) -> Hashable:
    parts = urlsplit(url)
    socket = parts.path if parts.scheme == "unix" else ""
    number = parse_qs(parts.query).get("db", ["" if socket else parts.path.strip("/")])[0]
    return "redis", *_server(url), socket, number or "0", prefix


def of_warehouse(path: str) -> Hashable:
    return "delta", os.path.realpath(path)


def shared(places: dict[str, Hashable]) -> tuple[str, str] | None:
    """The first two names that are on one place."""
    return next(((name, other) for name, other in combinations(places, 2) if places[name] == places[other]), None)


def _server(url: str) -> tuple[str, int]:
    """Host and port."""
    parts = urlsplit(url)
    host = parts.hostname or ""
    return ("127.0.0.1" if host in LOCAL else host), parts.port or PORTS.get(parts.scheme, 0)
