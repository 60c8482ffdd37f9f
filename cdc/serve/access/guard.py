"""Stands before every page: which Host, which Origin, which token, and the headers of each answer.

    Host      has to be a name of this server, so that no foreign name can be made to lead here
    Origin    of an unsafe method has to be this server; browsers send it with every form
    token     in the header Authorization, or a session's cookie; never in a URL
    CSRF      an unsafe method without the header Authorization needs the form's `csrf`

Probes (/livez, /readyz) tell nothing and are answered to anybody.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qs, urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request, cookie_parser
from starlette.responses import JSONResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cdc.serve.access.sessions import Sessions, new_cookie

COOKIE = "cdc_session"
"""Begins the name of the cookie. The port follows, for browsers send cookies to all ports of a
host.
"""
LOOPBACK = ("127.0.0.1", "localhost", "[::1]")
SAFE = ("GET", "HEAD")
OPEN = ("/livez", "/readyz")
"""Paths that are answered whatever the Host, and without a token."""
UNLOCKED = ("/login", "/static/")
"""Paths that are answered without a token."""
LARGEST = 64 * 1024
"""Most bytes of a form."""
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self';"
    " connect-src 'self'; form-action 'self'; frame-ancestors 'none'; base-uri 'none'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    # Not no-referrer: browsers would then send "null" as the Origin of a form.
    "Referrer-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}


@dataclass(frozen=True)
class Visitor:
    """Who asks: `name` as they gave it at the login, empty before that or without one; `address` of
    their end of the connection. `csrf` belongs into forms made for them.
    """

    name: str
    address: str
    cookie: str
    csrf: str


class Refused(Exception):
    """A request that is answered with a status and a reason alone."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status, self.reason = status, reason


class Guard:
    """Middleware that refuses what must not reach the pages. `hosts`: names of this server, without
    a port.
    """

    def __init__(self, app: ASGIApp, sessions: Sessions, hosts: Collection[str]) -> None:
        self._app, self._sessions = app, sessions
        self._hosts = {host.lower() for host in hosts}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer or pass on one request, with `visitor` and `form` in its state."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        name = cookie_name(scope)
        cookie = cookie_parser(headers.get("cookie", "")).get(name, "")
        fresh = "" if cookie else new_cookie()
        send_with_cookie = _with_headers(send, cookie_header(name, fresh) if fresh else "")
        try:
            response = await self._check(scope, receive, headers, cookie or fresh)
        except Refused as refusal:
            body = {"error": refusal.reason}
            response = JSONResponse(body, refusal.status)
        if response is None:
            await self._app(scope, receive, send_with_cookie)
        else:
            await response(scope, receive, send_with_cookie)

    async def _check(
        self, scope: Scope, receive: Receive, headers: Headers, cookie: str
    ) -> Response | None:
        """Refuse a request, send it to the login, or note who asks. Raises Refused."""
        path, unsafe = scope["path"], scope["method"] not in SAFE
        if path in OPEN and not unsafe:
            return None
        self._check_host(headers)
        bearer = self._bearer(headers)
        login = self._sessions.login(cookie)
        form: Mapping[str, str] = {}
        if unsafe:
            _check_origin(headers, required=not bearer)
            form = await _read_form(Request(scope, receive))
            if not bearer and not self._sessions.is_csrf(cookie, form.get("csrf", "")):
                raise Refused(403, "The form is too old or isn't this page's: load the page again.")
        address = scope["client"][0] if scope.get("client") else ""
        name = login.name if login else form.get("who", "").strip()[:80]
        visitor = Visitor(name, address, cookie, self._sessions.csrf(cookie))
        scope.setdefault("state", {}).update(visitor=visitor, form=form)
        if not self._sessions.needs_token or bearer or login or path.startswith(UNLOCKED):
            return None
        if path.startswith("/api/") or path in ("/metrics", "/events"):
            raise Refused(401, "A token is needed: Authorization: Bearer TOKEN.")
        return RedirectResponse("/login", 303)

    def _check_host(self, headers: Headers) -> None:
        host = _host_name(headers.get("host", ""))
        if host not in self._hosts:
            raise Refused(421, "This server has no such name: see --name of cdc serve.")

    def _bearer(self, headers: Headers) -> bool:
        """Whether the header Authorization has the token. Raises Refused for a wrong one."""
        kind, _, text = headers.get("authorization", "").partition(" ")
        if kind.lower() != "bearer":
            return False
        if not self._sessions.is_token(text.strip()):
            raise Refused(401, "The token is wrong.")
        return True


def _host_name(host: str) -> str:
    """The name in a Host header, without its port, in lower case."""
    if host.startswith("["):
        return host.partition("]")[0].lower() + "]"
    return host.partition(":")[0].lower()


def _check_origin(headers: Headers, *, required: bool) -> None:
    origin = headers.get("origin")
    if origin is None and not required:
        return
    if origin is None or urlsplit(origin).netloc.lower() != headers.get("host", "").lower():
        raise Refused(403, "The request comes from another page.")


async def _read_form(request: Request) -> dict[str, str]:
    """Read the fields of a form; of one that is repeated, the first. Raises Refused."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip()
    if kind != "application/x-www-form-urlencoded":
        raise Refused(415, "A form is expected: application/x-www-form-urlencoded.")
    body = b""
    async for chunk in request.stream():
        body += chunk
        if len(body) > LARGEST:
            raise Refused(413, "The form is too large.")
    fields = parse_qs(body.decode("utf-8", "replace"), keep_blank_values=True)
    return {name: values[0] for name, values in fields.items()}


def _with_headers(send: Send, cookie: str) -> Send:
    """Add the headers of every answer, and to a page the cookie of a browser that has none."""

    async def answer(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = MutableHeaders(scope=message)
            for name, value in HEADERS.items():
                headers.setdefault(name, value)
            is_page = headers.get("content-type", "").startswith("text/html")
            if cookie and is_page and "set-cookie" not in headers:
                headers.append("set-cookie", cookie)
        await send(message)

    return answer


def cookie_name(scope: Scope) -> str:
    """The name of this server's cookie."""
    server = scope.get("server")
    return f"{COOKIE}_{server[1]}" if server else COOKIE


def cookie_header(name: str, cookie: str, *, secure: bool = False) -> str:
    """Make the value of Set-Cookie. Lax, not Strict: a link from elsewhere finds one logged in."""
    return f"{name}={cookie}; HttpOnly; SameSite=Lax; Path=/{'; Secure' if secure else ''}"


def visitor_of(request: Request) -> Visitor:
    """Who asks, as the guard has noted it."""
    visitor: Visitor = request.state.visitor
    return visitor


def form_of(request: Request) -> Mapping[str, Any]:
    """The fields of the form, as the guard has read them."""
    form: Mapping[str, Any] = request.state.form
    return form
