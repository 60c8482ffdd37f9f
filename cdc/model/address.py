"""Addresses of servers: what of a URL may be shown, and whether a host is this machine."""

import ipaddress
import re

HIDDEN = "..."


def address(url: str) -> str:
    """Shorten a URL to scheme, host, port and path; `...` if a login seems to lie behind its path.

    A password that isn't escaped may hold any of `/?#@`. A parser that goes by the standard would
    then take a part of the password for the path, so an `@` behind the path hides everything.
    """
    prefix, separator, remainder = url.partition("://")
    if separator:
        scheme = prefix + separator
        body = remainder
    else:
        scheme = ""
        body = url
    location, *queries = re.split("[?#]", body, maxsplit=1)
    if any("@" in query for query in queries):
        return scheme + HIDDEN
    return scheme + location.rpartition("@")[2]


def is_loopback(host: str) -> bool:
    """Say whether a host's name or address, or a socket's folder, is this machine itself."""
    if host == "localhost" or host.startswith(("/", "@")):
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
