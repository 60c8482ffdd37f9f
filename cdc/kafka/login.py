"""How every client of Kafka finds the brokers and logs in: one pipeline setting, in the words of
kafka-python, of librdkafka and of Java's client.

In:  the brokers' `Address`. Out: settings. References to files are read when the settings are made;
kafka-python reads them at each connection, and the other two when a client is made, which they are
again after a failure.
"""

import ssl
import time
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, TypeVar

from cdc.errors import ConnectorError, KafkaUnavailable
from cdc.model import secrets
from cdc.model.address import address
from cdc.model.login import Login, login_of

LOGIN_S = 3.0
"""How long brokers may take to refuse a login."""
TLS_HINTS = {
    "trust": "name the certificate of its CA in the pipeline file: kafka: {brokers: ..., protocol: ..., ca: FILE}",
    "certificate": "write the host names of the brokers' certificates in `kafka`, or renew the certificates",
    "client": "name a client's certificate in the pipeline file: kafka: {..., certificate: FILE, key: FILE}",
    "lapsed": "renew the certificate that the pipeline file names: kafka: {..., certificate: FILE, key: FILE}",
    "plain": "write the port at which the brokers have TLS, or another protocol",
}
"""Hints by the kind of a `Cause`."""
TOKEN_TIMEOUT_S = 10.0
RENEWED_BEFORE_S = 60.0
"""How long before its end a token is replaced."""
Client = TypeVar("Client")
JAVA_LOGINS = "org.apache.kafka.common.security"


def for_librdkafka(brokers: str) -> dict[str, Any]:
    login = login_of(brokers)
    settings: dict[str, Any] = {"bootstrap.servers": str(brokers)}
    if login.protocol == "PLAINTEXT":
        return settings
    settings["security.protocol"] = login.protocol
    if login.uses_tls:
        settings |= {
            "ssl.ca.location": login.ca,
            "ssl.certificate.location": login.certificate,
            "ssl.key.location": login.key,
            "ssl.key.password": _read(login.key_password),
        }
    if login.mechanism == "OAUTHBEARER":
        settings |= {
            "sasl.mechanism": login.mechanism,
            # Not the client's own way, which trusts the authorities of one file alone.
            "oauth_cb": tokens(login).for_librdkafka,
        }
    elif login.uses_sasl:
        settings |= {
            "sasl.mechanism": login.mechanism,
            "sasl.username": login.user,
            "sasl.password": _read(login.password),
        }
    return {name: value for name, value in settings.items() if value is not None}


def make_client(
    kind: Callable[[dict[str, Any]], Client], brokers: str, settings: Mapping[str, Any]
) -> Client:
    """Make a client of librdkafka.

    Raises:
        KafkaUnavailable: its files don't fit each other, or can't be read: they may be exchanged at
            this moment.
    """
    from confluent_kafka import KafkaException

    try:
        return kind({**for_librdkafka(brokers), **settings})
    except KafkaException as error:
        raise KafkaUnavailable(
            f"Kafka's client can't use the files of its login at {brokers}: {error.args[0].name()}.",
            hint="check ca, certificate, key and key_password of `kafka`, on Spark's executors, too",
            server=str(brokers),
        ) from None


def for_java(brokers: str, prefix: str = "") -> dict[str, str]:
    """Return the settings of a client in Java, their names with this prefix."""
    login = login_of(brokers)
    settings: dict[str, str | None] = {"bootstrap.servers": str(brokers)}
    if login.protocol != "PLAINTEXT":
        settings["security.protocol"] = login.protocol
    if login.uses_tls and login.ca:
        settings |= {"ssl.truststore.type": "PEM", "ssl.truststore.location": login.ca}
    if login.uses_tls and login.certificate and login.key:
        # As texts: a file would have to hold both.
        settings |= {
            "ssl.keystore.type": "PEM",
            "ssl.keystore.certificate.chain": _text(login.certificate),
            "ssl.keystore.key": _text(login.key),
            "ssl.key.password": _read(login.key_password),
        }
    if login.uses_sasl:
        settings |= {"sasl.mechanism": login.mechanism, "sasl.jaas.config": _jaas(login)}
    if login.mechanism == "OAUTHBEARER":
        settings |= {
            "sasl.login.callback.handler.class": f"{JAVA_LOGINS}.oauthbearer.OAuthBearerLoginCallbackHandler",
            "sasl.oauthbearer.token.endpoint.url": login.token_url,
        }
    return {f"{prefix}{name}": value for name, value in settings.items() if value is not None}


