"""Clients of Kafka's library: how they are made, and what their errors are here.

In:  a broker's address. Out: producers and connections; `CdcError`s.
Invariant: this is the one import of the library in the project.
"""

import logging
import socket
import ssl
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from cdc.errors import ConnectorError, KafkaUnavailable, RecordRefused
from cdc.kafka.log_refusals import forbidden
from cdc.kafka.login import TLS_HINTS, TokenRefused, login_refusal, no_token, tokens
from cdc.model import secrets
from cdc.model.causes import PLAIN, UNKNOWN, cause
from cdc.model.login import Login, login_of, ssl_context

# kafka-python reads its schemas through a function that Python 3.11 deprecates, and 3.13 brings
# back.
with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)
    import kafka as kafka  # noqa: PLC0414
    import kafka.admin
    import kafka.errors
    from kafka.net.compat import KafkaNetClient
    from kafka.net.sasl import register_sasl_mechanism
    from kafka.net.sasl.oauth import AbstractTokenProvider
    from kafka.net.sasl.plain import SaslMechanismPlain
    from kafka.net.sasl.scram import SaslMechanismScram

# It also logs every failed connection attempt as an error of its own; ours says it once.
logging.getLogger("kafka").setLevel(logging.CRITICAL)

TIMEOUT_MS = 5000
LARGEST_BYTES = 32 * 1024 * 1024
"""The largest request: the connector's largest record is a third longer in base64."""
OVERHEAD_BYTES = 100
"""What the client adds at most to key and value of a record that is alone in its request."""
PAUSE_MS = 10
"""How long a client sleeps that doesn't know yet where a topic is; 100 by default."""


def _reading_password(mechanism: type[Any]) -> type[Any]:
    """Make a login that reads the password at each connection: the library would keep it for as long as
    the client.
    """

    class Reading(mechanism):  # type: ignore[misc]
        def __init__(self, **config: Any) -> None:
            password = secrets.read(config["sasl_plain_password"])
            super().__init__(**{**config, "sasl_plain_password": password})

    return Reading


register_sasl_mechanism("PLAIN", _reading_password(SaslMechanismPlain), overwrite=True)
for _name in ("SCRAM-SHA-256", "SCRAM-SHA-512"):
    register_sasl_mechanism(_name, _reading_password(SaslMechanismScram), overwrite=True)


class _TokenProvider(AbstractTokenProvider):  # type: ignore[misc]
    def __init__(self, login: Login) -> None:
        super().__init__()
        self._login = login

    def token(self) -> str:
        return tokens(self._login).token()


def connection_settings(brokers: str) -> dict[str, Any]:
    """Return the settings of this library by which a client finds the brokers and logs in."""
    login = login_of(brokers)
    settings: dict[str, Any] = {"bootstrap_servers": str(brokers)}
    if login.protocol == "PLAINTEXT":
        return settings
    settings["security_protocol"] = login.protocol
    if login.uses_tls:
        settings |= {
            "ssl_cafile": login.ca,
            "ssl_certfile": login.certificate,
            "ssl_keyfile": login.key,
            "ssl_password": secrets.read(login.key_password) if login.key_password else None,
        }
    if login.uses_sasl:
        settings["sasl_mechanism"] = login.mechanism
    if login.mechanism == "OAUTHBEARER":
        settings["sasl_oauth_token_provider"] = _TokenProvider(login)
    elif login.uses_sasl:
        settings |= {"sasl_plain_username": login.user, "sasl_plain_password": login.password}
    return settings


def quick_client(**settings: Any) -> KafkaNetClient:
    """Make the connections of a producer or consumer: its `kafka_client`.

    It looks for brokers at its start, and for its first topic `PAUSE_MS` later at the earliest; the
    library's own, which hands `retry_backoff_ms` to all of its parts but the list of topics, 100 ms
    later (kafka-python 3.0.12, `KafkaConnectionManager.__init__`).
    """
    client = KafkaNetClient(**settings)
    client.cluster.config["retry_backoff_ms"] = PAUSE_MS
    return client


def open_producer(
    bootstrap: str, patience_ms: int = TIMEOUT_MS, **settings: Any
) -> kafka.KafkaProducer:
    """Open a producer with these settings of its library; it waits for the broker for `patience_ms`
    at most.
    """
    return kafka.KafkaProducer(
        **connection_settings(bootstrap),
        kafka_client=quick_client,
        max_block_ms=patience_ms,
        max_request_size=LARGEST_BYTES,
        **settings,
    )


def is_sendable(key: bytes, value: bytes | None) -> bool:
    """Say whether a request has room for a record."""
    return len(key) + len(value or b"") + OVERHEAD_BYTES <= LARGEST_BYTES


