"""What a request needs before it reaches a page, and the headers of each answer.

    method    GET or HEAD: the page only shows
    Host      has to be a name of this server, so that no foreign name can be made to lead here
    token     in the header Authorization, compared in constant time; never in a URL

Probes (/livez, /readyz) say nothing about the data and are answered to anybody.
"""

import hashlib
import hmac
from collections.abc import Collection

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

LOOPBACK = ("127.0.0.1", "localhost", "[::1]")
SAFE = ("GET", "HEAD")
OPEN = ("/livez", "/readyz")
"""Paths that are answered whatever the Host, and without a token."""
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self';"
    " connect-src 'self'; form-action 'self'; frame-ancestors 'none'; base-uri 'none'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}


class Guard:
    """Middleware that refuses what must not reach the pages."""

    def __init__(self, app: ASGIApp, token: str | None, hosts: Collection[str]) -> None:
        """`token` None: everybody may see the page. `hosts`: names of this server, without a port."""
        self._app = app
        self._token = None if token is None else _digest(token)
        self._hosts = {host.lower() for host in hosts}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer or pass on one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        answer = self._refusal(scope) or self._app
        await answer(scope, receive, _with_headers(send))

    def _refusal(self, scope: Scope) -> JSONResponse | None:
        """The answer to a request that must not reach the pages; None: it may."""
        if scope["method"] not in SAFE:
            return _refuse(405, "The page only shows: GET and HEAD.", allow=", ".join(SAFE))
        if scope["path"] in OPEN:
            return None
        headers = Headers(scope=scope)
        if _host_name(headers.get("host", "")) not in self._hosts:
            return _refuse(421, "This server has no such name: see --name of cdc serve.")
        if self._token is None:
            return None
        kind, _, text = headers.get("authorization", "").partition(" ")
        if kind.lower() != "bearer":
            return _refuse(401, "A token is needed: Authorization: Bearer TOKEN.")
        if not hmac.compare_digest(_digest(text.strip()), self._token):
            return _refuse(401, "The token is wrong.")
        return None


def _refuse(status: int, reason: str, **headers: str) -> JSONResponse:
    if status == 401:
        headers["www-authenticate"] = "Bearer"
    return JSONResponse({"error": reason}, status, headers)


def _digest(text: str) -> bytes:
    """Hash a text. All hashes have one length, so comparing them reveals nothing about the token's."""
    return hashlib.sha256(text.encode("utf-8", "replace")).digest()


def _host_name(host: str) -> str:
    """The name in a Host header, without its port, in lower case."""
    if host.startswith("["):
        return host.partition("]")[0].lower() + "]"
    return host.partition(":")[0].lower()


def _with_headers(send: Send) -> Send:
    """Add the headers of every answer."""

    async def answer(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = MutableHeaders(scope=message)
            for name, value in HEADERS.items():
                headers.setdefault(name, value)
        await send(message)

    return answer
