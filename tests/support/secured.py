"""A Kafka for one test module that asks who its clients are: a listener with TLS and clients'
certificates, one with TLS and SASL, and one for the test itself.
"""

import base64
import json
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import trustme
from confluent_kafka.admin import (  # type: ignore[attr-defined]
    AclBinding,
    AclOperation,
    AclPermissionType,
    AdminClient,
    ResourcePatternType,
    ResourceType,
    ScramCredentialInfo,
    ScramMechanism,
    UserScramCredentialUpsertion,
)
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.serialization import pkcs12
from cryptography.x509 import load_pem_x509_certificate

from cdc.compose import artifacts, host, process
from cdc.compose.servers import Connect, Kafka, ServerDirs, last_lines
from cdc.connectors import client
from cdc.errors import ConnectorError
from cdc.kafka.login import for_java
from cdc.model.login import Address, Login
from tests.support.wait import wait_until

START_S = 120
PASSWORD = 'p@ss "word\\'
STORE_PASSWORD = "changeit"
_ENCRYPTION = serialization.BestAvailableEncryption(STORE_PASSWORD.encode())
LOGINS = "org.apache.kafka.common.security"
SETTINGS = r"""
listeners=PLAINTEXT://127.0.0.1:{kafka},CONTROLLER://127.0.0.1:{kafka-controller},\
  TLS://127.0.0.1:{tls},LOGIN://127.0.0.1:{login}
advertised.listeners=PLAINTEXT://127.0.0.1:{kafka},CONTROLLER://127.0.0.1:{kafka-controller},\
  TLS://localhost:{tls},LOGIN://localhost:{login}
listener.security.protocol.map=CONTROLLER:PLAINTEXT,PLAINTEXT:PLAINTEXT,TLS:SSL,LOGIN:SASL_SSL
inter.broker.listener.name=PLAINTEXT
ssl.keystore.type=PEM
ssl.keystore.location={folder}/broker.pem
ssl.truststore.type=PEM
ssl.truststore.location={folder}/ca.pem
listener.name.tls.ssl.client.auth=required
listener.name.tls.ssl.principal.mapping.rules=RULE:.*CN=([^,]*).*/$1/
listener.name.login.sasl.enabled.mechanisms=PLAIN,SCRAM-SHA-256,SCRAM-SHA-512,OAUTHBEARER
listener.name.login.plain.sasl.jaas.config={logins}.plain.PlainLoginModule required user_shop={password};
listener.name.login.scram-sha-256.sasl.jaas.config={logins}.scram.ScramLoginModule required;
listener.name.login.scram-sha-512.sasl.jaas.config={logins}.scram.ScramLoginModule required;
listener.name.login.oauthbearer.sasl.jaas.config={logins}.oauthbearer.OAuthBearerLoginModule required \
  unsecuredLoginStringClaim_sub="broker";
authorizer.class.name=org.apache.kafka.metadata.authorizer.StandardAuthorizer
super.users=User:ANONYMOUS
"""