def await_written(topic: str, record: Any, timeout_s: float) -> None:
    """Wait until the broker has a record; `record` is what the producer's `send` has returned.

    Raises:
        RecordRefused: it is too large for the topic. KafkaError.
    """
    try:
        record.get(timeout=timeout_s)
    except kafka.errors.MessageSizeTooLargeError as error:
        raise RecordRefused(
            f"{topic} takes smaller records than it is to hold: its max.message.bytes was lowered.",
            hint="cdc -p FILE topics",
            topic=topic,
        ) from error


FINAL = (
    kafka.errors.UnsupportedVersionError,
    kafka.errors.InvalidTopicError,
    kafka.errors.PolicyViolationError,
    kafka.errors.InvalidReplicationFactorError,
    kafka.errors.IllegalSaslStateError,
    kafka.errors.UnsupportedSaslMechanismError,
)
"""Errors that don't pass by waiting. So do errors of rights, which are translated first."""
RESOURCES = {
    kafka.errors.GroupAuthorizationFailedError: "group",
    kafka.errors.TransactionalIdAuthorizationFailedError: "transactional-id",
    kafka.errors.ClusterAuthorizationFailedError: "cluster",
}


@contextmanager
def translated_errors(
    bootstrap: str, operation: str = "Describe", name: str = ""
) -> Iterator[None]:
    """Translate errors of the client.

    operation: what the calls need to be allowed, as ACLs name it.
    name: the transactional id of a writer, which the client's error doesn't name.

    Raises:
        KafkaForbidden: the broker's ACLs don't allow it. ConnectorError: the broker refuses for
            another reason that lasts. KafkaUnavailable: any other error.
    """
    try:
        yield
    except (kafka.errors.KafkaError, OSError, ValueError) as error:
        # What a producer sends after a refusal fails with a general error that carries the refusal.
        for refusal in (error, *error.args):
            if isinstance(refusal, kafka.errors.AuthorizationError):
                kind = RESOURCES.get(type(refusal), "topic")
                subject = {"topic": _names(refusal), "cluster": "kafka-cluster"}.get(kind, name)
                raise forbidden(bootstrap, operation, subject, kind) from error
        if isinstance(error, FINAL):
            raise ConnectorError(
                f"Kafka at {bootstrap} refuses: {type(error).__name__}.",
                hint="kafka.replication_factor is larger than the number of brokers: lower it, or start more"
                if isinstance(error, kafka.errors.InvalidReplicationFactorError)
                else "look at the broker's log, then: cdc -p FILE doctor",
                server=bootstrap,
            ) from error
        is_late = isinstance(
            error, kafka.errors.KafkaTimeoutError | kafka.errors.RequestTimedOutError
        )
        is_refusal = isinstance(error, kafka.errors.SaslAuthenticationFailedError)
        if (is_late or is_refusal) and (problem := login_refusal(bootstrap)):
            raise problem from error
        if is_late:
            raise KafkaUnavailable(
                f"Kafka at {bootstrap} answers too late: {type(error).__name__}.",
                hint="it is busy or away, or its port needs another `protocol`: the same command again goes on;"
                " a local stack is started by: cdc -p FILE up",
                server=bootstrap,
            ) from error
        if isinstance(error, TokenRefused):
            raise no_token(bootstrap, error) from error
        why = cause(str(error)) if isinstance(error, OSError) else UNKNOWN
        if (
            isinstance(error, ssl.SSLEOFError | ConnectionResetError)
            and login_of(bootstrap).uses_tls
        ):
            # A broker without TLS takes a handshake for a request that is too large, and hangs up.
            why = PLAIN
        raise KafkaUnavailable(
            f"Kafka at {bootstrap} can't be reached{why}."
            if why.kind
            else f"Kafka at {bootstrap} can't be reached or refuses: {type(error).__name__}.",
            hint=TLS_HINTS.get(
                why.kind,
                "check `kafka` in the pipeline file; the local stack is started by: cdc -p FILE up",
            ),
            server=bootstrap,
        ) from error


def _names(error: kafka.errors.AuthorizationError) -> str:
    """The names of the topics in an error of rights: a name, or a set of them."""
    names = error.args[0] if error.args else ""
    return names if isinstance(names, str) else ", ".join(sorted(map(str, names)))


def check_reachable(bootstrap: str) -> None:
    """Raise OSError if no broker can be reached or trusted, or if there is no token to log in with: a
    client that can't start leaves sockets and a thread behind, and doesn't say why.
    """
    login = login_of(bootstrap)
    if login.mechanism == "OAUTHBEARER":
        tokens(login).token()
    context = ssl_context(login) if login.uses_tls else None
    refusal: OSError = ConnectionRefusedError(bootstrap)
    for server in bootstrap.split(","):
        host, _, port = server.strip().rpartition(":")
        host = host.strip("[]")
        try:
            with socket.create_connection((host, int(port)), TIMEOUT_MS / 1000) as connection:
                if context:
                    context.wrap_socket(connection, server_hostname=host).close()
                return
        except OSError as error:
            refusal = error
    raise refusal
