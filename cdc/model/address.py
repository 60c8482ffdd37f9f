"""What of a server's URL may be shown: never a user, a password or a key."""

import re

HIDDEN = "..."


def address(url: str) -> str:
    """Scheme, host, port and path of a URL; what looks as if it had a login behind its path is not shown at all.

    A password that isn't escaped may hold any of `/?#@`, so what is parsed by the book could still have a part of it.
    """
    before, separator, behind = url.partition("://")
    scheme, rest = (before + separator, behind) if separator else ("", url)
    place, *after = re.split("[?#]", rest, maxsplit=1)
    if any("@" in part for part in after):
        return scheme + HIDDEN
    return scheme + place.rpartition("@")[2]
