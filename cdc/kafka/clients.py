"""Clients of Kafka's library: how they are made, and what their errors are here.

In:  a broker's address. Out: producers and connections; `CdcError`s.
Invariant: this is the one import of the library in the project.
"""

import logging
import socket
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from cdc.errors import ConnectorError, KafkaUnavailable, RecordRefused
from cdc.kafka.log_refusals import forbidden

# kafka-python reads its schemas through a function that Python 3.11 deprecates, and 3.13 brings
# back.
with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)
    import kafka as kafka  # noqa: PLC0414
    import kafka.admin
    import kafka.errors
    from kafka.net.compat import KafkaNetClient

# It also logs every failed connection attempt as an error of its own; ours says it once.
logging.getLogger("kafka").setLevel(logging.CRITICAL)

TIMEOUT_MS = 5000
LARGEST_BYTES = 32 * 1024 * 1024
"""The largest request: the connector's largest record is a third longer in base64."""
OVERHEAD_BYTES = 100
"""What the client adds at most to key and value of a record that is alone in its request."""
PAUSE_MS = 10
"""How long a client sleeps that doesn't know yet where a topic is; 100 by default."""


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
        bootstrap_servers=bootstrap,
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
    kafka.errors.SaslAuthenticationFailedError,
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
        for cause in (error, *error.args):
            if isinstance(cause, kafka.errors.AuthorizationError):
                kind = RESOURCES.get(type(cause), "topic")
                subject = {"topic": _names(cause), "cluster": "kafka-cluster"}.get(kind, name)
                raise forbidden(bootstrap, operation, subject, kind) from error
        if isinstance(error, FINAL):
            raise ConnectorError(
                f"Kafka at {bootstrap} refuses: {type(error).__name__}.",
                hint="look at the broker's log, then: cdc -p FILE doctor",
                server=bootstrap,
            ) from error
        if isinstance(error, kafka.errors.KafkaTimeoutError | kafka.errors.RequestTimedOutError):
            raise KafkaUnavailable(
                f"Kafka at {bootstrap} answers too late: {type(error).__name__}.",
                hint="it is busy or away: the same command again goes on; a local stack is started by: cdc -p FILE up",
                server=bootstrap,
            ) from error
        raise KafkaUnavailable(
            f"Kafka at {bootstrap} can't be reached or refuses: {type(error).__name__}.",
            hint="check `kafka` in the pipeline file; the local stack is started by: cdc -p FILE up",
            server=bootstrap,
        ) from error


def _names(error: kafka.errors.AuthorizationError) -> str:
    """The names of the topics in an error of rights: a name, or a set of them."""
    names = error.args[0] if error.args else ""
    return names if isinstance(names, str) else ", ".join(sorted(map(str, names)))


def check_reachable(bootstrap: str) -> None:
    """Raise OSError if no server listens: a client that can't start leaves sockets and a thread
    behind.
    """
    refusal: OSError = ConnectionRefusedError(bootstrap)
    for server in bootstrap.split(","):
        host, _, port = server.strip().rpartition(":")
        try:
            with socket.create_connection((host.strip("[]"), int(port)), TIMEOUT_MS / 1000):
                return
        except OSError as error:
            refusal = error
    raise refusal
