"""Who may reach the page: the address it listens on, the names it answers to, the token."""

import ipaddress
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from cdc.errors import SettingsError
from cdc.serve.access.guard import LOOPBACK

TOKEN_VARIABLE = "CDC_SERVE_TOKEN"  # noqa: S105  # the name of the variable
SHORTEST_TOKEN = 16
"""Fewest characters of a token: fewer could be guessed."""
MAKING = (
    "python -c 'import secrets; print(secrets.token_urlsafe(32))' > token;"
    " cdc -p FILE serve --token-file token"
)
ANYWHERE = ("0.0.0.0", "::")  # noqa: S104  # compared with, not listened on


@dataclass(frozen=True)
class Access:
    """An address, the names in the Host header that are answered, and the token; None: none is
    needed.
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
    local = address == "localhost" or _is_loopback(address)
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


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False


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