def _jaas(login: Login) -> str:
    """Return the line by which Java's client logs in."""
    if login.mechanism == "OAUTHBEARER":
        module = "oauthbearer.OAuthBearerLoginModule"
        options = {
            "clientId": login.client_id,
            "clientSecret": _read(login.client_secret),
            "scope": login.scope,
        }
    else:
        module = (
            "plain.PlainLoginModule" if login.mechanism == "PLAIN" else "scram.ScramLoginModule"
        )
        options = {"username": login.user, "password": _read(login.password)}
    written = [f"{name}={_quoted(value)}" for name, value in options.items() if value is not None]
    return f"{JAVA_LOGINS}.{module} required {' '.join(written)};"


def _quoted(value: str) -> str:
    escaped = value.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


def _text(path: str) -> str:
    return secrets.read(f"${{file:{path}}}")


def _read(text: str | None) -> str | None:
    return None if text is None else secrets.read(text)


def login_refusal(brokers: str) -> ConnectorError | None:
    """Find out whether brokers that don't answer refuse the login. The error says why; None if the
    login is no reason, or can't be seen to be one.

    kafka-python tries again until its time is over, and reports only that.
    """
    if login_of(brokers).protocol == "PLAINTEXT":
        return None
    from confluent_kafka.admin import AdminClient

    login = login_of(brokers)
    if login.mechanism == "OAUTHBEARER":
        try:
            tokens(login).token()
        except TokenRefused as refusal:
            return no_token(brokers, refusal)
    errors: list[Any] = []
    client = make_client(AdminClient, brokers, {"error_cb": errors.append, "log_level": 0})
    deadline = time.monotonic() + LOGIN_S
    while time.monotonic() < deadline:
        client.poll(0.1)
        for error in errors:
            if error.name() == "_AUTHENTICATION":
                named = "user and password"
                if login.mechanism == "OAUTHBEARER":
                    # One of before the server has changed its keys, perhaps.
                    tokens(login).forget()
                    named = "client_id, client_secret and scope"
                return KafkaUnavailable(
                    f"Kafka at {brokers} refuses the login ({login.mechanism}).",
                    hint=f"check {named} of `kafka` in the pipeline file; it is tried again",
                    server=str(brokers),
                )
            if "alert" in error.str():
                return KafkaUnavailable(
                    f"Kafka at {brokers} asks for a client's certificate, or doesn't take this one.",
                    hint=TLS_HINTS["client"],
                    server=str(brokers),
                )
    return None


class TokenRefused(OSError):
    """No token is to be had. The text shows no secret."""


class Tokens:
    """Fetches tokens by OAuth's client credentials, and keeps one until shortly before its end."""

    def __init__(self, login: Login) -> None:
        self._login = login
        self._token = ""
        self._ends_at = 0.0

    def forget(self) -> None:
        """Fetch another token the next time."""
        self._ends_at = 0.0

    def for_librdkafka(self, _: str) -> tuple[str, float]:
        """Return a token, and the Unix time of its end in seconds."""
        token = self.token()
        return token, time.time() + self._ends_at - time.monotonic()

    def token(self) -> str:
        """Return a token that is valid for a while.

        Raises:
            TokenRefused: the server of `token_url` gives none.
        """
        if time.monotonic() < self._ends_at - RENEWED_BEFORE_S:
            return self._token
        import httpx

        login = self._login
        form = {"grant_type": "client_credentials", "scope": login.scope}
        url = login.token_url or ""
        try:
            answer = httpx.post(
                url,
                data={name: value for name, value in form.items() if value},
                auth=(login.client_id or "", _read(login.client_secret) or ""),
                verify=_authorities(login) if url.startswith("https:") else False,
                timeout=TOKEN_TIMEOUT_S,
            )
            answer.raise_for_status()
            content = answer.json()
            self._token = str(content["access_token"])
            self._ends_at = time.monotonic() + float(content.get("expires_in", 0))
        except (httpx.HTTPError, OSError, ValueError, KeyError, TypeError) as error:
            status = getattr(getattr(error, "response", None), "status_code", None)
            reason = f"status {status}" if status else f"{type(error).__name__}"
            raise TokenRefused(f"{address(url)} returned no token ({reason})") from None
        return self._token


def _authorities(login: Login) -> ssl.SSLContext:
    """Trust the brokers' authority and the system's: the server of tokens may be somebody else's."""
    context = ssl.create_default_context()
    if login.ca:
        context.load_verify_locations(login.ca)
    return context


def no_token(brokers: str, error: TokenRefused) -> KafkaUnavailable:
    """Make the error of a login for which there is no token."""
    return KafkaUnavailable(
        f"Can't get a token for Kafka at {brokers}: {error}.",
        hint="check token_url, client_id, client_secret and scope of `kafka` in the pipeline file",
        server=str(brokers),
    )


@cache
def tokens(login: Login) -> Tokens:
    """Return this process' tokens of a login. Any thread may use them."""
    return Tokens(login)
