"""Who may reach the page: the address it listens on, the names it answers to, the token."""

import hashlib
import hmac
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cdc.errors import SettingsError
from cdc.model.address import is_loopback

TOKEN_VARIABLE = "CDC_SERVE_TOKEN"  # noqa: S105  # the name of the variable
SHORTEST_TOKEN = 16
"""Fewest characters of a token: fewer could be guessed."""
MAKING = (
    "python -c 'import secrets; print(secrets.token_urlsafe(32))' > token;"
    " cdc -p FILE serve --token-file token"
)
ANYWHERE = ("0.0.0.0", "::")  # noqa: S104  # compared with, not listened on
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


@dataclass(frozen=True)
class Access:
    """An address, the names in the Host header that are answered, without a port, and the token;
    None: everybody may see the page.
    """

    address: str
    hosts: tuple[str, ...]
    token: str | None = field(repr=False)


def read_access(
    address: str, names: Sequence[str], token_file: Path | None, environment: Mapping[str, str]
) -> Access:
    """Read the token, and judge whether the page may be shown there.

    Raises:
        SettingsError: an address that others reach needs a token, and one that is no single address
            needs a name; a token that is too short or can't be read.
    """
    token = _token(token_file, environment)
    local = is_loopback(address)
    if not local and token is None:
        raise SettingsError(f"Others can reach {address}, so a token is needed.", hint=MAKING)
    if address in ANYWHERE and not names:
        raise SettingsError(
            f"{address} is every address of this machine: the page has to know its names.",
            hint="cdc -p FILE serve --address 0.0.0.0 --name cdc.example.com",
        )
    shown = f"[{address}]" if ":" in address else address
    defaults = LOOPBACK if local else LOOPBACK + ((shown,) if address not in ANYWHERE else ())
    return Access(address, (*defaults, *names), token)


def _token(token_file: Path | None, environment: Mapping[str, str]) -> str | None:
    """Read the token of the file, or else of the environment; None when there is neither."""
    if token_file is None:
        token = environment.get(TOKEN_VARIABLE) or None
    else:
        try:
            token = token_file.read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or "it is no text"
            raise SettingsError(
                f"The token can't be read from {token_file}: {reason}.", hint=MAKING
            ) from error
    if token is not None and len(token) < SHORTEST_TOKEN:
        raise SettingsError(
            f"The token has fewer than {SHORTEST_TOKEN} characters: it could be guessed.",
            hint=MAKING,
        )
    return token


class Guard:
    """Middleware that refuses what must not reach the pages."""

    def __init__(self, app: ASGIApp, access: Access) -> None:
        self._app = app
        self._token = None if access.token is None else _digest(access.token)
        self._hosts = {host.lower() for host in access.hosts}

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
    async def answer(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = MutableHeaders(scope=message)
            for name, value in HEADERS.items():
                headers.setdefault(name, value)
        await send(message)

    return answer