class Authority:
    """A certificate authority, and files in PEM for whom it certifies."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._authority = trustme.CA()
        self.ca = folder / "ca.pem"
        self._authority.cert_pem.write_to_path(str(self.ca))

    def keystore(self, host_name: str) -> Path:
        """Write a server's certificate and key as PKCS#12, with `STORE_PASSWORD`."""
        issued = self._authority.issue_cert(host_name)
        key: Any = serialization.load_pem_private_key(issued.private_key_pem.bytes(), None)
        certificate = load_pem_x509_certificate(issued.cert_chain_pems[0].bytes())
        return self._store(
            "server.p12",
            pkcs12.serialize_key_and_certificates(b"server", key, certificate, None, _ENCRYPTION),
        )

    def truststore(self) -> Path:
        """Write the authority's certificate as PKCS#12, with `STORE_PASSWORD`."""
        certificate = load_pem_x509_certificate(self._authority.cert_pem.bytes())
        entry = pkcs12.PKCS12Certificate(certificate, b"ca")
        return self._store("trusted.p12", pkcs12.serialize_java_truststore([entry], _ENCRYPTION))

    def _store(self, name: str, content: bytes) -> Path:
        path = self.folder / name
        path.write_bytes(content)
        return path

    def certify(
        self, name: str, *hosts: str, key_type: trustme.KeyType = trustme.KeyType.ECDSA
    ) -> tuple[Path, Path]:
        """Write a certificate with its chain, and its key; both are in `name.pem`, too."""
        issued = self._authority.issue_cert(*hosts, common_name=name, key_type=key_type)
        key = serialization.load_pem_private_key(
            issued.private_key_pem.bytes(), None
        ).private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
        chain = b"".join(part.bytes() for part in issued.cert_chain_pems)
        for suffix, content in ((".crt", chain), (".key", key), (".pem", key + chain)):
            path = self._store(f"{name}{suffix}", content)
            path.chmod(0o600)
        return self.folder / f"{name}.crt", self.folder / f"{name}.key"


def unsigned_token(user: str, lives_s: float = 3600) -> str:
    """A token that a broker without settings for OAUTHBEARER takes."""
    now = time.time()
    parts = ({"alg": "none"}, {"sub": user, "iat": now, "exp": now + lives_s})
    encoded = (
        base64.urlsafe_b64encode(json.dumps(part).encode()).rstrip(b"=").decode() for part in parts
    )
    return ".".join(encoded) + "."


