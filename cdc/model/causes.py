"""Find out why a server can't be reached, from the words of OpenSSL, libpq and the system.

Pure, and the same for every client. A text in another language, or a new one, has no cause here:
the error then says only that the server can't be reached.
"""

from typing import NamedTuple


class Cause(NamedTuple):
    """A reason for a failed connection, as the end of a sentence whose subject is the server.

    `is_transient`: the next try may succeed. `kind`: what to look at. Clients have a hint
    for each.
    """

    text: str
    is_transient: bool
    kind: str = ""

    def __str__(self) -> str:
        return f": {self.text}" if self.text else ""


UNKNOWN = Cause("", is_transient=True)
TRUST = Cause(
    "its certificate is of a CA that isn't trusted here", is_transient=False, kind="trust"
)
NO_FILE = Cause("the file of its CA isn't there", is_transient=False, kind="trust")
EXPIRED = Cause("its certificate has expired", is_transient=True, kind="expired")
"""Transient: somebody renews the certificate, and the waiting client goes on."""
HOST = Cause("its certificate is for another host name", is_transient=False, kind="certificate")
CLIENT = Cause("it asks for a client's certificate", is_transient=False, kind="client")
STRANGER = Cause("it doesn't trust the client's certificate", is_transient=False, kind="client")
LAPSED = Cause("the client's certificate has expired", is_transient=True, kind="lapsed")
"""Transient, as the server's: clients read a renewed one."""
PLAIN = Cause("it doesn't speak TLS at that port", is_transient=False, kind="plain")
NAME = Cause("its host name is unknown", is_transient=True, kind="name")
CLOSED = Cause("nothing listens there", is_transient=True)
SILENT = Cause("it doesn't answer", is_transient=True)
SHUT = Cause("it closes the connection without an answer", is_transient=True, kind="shut")
CAUSES_BY_PHRASE = (
    ("has expired", EXPIRED),
    ("root certificate file", NO_FILE),
    ("hostname mismatch", HOST),
    ("ip address mismatch", HOST),
    ("does not match host name", HOST),
    ("certificate required", CLIENT),
    ("handshake failure", CLIENT),
    ("alert unknown ca", STRANGER),
    ("alert bad certificate", STRANGER),
    ("alert certificate expired", LAPSED),
    # What servers in Java say of an authority that they don't know.
    ("alert certificate unknown", STRANGER),
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
    ("without response", SHUT),
    ("eof occurred in violation of protocol", SHUT),
    ("connection reset", SHUT),
    ("connection closed by server", SHUT),
    ("timeout", SILENT),
    ("timed out", SILENT),
)
"""The first phrase that a text holds counts, so special ones come first: "has expired" comes with
"verify failed".
"""


def cause(message: str) -> Cause:
    """The cause that an error message of a client library names; `UNKNOWN` if it names none."""
    lowered = message.lower()
    return next((reason for phrase, reason in CAUSES_BY_PHRASE if phrase in lowered), UNKNOWN)
