"""Every client of the log against a broker that asks who it is: by a certificate, by a password, by
a token. Rights are given by the pipeline's name alone.
"""

import json
import pickle
import threading
import uuid
from base64 import b64encode
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from cdc.compose.authority import Authority
from cdc.config.server_settings import KafkaSettings
from cdc.errors import ConnectorError, KafkaForbidden, KafkaUnavailable
from cdc.kafka.log_ends import LogEnds
from cdc.kafka.log_reader import OffsetRange, read_records
from cdc.kafka.topics import Topics
from cdc.kafka.transactions import Outgoing, TransactionalWriter, find_open
from cdc.model.login import Address
from cdc.spark import kafka_source
from tests.support.secured import PASSWORD, SecuredBroker, secured_broker
from tests.support.wait import wait_until

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

# kafka-python leaves the sockets of refused handshakes to the garbage collector.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
BASIC = "Basic " + b64encode(b"shop:a secret").decode()


@pytest.fixture(scope="module")
def broker() -> Iterator[SecuredBroker]:
    with secured_broker() as running:
        running.set_password("shop", PASSWORD)
        for user in ("shop", "certified"):
            for kind in ("TOPIC", "TRANSACTIONAL_ID"):
                running.allow(user, kind, "shop")
        yield running


@pytest.fixture(scope="module")
def token_url(broker: SecuredBroker) -> Iterator[str]:
    """A server that gives tokens to one client."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            form = self.rfile.read(int(self.headers["Content-Length"])).decode()
            is_known = self.headers["Authorization"] == BASIC and "client_credentials" in form
            self.send_response(200 if is_known else 401)
            self.send_header("content-type", "application/json")
            self.end_headers()
            answer = {
                "access_token": broker.token("shop"),
                "token_type": "bearer",
                "expires_in": 300,
            }
            self.wfile.write(json.dumps(answer if is_known else {"error": "?"}).encode())

        def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/token"
    server.shutdown()
    server.server_close()


def settings(broker: SecuredBroker, kind: str, /, **changed: Any) -> KafkaSettings:
    """Settings of a file that are right for the broker, but for what is changed."""
    if kind == "certificate":
        login = {"protocol": "SSL", "certificate": broker.certificate, "key": broker.key}
        address = broker.tls
    else:
        login = {
            "protocol": "SASL_SSL",
            "mechanism": kind,
            "user": "shop",
            "password": PASSWORD,
        }
        address = broker.login
    merged = {"brokers": address, "ca": broker.authority.ca, **login, **changed}
    return KafkaSettings.model_validate(
        {name: str(value) for name, value in merged.items() if value is not None}
    )


def use(brokers: Address, topic: str) -> list[bytes | None]:
    """Make a topic, write to it and read it, by every kind of client; returns the values."""
    with Topics(brokers) as topics:
        topics.create_topics({topic: {"num_partitions": 1}})
        topics.write(topic, [(b"a", b"1")])
        writer = TransactionalWriter(brokers, f"{topic}-writer")
        writer.write([Outgoing(topic, b"b", b"2")])
        writer.close()
        assert find_open(brokers, "-writer", topic) == []
        end = topics.ends([topic])[topic].offsets[0]
        assert [record.value for record in topics.iterate_range(topic, 0, end)] == [b"1", b"2"]
    assert LogEnds(brokers).read({topic: 1}) == {topic: (end,)}
    blocks = read_records(brokers, [OffsetRange(topic, 0, 0, end)])
    return [value for _, _, records in blocks for _, value, _ in records]


@pytest.mark.parametrize("mechanism", ["certificate", "PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512"])
def test_every_client_logs_in(broker: SecuredBroker, mechanism: str) -> None:
    brokers = settings(broker, mechanism).address
    # As executors get it.
    sent = pickle.loads(pickle.dumps(brokers))
    assert use(sent, f"shop.{mechanism}.{uuid.uuid4().hex}") == [b"1", b"2"]


def test_every_client_logs_in_by_a_token(
    broker: SecuredBroker, token_url: str, spark: "SparkSession"
) -> None:
    """Spark's client, too, which `topics audit` and `verify` read with."""
    by_token = {"token_url": token_url, "client_id": "shop", "client_secret": "a secret"}
    brokers = settings(broker, "OAUTHBEARER", user=None, password=None, **by_token).address
    topic = f"shop.token.{uuid.uuid4().hex}"
    assert use(brokers, topic) == [b"1", b"2"]
    with Topics(brokers) as topics:
        records = kafka_source.read_until(spark, brokers, topics.ends([topic]))
    assert {bytes(row["value"]) for row in records.collect()} == {b"1", b"2"}
    refused = settings(
        broker, "OAUTHBEARER", user=None, password=None, **by_token | {"client_secret": "?"}
    )
    with pytest.raises(
        ConnectorError, match=r"token for Kafka at .*/token returned no token \(status 401\)"
    ):
        use(refused.address, "shop.none")


