"""Shorten a server's URL to what may be shown: never a user, a password or a key."""

import re

HIDDEN = "..."


def address(url: str) -> str:
    """Scheme, host, port and path of a URL; `...` if a login seems to lie behind its path.

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
