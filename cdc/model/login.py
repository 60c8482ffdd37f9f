"""The address of Kafka or of Connect, and how a client logs in there."""

import ssl
from dataclasses import dataclass, field

from cdc.model import secrets


@dataclass(frozen=True)
class Login:
    """How a client trusts a server and logs in. Passwords and tokens may hold references to files:
    clients read these at each connection, see `cdc.model.secrets`.

    The fields have the meaning of the pipeline file's settings of the same names. `protocol` and
    `mechanism` are Kafka's.
    """

    protocol: str = "PLAINTEXT"
    ca: str | None = None
    certificate: str | None = None
    key: str | None = None
    key_password: str | None = field(default=None, repr=False)
    mechanism: str | None = None
    user: str | None = None
    password: str | None = field(default=None, repr=False)
    token: str | None = field(default=None, repr=False)
    api_key: str | None = field(default=None, repr=False)
    token_url: str | None = None
    client_id: str | None = None
    client_secret: str | None = field(default=None, repr=False)
    scope: str | None = None

    @property
    def uses_tls(self) -> bool:
        return self.protocol.endswith("SSL")

    @property
    def uses_sasl(self) -> bool:
        return self.protocol.startswith("SASL")


WITHOUT = Login()


class Address(str):
    """The address of a server, as messages name it, with how clients log in there.

    A text without a login is a server that asks for none. Executors get both; what is in files is
    read there.
    """

    login: Login

    def __new__(cls, address: str, login: Login = WITHOUT) -> "Address":
        made = super().__new__(cls, address)
        made.login = login
        return made

    def __reduce__(self) -> tuple[type["Address"], tuple[str, Login]]:
        return Address, (str(self), self.login)

    def __eq__(self, other: object) -> bool:
        return str.__eq__(self, other) and login_of(self) == login_of(other)

    def __hash__(self) -> int:
        return str.__hash__(self)


def login_of(address: object) -> Login:
    """Return how clients log in at an address; a plain text has no login."""
    return address.login if isinstance(address, Address) else WITHOUT


def ssl_context(login: Login) -> ssl.SSLContext:
    """Make the context of a client's TLS connections from what the files hold now.

    Raises:
        OSError, ssl.SSLError: a file can't be read, or isn't what it has to be.
    """
    context = ssl.create_default_context(cafile=login.ca)
    if login.certificate:
        password = secrets.read(login.key_password) if login.key_password else None
        context.load_cert_chain(login.certificate, login.key, password or "")
    return context
