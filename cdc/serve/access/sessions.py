"""Who may see the page: a token, compared in constant time; sessions of browsers that have logged
in; the proof that a form came from this page (CSRF).

A browser's cookie is a random text. It is no token and is worth nothing elsewhere; a login gives a
new one. Sessions end with the process, and after SESSION_S.
"""

import hashlib
import hmac
import secrets
import time
from dataclasses import dataclass

SESSION_S = 12 * 3600.0
"""Seconds after which one has to log in again."""
MOST = 1000
"""Most sessions at a time; the oldest ends first."""
SHORTEST_TOKEN = 16
"""Fewest characters of a token: fewer could be guessed."""


@dataclass(frozen=True)
class Login:
    """Who has logged in, as they call themselves, and until when (monotonic seconds)."""

    name: str
    until: float


class Sessions:
    """The sessions of one server; used by its event loop alone. `token` None: everybody may see
    the page.
    """

    def __init__(self, token: str | None) -> None:
        self._token = None if token is None else _digest(token)
        self._key = secrets.token_bytes(32)
        self._logins: dict[str, Login] = {}

    @property
    def needs_token(self) -> bool:
        """Whether a token is needed at all."""
        return self._token is not None

    def is_token(self, text: str) -> bool:
        """Compare a text with the token; as long a time, whatever is wrong with it."""
        return self._token is not None and hmac.compare_digest(_digest(text), self._token)

    def log_in(self, name: str) -> str:
        """Begin a session: its cookie."""
        while len(self._logins) >= MOST:
            del self._logins[next(iter(self._logins))]
        cookie = new_cookie()
        self._logins[cookie] = Login(name, time.monotonic() + SESSION_S)
        return cookie

    def log_out(self, cookie: str) -> None:
        """End a session."""
        self._logins.pop(cookie, None)

    def login(self, cookie: str) -> Login | None:
        """Look up who has logged in; None for a cookie without a session."""
        login = self._logins.get(cookie)
        if login and login.until < time.monotonic():
            del self._logins[cookie]
            return None
        return login

    def csrf(self, cookie: str) -> str:
        """Make the text that forms for the browser with this cookie carry."""
        return hmac.new(self._key, cookie.encode(), hashlib.sha256).hexdigest()

    def is_csrf(self, cookie: str, text: str) -> bool:
        """Whether a form was made for the browser with this cookie."""
        return bool(cookie) and hmac.compare_digest(
            self.csrf(cookie).encode(), text.encode("utf-8", "replace")
        )


def new_cookie() -> str:
    """Make a cookie that nobody can guess."""
    return secrets.token_urlsafe(32)


def _digest(text: str) -> bytes:
    """Hash a text. All hashes have one length, so comparing them tells nothing about the token's."""
    return hashlib.sha256(text.encode("utf-8", "replace")).digest()