class SecuredBroker:
    """`plain` is the test's own listener, where all is allowed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.authority = Authority(folder)
        self.certificate, self.key = self.authority.certify("certified", "client")
        self.authority.certify("broker", "localhost")
        self._server = Kafka()
        names = (*self._server.port_names, "tls", "login")
        self.ports = host.choose_ports(names)
        self._dirs = ServerDirs(folder / Kafka.name, self.ports, artifacts.servers(), host.java())
        self.plain = f"127.0.0.1:{self.ports[Kafka.name]}"
        self.tls = f"localhost:{self.ports['tls']}"
        self.login = f"localhost:{self.ports['login']}"

    def start(self) -> None:
        self._server.prepare(self._dirs)
        properties = self._dirs.conf / "server.properties"
        quoted = PASSWORD.replace("\\", "\\\\").replace('"', '\\"').replace("\\", "\\\\")
        added = SETTINGS.format(
            **self.ports, logins=LOGINS, folder=self.folder, password=f'"{quoted}"'
        )
        names = {line.partition("=")[0] for line in added.splitlines()}
        kept = [
            line
            for line in properties.read_text().splitlines()
            if line.partition("=")[0] not in names
        ]
        properties.write_text("\n".join(kept) + added)
        self._running = process.spawn(
            self._server.command(self._dirs),
            home=self._dirs.home,
            log=self._dirs.log,
            env=self._server.environment(self._dirs),
            user=None,
        )
        wait_until(lambda: self._server.ready(self.ports), START_S, "the broker")
        self._admin = AdminClient({"bootstrap.servers": self.plain, "log_level": 0})

    def kill(self) -> None:
        process.kill(self._running)

    def set_password(self, user: str, password: str) -> None:
        """For SCRAM."""
        for mechanism in (ScramMechanism.SCRAM_SHA_256, ScramMechanism.SCRAM_SHA_512):
            credential = ScramCredentialInfo(mechanism, 4096)
            change = UserScramCredentialUpsertion(user, credential, password.encode())
            self._admin.alter_user_scram_credentials([change])[user].result()

    def allow(self, user: str, kind: str, prefix: str, operation: str = "ALL") -> None:
        """Let a user do this with what has names with this prefix."""
        rule = AclBinding(
            ResourceType[kind],
            prefix,
            ResourcePatternType.LITERAL if kind == "BROKER" else ResourcePatternType.PREFIXED,
            f"User:{user}",
            "*",
            AclOperation[operation],
            AclPermissionType.ALLOW,
        )
        self._admin.create_acls([rule])[rule].result()


class SecuredConnect:
    """A worker of Connect that logs in to a broker as `connect`, and asks its own clients for a
    certificate.
    """

    def __init__(self, broker: SecuredBroker) -> None:
        self._server = Connect()
        self._broker = broker
        self.ports = {**broker.ports, **host.choose_ports(self._server.port_names)}
        self.url = f"https://localhost:{self.ports[Connect.name]}"
        home = broker.folder / Connect.name
        self._dirs = ServerDirs(home, self.ports, artifacts.servers(), host.java())

    def start(self) -> None:
        broker = self._broker
        secret = broker.folder / "connect-password"
        secret.write_text("connect's password")
        broker.set_password("connect", secret.read_text())
        broker.allow("connect", "TOPIC", "cdc-connect")
        broker.allow("connect", "GROUP", "cdc-connect")
        # Under this name the leader writes configurations.
        broker.allow("connect", "TRANSACTIONAL_ID", "connect-cluster-cdc-connect")
        broker.allow("connect", "BROKER", "kafka-cluster", "DESCRIBE")
        login = Login(
            protocol="SASL_SSL",
            ca=str(broker.authority.ca),
            mechanism="SCRAM-SHA-512",
            user="connect",
            password=f"${{file:{secret}}}",
        )
        brokers = Address(broker.login, login)
        added = {
            "listeners": self.url,
            "rest.advertised.host.name": "localhost",
            "listeners.https.ssl.keystore.type": "PKCS12",
            "listeners.https.ssl.keystore.location": str(broker.authority.keystore("localhost")),
            "listeners.https.ssl.keystore.password": STORE_PASSWORD,
            "listeners.https.ssl.key.password": STORE_PASSWORD,
            "listeners.https.ssl.truststore.type": "PKCS12",
            "listeners.https.ssl.truststore.location": str(broker.authority.truststore()),
            "listeners.https.ssl.truststore.password": STORE_PASSWORD,
            "listeners.https.ssl.client.auth": "required",
            # The worker fails without it.
            "listeners.https.ssl.cipher.suites": "",
        }
        for prefix in ("", "producer.", "consumer.", "admin."):
            added |= for_java(brokers, prefix)
        self._server.prepare(self._dirs)
        overwrite(self._dirs.conf / "server.properties", added)
        self._running = process.spawn(
            self._server.command(self._dirs),
            home=self._dirs.home,
            log=self._dirs.log,
            env=self._server.environment(self._dirs),
            user=None,
        )
        wait_until(self._is_ready, START_S, lambda: last_lines(self._dirs.log))

    def _is_ready(self) -> bool:
        assert self._running.find(), last_lines(self._dirs.log)
        login = Login(
            ca=str(self._broker.authority.ca),
            certificate=str(self._broker.certificate),
            key=str(self._broker.key),
        )
        try:
            with client.Connect(Address(self.url, login)) as connect:
                return bool(connect.plugins()) and connect.state("none").connector == "MISSING"
        except ConnectorError:
            return False

    def kill(self) -> None:
        process.kill(self._running)


def overwrite(properties: Path, values: Mapping[str, str]) -> None:
    """Give settings of a file of properties other values, or add them."""
    lines = properties.read_text().splitlines()
    kept = [line for line in lines if line.partition("=")[0] not in values]
    written = [f"{name}={_escaped(value)}" for name, value in values.items()]
    properties.write_text("\n".join([*kept, *written, ""]))


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace("\n", "\\n")


@contextmanager
def secured_broker() -> Iterator[SecuredBroker]:
    folder = Path(tempfile.mkdtemp(prefix="cdc-secured-"))
    broker = SecuredBroker(folder)
    try:
        broker.start()
        try:
            yield broker
        finally:
            broker.kill()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def secured_connect(broker: SecuredBroker) -> Iterator[SecuredConnect]:
    worker = SecuredConnect(broker)
    try:
        worker.start()
        yield worker
    finally:
        worker.kill()
