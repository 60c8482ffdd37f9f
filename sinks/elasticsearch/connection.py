"""Connections to the nodes of an index: trust, login, and the next node where one is away.

Elastic's nodes carry the requests, with bytes both ways. Its transport isn't used: it would go to the
next node after any failure of a connection, also where a certificate is refused, or where a request
that may have been carried out changes something twice.
"""

import json
import re
import ssl
from base64 import b64encode
from collections.abc import Mapping
from typing import Any, NamedTuple, cast
from urllib.parse import unquote, urlsplit

from elastic_transport import (
    ApiResponseMeta,
    ConnectionTimeout,
    HttpHeaders,
    NodeConfig,
    NodePool,
    TlsError,
    TransportError,
    Urllib3HttpNode,
)
from elastic_transport.client_utils import url_to_node_config
from urllib3 import Timeout
from urllib3.exceptions import ConnectTimeoutError, NewConnectionError

from cdc.errors import SecretUnreadable, SinkError, SinkRejected, SinkUnavailable
from cdc.model import secrets
from cdc.model.address import address
from cdc.model.causes import Cause, cause
from cdc.model.login import login_of, ssl_context

UNAVAILABLE_HINT = "it is tried again; is the server up?"
UNREADABLE_HINT = "check the file and who may read it, on Spark's executors, too; it is read again at the next try"
LOGIN_HINT = (
    "check the sink's user and password, or its api_key, which is `encoded` of the answer that created it;"
    " what is in a file is read again at the next try"
)
CAUSE_HINTS = {
    "trust": "name the file with its authority's certificate as the sink's `ca`; executors need it under the same path",
    "certificate": "write the host name of its certificate in the sink's url or nodes, or renew the certificate",
    "client": "name a certificate that the server trusts, and its key, as the sink's `certificate` and `key`",
    "plain": "write http:// in the sink's url or nodes, or the port at which it has TLS",
    "expired": "renew the server's certificate; it is tried again",
    "lapsed": "renew the sink's `certificate`; it is tried again",
    "name": "check the host in the sink's url or nodes; it is tried again",
    "shut": "write https:// in the sink's url or nodes if that port has TLS; it is tried again",
}
"""What a person can do, by the kind of a cause."""
NEXT_NODE = re.compile(r",(?=https?://)")
"""What separates the nodes of an address; a comma may be in a password."""
FILES = ("trust", "client", "lapsed", "expired")
"""Kinds of causes that a renewed file of the sink may mend. Each is a refused handshake, after which a
server carries out nothing, also where the client has sent its request already (TLS 1.3).
"""
UNSENT = (NewConnectionError, ConnectTimeoutError)
TIMEOUT = Timeout(connect=5.0, read=60.0)
UNAUTHORIZED = 401
PRODUCT = "x-elastic-product"
"""Header of Elasticsearch's answers; a proxy's answers lack it, and OpenSearch's."""
JSON = "application/json"
FAILED = 500


class Answer(NamedTuple):
    """An answer of the server, with its body as it came. node: the address of the node that gave it."""

    meta: ApiResponseMeta
    body: bytes
    node: str = ""

    @property
    def status(self) -> int:
        return self.meta.status


class Connections:
    """This process' connections to the nodes of an address. Any thread may use them.

    Files of certificates and the login are read when it is made, and when a connection or a login is
    refused.

    Raises:
        SinkRejected, SinkUnavailable: the address isn't one, or a file can't be read.
    """

    def __init__(self, url: str) -> None:
        self._url = url
        self._pool = _read_pool(url)
        self._login = read_login(url)
        self._is_opensearch: bool | None = None

    def is_opensearch(self) -> bool:
        """Whether the server is an OpenSearch: it says so at its root. Asked once, and not of a server
        whose answers have Elasticsearch's header.
        """
        if self._is_opensearch is None:
            answer = self.send("GET", "/", None, {"accept": JSON}, is_repeatable=True)
            try:
                version = json.loads(answer.body)["version"]
                self._is_opensearch = version.get("distribution") == "opensearch"
            except (ValueError, LookupError, TypeError, AttributeError):
                # Something else answers in its place, perhaps for a moment.
                return False
        return self._is_opensearch

    def send(
        self,
        method: str,
        target: str,
        body: bytes | None,
        headers: Mapping[str, str],
        *,
        is_repeatable: bool,
    ) -> Answer:
        """Send a request; return the answer, whatever it is.

        A request that isn't repeatable goes to the next node only if nothing of it was sent.

        Raises:
            SinkUnavailable, SinkRejected: no node can be reached, or one in a way that has to be
                mended. A secret's file can't be read.
        """
        login = self._login
        answer = self._send(method, target, body, {**headers, **login}, is_repeatable)
        if answer.status == UNAUTHORIZED:
            self._login = read_login(self._url)
            if self._login != login:
                return self._send(method, target, body, {**headers, **self._login}, is_repeatable)
        return answer

    def _send(
        self,
        method: str,
        target: str,
        body: bytes | None,
        headers: Mapping[str, str],
        is_repeatable: bool,
    ) -> Answer:
        pool = self._pool
        node = pool.get()
        away: list[str] = []
        is_renewed = False
        while True:
            try:
                # Connecting may have another timeout than the request: what the type says of it
                # leaves that out.
                meta, content = node.perform_request(
                    method, target, body, HttpHeaders(headers), cast(Any, TIMEOUT)
                )
            except TransportError as failure:
                if not is_renewed and _may_be_renewed(failure):
                    # The certificates may have been renewed since their files were read.
                    is_renewed = True
                    pool = self._pool = _read_pool(self._url)
                    node = next(same for same in pool.all() if same.base_url == node.base_url)
                    continue
                pool.mark_dead(node)
                away.append(node.base_url)
                if len(away) == len(pool) or not _may_go_on(failure, is_repeatable):
                    raise self._unreachable(failure, away) from None
                # The pool waits for a node longer the more often it has failed, and would rather give
                # one that failed just now.
                candidates = pool.get(), *pool.all()
                node = next(other for other in candidates if other.base_url not in away)
            else:
                if PRODUCT in meta.headers:
                    self._is_opensearch = False
                # One that has lost its cluster isn't asked while others are.
                (pool.mark_dead if meta.status >= FAILED else pool.mark_live)(node)
                return Answer(meta, content, node.base_url)

    def _unreachable(self, failure: TransportError, away: list[str]) -> SinkError:
        reason = _cause(failure)
        is_tls = isinstance(failure, TlsError)
        if is_tls:
            # The next request reads the files of certificates again.
            _connections.pop(self._url, None)
        nodes = away[-1] if is_tls else ", ".join(dict.fromkeys(away))
        kind = SinkUnavailable if reason.is_transient else SinkRejected
        hint = CAUSE_HINTS.get(reason.kind, UNAVAILABLE_HINT)
        if reason.kind == "shut" and nodes.startswith("https:"):
            hint = UNAVAILABLE_HINT
        return kind(f"The index at {nodes} can't be reached{reason}.", hint=hint)