@pytest.fixture(scope="module")
def strangers(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    authority = Authority(tmp_path_factory.mktemp("strangers"))
    authority.certify("stranger", "client")
    return authority


@pytest.mark.parametrize(
    ("mechanism", "changed", "error", "message", "hint"),
    [
        ("PLAIN", {"ca": "STRANGERS/ca.pem"}, KafkaUnavailable, "of a CA that isn't trusted here", "ca: FILE"),
        ("PLAIN", {"ca": None}, KafkaUnavailable, "of a CA that isn't trusted here", "ca: FILE"),
        ("PLAIN", {"brokers": "127.0.0.1:LOGIN"}, KafkaUnavailable, "is for another host name", "host names"),
        ("PLAIN", {"brokers": "localhost:KAFKA"}, KafkaUnavailable, "doesn't speak TLS", "another protocol"),
        ("PLAIN", {"brokers": "localhost:1"}, KafkaUnavailable, "can't be reached", "check `kafka`"),
        ("PLAIN", {"password": "wrong"}, KafkaUnavailable, "refuses the login (PLAIN)", "check user and password"),
        ("SCRAM-SHA-512", {"password": "wrong"}, KafkaUnavailable, "refuses the login", "check user and password"),
        ("SCRAM-SHA-256", {"user": "nobody"}, KafkaUnavailable, "refuses the login", "check user and password"),
        (
            "certificate", {"certificate": None, "key": None},
            KafkaUnavailable, "asks for a client's", "certificate: FILE",
        ),
        (
            "certificate", {"certificate": "STRANGERS/stranger.crt", "key": "STRANGERS/stranger.key"},
            KafkaUnavailable, "doesn't take this one", "certificate: FILE",
        ),
        ("PLAIN", {"protocol": "PLAINTEXT", "mechanism": None}, KafkaUnavailable, "", "protocol"),
        ("PLAIN", {"protocol": "SSL", "mechanism": None}, KafkaUnavailable, "", "protocol"),
    ],
)  # fmt: skip
def test_a_refused_login_names_the_setting(
    broker: SecuredBroker,
    strangers: Authority,
    mechanism: str,
    changed: dict[str, str | None],
    error: type[ConnectorError],
    message: str,
    hint: str,
) -> None:
    values = {
        "STRANGERS": str(strangers.folder),
        "LOGIN": str(broker.ports["login"]),
        "KAFKA": str(broker.ports["kafka"]),
    }
    for word, value in values.items():
        changed = {name: text and text.replace(word, value) for name, text in changed.items()}
    if "mechanism" in changed:
        changed = {**changed, "user": None, "password": None}
    if changed.get("protocol") in ("PLAINTEXT", "SASL_PLAINTEXT"):
        changed = {**changed, "ca": None}
    brokers = settings(broker, mechanism, **changed).address
    with pytest.raises(error) as caught:
        Topics(brokers).close()
    assert message in caught.value.message
    assert hint in caught.value.hint


def test_a_missing_right_is_named(broker: SecuredBroker) -> None:
    with (
        Topics(settings(broker, "PLAIN").address) as topics,
        pytest.raises(KafkaForbidden, match="Describe on the topic other"),
    ):
        topics.describe(["other"])


def test_a_rotated_password_counts_from_the_next_connection(
    broker: SecuredBroker, tmp_path: Path
) -> None:
    """Clients that are there log in again with what the file holds then."""
    secret = tmp_path / "secret"
    secret.write_text(PASSWORD)
    brokers = settings(broker, "SCRAM-SHA-512", password=f"${{file:{secret}}}").address
    topic = f"shop.rotated.{uuid.uuid4().hex}"
    assert use(brokers, topic) == [b"1", b"2"]
    ends = LogEnds(brokers)
    before = ends.read({topic: 1})
    with Topics(brokers) as topics:
        assert topics.ends([topic])[topic].offsets == before[topic]
        broker.set_password("shop", "changed")
        broker.kill()
        broker.start()
        secret.write_text("changed")

        def answers() -> bool:
            try:
                return topics.ends([topic])[topic].offsets == before[topic] and bool(
                    ends.read({topic: 1})
                )
            except ConnectorError:
                return False

        wait_until(answers, 60, "the clients to log in again")
        topics.write(topic, [(b"a", b"3")])
        end = topics.ends([topic])[topic].offsets[0]
    blocks = list(read_records(brokers, [OffsetRange(topic, 0, 0, end)]))
    assert blocks[-1][2][-1][1] == b"3"
    broker.set_password("shop", PASSWORD)


def test_a_topic_that_was_created_again_is_read_after_a_restart_of_the_broker(
    broker: SecuredBroker,
) -> None:
    """With each restart the leader's epoch grows; the new topic begins with the first one. A client
    that knows the former topic takes that for old news, and never answers.
    """
    brokers = settings(broker, "PLAIN").address
    topic = f"shop.again.{uuid.uuid4().hex}"
    use(brokers, topic)
    broker.kill()
    broker.start()
    with Topics(brokers) as topics:
        wait_until(lambda: is_read(topics, topic, brokers), 60, "the broker to be back")
        former = topics.ends([topic])[topic].topic_id
        topics.remove([topic])
        wait_until(lambda: topic not in topics.existing([topic]), 60, "the end of the topic")
        topics.create_topics({topic: {"num_partitions": 1}})
        topics.write(topic, [(b"a", b"1"), (b"b", b"2")])
        end = topics.ends([topic])[topic]
    assert end.topic_id != former
    asked = OffsetRange(topic, 0, 0, end.offsets[0], end.topic_id)
    assert [value for _, _, block in read_records(brokers, [asked]) for _, value, _ in block] == [
        b"1",
        b"2",
    ]


def is_read(topics: Topics, topic: str, brokers: Address) -> bool:
    """Whether a topic can be read, with the id that it has."""
    try:
        end = topics.ends([topic])[topic]
        return bool(
            list(read_records(brokers, [OffsetRange(topic, 0, 0, end.offsets[0], end.topic_id)]))
        )
    except ConnectorError:
        return False
