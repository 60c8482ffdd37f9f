"""Why a server can't be reached, from the words of OpenSSL, libpq and the system; the same for every client.

Pure. Words in another language, or new ones, have no cause that is known here: it can't be reached, is then all.
"""

from typing import NamedTuple


class Cause(NamedTuple):
    """`passes`: whether it may be gone at the next try; `kind` tells what to look at, see `HINTS` of its users."""

    what: str
    passes: bool
    kind: str = ""

    def __str__(self) -> str:
        return f": {self.what}" if self.what else ""


UNKNOWN = Cause("", passes=True)
TRUST = Cause("its certificate is of a CA that isn't trusted here", passes=False, kind="trust")
NO_FILE = Cause("the file of its CA isn't there", passes=False, kind="trust")
EXPIRED = Cause("its certificate has expired", passes=True)
"""Somebody renews it, and what was waiting for that goes on."""
HOST = Cause("its certificate is for another host name", passes=False, kind="certificate")
CLIENT = Cause("it asks for a client's certificate", passes=False, kind="client")
PLAIN = Cause("it doesn't speak TLS at that port", passes=False, kind="plain")
NAME = Cause("its host name is unknown", passes=True)
CLOSED = Cause("nothing listens there", passes=True)
SILENT = Cause("it doesn't answer", passes=True)
WORDS = (
    ("has expired", EXPIRED),
    ("root certificate file", NO_FILE),
    ("hostname mismatch", HOST),
    ("ip address mismatch", HOST),
    ("does not match host name", HOST),
    ("certificate required", CLIENT),
    ("handshake failure", CLIENT),
    ("certificate verify failed", TRUST),
    ("wrong version number", PLAIN),
    ("record layer failure", PLAIN),
    ("packet length too long", PLAIN),
    ("does not support ssl", PLAIN),
    ("could not translate host name", NAME),
    ("name or service not known", NAME),
    ("nodename nor servname", NAME),
    ("name resolution", NAME),
    ("no address associated", NAME),
    ("connection refused", CLOSED),
    ("timeout", SILENT),
    ("timed out", SILENT),
)
"""The first that is said counts: what is wrong with a certificate comes with that it couldn't be verified."""


def cause(words: str) -> Cause:
    lowered = words.lower()
    return next((known for part, known in WORDS if part in lowered), UNKNOWN)