def _cause(failure: TransportError) -> Cause:
    # The node only says "TLS error"; its cause has the words of OpenSSL or the system.
    return cause(f"{type(failure).__name__} {failure} {failure.__cause__}")


def _may_be_renewed(failure: TransportError) -> bool:
    return isinstance(failure, TlsError) and _cause(failure).kind in FILES


def _may_go_on(failure: TransportError, is_repeatable: bool) -> bool:
    """Whether a request that has failed so may be sent to the next node."""
    if isinstance(failure.__cause__, UNSENT):
        return True
    return is_repeatable and not isinstance(failure, TlsError | ConnectionTimeout)


_connections: dict[str, Connections] = {}


def connections(url: str) -> Connections:
    """Return this process' connections to an index; executors keep them across batches."""
    if url not in _connections:
        _connections[url] = Connections(url)
    return _connections[url]


def forget(url: str) -> None:
    """Let go of this process' connections; they are closed when nobody uses them any more."""
    _connections.pop(url, None)


def _read_pool(url: str) -> NodePool:
    """Make a pool of an address' nodes. Files of certificates are read, if a node has TLS."""
    nodes = [node_config(node) for node in NEXT_NODE.split(url)]
    if any(node.scheme == "https" for node in nodes):
        context = _context(url)
        nodes = [node.replace(ssl_context=context) for node in nodes]
    return NodePool(nodes, Urllib3HttpNode)


def node_config(url: str) -> NodeConfig:
    """Parse the URL of a node, without its login. Raises SinkRejected."""
    try:
        return url_to_node_config(url, use_default_ports_for_scheme=True).replace(headers={})
    except ValueError:
        raise SinkRejected(
            f"The index' url {address(url)} can't be read.",
            hint="write http://host:port or https://host:port",
        ) from None


def read_login(url: str) -> dict[str, str]:
    """Return the header with which a client logs in, from what secrets' files hold now."""
    login = login_of(url)
    parts = urlsplit(url)
    user = login.user or unquote(parts.username or "")
    password = login.password or unquote(parts.password or "")
    try:
        if login.api_key:
            return {"authorization": f"ApiKey {_api_key(secrets.read(login.api_key))}"}
        if not user:
            return {}
        pair = f"{secrets.read(user)}:{secrets.read(password)}"
    except SecretUnreadable as error:
        raise SinkUnavailable(error.message, hint=UNREADABLE_HINT) from None
    return {"authorization": f"Basic {b64encode(pair.encode()).decode()}"}


def _api_key(text: str) -> str:
    # Of what a header can't hold the client's own error would quote all.
    if re.fullmatch(r"[A-Za-z0-9+/_-]+=*", text):
        return text
    raise SinkRejected("The sink's api_key isn't in base64.", hint=LOGIN_HINT)


def _context(url: str) -> ssl.SSLContext:
    login = login_of(url)
    try:
        return ssl_context(login)
    except SecretUnreadable as error:
        raise SinkUnavailable(error.message, hint=UNREADABLE_HINT) from None
    except OSError as error:
        files = [login.ca, login.certificate, login.key]
        names = " or ".join(name for name in files if name)
        reason = (
            "not what it has to be, in PEM" if isinstance(error, ssl.SSLError) else error.strerror
        )
        raise SinkUnavailable(
            f"The sink's certificates can't be read from {names}: {reason}.", hint=UNREADABLE_HINT
        ) from None


def unavailable(message: str) -> SinkUnavailable:
    return SinkUnavailable(message, hint=UNAVAILABLE_HINT)
